"""Both stores keep the promises of an index; and what is particular to each."""

import os
import sqlite3
import struct
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
import sqlalchemy as sa

from nearveil.gallery import _directory as _index_directory
from nearveil.gallery.errors import (
    DamagedIndexError,
    IndexStoreError,
    NotAnIndexError,
)
from nearveil.gallery.index import Index
from nearveil.gallery.items import FORMAT, Head, Item, Snapshot
from nearveil.storage import describe_url

from ..ledger.postgres import Postgres
from .index_conformance import IndexConformance
from .index_places import DIMENSION, WEBP, filled, index_server, index_url, one_thread, plain_items, unit_rows

__all__ = ["index_server", "index_url", "one_thread"]  # fixtures

ROW = unit_rows(1)[0]


class TestDirectory(IndexConformance):
    @pytest.fixture
    def place(self, tmp_path: Path) -> str:
        return str(tmp_path / "a gallery")

    def damage(self, place: str, table: str) -> None:
        column = {
            "nearveil_index": "next_id",
            "nearveil_item": "name",
            "nearveil_deleted": "revision",
            "nearveil_details": "columns",
        }.get(table)
        change = f"{column} = {column} || 1" if column else "feature = zeroblob(48)"
        with sqlite3.connect(Path(place) / "index.db") as file:
            file.execute(f"UPDATE {table} SET {change} WHERE rowid = (SELECT min(rowid) FROM {table})")  # noqa: S608
        file.close()

    def set_format(self, place: str, head: Head) -> None:
        with sqlite3.connect(Path(place) / "index.db") as file:
            file.execute("UPDATE nearveil_index SET format = :format, crc = :crc", head.row())
        file.close()

    def test_no_byte_of_the_file_changes_what_is_read(self, tmp_path: Path) -> None:
        """Flip bytes all over the file: everything reads as before, or the damage is told."""
        with filled(tmp_path / "one", unit_rows(40)) as index:
            index.delete([7])
            index.publish(2.0, 0.2, n_sets=3)
            content = everything(index)
        data = (tmp_path / "one" / "index.db").read_bytes()
        generator, told = np.random.default_rng(0), 0
        used = np.flatnonzero(np.frombuffer(data, np.uint8))  # of empty space there is much
        for turn, at in enumerate([*generator.choice(used, 110, replace=False), *range(0, 100, 5)]):
            place = tmp_path / f"{turn}"
            place.mkdir()
            broken = bytearray(data)
            broken[at] ^= 1 << int(generator.integers(8))
            (place / "index.db").write_bytes(broken)
            try:
                with Index.open(place) as index:
                    assert everything(index) == content
            except IndexStoreError:
                told += 1
        assert told > 70

    def test_a_file_that_is_cut(self, tmp_path: Path) -> None:
        filled(tmp_path / "one", unit_rows(40)).close()
        data = (tmp_path / "one" / "index.db").read_bytes()
        for size in (0, 1, 99, 100, 5000, len(data) // 2, len(data) - 4096):
            (tmp_path / "one" / "index.db").write_bytes(data[:size])
            with pytest.raises(IndexStoreError, match=r"damaged|never finished"):
                Index.open(tmp_path / "one")

    def test_what_is_no_index_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "photo.jpg").write_bytes(b"x")
        with pytest.raises(IndexStoreError, match="new or empty"):
            Index.create(tmp_path, dimension=3)
        with pytest.raises(NotAnIndexError):
            Index.open(tmp_path)
        with pytest.raises(NotAnIndexError):
            Index.open(tmp_path / "photo.jpg")
        with pytest.raises(IndexStoreError, match="cannot be made"):
            Index.create(tmp_path / "photo.jpg", dimension=3)
        other = tmp_path / "other"
        other.mkdir()
        with sqlite3.connect(other / "index.db") as file:
            file.execute("CREATE TABLE mine (a)")
        file.close()
        before = (other / "index.db").read_bytes()
        with pytest.raises(NotAnIndexError, match="not an index of nearveil"):
            Index.open(other)
        with pytest.raises(IndexStoreError):
            Index.create(other, dimension=3)
        assert (other / "index.db").read_bytes() == before
        (other / "index.db").write_bytes(b"no database" * 50)
        with pytest.raises(DamagedIndexError):
            Index.open(other)
        with pytest.raises(DamagedIndexError):
            Index.create(other, dimension=3)
        for url in ("http://a/b", "mysql://a/b", "", " "):
            with pytest.raises(ValueError, match="where must be"):
                Index.open(url)

    def test_what_is_deleted_is_gone_from_the_disk(self, tmp_path: Path) -> None:
        secret, row = b"SECRET" * 3000, unit_rows(2)
        with Index.create(tmp_path / "i", dimension=DIMENSION) as index:
            index.add([Item(row[0], "hidden-name", WEBP + b"hidden-thumb", secret), Item(row[1], "kept-name")])
            index.add(plain_items(unit_rows(200)))
            assert any(b"SECRET" in file.read_bytes() for file in (tmp_path / "i").iterdir())
            index.delete([0])
            left = b"".join(file.read_bytes() for file in (tmp_path / "i").iterdir())
            assert b"kept-name" in left
            for gone in (b"SECRET", b"hidden-name", b"hidden-thumb", row[0].tobytes()):
                assert gone not in left

    def test_a_backup_that_was_put_back(self, tmp_path: Path) -> None:
        with filled(tmp_path / "i", unit_rows(10)) as index:
            index.add(plain_items(unit_rows(5)))
            index._wipe()
            data = (tmp_path / "i" / "index.db").read_bytes()
            index.delete([0, 1, 2])
            assert len(index.snapshot()) == 12
            index.close()
            for file in (tmp_path / "i").iterdir():
                file.unlink()
            (tmp_path / "i" / "index.db").write_bytes(data)
            assert index.snapshot().ids.tolist() == list(range(15))

    def test_rows_are_read_anew_after_damage_was_told(self, tmp_path: Path) -> None:
        place = str(tmp_path / "i")
        with filled(place, unit_rows(10)) as index, Index.open(place) as other:
            other.add(plain_items(unit_rows(5)))
            with sqlite3.connect(Path(place) / "index.db") as file:
                (kept,) = file.execute("SELECT feature FROM nearveil_feature WHERE id = 10").fetchone()
                file.execute("UPDATE nearveil_feature SET feature = zeroblob(240) WHERE id = 10")
                file.commit()
                with pytest.raises(DamagedIndexError):
                    index.snapshot()
                file.execute("UPDATE nearveil_feature SET feature = ? WHERE id = 10", (kept,))
            file.close()
            assert index.snapshot().features.tobytes() == other.snapshot().features.tobytes()

    def test_who_waits_too_long_is_told(self, tmp_path: Path) -> None:
        filled(tmp_path / "i", unit_rows(10)).close()
        with Index.open(tmp_path / "i", timeout=0.1) as index, index._database.begin_write():
            with pytest.raises(IndexStoreError, match="others held its lock"):
                index.add(plain_items(unit_rows(1)))
            assert len(index) == 10  # readers do not wait

    def test_all_ids_used_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        place = str(tmp_path / "i")
        filled(place, unit_rows(10)).close()
        head = Head(FORMAT, DIMENSION, 1, 2**32 - 1, 10, "tests")
        with sqlite3.connect(Path(place) / "index.db") as file:
            file.execute("UPDATE nearveil_index SET next_id = :next_id, crc = :crc", head.row())
        file.close()
        # All but ten ids count as deleted; nobody shall write four billion rows for a test.
        monkeypatch.setattr(_index_directory, "count_deleted", lambda _: 2**32 - 11)
        with Index.open(place) as index:
            with pytest.raises(IndexStoreError, match="used up"):
                index.add(plain_items(unit_rows(2)))
            assert index.add(plain_items(unit_rows(1))).tolist() == [2**32 - 1]


class TestPostgres(IndexConformance):
    @pytest.fixture
    def place(self, index_url: str) -> str:
        return index_url

    def damage(self, place: str, table: str) -> None:
        change = {
            "nearveil_index": "next_id = next_id + 1",
            "nearveil_item": "name = name || '1'",
            "nearveil_deleted": "revision = revision + 1",
            "nearveil_details": "columns = columns || '1'",
            "nearveil_feature": "feature = (SELECT feature FROM nearveil_feature WHERE id = 1)",
        }[table]
        with psycopg.connect(place) as server:
            only = " WHERE id = 0" if table in ("nearveil_item", "nearveil_feature") else ""
            server.execute("SET search_path = {}, public".format(place.rpartition("%3D")[2]).encode())
            server.execute(f"UPDATE {table} SET {change}{only}".encode())  # noqa: S608

    def set_format(self, place: str, head: Head) -> None:
        with psycopg.connect(place) as server:
            server.execute("UPDATE nearveil_index SET format = %(format)s, crc = %(crc)s", head.row())

    def test_many_dimensions(self, place: str) -> None:
        rows = unit_rows(150, 4001)
        with filled(place, rows) as index:
            ids, scores = index.search(rows[:20], 10)
            assert (ids[:, 0] == np.arange(20)).all()
            np.testing.assert_allclose(scores, np.einsum("qd,qkd->qk", rows[:20], rows[ids]), atol=1e-6)
            assert index.snapshot().features.tobytes() == rows.tobytes()

    def test_connections_that_die(self, index: Index, place: str) -> None:
        assert len(index) == 40
        with psycopg.connect(place, autocommit=True) as server:
            server.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        index.add(plain_items(unit_rows(1)))  # the pool notices
        assert len(index) == 41

    def test_errors_in_words(self, index_server: Postgres) -> None:
        with pytest.raises(IndexStoreError, match="connection refused"):
            Index.open("postgresql://me:secret@127.0.0.1:1/none", timeout=2)
        with pytest.raises(IndexStoreError) as error:
            Index.open(index_server.url("no_such_database").replace("postgres@", "postgres:secret@"))
        assert "secret" not in str(error.value)
        with pytest.raises(ValueError, match="where must be"):
            Index.open("postgresql:nonsense")


def everything(index: Index) -> list[Any]:
    """Return all that an index says of itself."""
    now: Snapshot = index.snapshot()
    published = index.current().published
    told = [index.dimension, index.extractor, len(index), index.revision, now.ids.tolist(), now.features.tobytes()]
    arrays = [published.ids.tobytes(), published.codes.tobytes(), published.release.members_.indices.tobytes()]
    return [*told, index.items(now.ids), published.public_id, published.map.to_bytes(), *arrays]


def test_a_header_tells_ours(tmp_path: Path) -> None:
    filled(tmp_path / "i", unit_rows(5)).close()
    data = (tmp_path / "i" / "index.db").read_bytes()
    assert struct.unpack_from(">I", data, 68)[0] == 0x4E567831


def test_errors_show_nothing_of_what_was_written(tmp_path: Path) -> None:
    with filled(tmp_path / "i", unit_rows(5)) as index:
        with sqlite3.connect(tmp_path / "i" / "index.db") as file:
            file.execute("CREATE TRIGGER t BEFORE INSERT ON nearveil_item BEGIN SELECT raise(abort, 'secret'); END")
        file.close()
        item = Item(ROW, "secret-name", WEBP + b"secret-thumb")
        with pytest.raises(IndexStoreError) as caught:
            index.add([item])
        shown = "".join(traceback.format_exception(caught.value))
        assert "secret" not in shown
        assert index._database.engine.hide_parameters


def test_a_password_in_a_query_is_not_shown() -> None:
    url = sa.make_url("postgresql+psycopg://me:first@host/birds?password=second&sslpassword=third")
    assert describe_url(url) == "postgresql+psycopg://me:***@host/birds"


def test_an_index_is_for_its_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    before = os.umask(0o022)
    try:
        for place in ("new", "there"):
            with Index.create(tmp_path / place, dimension=3) as index:
                index.add([Item(np.array([1.0, 0, 0], np.float32), "name")])
                assert {path.stat().st_mode & 0o777 for path in (tmp_path / place).iterdir()} == {0o600}
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
