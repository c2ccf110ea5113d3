"""What a study leaves behind: CSV, JSON, SVG, PNG, and a page, each with all that one needs to check it."""

import csv
import hashlib
import io
import json
import os
import platform
import shutil
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from studies._study import Measured, Row, Study
from studies._style import STYLE
from studies.data import find

PACKAGES = ("nearveil", "numpy", "scipy", "scikit-learn", "faiss-cpu", "dp-accounting", "opendp", "openTSNE", "torch")


class PageError(ValueError):
    """A page that does not show all figures of its study, or shows others."""


def write(study: Study, measured: Measured, folder: Path) -> Path:
    """Draw the figures of a study and write all of its files.

    Parameters
    ----------
    study : Study
    measured : Measured
    folder : Path

    Returns
    -------
    Path
        Of its page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = _draw(study, measured.rows, folder)
    body = study.tell(measured.rows)
    for name in names:
        if f"({name}.svg)" not in body:
            raise PageError(f"the page of {study.name} does not show {name}.svg")
    about = provenance(study, measured)
    _put(folder / f"{study.name}.csv", as_csv(measured.rows))
    _put(folder / f"{study.name}.json", json.dumps({**about, "rows": measured.rows}, indent=1) + "\n")
    page = folder / f"{study.name}.md"
    _put(page, as_page(study, body, about))
    return page


def publish(study: Study, folder: Path, docs: Path) -> None:
    """Copy the files of a study, but the cases it keeps for itself, to the documentation.

    Parameters
    ----------
    study : Study
    folder, docs : Path
    """
    docs.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.glob(f"{study.name}*")):
        shutil.copyfile(path, docs / path.name)


def provenance(study: Study, measured: Measured) -> dict[str, Any]:
    """Return what was measured with what: data, parameters, seeds, versions, command, time.

    Parameters
    ----------
    study : Study
    measured : Measured

    Returns
    -------
    dict
    """
    return {
        "study": study.name,
        "command": f"nearveil study {study.name}",
        "data": {name: _checksum(name) for name in study.data},
        "parameters": dict(study.parameters),
        "seeds": list(study.seeds),
        "versions": {"python": platform.python_version(), **_versions()},
        "cores": os.cpu_count(),
        "seconds": round(measured.seconds),
    }


def as_csv(rows: Sequence[Row]) -> str:
    """Return rows as CSV, with every column that any of them has.

    Parameters
    ----------
    rows : sequence of dict

    Returns
    -------
    str

    Examples
    --------
    >>> print(as_csv([{"a": 1}, {"a": 2, "b": "x"}]), end="")
    a,b
    1,
    2,x
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_page(study: Study, body: str, about: dict[str, Any]) -> str:
    """Return the page of a study.

    Parameters
    ----------
    study : Study
    body : str
    about : dict
        As of `provenance`.

    Returns
    -------
    str
    """
    data = "; ".join(name if sum_ is None else f"{name} (SHA-256 {sum_[:16]})" for name, sum_ in about["data"].items())
    parameters = "; ".join(f"{name} {_words(value)}" for name, value in about["parameters"].items())
    lines = [
        ("data", data),
        ("parameters", parameters),
        ("seeds", ", ".join(map(str, about["seeds"]))),
        ("versions", ", ".join(f"{name} {number}" for name, number in about["versions"].items())),
        ("time", f"{about['seconds']:,} s on {about['cores']} cores"),
        ("all figures", f"[CSV]({study.name}.csv), [JSON]({study.name}.json)"),
    ]
    table = "\n".join(f"| {name} | {text} |" for name, text in lines if text)
    return (
        f"# {study.title}\n\n{study.about.strip()}\n\n```sh\n{about['command']}\n```\n\n{body.strip()}\n\n"
        f"## What this was made with\n\n| | |\n|---|---|\n{table}\n"
    )


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown.

    Parameters
    ----------
    head : sequence of str
    lines : sequence of sequence of str

    Returns
    -------
    str

    Examples
    --------
    >>> print(table(["data", "recall"], [["CUB", "0.9"]]))
    | data | recall |
    |---|---|
    | CUB | 0.9 |
    """
    return "\n".join(
        "| " + " | ".join(line) + " |" if number != 1 else "|" + "---|" * len(head)
        for number, line in enumerate([head, [], *lines])
    )


def _draw(study: Study, rows: Sequence[Row], folder: Path) -> list[str]:
    import matplotlib as mpl

    names = []
    with mpl.rc_context(STYLE):
        for name, figure in study.figures(rows).items():
            full = f"{study.name}-{name}"
            figure.savefig(folder / f"{full}.svg", metadata={"Date": None})
            figure.savefig(folder / f"{full}.png", metadata={"Software": None})
            names.append(full)
    return names


def _put(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _words(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_words(one) for one in value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(one)}" for name, one in value.items())
    return f"{value:,g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _checksum(name: str) -> str | None:
    """Return the SHA-256 of a file of real data; None for words that name no file."""
    if "/" not in name:
        return None
    with find(name).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
