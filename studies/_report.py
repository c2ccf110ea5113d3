"""What a study leaves behind: CSV, JSON, SVG, PNG, and a page, each with all that one needs to check it."""

import hashlib
import json
import math
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from jinja2 import Environment, StrictUndefined

from studies._figures import STYLE
from studies._study import Measured, Row, Study, as_frame
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
    frame = as_frame(measured.rows)
    names = _draw(study, frame, folder)
    text = render(study, frame)
    for name in names:
        if f"({name}.svg)" not in text:
            raise PageError(f"the page of {study.name} does not show {name}.svg")
    about = describe_origin(study, measured)
    _replace(folder / f"{study.name}.csv", as_csv(measured.rows))
    _replace(folder / f"{study.name}.json", json.dumps({**about, "rows": measured.rows}, indent=1) + "\n")
    page = folder / f"{study.name}.md"
    _replace(page, f"{text}\n\n## What this was made with\n\n{_list_origin(study, about)}\n")
    return page


def publish(study: Study, folder: Path, docs: Path) -> None:
    """Copy the files of a study, but the cases it keeps for itself, to the documentation."""
    docs.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.glob(f"{study.name}*")):
        shutil.copyfile(path, docs / path.name)


def render(study: Study, frame: pd.DataFrame) -> str:
    """Fill the template of a study with what its rows say."""
    facts = {**study.facts(frame), "command": f"```sh\nnearveil study {study.name}\n```"}
    return fill_template(study.page, facts)


def fill_template(text: str, facts: Mapping[str, Any]) -> str:
    """Fill a Jinja template; a name that is not among the facts is an error."""
    pages = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # noqa: S701 - Markdown
    pages.filters.update(fmt=format, interval=interval)
    return pages.from_string(text).render(facts, table=table).strip()


def interval(found: Any, spec: str = ".2f", least: float = -math.inf, most: float = math.inf) -> str:
    """Return a mean and its interval in print, within what is possible; of one seed, the mean alone.

    Examples
    --------
    >>> from studies import Mean
    >>> interval(Mean(0.5, -0.1, 1.1), ".2f", 0, 1), interval(Mean(0.5, math.nan, math.nan), ".1f")
    ('0.50 (0.00 to 1.00)', '0.5')
    """
    if math.isnan(found.low):
        return format(found.value, spec)
    return f"{found.value:{spec}} ({max(found.low, least):{spec}} to {min(found.high, most):{spec}})"


def plain(value: float) -> str:
    """Return three digits of a number, without an exponent."""
    return f"{float(f'{value:.3g}'):,.10g}"


def describe_origin(study: Study, measured: Measured) -> dict[str, Any]:
    """Return what was measured with what: data, parameters, seeds, versions, command, time."""
    return {
        "study": study.name,
        "command": f"nearveil study {study.name}",
        "data": {name: _compute_checksum(name) for name in study.data},
        "parameters": dict(study.parameters),
        "seeds": list(study.seeds),
        "versions": {"python": platform.python_version(), **_list_versions()},
        "cores": os.cpu_count(),
        "seconds": round(measured.seconds),
    }


def as_csv(rows: Sequence[Row]) -> str:
    """Return rows as CSV, with every column that any of them has."""
    return str(pd.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n"))


def table(frame: pd.DataFrame) -> str:
    """Return a data frame as a table in Markdown, without its index.

    Parameters
    ----------
    frame : DataFrame

    Returns
    -------
    str

    Examples
    --------
    >>> print(table(pd.DataFrame({"data": ["CUB", "Cars"], "recall": ["0.9", None]})))
    | data | recall |
    |---|---|
    | CUB | 0.9 |
    | Cars |  |
    """
    cells = frame.astype(object).where(frame.notna(), "").to_numpy()
    head, *lines = ("| " + " | ".join(map(str, line)) + " |" for line in (frame.columns, *cells))
    return "\n".join([head, "|" + "---|" * frame.shape[1], *lines])


def _list_origin(study: Study, about: dict[str, Any]) -> str:
    data = "; ".join(name if sum_ is None else f"{name} (SHA-256 {sum_[:16]})" for name, sum_ in about["data"].items())
    lines = [
        ("data", data),
        ("parameters", "; ".join(f"{name} {_as_words(value)}" for name, value in about["parameters"].items())),
        ("seeds", ", ".join(map(str, about["seeds"]))),
        ("versions", ", ".join(f"{name} {number}" for name, number in about["versions"].items())),
        ("time", f"{about['seconds']:,} s on {about['cores']} cores"),
        ("all figures", f"[CSV]({study.name}.csv), [JSON]({study.name}.json)"),
    ]
    return table(pd.DataFrame([line for line in lines if line[1]], columns=["", " "])).replace("|  |   |", "| | |", 1)


def _draw(study: Study, frame: pd.DataFrame, folder: Path) -> list[str]:
    names = []
    with mpl.rc_context(STYLE):
        for name, figure in study.figures(frame).items():
            full = f"{study.name}-{name}"
            figure.savefig(folder / f"{full}.svg", metadata={"Date": None})
            figure.savefig(folder / f"{full}.png", metadata={"Software": None})
            names.append(full)
    return names


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _as_words(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_as_words(one) for one in value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {_as_words(one)}" for name, one in value.items())
    return f"{value:,g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _compute_checksum(name: str) -> str | None:
    """Return the SHA-256 of a file of real data; None for words that name no file."""
    if "/" not in name:
        return None
    with find(name).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _list_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
