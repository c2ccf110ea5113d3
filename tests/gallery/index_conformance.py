"""What every index promises, whatever keeps it. ``test_index.py`` runs it on both stores."""

import datetime
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sqlalchemy as sa
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nearveil.features import HogColor
from nearveil.gallery import _directory
from nearveil.gallery import store as _store
from nearveil.gallery.answers import ItemDetails, encode_details, encode_name
from nearveil.gallery.errors import (
    CorruptedIndexError,
    IndexStoreError,
    InexactRowsError,
    NotAnIndexError,
    PrivateIndexError,
    UnknownItemError,
)
from nearveil.gallery.index import Index
from nearveil.gallery.items import Item
from nearveil.gallery.publishing import Published
from nearveil.gallery.store import FORMAT, Header, bindings, checksum
from nearveil.mechanisms import Covers
from nearveil.wire.messages import Query
from nearveil.wire.server import serve_maps

from .index_places import DIMENSION, WEBP, filled, names, plain_items, true_nearest, unit_rows

ROW = unit_rows(1)[0]


def replaced(at: int, value: float) -> NDArray[np.float32]:
    row: NDArray[np.float32] = ROW.copy()
    row[at] = value
    return row


WRONG_ITEMS: list[tuple[Any, str]] = [
    (Item(ROW[:-1]), "one row of 12 dimensions, as this index has, not (1, 11)"),
    (Item(np.append(ROW, np.float32(0))), "not (1, 13)"),
    (Item(replaced(2, np.nan)), "must be finite"),
    (Item(replaced(2, np.inf)), "must be finite"),
    (Item(np.zeros(DIMENSION, np.float32)), "number 2 must not be all zeros"),
    (Item(np.array([ROW, ROW])), "number 2 must be one row"),
    (Item(ROW[None, None]), "number 2 must have shape"),
    (Item(ROW > 0), "number 2 must be numbers"),
    (Item("text"), "number 2 must be numbers"),
    (Item([1.0, [2.0]]), "number 2 must be numbers"),  # type: ignore[arg-type]
    (Item([]), "number 2 must have shape"),
    (ROW, "must be an Item"),
    (Item(ROW, "a\0b"), "name of number 2"),
    (Item(ROW, "\udcff"), "name of number 2"),
    (Item(ROW, "x" * 4097), "name of number 2"),
    (Item(ROW, thumbnail="text"), "thumbnail of number 2"),  # type: ignore[arg-type]
    (Item(ROW, thumbnail=WEBP + bytes(1 << 20)), "thumbnail of number 2"),
    (Item(ROW, thumbnail=b"\x89PNG"), "thumbnail of number 2 must be WebP"),
    (Item(ROW, original="a/path"), "original of number 2"),  # type: ignore[arg-type]
    (Item(ROW, external_id="a\0b"), "external_id of number 2"),
    (Item(ROW, external_id=""), "external_id of number 2 is empty"),
    (Item(ROW, external_id="x" * 513), "external_id of number 2"),
    (Item(ROW, external_id=b"a"), "external_id of number 2"),  # type: ignore[arg-type]
    (Item(ROW, metadata=["a"]), "metadata of number 2 must be a mapping"),  # type: ignore[arg-type]
    (Item(ROW, metadata={1: "a"}), "metadata of number 2 must be a mapping"),  # type: ignore[dict-item]
    (Item(ROW, metadata={"a": float("nan")}), "metadata of number 2 must be JSON"),
    (Item(ROW, metadata={"a": object()}), "metadata of number 2 must be JSON"),
    (Item(ROW, metadata={"a": "\udcff"}), "metadata of number 2 must be JSON"),
    (Item(ROW, metadata={"a": "x" * (64 << 10)}), "metadata of number 2 must be at most 65536 bytes"),
]


class Loud(str):
    """Text that shows itself as something else."""

    def __str__(self) -> str:
        return "something else"

    __repr__ = __str__


class Data(bytes):
    """Bytes of a subclass."""


TEXTS: list[Any] = [str, Loud, np.str_, lambda text: pd.Series([text])[0], lambda text: np.array([text])[0]]
BYTES: list[Any] = [bytes, Data, np.bytes_, lambda data: pd.Series([data])[0]]
ROWS: list[Any] = [np.asarray, torch.tensor, pd.Series, list, lambda row: row[None], lambda row: row.astype(np.float64)]
LETTERS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
VALUES: list[tuple[Any, Any]] = [
    (np.int64(3), 3),
    (np.float32(0.5), 0.5),
    (np.bool_(True), True),
    (Loud("a"), "a"),
    (np.str_("b"), "b"),
    (np.array([1, 2]), [1, 2]),
    ({"inner": np.uint8(1)}, {"inner": 1}),
    (pd.Timestamp("2026-11-17"), "2026-11-17T00:00:00"),
    (datetime.date(2026, 11, 17), "2026-11-17"),
    (torch.tensor([0.5]), [0.5]),
    (None, None),
]


@st.composite
def foreign_items(draw: st.DrawFn, number: int) -> tuple[Item, tuple[Any, ...]]:
    """Return an item of values of other libraries, and what an index shall give back."""
    text, data = st.sampled_from(TEXTS), st.sampled_from(BYTES)
    # A byte string of NumPy ends before its last zeros.
    name, original = draw(LETTERS), draw(st.none() | st.binary(max_size=8).map(lambda one: one.rstrip(b"\0")))
    small, own = draw(st.sampled_from([b"", WEBP])), draw(st.none() | st.just(f"{number}: "))
    given, want = draw(st.sampled_from(VALUES))
    item = Item(
        draw(st.sampled_from(ROWS))(unit_rows(1, seed=number)[0]),
        draw(text)(name),
        draw(data)(small),
        None if original is None else draw(data)(original),
        None if own is None else draw(text)(own),
        {draw(text)("key"): given},
    )
    return item, (name, original, small, own, {"key": want})


def _message(published: Published) -> Any:
    client = Covers(4.0, 0.25).fit_space(published.space, published.public_digest).use_map(published.map)
    return client.release(ROW)


def exact(index: Index) -> bool:
    return index.row_exact


def private(index: Index) -> bool:
    return index.is_private


class IndexConformance:
    """Every store inherits this."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> str:
        raise NotImplementedError

    @pytest.fixture
    def index(self, place: str) -> Iterator[Index]:
        with filled(place, unit_rows(40)) as index:
            yield index

    def damage(self, place: str, table: str) -> None:
        """Change the first row of a table behind the index's back."""
        raise NotImplementedError

    def set_format(self, place: str, header: Header) -> None:
        raise NotImplementedError

    def test_rows_are_exact_only_where_that_was_said(self, place: str) -> None:
        with Index.create(place, dimension=DIMENSION) as index:
            assert exact(index)
            for start in (0, 3, 6):
                index.add(plain_items(unit_rows(3, seed=start)), row_exact=True)
            assert exact(index)
            others = index.add(plain_items(unit_rows(4, seed=9)))
            assert not exact(index)
        with Index.open(place) as index:
            more = index.add(plain_items(unit_rows(2, seed=10)), row_exact=True)
            assert not exact(index)
            with pytest.raises(InexactRowsError, match="Index the images again: `nearveil index DIR --private`"):
                index.assert_row_exact()
            index.delete(others)
            assert exact(index)
            index.delete(more)
            index.assert_row_exact()
            index.verify()

    def test_hog_and_colour_are_exact_whoever_added_them(self, place: str) -> None:
        with Index.create(place, dimension=DIMENSION, extractor=HogColor().fingerprint) as index:
            index.add(plain_items(unit_rows(5)))
            assert exact(index)
            assert index.bind("account") == "account"
            assert len(index.add(plain_items(unit_rows(1, seed=1)))) == 1

    def test_private_rows_are_never_published(self, index: Index, place: str) -> None:
        index.publish(4.0, 0.25, n_sets=4, reach=0.0)
        message = _message(index.current().published)
        with Index.open(place) as other:
            other.protect()
            assert private(other)
        assert private(index)
        for shows in (
            index.assert_open,
            index.maps,
            index.current,
            index.state,
            index.republish,
            lambda: index.publish(4.0, 0.25, n_sets=4, reach=0.0),
            lambda: index.answer(message),
            lambda: serve_maps(index, "birds"),
        ):
            with pytest.raises(PrivateIndexError, match="has private rows"):
                shows()
        with index._database.begin_read() as connection:
            for table in ("nearveil_published", "nearveil_published_part"):
                assert connection.execute(sa.text(f"SELECT count(*) FROM {table}")).scalar_one() == 0  # noqa: S608
        with Index.open(place) as again:
            assert private(again)
            assert len(again.snapshot()) == 40  # its owner still has them

    def test_a_map_that_was_left_behind_is_not_shown_either(self, index: Index, place: str) -> None:
        """An earlier version bound indexes and kept their maps."""
        index.publish(4.0, 0.25, n_sets=4, reach=0.0)
        with index._database.begin_write() as connection:
            connection.execute(sa.insert(bindings).values(name="account", crc=checksum("account")))
        with Index.open(place) as again, pytest.raises(PrivateIndexError):
            again.maps()

    def test_a_map_that_is_learned_while_rows_become_private_is_dropped(
        self, index: Index, place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        learn = Published.learn

        def slow(*told: Any, **more: Any) -> Any:
            with Index.open(place) as other:
                other.protect()
            return learn(*told, **more)

        monkeypatch.setattr(Published, "learn", slow)
        with pytest.raises(PrivateIndexError):
            index.publish(4.0, 0.25, n_sets=4, reach=0.0)
        index.unprotect(rows_are_public=True)
        assert index.maps() == []

    def test_private_rows_must_be_exact(self, index: Index) -> None:
        with pytest.raises(InexactRowsError):
            index.bind("account")
        assert not private(index)
        index.delete(index.ids())
        index.protect()
        before = index.revision
        with pytest.raises(InexactRowsError, match="private rows must be row-exact"):
            index.add(plain_items(unit_rows(2)))
        assert (index.revision, len(index)) == (before, 0)
        index.add(plain_items(unit_rows(2)), row_exact=True)
        assert index.bind("account") == "account"
        index.protect()
        assert index.bind("another") == "account"

    def test_rows_are_opened_by_an_explicit_word(self, index: Index) -> None:
        index.protect()
        for word in (False, None, 1, "yes"):
            with pytest.raises(ValueError, match="rows_are_public must be True"):
                index.unprotect(rows_are_public=word)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            index.unprotect()  # type: ignore[call-arg]
        assert private(index)
        index.unprotect(rows_are_public=True)
        assert not private(index)
        index.publish(4.0, 0.25, n_sets=4, reach=0.0)

    @pytest.mark.parametrize(
        ("change", "what"),
        [
            ("UPDATE nearveil_bound SET name = 'x'", "the binding"),
            ("INSERT INTO nearveil_bound (name, crc) SELECT 'x', crc FROM nearveil_bound", "the binding"),
            ("UPDATE nearveil_row_exact SET last = 99", "row-exact"),
        ],
    )
    def test_corruption_of_a_binding_is_detected(self, place: str, change: str, what: str) -> None:
        with Index.create(place, dimension=DIMENSION) as index:
            index.add(plain_items(unit_rows(2)), row_exact=True)
            index.bind("account")
            self.execute(index, change)
            with pytest.raises(CorruptedIndexError, match=what):
                index.verify()

    def execute(self, index: Index, *statements: str) -> None:
        """Change the database behind the index's back."""
        with index._database.begin_write() as connection:
            for statement in statements:
                connection.execute(sa.text(statement))

    def test_it_is_bound_once(self, place: str) -> None:
        with Index.create(place, dimension=DIMENSION) as index:
            assert index.bind("first") == "first"
        with Index.open(place) as index:
            assert index.bind("second") == "first"
            assert index.bind("first") == "first"
            index.verify()

    def test_an_empty_index(self, place: str) -> None:
        with Index.create(place, dimension=3, extractor="some model") as index:
            assert (len(index), index.revision, index.dimension, index.extractor) == (0, 0, 3, "some model")
            assert index.ids().tolist() == []
            assert index.snapshot().features.shape == (0, 3)
            assert index.add([]).tolist() == []
            assert index.items([]) == []
            assert index.features([]).shape == (0, 3)
            index.delete([])
            assert index.revision == 0
            with pytest.raises(ValueError, match="k must be at most 0"):
                index.search([1.0, 0.0, 0.0], 1)
            index.verify()

    def test_what_was_added_is_there_again(self, place: str) -> None:
        rows = unit_rows(6)
        given = [
            Item(rows[0]),
            Item(rows[1], "Amsel, Männchen 🐦.jpg", WEBP + b"\0\xff", b"\x89PNG\0"),
            Item(rows[2], "with a path", b"", Path("photos/ein Bild.jpg")),
            Item(rows[3], "empty original", WEBP, b""),
            Item(rows[4].astype(np.float64), "doubles"),
            Item(rows[5].astype(np.float16), "halves"),
        ]
        with Index.create(place, dimension=DIMENSION, extractor="m") as index:
            assert index.add(iter(given)).tolist() == [0, 1, 2, 3, 4, 5]
        with Index.open(place) as index:
            assert (index.dimension, index.extractor, len(index), index.revision) == (DIMENSION, "m", 6, 1)
            for number, item in zip([5, 0, 2, 1, 3, 4, 2], index.items([5, 0, 2, 1, 3, 4, 2]), strict=True):
                want = given[number]
                assert (item.id, item.name, item.thumbnail) == (number, want.name, want.thumbnail)
                original = want.original
                assert item.original == (original.resolve() if isinstance(original, Path) else original)
                assert type(item.original) is type(want.original) or isinstance(item.original, Path)
            expected = np.stack([item.feature for item in given]).astype(np.float32)
            assert index.features([3, 1, 4, 3, 5]).tobytes() == expected[[3, 1, 4, 3, 5]].tobytes()
            assert index.snapshot().features.tobytes() == expected.tobytes()
            index.verify()

    @given(st.data())
    @settings(
        max_examples=12,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],  # both stores
    )
    def test_values_of_other_libraries_come_back_as_plain_ones(self, place: str, data: st.DataObject) -> None:
        """A NumPy string changed the checksum on the way back: every question that was paid for failed."""
        drawn = [data.draw(foreign_items(number)) for number in range(4)]
        with self.opened(place) as index:
            index.delete(index.ids())
            ids = index.add([item for item, _ in drawn])
            index.publish(4.0, 0.25, n_sets=2, reach=0.0, keep=1)
        with Index.open(place) as index:
            index.verify()
            for stored, (_, want) in zip(index.items(ids), drawn, strict=True):
                told = (stored.name, stored.original, stored.thumbnail, stored.external_id, dict(stored.metadata))
                assert told == want
                assert [type(one) for one in told] == [type(one) for one in want]
                assert json.dumps(stored.metadata) == json.dumps(want[-1])  # plain all the way down
            (served,) = serve_maps(index, "birds", offers=("thumbnails", "originals", "names"))
            answer = served.answer(Query(_message(served.published), "names"))
            plain = {number: want[0] for number, (_, want) in zip(ids.tolist(), drawn, strict=True)}
            assert list(answer.contents) == [encode_name(plain[number]) for number in answer.ids.tolist()]

    def opened(self, place: str) -> Index:
        """Return the index of this place, made where there is none."""
        try:
            return Index.open(place)
        except NotAnIndexError:
            return Index.create(place, dimension=DIMENSION, extractor="tests")

    def test_tables_of_any_library(self, place: str) -> None:
        rows = unit_rows(6)
        scaled = rows * np.array([[1], [2], [1e-30], [1e30], [7], [1]], np.float32)
        columns = {"ids": np.array(["a", "b", "c", "d", "e", "f"]), "names": pd.Series(list("uvwxyz"))}
        frame = pd.DataFrame({"n": np.arange(6), "text": ["x", None, "y", "z", "ä", ""]})
        kinds = [scaled, scaled.astype(np.float64), torch.tensor(scaled), pd.DataFrame(scaled), scaled.tolist()]
        with Index.create(place, dimension=DIMENSION) as index:
            for number, kind in enumerate(kinds):
                ids = index.add_table(kind, metadata=frame, replace=bool(number), **columns)
                np.testing.assert_allclose(index.features(columns["ids"]), rows, atol=1e-6)
                assert ids.tolist() == [item.id for item in index.items(list("abcdef"))]
            found = index.items(["b", "e"])
            assert [(one.external_id, one.name, one.metadata) for one in found] == [
                ("b", "v", {"n": 1, "text": None}),
                ("e", "y", {"n": 4, "text": "ä"}),
            ]
            assert len(index) == 6
            assert index.add_table(rows[0], ids=[17]).tolist() == index.add_table(rows[:1], [17], replace=True).tolist()
            assert index.items(["17"])[0].external_id == "17"
            index.verify()

    def test_replace_and_delete_by_your_own_ids(self, place: str) -> None:
        rows = unit_rows(8)
        own = [f"doc {number}" for number in range(8)]
        with Index.create(place, dimension=DIMENSION) as index:
            first = index.add_table(rows, own, metadata=[{"n": number} for number in range(8)])
            with pytest.raises(ValueError, match=r"number 0 is already in the index \(2 such rows in all\)"):
                index.add_table(rows[:2], own[:2])
            with pytest.raises(ValueError, match="ids: number 1 is the same as number 0"):
                index.add_table(rows[:2], ["new", "new"])
            assert (len(index), index.revision) == (8, 1)
            # What is the same stays, with its number: nothing is written, and the map stays in step.
            same = index.add_table(rows, own, metadata=[{"n": number} for number in range(8)], replace=True)
            assert (same.tolist(), index.revision) == (first.tolist(), 1)
            changed = index.add_table(rows[[0, 1, 0]], own[:3], metadata=[{"n": 0}, {"n": 9}, {"n": 2}], replace=True)
            assert changed.tolist() == [0, 8, 9]
            assert [one.metadata["n"] for one in index.items(own[:3])] == [0, 9, 2]
            assert (len(index), index.revision) == (8, 2)
            index.delete(["doc 1", "doc 7"])
            with pytest.raises(UnknownItemError, match="no item with id 'doc 1'"):
                index.delete(["doc 0", "doc 1"])
            assert [one.external_id for one in index.items(["doc 1", "doc 0"], lenient=True)] == ["doc 0"]
            assert index.ids().tolist() == [0, 3, 4, 5, 6, 9]
            assert index.features([9, 3]).tobytes() == rows[[0, 3]].tobytes()
            index.add([Item(rows[1], "an image", WEBP, external_id="doc 0")], replace=True)
            assert index.items(["doc 0"])[0].thumbnail == WEBP
            index.verify()
        with Index.open(place) as index:
            index.verify()
            assert names(index, index.ids()) == [""] * 5 + ["an image"]

    def test_names_and_metadata_that_are_not_given_again_stay(self, place: str) -> None:
        rows = unit_rows(4)
        own = ["a", "b", "c", "d"]
        with Index.create(place, dimension=DIMENSION) as index:
            index.add_table(rows, own, ["Anna", "Bo", "", ""], [{"n": 0, "m": 1}, {"n": 1}, {"n": 2}, None])
            index.add_table(-rows[:3], own[:3], replace=True)
            index.add_table(rows[1:2], ["b"], replace=True, metadata=[{"k": "given again, as a whole"}])
            index.add_table(rows[2:3], ["c"], ["Cy"], [{}], replace=True)
            stored = [(item.name, item.metadata) for item in index.items(own)]
            assert stored == [
                ("Anna", {"n": 0, "m": 1}),
                ("Bo", {"k": "given again, as a whole"}),
                ("Cy", {}),
                ("", {}),
            ]
            np.testing.assert_array_equal(index.features(own), np.stack([-rows[0], *rows[1:]]))
            before = index.revision
            index.add_table(rows[1:], own[1:], replace=True)  # nothing has changed
            index.add([Item(rows[1], external_id="b")], replace=True)
            assert index.revision == before
            index.add([Item(-rows[1], external_id="b")], replace=True)
            assert (index.items(["b"])[0].name, index.items(["b"])[0].metadata) == stored[1]
            assert index.texts(index.ids()[-1:], "metadata") == [encode_details(ItemDetails("Bo", "b", stored[1][1]))]
            index.verify()

    @pytest.mark.parametrize(
        ("table", "words"),
        [
            ({"rows": np.zeros((2, DIMENSION))}, "rows: number 0 must not be all zeros"),
            ({"rows": np.stack([ROW, replaced(1, np.nan)])}, "rows: number 1 must be finite"),
            ({"rows": [[1e400] * DIMENSION]}, "rows: number 0 must be finite"),
            ({"rows": unit_rows(2, 3)}, "rows have 3 dimensions; this index has 12"),
            ({"rows": "text"}, "rows must be numbers"),
            ({"rows": [[1.0], [1.0, 2.0]]}, "rows must be numbers"),
            ({"rows": np.empty((0, DIMENSION))}, "rows must have shape"),
            ({"rows": ROW, "ids": ["a", "b"]}, "ids must be a list of 1, one for each row"),
            ({"rows": ROW, "ids": "a"}, "ids must be a list of 1"),
            ({"rows": ROW, "ids": [0.5]}, "ids: number 0 must be text"),
            ({"rows": ROW, "ids": [True]}, "ids: number 0 must be text"),
            ({"rows": ROW, "names": [None]}, "names: number 0 must be text"),
            ({"rows": ROW, "metadata": ["a"]}, "metadata: number 0 must be a mapping"),
            ({"rows": ROW, "metadata": [{"a": np.nan}]}, "metadata: number 0 must be JSON"),
        ],
    )
    def test_wrong_tables(self, index: Index, table: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=re.escape(words)):
            index.add_table(**table)
        assert (len(index), index.revision) == (40, 1)

    def test_a_large_table_with_holes(self, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Features and digests are of blocks of items; deleting some does not change the others."""
        monkeypatch.setattr(_directory, "_BLOCK_BYTES", 4 * DIMENSION * 16)
        monkeypatch.setattr(_store, "BLOCK", 32)
        rows = unit_rows(150)
        ticks: list[int] = []
        own = [f"{number}" for number in range(150)]
        with Index.create(place, dimension=DIMENSION) as index:
            index.add_table(rows[:7], own[:7])
            totals: list[tuple[str, int | None]] = []

            def start(text: str, total: int | None) -> Callable[[int], object]:
                totals.append((text, total))
                return ticks.append

            assert index.add_table(rows[7:], own[7:], own[7:], progress=start).tolist() == list(range(7, 150))
            assert (totals, sum(ticks)) == ([("adding", 143)], 143)
            held = np.arange(150)
            for gone in ([0], [15, 16, 17], list(range(30, 70)), [149], list(range(71, 149, 2))):
                index.delete([own[number] for number in gone] if len(gone) % 2 else gone)
                held = np.setdiff1d(held, gone)
                with Index.open(place) as other:
                    other.verify()
                    assert other.snapshot().features.tobytes() == rows[held].tobytes()
                    assert [item.external_id for item in other.items(held)] == [own[number] for number in held]
                    assert other.items([held[-1]])[0].name == own[held[-1]]
                assert index.ids().tolist() == held.tolist()

    def test_texts_of_answers_follow_every_change(self, place: str) -> None:
        rows, odd = unit_rows(40), {2: "two\nlines", 3: "\u202egnp.exe", 4: "", 5: "été \U0001f426\u200d"}
        told = [{"n": number, "odd": "a\0b"} if number % 3 else None for number in range(40)]
        shown = [odd.get(number, f"bird {number}") for number in range(40)]
        with Index.create(place, dimension=DIMENSION) as index, Index.open(place) as other:

            def check() -> None:
                ids = np.arange(int(index.ids().max()) + 1)[::-1]
                held = {item.id: item for item in index.items(ids, lenient=True)}
                found = [held.get(number) for number in ids.tolist()]
                assert other.texts(ids, "names") == [b"" if one is None else encode_name(one.name) for one in found]
                details = [
                    b"" if one is None else encode_details(ItemDetails(one.name, one.external_id, one.metadata))
                    for one in found
                ]
                assert other.texts(ids, "metadata") == details
                assert other.texts(ids[3:5], "names") == other.texts(ids, "names")[3:5]

            index.add_table(rows[:20], list(range(20)), shown[:20], told[:20])
            check()
            index.add_table(rows[20:30], None, shown[20:30])
            index.delete([0, 7, 8, 9, 21])
            check()
            index.add_table(rows[30:31], [1], ["another"], [{"n": 1}], replace=True)
            index.add([Item(rows[31], "an image", WEBP, metadata={"n": 2})])
            check()

    def test_keys_of_metadata_are_those_of_all_items(self, index: Index) -> None:
        rows = np.random.default_rng(0).standard_normal((4, index.dimension))
        assert index.metadata_keys() == ()
        index.add_table(rows[:2], metadata=[{"b": 1}, {"a": {"inner": 1}}])
        assert index.metadata_keys() == ("a", "b")
        index.add_table(rows[2:3], metadata=[{"c": 1}])
        assert index.metadata_keys() == ("a", "b", "c")
        index.add_table(rows[3:], metadata=[{"\n": 1}])  # a list of galleries holds only text that prints
        assert index.metadata_keys() is None

    def test_an_id_is_never_given_twice(self, index: Index, place: str) -> None:
        index.delete([39, 3])
        assert index.add(plain_items(unit_rows(1))).tolist() == [40]
        index.delete([40])
        with Index.open(place) as again:
            assert again.add(plain_items(unit_rows(2))).tolist() == [41, 42]
            again.delete(again.ids())
            assert again.add(plain_items(unit_rows(1))).tolist() == [43]
        assert index.ids().tolist() == [43]

    def test_revisions_grow_by_one_and_everybody_sees_them(self, index: Index, place: str) -> None:
        with Index.open(place) as other:
            assert (index.revision, other.revision) == (1, 1)
            added = other.add(plain_items(unit_rows(3, seed=5), "new"))
            assert (index.revision, len(index)) == (2, 43)
            assert names(index, added) == ["new 0", "new 1", "new 2"]
            index.delete([0, 1, 0, 1])
            assert (other.revision, len(other)) == (3, 41)
            assert other.ids().tolist() == list(range(2, 43))
            assert other.search(unit_rows(3, seed=5), 1)[0][:, 0].tolist() == added.tolist()

    def test_search_is_exact(self, index: Index) -> None:
        rows, queries = unit_rows(40), unit_rows(30, seed=1)
        for some, k in ((queries, 40), (queries, 1), (queries[0], 7), (queries[:3].astype(np.float64), 8)):
            ids, scores = index.search(some, k)
            assert ids.dtype == np.uint32
            assert scores.dtype == np.float32
            want, true = true_nearest(np.arange(40, dtype=np.uint32), rows, np.atleast_2d(some).astype(np.float32), k)
            assert ids.tolist() == want.tolist()
            np.testing.assert_allclose(scores, true, atol=5e-7)

    def test_search_after_changes(self, index: Index) -> None:
        rows = dict(enumerate(unit_rows(40)))
        generator, queries = np.random.default_rng(3), unit_rows(25, seed=2)
        for turn in range(12):
            if turn % 2:
                gone = generator.choice(list(rows), 2, replace=False)
                index.delete(gone)
                for number in gone:
                    del rows[number]
            else:
                more = unit_rows(5, seed=100 + turn)
                rows.update(zip(index.add(plain_items(more)).tolist(), more, strict=True))
            held = np.array(list(rows), np.uint32)
            want, _ = true_nearest(held, np.stack(list(rows.values())), queries, 9)
            assert index.search(queries, 9)[0].tolist() == want.tolist()
            now = index.snapshot()
            assert now.ids.tolist() == held.tolist()
            assert now.features.tobytes() == np.stack(list(rows.values())).tobytes()
            assert index.features(held[::-1]).tobytes() == now.features[::-1].tobytes()
        index.verify()

    def test_equal_scores_go_by_id(self, index: Index) -> None:
        twin = unit_rows(1, seed=77)
        ids = index.add(plain_items(np.repeat(twin, 5, axis=0)))
        assert index.search(twin, 5)[0].tolist() == [ids.tolist()]

    def test_a_snapshot_stays_as_it_is(self, index: Index) -> None:
        before = index.snapshot()
        ids, features = before.ids.tolist(), before.features.tobytes()
        index.add(plain_items(unit_rows(300, seed=4)))
        index.delete([5, 6, 41])
        assert (before.revision, before.ids.tolist(), before.features.tobytes()) == (1, ids, features)
        after = index.snapshot()
        assert (after.revision, len(after)) == (3, 337)
        for array in (before.ids, before.features, after.ids, after.features):
            with pytest.raises(ValueError, match="read-only"):
                array[:1] = 0

    @pytest.mark.parametrize(("wrong", "words"), WRONG_ITEMS)
    def test_one_wrong_item_and_nothing_is_added(self, index: Index, wrong: Any, words: str) -> None:
        with pytest.raises(ValueError, match=re.escape(words)):
            index.add([*plain_items(unit_rows(2)), wrong])
        assert (len(index), index.revision) == (40, 1)

    def test_one_unknown_id_and_nothing_is_deleted(self, index: Index) -> None:
        for unknown in ([3, 40], [3, -1], [3, 2**40], [99] * 9):
            with pytest.raises(UnknownItemError, match="no item with id") as error:
                index.delete(unknown)
            assert set(error.value.ids) == set(unknown) - {3}
            for ask in (index.items, index.features):
                with pytest.raises(UnknownItemError):
                    ask(unknown)
        assert (len(index), index.revision) == (40, 1)
        index.delete([3])
        for again in (index.delete, index.items, index.features):
            with pytest.raises(UnknownItemError):
                again([2, 3])
        assert [item.id for item in index.items([2, 3, 4, 77], lenient=True)] == [2, 4]
        for wrong in ([0.5], [[1]], ["a"], 3):
            with pytest.raises(ValueError, match="ids"):
                index.delete(wrong)

    def test_wrong_queries(self, index: Index) -> None:
        for wrong in (np.full(DIMENSION, np.nan), np.full(DIMENSION, np.inf), ROW[:-1], np.zeros((0, DIMENSION)), "a"):
            with pytest.raises(ValueError, match="queries must"):
                index.search(wrong, 1)
        for k in (0, -1, 41, True, 1.5):
            with pytest.raises(ValueError, match="k must be"):
                index.search(ROW, k)  # type: ignore[arg-type]

    def test_there_is_one_or_there_is_none(self, place: str) -> None:
        with pytest.raises(NotAnIndexError, match=r"Index\.create"):
            Index.open(place)
        for dimension in (0, -1, 16_001, 2.0, True):
            with pytest.raises(ValueError, match="dimension must be"):
                Index.create(place, dimension=dimension)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="extractor must be"):
            Index.create(place, dimension=3, extractor="\0")
        Index.create(place, dimension=3).close()
        with pytest.raises(IndexStoreError, match=r"Index\.open"):
            Index.create(place, dimension=3)

    def test_a_newer_format_is_left_alone(self, index: Index, place: str) -> None:
        self.set_format(place, Header(FORMAT + 1, DIMENSION, 1, 40, 40, "tests", "cosine"))
        with pytest.raises(IndexStoreError, match="install a newer nearveil"):
            Index.open(place)
        with pytest.raises(IndexStoreError):
            index.add(plain_items(unit_rows(1)))

    @pytest.mark.parametrize(
        "table", ["nearveil_index", "nearveil_item", "nearveil_image", "nearveil_feature", "nearveil_deleted"]
    )
    def test_corruption_is_detected(self, index: Index, place: str, table: str) -> None:
        index.delete([30])
        index.verify()
        self.damage(place, table)
        with pytest.raises(CorruptedIndexError, match="corrupted"), Index.open(place) as again:
            again.verify()

    def test_many_write_and_read_at_once(self, place: str) -> None:
        """Four threads with indexes of their own add and delete; two read. Every view is of one revision."""
        Index.create(place, dimension=DIMENSION).close()
        kept: list[int] = []
        seen: dict[int, int] = {}
        errors: list[BaseException] = []
        busy = threading.Event()

        def write(worker: int) -> None:
            with Index.open(place) as index:
                for turn in range(6):
                    ids = index.add(plain_items(unit_rows(3, seed=10 * worker + turn), f"{worker}-{turn}"))
                    index.delete(ids[:1])
                    kept.extend(ids[1:].tolist())

        def read() -> None:
            with Index.open(place) as index:
                while not busy.is_set():
                    now = index.snapshot()
                    assert seen.setdefault(now.revision, len(now)) == len(now)
                    assert (np.diff(now.ids.astype(np.int64)) > 0).all()

        def guarded(work: Any, *arguments: Any) -> None:
            try:
                work(*arguments)
            except BaseException as error:
                errors.append(error)

        writers = [threading.Thread(target=guarded, args=(write, worker)) for worker in range(4)]
        readers = [threading.Thread(target=guarded, args=(read,)) for _ in range(2)]
        for thread in (*writers, *readers):
            thread.start()
        for thread in writers:
            thread.join()
        busy.set()
        for thread in readers:
            thread.join()
        assert not errors
        with Index.open(place) as index:
            assert index.ids().tolist() == sorted(kept)
            assert (len(kept), index.revision) == (48, 48)
            index.verify()
