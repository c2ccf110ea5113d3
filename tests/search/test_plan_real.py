"""Plans against galleries that ``nearveil index`` makes by default: bytes sent, received and kept, and reach."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearveil.features.vectors import VectorTable
from nearveil.gallery.codes import ID_BYTES, list_code_sizes
from nearveil.gallery.sync import SyncReport, sync_table
from nearveil.search import plan
from nearveil.search.planning import SearchPlan, SearchWay
from tests.service.asking import scene

OFFERS = ("names", "codes", "sealed")
NEAR = 0.25  # largest difference of a planned size from the real one, if the size of codes is known
TWICE = 1.0  # if it is not: "auto" chooses by the data
EPSILON = 4.0


def make_rows(items: int, dimension: int) -> Any:
    """Return rows whose variances fall, as those of features do."""
    generator = np.random.default_rng(0)
    spread = np.arange(1, dimension + 1) ** -0.5
    return (generator.standard_normal((items, dimension)) * spread).astype(np.float32)


def make_gallery(path: Path, rows: Any, **options: Any) -> SyncReport:
    names = [f"a name, number {n:05}"[-16:] for n in range(len(rows))]
    return sync_table(VectorTable(rows, None, names), path, **options)


def measure_ways(path: Path, folder: Path, rows: Any) -> dict[str, SearchWay]:
    """Return the real bytes of each way, in place of the planned ones."""
    real = {}
    with scene(path, folder, epsilon=100.0, offers=OFFERS) as here:
        here.gallery.prepare()  # type: ignore[attr-defined]
        client, _ = here.client(home=folder / "home")
        copy = client.sync()
        files = sum(file.stat().st_size for file in copy.folder.iterdir())
        real["home"] = SearchWay("home", "", 0.0, files, 0, 0, 0, (0, 1))
        for name, options in (("sealed", {"by": "sealed"}), ("message", {"epsilon": EPSILON})):
            client, _ = here.client(home=folder / "none")
            first, second = (client.nearest(row, **options) for row in rows[:2])
            kept = first.bytes_received - second.bytes_received
            real[name] = SearchWay(name, "", 0.0, kept, second.bytes_sent, second.bytes_received, 0, (0, 1))
    return real


def compare(planned: SearchPlan, real: dict[str, SearchWay], most: float) -> None:
    """Require sizes in both directions: a plan that is too large misleads, too."""
    for way in planned.ways:
        for name in ("stored_bytes", "sent_bytes", "received_bytes"):
            expected, measured = getattr(way, name), getattr(real[way.name], name)
            assert abs(expected - measured) <= most * min(expected, measured) + 100, (way.name, name)


@pytest.mark.parametrize(("items", "dimension"), [(500, 24), (3000, 64), (20_000, 32), (500, 1280)])
def test_what_is_planned_is_what_is_made(tmp_path: Path, items: int, dimension: int) -> None:
    rows = make_rows(items, dimension)
    report = make_gallery(tmp_path / "gallery", rows)
    planned = plan(items, EPSILON, dimension=dimension)
    assert report.published is not None
    assert report.published.reach == planned.reach == 1
    assert planned.candidates * items == report.published.map.set_size
    assert report.item_bytes - ID_BYTES in list_code_sizes(items, dimension)
    assert f"{report.item_bytes}" in planned.describe_codes()
    real = measure_ways(tmp_path / "gallery", tmp_path, rows)
    compare(planned, real, TWICE)
    compare(plan(items, EPSILON, dimension=dimension, code_bytes=report.item_bytes), real, NEAR)


def test_planned_options_are_those_of_the_index(tmp_path: Path) -> None:
    """A gallery with other options, by the commands of its plan."""
    rows = make_rows(1000, 48)
    planned = plan(1000, EPSILON, 5000, dimension=48, code_bytes=30, reach=0)
    words = planned.ways[2].commands[0].split()
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options.keys() == {"--into", "--code-bytes", "--candidates", "--epsilon", "--reach"}
    report = make_gallery(
        tmp_path / "gallery",
        rows,
        code_bytes=int(options["--code-bytes"]),
        candidates=float(options["--candidates"]),
        epsilon=float(options["--epsilon"]),
        reach=float(options["--reach"]),
    )
    assert report.published is not None
    assert abs(report.published.reach - planned.reach) < 0.2
    assert report.item_bytes == planned.item_bytes == 30
    assert planned.candidates * 1000 == report.published.map.set_size
