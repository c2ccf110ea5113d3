import importlib
import inspect
import json
import pkgutil
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import nearveil.mechanisms
import studies.baselines
from nearveil.cli._plan import mechanisms
from nearveil.mechanisms import Release, catalog
from tests.catalogue import FILE, describe_all

app = typer.Typer()
app.command()(mechanisms)
runner = CliRunner()


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = runner.invoke(app, ["--json"])
    assert done.exit_code == 0, done.output
    parsed: dict[str, Any] = json.loads(done.output)
    return parsed


@pytest.fixture(scope="module")
def rows(found: dict[str, Any]) -> dict[str, Any]:
    return {row["name"]: row for row in found["mechanisms"]}


def test_none_is_missing(rows: dict[str, Any]) -> None:
    """Every release that can be built is in the table, exported or not."""
    for package in (nearveil.mechanisms, studies.baselines):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    pending, classes = [Release], set()
    while pending:
        for child in pending.pop().__subclasses__():
            pending.append(child)
            # Test doubles are releases too; those of the library are what counts.
            if not inspect.isabstract(child) and child.__module__.startswith(
                ("nearveil.mechanisms.", "nearveil.privatemail.", "studies.baselines.")
            ):
                classes.add(child.__name__)
    exported = {
        name
        for package in (nearveil.mechanisms, studies.baselines)
        for name in package.__all__
        if inspect.isclass(value := getattr(package, name)) and issubclass(value, Release)
    } - {"Release"}
    assert exported <= classes
    assert {row["class_name"] for row in rows.values()} == classes


def test_the_listing_is_what_the_mechanisms_are() -> None:
    assert FILE.read_text() == describe_all(), "python -m tests.catalogue writes it"


def test_names_are_unique(found: dict[str, Any], rows: dict[str, Any]) -> None:
    assert len(rows) == len(found["mechanisms"])


@pytest.mark.parametrize(
    ("name", "protects", "sound", "kind"),
    [
        ("covers", "the query", True, "pure"),
        ("privunit", "the query", True, "pure"),
        ("privatemail (gaussian)", "the query", True, "approximate"),
        ("privatemail (laplace)", "the query", True, "pure"),
        ("privatemail (as published 2022)", "claims: the query", False, "approximate"),
        ("privatemail (as published 2021)", "claims: the query", False, "approximate"),
        ("privatemail (as published 2022-code)", "claims: the query", False, "approximate"),
        ("latent", "the query", True, "pure"),
        ("ome", "the query", True, "pure"),
        ("analytic-gaussian", "the query", True, "approximate"),
        ("random-projection", "the query", True, "approximate"),
        ("random-projection (as published)", "claims: the query", False, "approximate"),
        ("von-mises-fisher", "the query", True, "metric, pure"),
        ("dp-dsne", "the query", True, "approximate"),
        (
            "private-pca (gaussian)",
            "a record of the set whose covariance is released; not the query",
            True,
            "approximate",
        ),
        (
            "private-pca (bingham)",
            "claims: a record of the set that the directions are learned from; not the query",
            False,
            "pure",
        ),
        (
            "private-pca (gibbs)",
            "claims: a record of the set that the directions are learned from; not the query",
            False,
            "pure",
        ),
        ("raw", "nothing", True, "none"),
        ("plain-tsne", "nothing", True, "none"),
    ],
)
def test_what_each_promises(rows: dict[str, Any], name: str, protects: str, sound: bool, kind: str) -> None:
    row = rows[name]
    assert (row["protects"], row["sound"], row["kind"]) == (protects, sound, kind)
    assert bool(row["reason"]) is not sound
    assert row["source"]


def test_bytes_are_measured(rows: dict[str, Any]) -> None:
    # Raw features are 64 floats of 4 bytes, PrivUnit's vectors 64 bytes, and all have a header.
    assert 256 < rows["raw"]["message_bytes"] < 256 + 160
    assert 64 < rows["privunit"]["message_bytes"] < 64 + 160
    assert rows["privatemail (as published 2022)"]["message_bytes"] > 200 * 2 * 8
    assert all(row["message_bytes"] or name == "plain-tsne" for name, row in rows.items())


def test_the_table_says_why_a_promise_does_not_hold(rows: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from nearveil.mechanisms.catalog import MechanismSummary

    monkeypatch.setattr(
        "nearveil.mechanisms.catalog.describe_mechanisms",
        lambda entries: [MechanismSummary(**rows[entry.name]) for entry in entries],
    )
    done = runner.invoke(app, [], env={"COLUMNS": "220"})
    assert done.exit_code == 0
    text = " ".join(done.output.split())
    assert "protects" in text
    assert "not the query" in text
    assert "random-projection (as published): its noise is for a change of one attribute" in text


def test_a_missing_library_leaves_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    def missing(name: str) -> Any:
        raise ImportError(name)

    (entry,) = (entry for entry in studies.baselines.BASELINES if entry.needs)
    monkeypatch.setattr("studies.baselines.embeddings.importlib.import_module", missing)
    row = catalog._describe(entry, np.random.default_rng(0).standard_normal((400, 64)), np.arange(200) % 4)
    assert (row.name, row.message_bytes, row.protects) == ("plain-tsne", None, "nothing")
