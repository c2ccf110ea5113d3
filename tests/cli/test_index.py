"""``nearveil index``: what is new comes in, what is gone goes out, and a second run does nothing."""

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")
pytest.importorskip("skimage")

from nearveil.features import HogColor, OnnxExtractor, load_image
from nearveil.features.backbones import EXTRACTORS
from nearveil.gallery import Index, sync
from nearveil.gallery.errors import PrivateIndexError
from nearveil.storage import data_folder
from tests.cli.galleries import COUNT, colour, fine, gallery, picture, refused, run, told

HOG = ("--extractor", "hog")


@pytest.fixture(autouse=True)
def learns_few_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = Index.publish

    def quick(self: Index, *terms: Any, **more: Any) -> Any:
        quick_terms = {"n_sets": more["n_sets"] or 3, "reach": 0.0}  # to choose the number takes most of the time
        return publish(self, *terms, **{**more, **quick_terms})

    monkeypatch.setattr(Index, "publish", quick)


@pytest.fixture
def folder(here: Path) -> Path:
    return gallery(here / "photos")


def place(here: Path) -> Path:
    return here / "data" / "nearveil" / "index"


def state(here: Path) -> tuple[int, list[str], dict[str, int]]:
    """Return the revision, the maps, and the ids by name."""
    with Index.open(place(here)) as index:
        items = index.items(index.ids())
        assert len({item.name for item in items}) == len(items)
        return index.revision, [one.public_id for one in index.maps()], {item.name: item.id for item in items}


def test_a_folder_becomes_a_gallery(folder: Path, here: Path) -> None:
    found = told("index", folder, *HOG)
    assert (found["images"], found["added"], found["deleted"], found["skipped"]) == (COUNT, COUNT, 0, [])
    assert (found["dimension"], found["candidates"], found["epsilon"], found["revision"]) == (436, 4, 4.0, 1)
    assert found["index"] == str(place(here))
    files = sorted(folder.rglob("*.png"))
    with Index.open(place(here)) as index:
        items = index.items(index.ids())
        assert [item.name for item in items] == [str(file.relative_to(folder)) for file in files]
        assert [item.original for item in items] == files
        rows = HogColor().extract([load_image(file) for file in files])
        assert np.array_equal(index.features(index.ids()), rows)
        for item, file in zip(items, files, strict=True):
            assert item.thumbnail[8:12] == b"WEBP"
            small = load_image(item.thumbnail)
            assert small.shape == (60, 90, 3)
            assert np.abs(small.mean(axis=(0, 1)) - load_image(file).mean(axis=(0, 1))).max() < 8
        published, stale = index.current()
        assert not stale
        assert (published.map.nbytes, published.map.n_sets) == (found["map_bytes"], found["sets"])


def test_sets_and_bytes_of_codes_stay_until_others_are_given(folder: Path, here: Path) -> None:
    found = told("index", folder, *HOG, "--sets", 4, "--reach", 0, "--code-bytes", 20)
    assert (found["sets"], found["code_bytes"]) == (4, 20)
    again = told("index", folder, *HOG)
    assert (again["sets"], again["code_bytes"], again["map_learned"]) == (4, 20, False)
    other = told("index", folder, *HOG, "--sets", 5)
    assert (other["sets"], other["code_bytes"], other["map_learned"]) == (5, 20, True)
    assert "--sets must be from 2 to" in refused("index", folder, *HOG, "--sets", 10_000)


def test_a_second_run_does_nothing(folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fine("index", folder, *HOG)
    before = state(here)

    def never(*_: object) -> None:
        raise AssertionError("features come from the cache")

    monkeypatch.setattr(HogColor, "_rows", never)
    text = fine("index", folder)  # auto finds the extractor of the index
    assert "Nothing new" in text
    assert "0 added, 0 deleted, 0 skipped" in text
    assert state(here) == before


def test_without_the_cache_images_are_still_known(folder: Path, here: Path) -> None:
    fine("index", folder, *HOG)
    before = state(here)
    (here / "data" / "nearveil" / "index.features").rename(here / "elsewhere")
    assert told("index", folder)["map_learned"] is False
    assert state(here) == before


def test_only_what_changed_is_changed(folder: Path, here: Path) -> None:
    fine("index", folder, *HOG)
    _, maps, ids = state(here)
    picture(folder / "0" / "00.png", (255, 255, 0))  # another image under the name
    (folder / "1" / "01.png").unlink()
    (folder / "2" / "02.png").rename(folder / "2" / "moved.png")
    picture(folder / "new" / "one.png", (0, 255, 255))
    found = told("index", folder)
    assert (found["added"], found["replaced"], found["deleted"], found["images"]) == (2, 1, 2, COUNT)
    _, maps_now, now = state(here)
    assert set(now) - set(ids) == {"2/moved.png", "new/one.png"}
    assert set(ids) - set(now) == {"1/01.png", "2/02.png"}
    assert [name for name in ids.keys() & now.keys() if ids[name] != now[name]] == ["0/00.png"]
    # The older map tells of what was deleted, so it is not kept.
    assert len(maps_now) == 1
    assert maps_now != maps
    with Index.open(place(here)) as index:
        small = load_image(index.items([now["0/00.png"]])[0].thumbnail)
        assert small.mean(axis=(0, 1)) == pytest.approx([250, 250, 5], abs=12)


def test_the_map_before_is_kept_while_nothing_was_deleted(folder: Path, here: Path) -> None:
    fine("index", folder, *HOG)
    before = state(here)[1]
    picture(folder / "new.png", (0, 255, 255))
    fine("index", folder)
    assert state(here)[1][1:] == before


def test_what_is_no_image_is_skipped_with_its_reason(folder: Path, here: Path) -> None:
    outside = picture(here / "outside" / "private.png", (9, 9, 9))
    (folder / "notes.txt").write_text("no image")
    whole = (folder / "0" / "00.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "link.png").symlink_to(outside)
    (folder / "way out").symlink_to(outside.parent)
    (folder / "round").symlink_to(folder)
    picture(folder / ".hidden" / "one.png", (1, 2, 3))
    found = told("index", folder, *HOG)
    assert found["images"] == COUNT
    reasons = {Path(one["file"]).name: one["reason"].split(":")[0] for one in found["skipped"]}
    assert reasons == {
        "notes.txt": "not an image",
        "cut.png": "broken or truncated",
        "link.png": "a link",
        "way out": "a link",
        "round": "a link",
    }
    text = fine("index", folder)
    assert "5 skipped" in text
    assert "cut.png: broken or truncated" in text


def test_a_name_that_is_no_text_is_skipped(folder: Path) -> None:
    strange = folder / b"caf\xe9.png".decode("utf-8", "surrogateescape")
    try:
        picture(folder / "plain.png", (1, 2, 3)).rename(strange)
    except OSError:
        pytest.skip("this file system has names of text alone")
    found = told("index", folder, *HOG)
    assert [one["reason"] for one in found["skipped"]] == ["its name is not text"]


def test_many_skipped_files_are_counted(folder: Path) -> None:
    for number in range(13):
        (folder / f"{number}.txt").write_text("no image")
    text = fine("index", folder, *HOG)
    assert text.count("skipped /") == 10
    assert "and 3 more skipped" in text


def test_images_of_other_sync_stay(folder: Path, here: Path) -> None:
    other = gallery(here / "other", 10)
    fine("index", folder, *HOG)
    assert told("index", other)["images"] == COUNT + 10
    (other / "0" / "00.png").unlink()
    found = told("index", other)
    assert (found["deleted"], found["images"]) == (1, COUNT + 9)
    assert told("index", folder)["added"] == 0


def test_an_index_inside_the_folder_is_not_indexed(folder: Path) -> None:
    for _ in range(2):
        found = told("index", folder, *HOG, "--into", folder / "kept")
        assert (found["images"], found["skipped"]) == (COUNT, [])


def test_the_terms_of_the_map_stay_until_others_are_given(folder: Path) -> None:
    assert told("index", folder, *HOG, "--epsilon", 2, "--candidates", 0.5)["candidates"] == 20
    picture(folder / "new.png", (0, 255, 255))
    found = told("index", folder)
    assert (found["epsilon"], found["candidates"], found["map_learned"]) == (2.0, 20, True)
    found = told("index", folder, "--epsilon", 3)
    assert (found["epsilon"], found["candidates"], found["map_learned"], found["added"]) == (3.0, 20, True, 0)


def test_a_run_that_died_before_the_map_is_finished_by_the_next(
    folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Index, "publish", dies)
        assert run("index", folder, *HOG).exit_code != 0
    found = told("index", folder)
    assert (found["added"], found["images"], found["map_learned"]) == (0, COUNT, True)


def test_where_the_index_is(folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARVEIL_INDEX", "named")
    assert told("index", folder, *HOG)["index"] == str(here / "named")
    assert told("index", folder, *HOG, "--into", "given")["index"] == str(here / "given")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.setenv("HOME", str(here))
    assert sync.find_index(None) == str(here / ".local" / "share" / "nearveil" / "index")
    assert sync.describe_location("postgresql://me:secret@host/birds") == "postgresql://me:***@host/birds"


def test_a_folder_without_images_leaves_nothing_and_names_no_index(here: Path) -> None:
    (here / "empty").mkdir()
    (here / "empty" / "notes.txt").write_text("no image")
    said = refused("index", here / "empty", *HOG, "--into", here / "g0")
    assert "no image below" in said
    assert "delete" not in said
    assert [one.name for one in here.iterdir()] == ["empty"]


def test_a_place_that_cannot_be_written_is_named_as_it_was_given(folder: Path, here: Path) -> None:
    (here / "file").write_text("in the way")
    said = refused("index", folder, *HOG, "--into", here / "file" / "g0")
    assert f"--into: nothing can be written at {here / 'file' / 'g0'}: Not a directory" in said
    assert ".features" not in said


def test_a_gallery_too_small_for_messages_is_told_what_to_do(here: Path) -> None:
    gallery(here / "few", 12)
    said = " ".join(fine("index", here / "few", *HOG, "--into", here / "small").split())
    assert "Warning: an answer holds 1 of 12 items" in said
    assert "Search so small a gallery without --epsilon, at no cost" in said
    assert "For 8 matches by message, use --candidates 0.67" in said
    gallery(here / "more", 40)
    assert "Warning" not in fine("index", here / "more", *HOG, "--into", here / "large", "--candidates", 0.2)


def test_what_cannot_be_indexed_changes_nothing(folder: Path, here: Path) -> None:
    empty = here / "empty"
    empty.mkdir()
    (empty / "notes.txt").write_text("no image")
    assert "no folder at" in refused("index", here / "nowhere", *HOG)
    assert "no image below" in refused("index", empty, *HOG)
    picture(empty / "one.png", (1, 2, 3))
    assert "at least two items" in refused("index", empty, *HOG)
    picture(empty / "two.png", (200, 2, 3))
    assert "--candidates must be at least 1/2" in refused("index", empty, *HOG)
    assert "--candidates must" in refused("index", folder, *HOG, "--candidates", 0)
    for wrong in (("--candidates", 2), ("--epsilon", 0), ("--epsilon", "nan"), ("--reach", 2), ("--sets", 1)):
        result = run("index", here / "nowhere", *wrong)  # before anything is looked for
        assert result.exit_code == 2
        assert wrong[0] in result.output
    assert not place(here).exists()
    fine("index", folder, *HOG)
    before = state(here)
    for file in folder.rglob("*.png"):
        file.unlink()
    assert "no image below" in refused("index", folder)
    gallery(folder, 3)
    assert "--candidates must be at least 1/3 (3 items)" in refused("index", folder).replace(
        ", one item of this gallery", ""
    )
    gallery(folder)
    picture(folder / "new.png", (0, 255, 255))
    assert "--sets must" in refused("index", folder, "--sets", 1000)
    assert state(here)[2] == before[2]
    assert state(here)[1] == before[1]


def test_an_index_of_other_features_is_refused(folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Index.create(here / "theirs", dimension=436, extractor="f00d" * 16).close()
    assert "not installed" in refused("index", folder, "--into", "theirs")
    assert "another extractor than HOG" in refused("index", folder, "--into", "theirs", *HOG)
    (here / "full").mkdir()
    (here / "full" / "file").write_text("mine")
    assert "new or empty" in refused("index", folder, "--into", "full", *HOG)

    def lacking() -> Any:
        raise ModuleNotFoundError("this needs torch: pip install nearveil[torch]")

    monkeypatch.setitem(EXTRACTORS, "mobilenet-v2", lacking)
    assert "pip install nearveil[torch]" in refused("index", folder, "--extractor", "mobilenet-v2")


def test_the_best_extractor_is_taken_for_a_new_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "default_extractor", HogColor)
    assert told("index", folder)["extractor"] == "HOG and colour"


def colours(here: Path) -> Path:
    """A network: the mean colour."""
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    helper = pytest.importorskip("onnx", reason="makes the model").helper
    pooled = helper.make_node("GlobalAveragePool", ["x"], ["mean"])
    flat = helper.make_node("Flatten", ["mean"], ["y"])
    ends = [
        helper.make_tensor_value_info(name, 1, shape) for name, shape in (("x", ["n", 3, "h", "w"]), ("y", ["n", 3]))
    ]
    graph = helper.make_graph([pooled, flat], "colours", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (here / "colours.onnx").write_bytes(model.SerializeToString())
    return here / "colours.onnx"


def test_a_model_file_makes_the_features(folder: Path, here: Path) -> None:
    colours(here)
    assert told("index", folder, "--extractor", "colours.onnx", "--candidates", 0.5)["dimension"] == 3
    assert "pass its model file" in refused("index", folder)
    assert "model file that exists" in refused("index", folder, "--extractor", "gone.nvm")


def test_what_is_kept_by_default_is_for_its_owner_alone(folder: Path, here: Path) -> None:
    fine("index", folder, *HOG)
    assert stat.S_IMODE(data_folder().stat().st_mode) == 0o700


def rows_of(where: Path) -> dict[str, bytes]:
    with Index.open(where) as index:
        items = index.items(index.ids())
        return {item.name: index.features([item.id]).tobytes() for item in items}


@pytest.fixture
def private(folder: Path, here: Path) -> Path:
    """The index of private images, by a network."""
    found = told("index", folder, "--into", "private", "--extractor", colours(here), "--private")
    assert (found["private"], found["row_exact"], found["added"], found["map_learned"]) == (True, True, COUNT, False)
    assert "sets" not in found
    return here / "private"


def test_private_images_have_exact_rows_and_no_map(folder: Path, private: Path, here: Path) -> None:
    files = sorted(folder.rglob("*.png"))
    extractor = OnnxExtractor(here / "colours.onnx")
    alone = {str(file.relative_to(folder)): extractor.extract([load_image(file)], row_exact=True) for file in files}
    before = rows_of(private)
    assert before == {name: row.tobytes() for name, row in alone.items()}
    (folder / "0" / "00.png").unlink()
    found = told("index", folder, "--into", "private", "--extractor", "colours.onnx")  # the index remembers
    assert (found["private"], found["row_exact"], found["deleted"], found["added"]) == (True, True, 1, 0)
    del before["0/00.png"]
    assert rows_of(private) == before
    text = fine("index", folder, "--into", "private", "--extractor", "colours.onnx")
    assert "none: the images are private" in text
    assert "Nothing new" in text
    with Index.open(private) as index, pytest.raises(PrivateIndexError):
        index.maps()


def test_private_images_are_shown_by_no_command(private: Path, here: Path) -> None:
    image = picture(here / "question.png", (10, 20, 30))
    assert "has private rows" in refused("query", image, "--index", "private", "--epsilon", 4)
    assert "has private rows" in refused("ui", "--index", "private", "--no-browser")
    assert "has private rows" in refused("serve", "private", "--tokens", "tokens.db", "--port", 0)


def test_what_was_shown_does_not_become_private(folder: Path, here: Path) -> None:
    fine("index", folder, "--into", "open", *HOG)
    assert "--private: this index was made for an open gallery" in refused(
        "index", folder, "--into", "open", "--private", *HOG
    )
    for term in (("--epsilon", 4), ("--candidates", 0.2), ("--sets", 3), ("--code-bytes", 64)):
        assert "private images have no map" in refused("index", folder, "--into", "new", "--private", *HOG, *term)
    assert not (here / "new").exists()
    Index.create(here / "empty", dimension=436, extractor=HogColor().fingerprint).close()
    assert told("index", folder, "--into", "empty", "--private")["private"]


def test_private_rows_of_an_earlier_version_are_made_anew(
    folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine("index", folder, "--into", "old", "--extractor", colours(here), "--candidates", 0.5)
    with Index.open(here / "old") as index:
        index.protect()
        first = index.ids()
        order: list[str] = []

        def watch(name: str) -> None:
            real = getattr(Index, name)

            def watched(self: Index, *given: Any, **more: Any) -> Any:
                order.append(name)
                return real(self, *given, **more)

            monkeypatch.setattr(Index, name, watched)

        watch("add")
        watch("delete")
        found = told("index", folder, "--into", "old", "--extractor", "colours.onnx")
        assert (found["row_exact"], found["added"], found["replaced"], found["deleted"]) == (True, 0, COUNT, 0)
        assert order == ["delete", "add"]
        assert not set(first.tolist()) & set(index.ids().tolist())


def test_what_sealed_questions_need_is_made_and_kept_in_step(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from nearveil.sealed import SealedIndex

    place = tmp_path / "sealed index"
    fine("index", folder, *HOG, "--into", place, "--candidates", 0.2)
    assert not (place / "index.sealed").exists()
    fine("index", folder, *HOG, "--into", place, "--sealed")
    assert len(SealedIndex.load(place / "index.sealed")) == COUNT
    picture(folder / "one more.png", colour(3), seed=77)
    fine("index", folder, *HOG, "--into", place)
    assert len(SealedIndex.load(place / "index.sealed")) == COUNT + 1
    assert "--sealed" in refused("index", folder, *HOG, "--into", tmp_path / "private", "--private", "--sealed")
