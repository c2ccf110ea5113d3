"""Copies of a gallery's codes: what is downloaded, what is downloaded again, and what is found in them."""

import hashlib
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nearveil.client.copies import HomeCopy, HomeError, _limit_range
from nearveil.gallery.answers import ItemDetails
from nearveil.gallery.codes import ScalarCodes
from nearveil.gallery.items import IndexSnapshot
from nearveil.gallery.publishing import MapTerms, Published
from nearveil.wire.client import encode_queries
from nearveil.wire.codes import Block, CodesGroup, CodesManifest, CodesSource
from nearveil.wire.frames import WireError, frame, write_fields
from nearveil.wire.messages import PublicPart
from nearveil.wire.server import ServedMap

WIDE = 1 << 14  # ids of a group


class _Index:
    extractor = "toy"


def _publish(ids: np.ndarray, dimension: int = 8, code_bytes: int | None = None) -> tuple[Published, PublicPart]:
    rows = np.random.default_rng(3).normal(size=(len(ids), dimension)).astype(np.float32)
    published = Published.learn(
        IndexSnapshot(1, ids.astype(np.uint32), rows), MapTerms(4.0, 0.2, n_sets=6, reach=0.0, code_bytes=code_bytes)
    )
    return published, ServedMap(_Index(), published, "birds").make_public_part()  # type: ignore[arg-type]


def _names(ids: np.ndarray) -> list[bytes]:
    return [f"bird {number}".encode() for number in ids.tolist()]


@pytest.fixture(scope="module")
def gallery() -> tuple[Published, PublicPart]:
    """Ids in three groups, with gaps."""
    return _publish(
        np.concatenate([np.arange(0, 600), np.arange(WIDE, WIDE + 300), np.arange(5 * WIDE, 5 * WIDE + 30)])
    )


def _source(gallery: tuple[Published, PublicPart], alive: np.ndarray | None = None) -> CodesSource:
    published, public = gallery
    keep = np.ones(len(published.ids), bool) if alive is None else alive
    return CodesSource(public, published.ids[keep], published.codes[keep], {"names": _names})


def _download(source: CodesSource, copy: HomeCopy, public: PublicPart) -> list[tuple[int, int]]:
    """Synchronise as a client does; return the groups that were asked for and how many blocks came."""
    manifest, asked = CodesManifest.from_bytes(source.manifest.to_bytes()), []
    for number, has_older in copy.find_changed(manifest).items():
        older = copy.read_group(number) if has_older else None
        if older is None:
            group = CodesGroup.from_bytes(source.group(number).to_bytes())  # type: ignore[union-attr]
        else:
            told = CodesGroup.from_bytes(source.group(number, ()).to_bytes())  # type: ignore[union-attr]
            wanted = [one for one, digest in told.digests.items() if older.digests.get(one) != digest]
            sent = CodesGroup.from_bytes(source.group(number, wanted).to_bytes())  # type: ignore[union-attr]
            kept = {one: older.blocks[one] for one in told.digests if one not in sent.blocks}
            group = CodesGroup(number, told.digests, dict(sorted((kept | dict(sent.blocks)).items())))
            asked.append((number, len(sent.blocks)))
        if older is None:
            asked.append((number, len(group.blocks)))
        copy.write_group(group)
    copy.commit(manifest, public)
    return asked


def test_a_copy_finds_what_the_codes_say(gallery: tuple[Published, PublicPart], tmp_path: Path) -> None:
    published, public = gallery
    copy = HomeCopy(tmp_path / "copy")
    assert _download(_source(gallery), copy, public) == [(0, 3), (1, 2), (5, 1)]
    assert len(HomeCopy(tmp_path / "copy")) == len(copy) == 930
    queries = np.random.default_rng(4).normal(size=(5, 8))
    ids, scores = copy.load().search(queries, 7)
    rows = encode_queries(public, queries)
    true = published.table.scores(rows.queries, published.codes)
    order = np.argsort(-true, axis=1, kind="stable")[:, :7]
    assert np.array_equal(ids, published.ids[order])
    assert np.allclose(scores, public.space.measure(rows.encoded, np.take_along_axis(true, order, axis=1)))
    assert [item.name for item in copy.load().details(ids[0])] == [f"bird {number}" for number in ids[0].tolist()]


@pytest.mark.parametrize("code_bytes", [None, 24, 12])
def test_every_kind_of_codes_is_found_in_its_own_order(code_bytes: int | None, tmp_path: Path) -> None:
    published, public = gallery = _publish(np.arange(300), 12, code_bytes)
    copy = HomeCopy(tmp_path)
    _download(_source(gallery), copy, public)
    rows = np.random.default_rng(5).normal(size=(3, 12))
    true = published.table.scores(encode_queries(public, rows).queries, published.codes)
    found = np.take_along_axis(true, np.searchsorted(published.ids, copy.load().search(rows, 5)[0]), axis=1)
    assert np.allclose(found, -np.sort(-true, axis=1)[:, :5], atol=1e-6)


@pytest.mark.parametrize("is_half", [False, True])
def test_a_hostile_table_leaves_no_item_out_for_some_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_half: bool
) -> None:
    """A score that is not finite has no order. One number of the query would decide whether a filter is applied."""
    monkeypatch.setattr("nearveil.client.copies._MAX_FLOAT32", 0 if is_half else 1 << 30)
    published, public = _publish(np.arange(300))
    projection = np.zeros((8, 2), np.float32)
    projection[0, 0], projection[1, 1] = 3e38, 1
    table = ScalarCodes(projection, np.array([-3e38, 0], np.float32), np.array([1e-30, 0.01], np.float32), 0)
    public = replace(public, table=table, space=replace(public.space, mean=np.zeros(8)))
    codes = np.zeros((300, 2), np.uint8)
    codes[:, 1] = np.arange(300) % 256
    copy = HomeCopy(tmp_path)
    _download(CodesSource(public, published.ids, codes, {"names": _names}), copy, public)
    for row in np.random.default_rng(0).normal(size=(10, 8)):
        ids, _ = copy.load().search(row, 20)
        assert len(np.unique(ids)) == 20
        ids, _ = copy.load().search(row, 20, published.ids % 3 == 0)
        assert len(np.unique(ids)) == 20
        assert (ids % 3 == 0).all()


def test_products_of_a_search_are_neither_subnormal_nor_infinite() -> None:
    values = np.array([np.nan, np.inf, -np.inf, 3e38, 1e-40, -1e-12, 1e-9, 0.5])
    limited = _limit_range(values)
    assert limited.tolist() == pytest.approx([0, 6e4, -6e4, 6e4, 0, 0, 1e-9, 0.5], rel=1e-6, abs=0)
    products = np.abs(np.outer(limited, limited)[np.outer(limited, limited) != 0])
    assert np.finfo(np.float32).tiny * 2**48 < products.min()  # a sum that nearly cancels is not subnormal either
    assert 32_000 * products.max() < np.finfo(np.float32).max


def test_one_change_costs_one_block(gallery: tuple[Published, PublicPart], tmp_path: Path) -> None:
    copy, alive = HomeCopy(tmp_path), np.ones(930, bool)
    _download(_source(gallery), copy, gallery[1])
    assert _download(_source(gallery), copy, gallery[1]) == []
    alive[700] = False  # of the second group
    changed = _source(gallery, alive)
    assert _download(changed, copy, gallery[1]) == [(1, 1)]
    assert gallery[0].ids[700] not in copy.load().search(np.ones((1, 8)), 929)[0]
    assert len(changed.group(1, [0]).to_bytes()) < 12_000  # type: ignore[union-attr]
    assert len(list(tmp_path.iterdir())) == 5  # three groups, manifest and public part: what is old is gone


def test_what_was_hashed_before_is_not_read_again(gallery: tuple[Published, PublicPart]) -> None:
    published, public = gallery
    read: list[int] = []

    def names(ids: np.ndarray) -> list[bytes]:
        read.append(len(ids))
        return _names(ids)

    known: dict[bytes, CodesGroup] = {}
    first = CodesSource(public, published.ids, published.codes, {"names": names}, known).manifest
    alive = published.ids != 3
    second = CodesSource(public, published.ids[alive], published.codes[alive], {"names": names}, known).manifest
    assert read == [600, 300, 30, 599]
    assert [one for one in first.groups if first.groups[one] != second.groups[one]] == [0]


def test_a_copy_that_was_cut_off_is_none(gallery: tuple[Published, PublicPart], tmp_path: Path) -> None:
    copy = HomeCopy(tmp_path)
    source = _source(gallery)
    copy.write_group(source.group(0))  # type: ignore[arg-type]
    with pytest.raises(HomeError, match="2 groups are missing"):
        copy.commit(source.manifest, gallery[1])
    with pytest.raises(HomeError, match="nearveil sync"):
        HomeCopy(tmp_path).load().search(np.ones((1, 8)))
    assert sorted(copy.find_changed(source.manifest)) == [0, 1, 5]


def test_damaged_files_are_told_and_fetched_again(gallery: tuple[Published, PublicPart], tmp_path: Path) -> None:
    copy = HomeCopy(tmp_path)
    _download(_source(gallery), copy, gallery[1])
    for path in tmp_path.glob("*.codes"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(bytes(content))
    with pytest.raises(HomeError, match="corrupted"):
        HomeCopy(tmp_path).load().search(np.ones((1, 8)))
    assert copy.read_group(0) is None
    (tmp_path / "manifest").write_bytes(b"none")
    assert HomeCopy(tmp_path).is_corrupted
    with pytest.raises(HomeError, match="corrupted"):
        HomeCopy(tmp_path).load().search(np.ones((1, 8)))


def test_hostile_groups_and_manifests(gallery: tuple[Published, PublicPart]) -> None:
    source = _source(gallery)
    group, manifest = source.group(0), source.manifest
    assert group is not None
    swapped = CodesGroup(0, group.digests, {0: group.blocks[1], 1: group.blocks[0], 2: group.blocks[2]})
    for bad, words in [
        (swapped, "does not match its digest"),
        (CodesGroup(0, {1: group.digests[0], 0: group.digests[1]}, {}), "rise"),
        (CodesGroup(0, {0: group.digests[0]}, {1: group.blocks[1]}), "have digests"),
        (CodesGroup(0, {}, {}), "1 to 64 blocks"),
    ]:
        with pytest.raises(WireError, match=words):
            CodesGroup.from_bytes(bad.to_bytes())
    data = group.to_bytes()
    for cut in range(0, len(data), 997):
        with pytest.raises(WireError):
            CodesGroup.from_bytes(data[:cut])
    for changes in ({"items": 1 << 40}, {"columns": tuple("abcde")}, {"width": 0}, {"groups": {3: b"short"}}):
        told = CodesManifest(**(vars(manifest) | changes))
        with pytest.raises(WireError):
            CodesManifest.from_bytes(told.to_bytes())


def test_group_numbers_of_a_manifest_must_be_whole() -> None:
    """NumPy raises a ValueError that names no cause; no client expects it."""
    body = write_fields("birds", 1, "digest", 8, "names", 1, bytes(5), bytes(32))
    with pytest.raises(WireError, match="32 bits"):
        CodesManifest.from_bytes(frame(CodesManifest.kind, body))


def test_a_packed_group_unpacks_to_what_it_says_and_no_more() -> None:
    body = write_fields(0, b"\0" + bytes(32), b"\0", 1000, zlib.compress(bytes(50 << 20)))
    with pytest.raises(WireError, match="another size than it states"):
        CodesGroup.from_bytes(frame(CodesGroup.kind, body, 1))


def test_bad_questions_are_refused(gallery: tuple[Published, PublicPart], tmp_path: Path) -> None:
    copy = HomeCopy(tmp_path)
    _download(_source(gallery), copy, gallery[1])
    for rows in (np.ones((1, 7)), np.full((1, 8), np.nan)):
        with pytest.raises(ValueError, match="rows"):
            copy.load().search(rows, 1)
    other = _publish(np.arange(300), 12)[1]
    with pytest.raises(WireError, match="another map"):
        copy.commit(_source(gallery).manifest, other)


def test_names_of_bad_will_are_made_harmless(gallery: tuple[Published, PublicPart], tmp_path: Path) -> None:
    published, public = gallery
    copy = HomeCopy(tmp_path)
    texts = {"names": lambda ids: [b"\x1b[2J\xff" for _ in ids]}
    _download(CodesSource(public, published.ids, published.codes, texts), copy, public)
    (details,) = copy.load().details(np.array([0]))
    assert details == ItemDetails("\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}")


def test_what_others_put_into_the_folder_is_not_deleted(gallery: tuple[Published, PublicPart], tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    (tmp_path / "pictures").mkdir()
    (tmp_path / ("0" * 64 + ".codes")).write_bytes(b"of an older copy")
    _download(_source(gallery), HomeCopy(tmp_path), gallery[1])
    assert (tmp_path / "letter.txt").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 3 + 2 + 2


@pytest.mark.parametrize("place", [0, 257, WIDE, 5 * WIDE])
def test_blocks_with_ids_of_another_place_are_refused(place: int) -> None:
    def make(ids: np.ndarray) -> bytes:
        return Block.make(ids.astype(np.uint32), np.zeros((len(ids), 3), np.uint8), []).to_bytes()

    contents = {1: make(np.arange(WIDE + 256, WIDE + 260)), 2: make(np.arange(place, place + 3))}
    group = CodesGroup(1, {one: hashlib.sha256(content).digest() for one, content in contents.items()}, contents)
    read = CodesGroup.from_bytes(group.to_bytes())
    with pytest.raises(WireError, match="ids of its own range"):
        read.check_blocks(3, 0)


def test_a_copy_that_another_process_brought_up_to_date_is_searched(
    gallery: tuple[Published, PublicPart], tmp_path: Path
) -> None:
    _download(_source(gallery), HomeCopy(tmp_path), gallery[1])
    waiting, alive = HomeCopy(tmp_path), np.arange(930) > 3
    _download(_source(gallery, alive), HomeCopy(tmp_path), gallery[1])
    assert len(waiting.load().search(np.ones((1, 8)), 926)[0][0]) == 926


def test_a_loaded_copy_stays_as_it_is_while_another_is_committed(
    gallery: tuple[Published, PublicPart], tmp_path: Path
) -> None:
    """A server deletes the items near a suspect. A search that has begun must not fail for that."""
    published, public = gallery
    copy, query = HomeCopy(tmp_path), np.random.default_rng(4).normal(size=8)
    _download(_source(gallery), copy, public)
    loaded = copy.load()
    ids = loaded.search(query, 5)[0][0]
    _download(_source(gallery, ~np.isin(published.ids, ids)), copy, public)
    assert np.array_equal(loaded.search(query, 5)[0][0], ids)
    assert [about.name for about in loaded.details(ids)] == [name.decode() for name in _names(ids)]
    assert (len(loaded), len(copy)) == (930, 925)
    assert not np.isin(copy.load().search(query, 5)[0][0], ids).any()


def test_one_process_at_a_time_changes_a_copy(tmp_path: Path) -> None:
    held = HomeCopy(tmp_path / "copy").lock()
    assert held is not None
    assert HomeCopy(tmp_path / "copy").lock() is None
    held.close()
    again = HomeCopy(tmp_path / "copy").lock()
    assert again is not None
    again.close()
