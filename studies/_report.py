"""What a study leaves behind: CSV, JSON, SVG, PNG and a page; and the findings that lead the results."""

import hashlib
import json
import math
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from jinja2 import Environment, StrictUndefined

from studies._figures import STYLE
from studies._search import NAMES
from studies._study import TEMPLATES, Measured, Row, Study, as_frame, select, summarise
from studies.data import find

PACKAGES = ("nearveil", "numpy", "scipy", "scikit-learn", "faiss-cpu", "dp-accounting", "openTSNE", "torch")


class PageError(ValueError):
    """A page that does not show all figures of its study, or shows others."""


def write(study: Study, measured: Measured, folder: Path) -> Path:
    """Draw the figures of a study, write all of its files, and return the path of its page."""
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
    _replace(page, f"{text}\n\n## Data, parameters and versions\n\n{_list_origin(study, about)}\n")
    return page


def publish(study: Study, folder: Path, docs: Path) -> None:
    """Copy the files of a study, but the cases it keeps for itself, to the documentation."""
    docs.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.glob(f"{study.name}*")):
        shutil.copyfile(path, docs / path.name)


def render(study: Study, frame: pd.DataFrame) -> str:
    """Fill the template of a study with what its rows say, and with the constants of its module."""
    constants = {name: value for name, value in getattr(study.facts, "__globals__", {}).items() if name.isupper()}
    command = {"command": f"```sh\nnearveil study {study.name}\n```"}
    return fill_template(study.page, {**constants, **study.facts(frame), **command})


def fill_template(text: str, facts: Mapping[str, Any]) -> str:
    """Fill a Jinja template; a name that is not among the facts is an error."""
    pages = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # noqa: S701 - Markdown
    pages.filters.update(fmt=format, interval=interval)
    return pages.from_string(text).render(facts, table=table).strip()


def interval(results: Any, spec: str = ".2f", least: float = -math.inf, most: float = math.inf) -> str:
    """Return a mean and its interval in print, within what is possible; of one seed, the mean alone."""
    if math.isnan(results.low):
        return format(results.value, spec)
    return f"{results.value:{spec}} ({max(results.low, least):{spec}} to {min(results.high, most):{spec}})"


def show(
    frame: pd.DataFrame, column: str, *by: str, spec: str = ".3f", least: float = -math.inf, most: float = math.inf
) -> pd.Series:
    """Return means over seeds with their intervals in print, for all values of other columns."""
    return summarise(frame, column, *by).apply(interval, axis=1, args=(spec, least, most))


def round_up(value: float) -> str:
    """Return an upper bound in print, never below what it is."""
    return f"{math.ceil(value * 1000 - 1e-9) / 1000:.3f}"


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
            names.append(f"{study.name}-{name}")
            figure.savefig(folder / f"{names[-1]}.svg", metadata={"Date": None})
            figure.savefig(folder / f"{names[-1]}.png", metadata={"Software": None})
    return names


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _as_words(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_as_words(entry) for entry in value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {_as_words(entry)}" for name, entry in value.items())
    return f"{value:,g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _compute_checksum(name: str) -> str | None:
    """Return the SHA-256 of a file of real data; None for words that name no file."""
    if "/" not in name:
        return None
    with find(name).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _list_versions() -> dict[str, str]:
    results = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            results[name] = version(name)
    return results


BEGIN, END = "<!-- findings: written by nearveil study -->", "<!-- end of findings -->"
NEAR = 0.9  # of the ceiling


def _find_leak(rows: pd.DataFrame) -> dict[str, Any]:
    here = select(rows, data="cars196" if "cars196" in set(rows["data"]) else rows["data"].iloc[0])
    recall = here.groupby(["features", "label"])["recall"].mean().to_dict()
    return {"epsilon": here["epsilon"].iloc[0], "recall": recall, "ceiling": round_up(here["ceiling"].iloc[0])}


def _compare_covers(rows: pd.DataFrame) -> dict[str, Any]:
    results = select(rows, part="recall")
    covers = select(results, method="covers")
    shares = (covers["nn_recall"] / covers["ceiling"]).groupby([covers[key] for key in ("data", "f", "epsilon")]).mean()
    first = select(results, data=results["data"].iloc[0], f=0.1)
    data = first["data"].iloc[0]
    return {
        "near": int((shares >= NEAR).sum()),
        "total": len(shares),
        "least": shares.min(),
        "data": NAMES.get(data, data),
        "found": select(first, epsilon=4.0).groupby("method")["nn_recall"].mean(),
        "floor": select(first, method="covers")["floor"].mean(),
    }


def _compare_sensitivity(rows: pd.DataFrame) -> dict[str, Any]:
    results = rows.dropna(subset=["found"])
    stated = select(results, rows=1000, bandwidth=6.0).dropna(subset=["published"])
    waste = stated["published"] / stated["found"]
    target = stated["released"].str.startswith("target")
    near, most = ((part[["plain", "sharp"]].min(axis=1) / part["found"]).max() for part in (stated, results))
    return {"target": waste[target], "all": waste[~target], "near": near, "most": most}


def _compare_claims(rows: pd.DataFrame) -> dict[str, Any]:
    costs = select(rows, part="all").groupby(["plan", "kind"])["epsilon"].agg(["min", "max"])
    plans = []
    for plan, claimed in (("MNIST", 0.47), ("SVHN", 0.49)):
        upper, lower = costs["min"][plan, "upper"], costs["max"].get((plan, "lower"))
        plans.append({"name": plan, "claimed": claimed, "upper": upper, "lower": lower})
    return {"plans": plans}


def _compare_bits(rows: pd.DataFrame) -> dict[str, Any]:
    budgets = select(rows, part="budget")
    ome = budgets[budgets["mechanism"] != "LATENT"]
    default = select(ome, alpha=100.0, claimed=10.0).sort_values("bits").iloc[-1]
    below = int((ome["correction"] < ome["exact"]).sum())
    return {"exact": default["exact"], "claimed": default["claimed"], "below": below, "total": len(ome)}


FINDINGS: dict[str, Callable[[pd.DataFrame], Mapping[str, Any]]] = {
    "label-leak": _find_leak,
    "retrieval": _compare_covers,
    "sensitivity": _compare_sensitivity,
    "accounting": _compare_claims,
    "latent-ome": _compare_bits,
}
"""What a reader should take away, by study: the facts of its template, a sentence and a figure."""


def describe_finding(study: str, rows: list[Row]) -> str:
    """Return the finding of a study in Markdown."""
    text = (TEMPLATES / "findings" / f"{study}.md").read_text(encoding="utf-8")
    check = f"\n\n   Check it: `nearveil study {study}` ([page](study/{study}.md))"
    return fill_template(text, FINDINGS[study](as_frame(rows))) + check


def list_findings(folder: Path) -> str:
    """Return the findings of all studies that were made, in Markdown."""
    files = {study: folder / f"{study}.json" for study in FINDINGS}
    made = [(study, json.loads(path.read_text(encoding="utf-8"))) for study, path in files.items() if path.exists()]
    return "\n\n".join(f"{i}. {describe_finding(study, data['rows'])}" for i, (study, data) in enumerate(made, 1))


def write_findings(docs: Path) -> None:
    """Write the findings into the page that leads the results, between two marks."""
    page = docs / "index.md"
    if not page.exists():
        return
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        page.write_text(f"{before}{BEGIN}\n\n{list_findings(docs / 'study')}\n\n{END}{after}", encoding="utf-8")
