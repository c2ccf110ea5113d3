"""A gallery that lasts: one interface, kept in a directory or in PostgreSQL."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast

import numpy as np
import sqlalchemy as sa
from numpy.typing import ArrayLike, NDArray

from nearveil.cluster import connect
from nearveil.features.vectors import VectorFile
from nearveil.gallery.answers import Singles
from nearveil.gallery.errors import InexactRowsError, UnknownItemError
from nearveil.gallery.items import (
    FORMAT,
    Batch,
    ExternalIds,
    Head,
    Ids,
    Item,
    Progress,
    Snapshot,
    StoredItem,
    TextColumn,
    Tick,
    check_dimension,
    check_exact,
    check_extractor,
    check_ids,
    check_items,
    check_part,
    check_queries,
    check_table,
    check_unknown,
    count_deleted,
    count_inexact,
    delete_maps,
    delete_rows,
    encode_text,
    find_deleted_since,
    find_external_ids,
    find_present,
    load_binding,
    load_head,
    load_items,
    make_damaged_error,
    mark_exact,
    name_parts,
    save_binding,
    save_details,
    save_head,
    sum_sizes,
    take_ids,
    upgrade,
)
from nearveil.gallery.publishing import MapPublisher
from nearveil.storage import Database


class Index(MapPublisher):
    """Features of a gallery, with names, thumbnails and originals; and the public map that is learned on them.

    Made by :meth:`create`, found again by :meth:`open`. What `add`, `delete` or `publish` did is on the disk when they
    return; killed before, they did nothing. Any number of threads and processes may use an index at once: those who
    write take turns, those who read do not wait.

    Both stores pass one conformance suite, ``tests/gallery/test_index.py``.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> folder = tempfile.TemporaryDirectory()
    >>> index = Index.create(Path(folder.name) / "gallery", dimension=3, extractor="toy")
    >>> index.add(Item(row, name) for row, name in zip(np.eye(3, dtype=np.float32), ("red", "green", "blue")))
    array([0, 1, 2], dtype=uint32)
    >>> ids, scores = index.search([0.6, 0.8, 0.0], k=2)
    >>> [item.name for item in index.items(ids[0])], index.revision
    (['green', 'red'], 1)
    >>> index.close(); folder.cleanup()
    """

    def __init__(self, database: Database, where: str) -> None:
        super().__init__(database, where)
        with database.begin_read() as connection:
            head = load_head(connection, where)
        self._dimension, self._extractor = head.dimension, head.extractor
        self._names, self._details = TextColumn("names"), TextColumn("metadata")

    @staticmethod
    def create(where: str | Path, *, dimension: int, extractor: str = "", timeout: float = 30.0) -> "Index":
        """Make an empty index.

        Parameters
        ----------
        where : str or Path
            A new or empty directory, or a URL such as ``postgresql://user@host/database``.
        dimension : int
        extractor : str, default=""
            The fingerprint of what makes features: they are comparable with those of the same alone.
        timeout : float, default=30.0
            Seconds to wait while others write.

        Returns
        -------
        Index
        """
        first = Head(FORMAT, check_dimension(dimension), 0, 0, 0, check_extractor(extractor))
        return _store(where)._create(str(where), first, timeout)

    @staticmethod
    def open(where: str | Path, *, timeout: float = 30.0) -> "Index":
        """Open an index.

        Parameters
        ----------
        where : str or Path
            As :meth:`create` was given.
        timeout : float, default=30.0

        Returns
        -------
        Index
        """
        return _store(where)._open(str(where), timeout)

    @property
    def dimension(self) -> int:
        """Of the features."""
        return self._dimension

    @property
    def extractor(self) -> str:
        """The fingerprint of what makes the features."""
        return self._extractor

    @property
    def sealed_file(self) -> Path | None:
        """Where the index for sealed questions is kept beside this one; None where there is no folder."""
        return None

    @property
    def revision(self) -> int:
        """Grows by one with every `add` and every `delete`, whoever does it."""
        return self._head().revision

    def __len__(self) -> int:
        return self._head().count

    @property
    def is_private(self) -> bool:
        """Whether the rows are private: see :meth:`protect`."""
        with self._database.begin_read() as connection:
            return load_binding(connection, self._where) is not None

    @property
    def row_exact(self) -> bool:
        """Whether each row is a function of its own image alone, to the last bit, as far as `add` was told.

        Whatever protects records asks for it. True of all rows of :class:`nearveil.features.HogColor`.
        """
        if self._extractor_is_exact:
            return True
        with self._database.begin_read() as connection:
            return count_inexact(connection, self._where) == 0

    def assert_row_exact(self) -> None:
        """Raise InexactRowsError, which says what to do, unless all rows are row-exact."""
        with self._database.begin_read() as connection:
            self._check_exact(connection)

    def add(self, items: Iterable[Item], *, replace: bool = False, row_exact: bool = False) -> Ids:
        """Add items: all of them, or, where something is wrong with one, none.

        Parameters
        ----------
        items : iterable of Item
        replace : bool, default=False
            Whether items take the place of those with the same `external_id`. Otherwise such an item is refused.
        row_exact : bool, default=False
            Your word that each row was made from its own image alone, to the last bit: by
            ``extract(images, row_exact=True)``, or in a way of your own for which you can prove it.

        Returns
        -------
        ndarray of shape (n,), uint32
            Their ids, in the order of the items. An id is never given twice.

        Raises
        ------
        InexactRowsError
            If the rows of this index are private, and these are not row-exact.
        """
        return self._add([check_items(items, self.dimension)], replace, row_exact, lambda _: None)

    def add_table(
        self,
        rows: Any,
        ids: Any = None,
        names: Any = None,
        metadata: Any = None,
        *,
        replace: bool = False,
        row_exact: bool = False,
        progress: Progress | None = None,
    ) -> Ids:
        """Add many vectors at once: all of them, or, where something is wrong with one, none.

        Rows whose norm is not one are divided by it, as the vectors of questions are. A row of zeros has no direction
        and is refused.

        Parameters
        ----------
        rows : array-like of shape (n, d) or (d,)
            An array of NumPy, a tensor, a data frame, a pyarrow table or column of lists, or lists of numbers.
        ids : sequence of str or int, optional
            Your own ids, each once in an index; whole numbers become text. They replace and delete items.
        names : sequence of str, optional
            For people; need not be unique.
        metadata : sequence of mappings, or a data frame, optional
            What JSON can hold, for each row. Clients get it with every match where the gallery offers it.
        replace : bool, default=False
            Whether rows take the place of items with the same ids. Those that are the same already stay as they are.
        row_exact : bool, default=False
            As of :meth:`add`.
        progress : callable, optional
            ``progress(text, total)`` returns a function that is called with the number of rows done.

        Returns
        -------
        ndarray of shape (n,), uint32
            The index's own ids, in the order of the rows.

        Examples
        --------
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> index = Index.create(Path(folder.name) / "texts", dimension=2)
        >>> index.add_table([[3, 4], [1, 0]], ids=["a", "b"], metadata=[{"lang": "en"}, {"lang": "de"}])
        array([0, 1], dtype=uint32)
        >>> index.add_table([[0, 2], [1, 0]], ids=["a", "b"], replace=True)
        array([2, 3], dtype=uint32)
        >>> index.delete(["b"])
        >>> index.features(["a"]), index.items(["a"])[0].metadata
        (array([[0., 1.]], dtype=float32), {})
        >>> index.close(); folder.cleanup()
        """
        batch = check_table(rows, ids, names, metadata, self.dimension)
        tick = (lambda _: None) if progress is None else progress("adding", len(batch))
        return self._add([batch], replace, row_exact, tick)

    def add_file(
        self,
        file: VectorFile,
        *,
        replace: bool = False,
        row_exact: bool = False,
        progress: Progress | None = None,
        cluster: Any = None,
    ) -> Ids:
        """Add the vectors of a file that may be larger than the memory: all of them, or none.

        Parameters
        ----------
        file : VectorFile
            From :mod:`nearveil.features`. Without ids, vectors are called ``FILE:0``, ``FILE:1``, and so on.
        replace, row_exact, progress
            As of :meth:`add_table`.
        cluster : str or dask.distributed.Client, optional
            Whose workers read, check and normalise the partitions; see :func:`nearveil.cluster.connect`. They must
            reach the file under the same path. The result is the same.

        Returns
        -------
        ndarray of shape (n,), uint32
            The index's own ids, in the order of the rows.

        Raises
        ------
        PartitionError
            If something is wrong with a row; it names the partition.
        """
        parts = file.cut()
        tick = (lambda _: None) if progress is None else progress("adding", parts[-1].stop if parts else 0)
        with connect(cluster) as workers:
            batches = workers.map(
                check_part, parts, file, self.dimension, stage="reading", names=name_parts(file, parts)
            )
            return self._add(batches, replace, row_exact, tick)

    def delete(self, ids: ArrayLike) -> None:
        """Delete items: all of them, or, where one is not there, none. No answer that begins later holds them.

        Parameters
        ----------
        ids : sequence of int or str
            The index's own ids, or your `external_id`.
        """
        given = check_ids(ids)
        if not len(given):
            return
        with self._database.begin_write() as connection:
            head = load_head(connection, self._where, lock=True)
            numbers = np.unique(self._resolve(connection, given))
            missing = sorted(set(numbers.tolist()) - find_present(connection, numbers, head))
            if missing:
                check_unknown(connection, missing, self._where)
                raise UnknownItemError(missing)
            self._delete(connection, head, numbers)
            save_head(connection, _change(head, head, gone=len(numbers)))
        self._wipe()

    def ids(self) -> Ids:
        """Return the ids of all items, rising."""
        return self.snapshot().ids

    def items(self, ids: ArrayLike, *, lenient: bool = False, originals: bool = True) -> list[StoredItem]:
        """Return names, thumbnails and originals, in the order of the ids.

        Parameters
        ----------
        ids : sequence of int or str
            The index's own ids, or your `external_id`.
        lenient : bool, default=False
            Whether ids that the index does not hold are left out, instead of an error: for a server, whose items may be
            deleted while it answers.
        originals : bool, default=True
            Whether originals that the index itself holds are read. Paths are given back in any case.

        Returns
        -------
        list of StoredItem
        """
        given = check_ids(ids)
        with self._database.begin_read() as connection:
            numbers = self._resolve(connection, given, lenient=lenient)
            found = load_items(connection, np.unique(numbers), self._where, originals=originals)
            missing = sorted(set(numbers.tolist()) - set(found))
            check_unknown(connection, missing, self._where)
        if missing and not lenient:
            raise UnknownItemError(missing)
        return [found[number] for number in numbers.tolist() if number in found]

    def texts(self, ids: ArrayLike, kind: Literal["names", "metadata"]) -> list[bytes]:
        """Return names, or details as JSON, as answers hold them: in the order of the ids, much faster than `items`.

        The first call reads those of all items, and keeps them in memory where they are at most 256 MiB.

        Parameters
        ----------
        ids : array-like of int
        kind : {"names", "metadata"}
            The second is name, external id and metadata.

        Returns
        -------
        list of bytes
            Empty where the index does not hold an item.
        """
        numbers = np.asarray(ids, np.int64)
        with self._database.begin_read() as connection:
            found = (self._names if kind == "names" else self._details).find(connection, numbers, self._where)
            missing = np.array([number for number, text in zip(numbers.tolist(), found, strict=True) if text is None])
            others = {}
            if len(missing):
                missing = np.unique(missing)
                others = load_items(connection, missing, self._where, originals=False)
                check_unknown(connection, sorted(set(missing.tolist()) - set(others)), self._where)
        if not len(missing):
            return cast("list[bytes]", found)
        told = {number: encode_text(item, kind) for number, item in others.items()}
        return [told.get(n, b"") if text is None else text for n, text in zip(numbers.tolist(), found, strict=True)]

    def metadata_keys(self) -> tuple[str, ...] | None:
        """Return the keys of all items' metadata, sorted: what a filter may name. The first call reads all of it.

        Returns
        -------
        tuple of str or None
            None where there are more than 64, or where the metadata are too large to be kept in memory.
        """
        with self._database.begin_read() as connection:
            return self._details.find_keys(connection, self._where)

    def stored_bytes(self, ids: ArrayLike, kind: Literal["thumbnail", "original"]) -> int:
        """Return how many bytes of thumbnails or originals the index itself holds of items, without reading them.

        Parameters
        ----------
        ids : array-like of int
        kind : {"thumbnail", "original"}

        Returns
        -------
        int
        """
        with self._database.begin_read() as connection:
            return sum_sizes(connection, np.unique(self._resolve(connection, check_ids(ids))), kind)

    @abstractmethod
    def features(self, ids: ArrayLike) -> Singles:
        """Return features, shape (n, d), in the order of the ids.

        Parameters
        ----------
        ids : sequence of int or str
            The index's own ids, or your `external_id`.

        Returns
        -------
        ndarray of shape (n, d), float32
        """

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Return all ids and features as they are now; later changes do not reach it."""

    def search(self, queries: ArrayLike, k: int = 8) -> tuple[Ids, Singles]:
        """Find the items with the largest inner products. Not private: for those who may see the queries.

        Parameters
        ----------
        queries : array-like of shape (d,) or (q, d)
        k : int, default=8
            At most the number of items.

        Returns
        -------
        ids : ndarray of shape (q, k), uint32
            Best first; of equal scores the smallest id, but any of those that tie for the last place.
        scores : ndarray of shape (q, k), float32
        """
        return self._search(check_queries(queries, self.dimension), k)

    def protect(self) -> None:
        """Keep the rows private from now on, in every process: no map of them is published, kept or served.

        What was published before is deleted. Rows that are added must be row-exact. A protected gallery does this, too,
        when it first publishes.
        """
        with self._database.begin_write() as connection:
            load_head(connection, self._where, lock=True)
            save_binding(connection, load_binding(connection, self._where) or "")
            delete_maps(connection)
        self._wipe()
        self._delete_sealed()

    def bind(self, name: str) -> str:
        """Bind private rows to something, for good: whoever comes first. A protected gallery binds them to its account.

        The rows are private from then on, as after :meth:`protect`.

        Parameters
        ----------
        name : str

        Returns
        -------
        str
            What they are bound to now: `name`, or what was there before.

        Raises
        ------
        InexactRowsError
            If a row is not row-exact: removing one record may change others, and no guarantee to records holds.
        """
        with self._database.begin_write() as connection:
            load_head(connection, self._where, lock=True)
            self._check_exact(connection)
            held = load_binding(connection, self._where) or name
            save_binding(connection, held)
            delete_maps(connection)
        self._wipe()
        self._delete_sealed()
        return held

    def unprotect(self, *, rows_are_public: bool) -> None:
        """Let the rows be served, published and searched openly again. What was promised to the records ends with that.

        Parameters
        ----------
        rows_are_public : bool
            Must be True: your word that everybody may see every row.
        """
        if rows_are_public is not True:
            raise ValueError("rows_are_public must be True: only rows that everybody may see are open")
        with self._database.begin_write() as connection:
            load_head(connection, self._where, lock=True)
            save_binding(connection, None)

    def verify(self) -> None:
        """Read everything and compare it with its checksums; raise DamagedIndexError if something does not fit."""
        with self._database.begin_read() as connection:
            head = load_head(connection, self._where)
            self._check_pages(connection)
            held = 0
            for ids, _ in self._stored(connection, 0):
                held += len(load_items(connection, ids.astype(np.int64), self._where))
            if held != head.count or count_deleted(connection) != head.next_id - head.count:
                raise make_damaged_error(self._where, "the list of items")
            find_deleted_since(connection, -1, self._where)
            load_binding(connection, self._where)
            count_inexact(connection, self._where)

    def close(self) -> None:
        """Close all connections."""
        if self._watch is not None:
            self._watch.close()
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._where}: {self.dimension} dimensions>"

    @cached_property
    def _extractor_is_exact(self) -> bool:
        """Whether the extractor is known to make row-exact rows in any case."""
        from nearveil.features import HogColor

        return self._extractor == HogColor().fingerprint

    def _check_exact(self, connection: sa.Connection) -> None:
        if not self._extractor_is_exact:
            check_exact(connection, self._where)

    def _reset(self) -> None:
        super()._reset()
        self._names, self._details = TextColumn("names"), TextColumn("metadata")

    def _add(self, batches: Iterable[Batch], replacing: bool, row_exact: bool, tick: Tick) -> Ids:
        """Write items, in one transaction."""
        added, gone = [np.empty(0, np.int64)], False
        with self._database.begin_write() as connection:
            first = head = load_head(connection, self._where, lock=True)
            upgrade(connection)
            held = ExternalIds(connection, self._where)
            for batch in batches:
                known = self._find_known(held, batch, first.next_id, replacing=replacing)
                same = self._find_same(connection, batch, known)
                ids = np.full(len(batch), -1, np.int64)
                ids[list(same)] = list(same.values())
                added.append(ids)
                places = np.flatnonzero(ids < 0)
                tick(len(same))
                if not len(places):
                    continue
                new = batch if not same else batch.select(places.tolist())
                old = np.array(sorted(set(known.values()) - set(same.values())), np.int64)
                ids[places] = given = take_ids(head, len(new))
                self._insert(connection, given, new, tick)
                save_details(connection, int(given[0]), new.details)
                self._mark_exact(connection, given, row_exact=row_exact)
                self._delete(connection, first, old)
                head, gone = _change(first, head, added=len(new), gone=len(old)), gone or len(old) > 0
            if head is not first:
                save_head(connection, head)
        if gone:
            self._wipe()
        return np.concatenate(added).astype(np.uint32)

    def _delete_sealed(self) -> None:
        """Delete what is kept for sealed questions: it holds codes."""
        if self.sealed_file is not None:
            self.sealed_file.unlink(missing_ok=True)

    def _find_known(self, held: ExternalIds, batch: Batch, next_id: int, *, replacing: bool) -> dict[int, int]:
        """Return the ids of items that rows of a batch take the place of, by the position of the row."""
        own = batch.details.external_ids or []
        found = held.find(own)
        known = {place: found[one] for place, one in enumerate(own) if one in found} if found else {}
        if known and not replacing:
            raise ValueError(
                f"ids: number {min(known)} is in the index already, and so are {len(known) - 1:,} others: replace=True "
                "replaces them; nothing was changed"
            )
        twice = [place for place, number in known.items() if number >= next_id]
        if twice:
            raise ValueError(f"ids: {own[min(twice)]!r} is there twice; nothing was changed")
        return known

    def _find_same(self, connection: sa.Connection, batch: Batch, known: dict[int, int]) -> dict[int, int]:
        """Return those of the known items that a batch would not change."""
        if not known or batch.attached:
            return {}
        places = list(known)
        held = load_items(connection, np.unique(list(known.values())), self._where, originals=False)
        alike = (self.features([known[place] for place in places]) == batch.features[places]).all(axis=1)
        return {
            place: known[place]
            for place, equal in zip(places, alike.tolist(), strict=True)
            if equal and held[known[place]] == batch.details.as_item(place, known[place])
        }

    def _delete(self, connection: sa.Connection, head: Head, numbers: NDArray[np.int64]) -> None:
        """Delete items that are there, inside the caller's transaction; the head is the caller's."""
        if self._delete_features(connection, numbers) != len(numbers):
            raise make_damaged_error(self._where, "the list of features")
        delete_rows(connection, numbers, head.revision + 1, self._where)

    def _mark_exact(self, connection: sa.Connection, ids: NDArray[np.int64], *, row_exact: bool) -> None:
        if row_exact or self._extractor_is_exact:
            mark_exact(connection, ids)
        elif load_binding(connection, self._where) is not None:
            raise InexactRowsError(
                "items: private rows must be row-exact: make them by extract(images, row_exact=True), and say so: "
                "add(items, row_exact=True)"
            )

    def _resolve(
        self, connection: sa.Connection, ids: NDArray[np.int64] | Sequence[str], *, lenient: bool = False
    ) -> NDArray[np.int64]:
        """Return the index's own ids of ids that were checked; those that are not held are left out if `lenient`."""
        if isinstance(ids, np.ndarray):
            return ids
        held = find_external_ids(connection, ids, self._where)
        missing = [one for one in ids if one not in held]
        if missing and not lenient:
            raise UnknownItemError(missing)
        return np.array([held[one] for one in ids if one in held], np.int64)

    def _find_numbers(self, ids: ArrayLike) -> NDArray[np.int64]:
        """Return the index's own ids of items."""
        given = check_ids(ids)
        if isinstance(given, np.ndarray):
            return given
        with self._database.begin_read() as connection:
            return self._resolve(connection, given)

    def _head(self) -> Head:
        with self._database.begin_read() as connection:
            return load_head(connection, self._where)

    @classmethod
    @abstractmethod
    def _create(cls, where: str, first: Head, timeout: float) -> "Index": ...

    @classmethod
    @abstractmethod
    def _open(cls, where: str, timeout: float) -> "Index": ...

    @abstractmethod
    def _insert(self, connection: sa.Connection, ids: NDArray[np.int64], batch: Batch, tick: Tick) -> None:
        """Write features and images of items, inside the caller's transaction."""

    @abstractmethod
    def _delete_features(self, connection: sa.Connection, ids: NDArray[np.int64]) -> int:
        """Delete features of ids, which rise, inside the caller's transaction; return how many there were."""

    @abstractmethod
    def _stored(self, connection: sa.Connection, first: int) -> Iterator[tuple[Ids, Singles]]:
        """Yield ids, from `first`, and features as they are on the disk, checked, in blocks of rising ids."""

    @abstractmethod
    def _search(self, queries: Singles, k: int) -> tuple[Ids, Singles]:
        """Search for rows that were checked; `k` was not."""

    def _wipe(self) -> None:
        """After a deletion: let nothing of it lie around, as far as the store can."""

    def _check_pages(self, connection: sa.Connection) -> None:
        """Check what is below the rows, as far as the store can."""


def _change(first: Head, head: Head, *, added: int = 0, gone: int = 0) -> Head:
    """Return the head after a change, in today's format; one transaction is one revision after the `first`."""
    return replace(
        head,
        format=FORMAT,
        revision=first.revision + 1,
        next_id=head.next_id + added,
        count=head.count + added - gone,
    )


def _store(where: str | Path) -> type[Index]:
    """Return the store for a place."""
    text = str(where)
    if text.startswith(("postgresql:", "postgresql+psycopg:")):
        from nearveil.gallery._postgres import PostgresIndex

        return PostgresIndex
    if "://" in text or not text.strip():
        raise ValueError("where must be a directory, or a URL such as postgresql://user@host/database")
    from nearveil.gallery._directory import DirectoryIndex

    return DirectoryIndex
