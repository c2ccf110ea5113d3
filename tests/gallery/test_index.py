"""Both stores keep the promises of an index; and what is particular to each."""

import json
import os
import sqlite3
import struct
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
import sqlalchemy as sa

from nearveil.gallery.errors import (
    CorruptedIndexError,
    IndexStoreError,
    NotAnIndexError,
)
from nearveil.gallery.index import Index
from nearveil.gallery.items import IndexSnapshot, Item
from nearveil.gallery.store import FORMAT, Header, allocate_ids, checksum, load_header
from nearveil.metrics import CENTRED
from nearveil.storage import Database, describe_url

from ..ledger.postgres import Postgres
from .index_conformance import IndexConformance
from .index_places import DIMENSION, WEBP, filled, index_server, index_url, one_thread, plain_items, unit_rows, where

__all__ = ["index_server", "index_url", "one_thread", "where"]  # fixtures

ROW = unit_rows(1)[0]


class TestDirectory(IndexConformance):
    @pytest.fixture
    def place(self, tmp_path: Path) -> str:
        return str(tmp_path / "a gallery")

    def damage(self, place: str, table: str) -> None:
        column = {
            "nearveil_index": "next_id",
            "nearveil_item": "name",
            "nearveil_image": "thumbnail",
            "nearveil_deleted": "revision",
        }.get(table)
        change = f"{column} = {column} || 1" if column else "feature = zeroblob(48)"
        with sqlite3.connect(Path(place) / "index.db") as file:
            file.execute(f"UPDATE {table} SET {change} WHERE rowid = (SELECT min(rowid) FROM {table})")  # noqa: S608
        file.close()

    def set_format(self, place: str, header: Header) -> None:
        with sqlite3.connect(Path(place) / "index.db") as file:
            file.execute("UPDATE nearveil_index SET format = :format, crc = :crc", header.to_row())
        file.close()

    def test_no_byte_of_the_file_changes_what_is_read(self, tmp_path: Path) -> None:
        """Flip bytes all over the file: everything reads as before, or `verify` detects the corruption."""
        with filled(tmp_path / "one", unit_rows(40)) as index:
            index.delete([7])
            index.publish(2.0, 0.2, n_sets=3, reach=0.0)
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
                    index.verify()
                    assert everything(index) == content
            except IndexStoreError:
                told += 1
        assert told > 70

    @pytest.mark.parametrize("name", ["format", "crc"])
    def test_a_column_of_another_name(self, tmp_path: Path, name: str) -> None:
        filled(tmp_path / "one", unit_rows(40)).close()
        with sqlite3.connect(tmp_path / "one" / "index.db") as database:
            database.execute(f"ALTER TABLE nearveil_index RENAME COLUMN {name} TO other")
        with pytest.raises(IndexStoreError, match="corrupted"):
            Index.open(tmp_path / "one")

    def test_a_file_that_is_cut(self, tmp_path: Path) -> None:
        filled(tmp_path / "one", unit_rows(40)).close()
        data = (tmp_path / "one" / "index.db").read_bytes()
        for size in (0, 1, 99, 100, 5000, len(data) // 2, len(data) - 4096):
            (tmp_path / "one" / "index.db").write_bytes(data[:size])
            with pytest.raises(IndexStoreError, match=r"corrupted|never finished"):
                Index.open(tmp_path / "one")

    def test_what_is_no_index_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "photo.jpg").write_bytes(b"x")
        with pytest.raises(IndexStoreError, match="new or empty"):
            Index.create(tmp_path, dimension=3)
        with pytest.raises(NotAnIndexError):
            Index.open(tmp_path)
        with pytest.raises(NotAnIndexError):
            Index.open(tmp_path / "photo.jpg")
        with pytest.raises(IndexStoreError, match="cannot create the directory"):
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
        with pytest.raises(CorruptedIndexError):
            Index.open(other)
        with pytest.raises(CorruptedIndexError):
            Index.create(other, dimension=3)
        for url in ("ftp://a/b", "mysql://a/b", "", " "):
            with pytest.raises(ValueError, match="location must be"):
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

    def test_rows_are_loaded_again_after_corruption(self, tmp_path: Path) -> None:
        place = str(tmp_path / "i")
        with filled(place, unit_rows(10)) as index, Index.open(place) as other:
            other.add(plain_items(unit_rows(5)))
            with sqlite3.connect(Path(place) / "index.db") as file:
                (kept,) = file.execute("SELECT feature FROM nearveil_feature WHERE id = 10").fetchone()
                file.execute("UPDATE nearveil_feature SET feature = zeroblob(240) WHERE id = 10")
                file.commit()
                with pytest.raises(CorruptedIndexError):
                    index.snapshot()
                file.execute("UPDATE nearveil_feature SET feature = ? WHERE id = 10", (kept,))
            file.close()
            assert index.snapshot().features.tobytes() == other.snapshot().features.tobytes()

    def test_who_waits_too_long_is_told(self, tmp_path: Path) -> None:
        filled(tmp_path / "i", unit_rows(10)).close()
        with Index.open(tmp_path / "i", timeout=0.1) as index, index._database.begin_write():
            with pytest.raises(IndexStoreError, match="other processes locked it"):
                index.add(plain_items(unit_rows(1)))
            assert len(index) == 10  # readers do not wait

    def test_all_ids_used_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        last = Header(FORMAT, DIMENSION, 1, 2**32 - 1, 10, "tests")
        assert allocate_ids(last, 1).tolist() == [2**32 - 1]
        with pytest.raises(IndexStoreError, match="used up"):
            allocate_ids(last, 2)
        monkeypatch.setattr("nearveil.gallery.store.MOST_ITEMS", 11)
        with filled(tmp_path / "i", unit_rows(10)) as index:
            with pytest.raises(IndexStoreError, match="used up"):
                index.add(plain_items(unit_rows(2)))
            assert index.add(plain_items(unit_rows(1))).tolist() == [10]


class TestPostgres(IndexConformance):
    @pytest.fixture
    def place(self, index_url: str) -> str:
        return index_url

    def damage(self, place: str, table: str) -> None:
        change = {
            "nearveil_index": "next_id = next_id + 1",
            "nearveil_item": "name = name || '1'",
            "nearveil_image": "thumbnail = ''",
            "nearveil_deleted": "revision = revision + 1",
            "nearveil_feature": "feature = (SELECT feature FROM nearveil_feature WHERE id = 1)",
        }[table]
        with psycopg.connect(place) as server:
            only = " WHERE id = 0" if table in ("nearveil_item", "nearveil_image", "nearveil_feature") else ""
            server.execute("SET search_path = {}, public".format(place.rpartition("%3D")[2]).encode())
            server.execute(f"UPDATE {table} SET {change}{only}".encode())  # noqa: S608

    def set_format(self, place: str, header: Header) -> None:
        with psycopg.connect(place) as server:
            server.execute("UPDATE nearveil_index SET format = %(format)s, crc = %(crc)s", header.to_row())

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
        with pytest.raises(ValueError, match="location must be"):
            Index.open("postgresql:nonsense")


def everything(index: Index) -> list[Any]:
    """Return all that an index says of itself."""
    now: IndexSnapshot = index.snapshot()
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
            file.execute("CREATE TRIGGER t BEFORE INSERT ON nearveil_image BEGIN SELECT raise(abort, 'secret'); END")
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


def downgrade(index: Index) -> None:
    """Turn an index without images into one of format 2, which had details in rows of JSON."""
    with index._database.begin_write() as connection:
        header = load_header(connection, "here")
        rows = connection.exec_driver_sql("SELECT name, external_id, metadata FROM nearveil_item ORDER BY id").all()
        names, external_ids, texts = ([row[column] or "" for row in rows] for column in range(3))
        columns = json.dumps({"names": names, "metadata": texts})
        values = (0, len(rows) - 1, json.dumps([text or None for text in external_ids]), columns)
        for statement in (
            "ALTER TABLE nearveil_index DROP COLUMN metric",
            "DROP TABLE nearveil_item",
            "DROP TABLE nearveil_digest",
            "DROP TABLE nearveil_metadata_key",
            "ALTER TABLE nearveil_image RENAME TO nearveil_item",
            *(f"ALTER TABLE nearveil_item ADD COLUMN {column}" for column in ("crc BIGINT", "original_crc BIGINT")),
            "ALTER TABLE nearveil_item ADD COLUMN name TEXT",
            "ALTER TABLE nearveil_deleted ADD COLUMN crc BIGINT",
            *(f"ALTER TABLE nearveil_published ADD COLUMN {column}" for column in ("crc BIGINT", "parts BIGINT")),
            "ALTER TABLE nearveil_published DROP COLUMN digest",
            "ALTER TABLE nearveil_published_part ADD COLUMN crc BIGINT",
            "CREATE TABLE nearveil_details (first BIGINT, last BIGINT, external_ids TEXT, columns TEXT, crc BIGINT)",
        ):
            connection.exec_driver_sql(statement)
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("ALTER TABLE nearveil_feature ADD COLUMN crc BIGINT")
        names_of_values = ("first", "last", "external_ids", "columns", "crc")
        parameters = dict(zip(names_of_values, (*values, checksum(*values)), strict=True))
        insert = "INSERT INTO nearveil_details VALUES (:first, :last, :external_ids, :columns, :crc)"
        connection.execute(sa.text(insert), parameters)
        old = {**asdict(header), "format": 2}
        del old["metric"]
        crc = checksum(*old.values())
        connection.execute(sa.text("UPDATE nearveil_index SET format = 2, crc = :crc"), {"crc": crc})


def test_an_index_of_format_2_is_upgraded(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = unit_rows(30)
    with Index.create(where, dimension=DIMENSION, metric=CENTRED) as index:
        index.add_table(rows, [f"doc {n}" for n in range(30)], [f"name {n}" for n in range(30)], [{"n": 1}] * 30)
        public_id = index.publish(4.0, 0.2, n_sets=2, reach=0.0).public_id
        items = index.items(index.ids())
        downgrade(index)
    with monkeypatch.context() as patch:
        patch.setattr(Database, "is_read_only", True)
        with pytest.raises(IndexStoreError, match=r"older format and is read-only\. Upgrade it: run `nearveil index`"):
            Index.open(where)
    with Index.open(where) as index:
        index.verify()
        assert index.items(index.ids()) == items
        assert index.snapshot().features.tobytes() == rows.tobytes()
        assert (index.current().published.public_id, index.metadata_keys()) == (public_id, ("n",))
        index.add_table(-rows[:1], ["doc 0"], replace=True)
        index.verify()
