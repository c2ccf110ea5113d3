"""A durable gallery: one interface, stored in a directory or in PostgreSQL."""

import json
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import sqlalchemy as sa
from numpy.typing import ArrayLike, NDArray

from nearveil.cluster import connect
from nearveil.features.vectors import VectorFile
from nearveil.gallery import items as inputs
from nearveil.gallery import store
from nearveil.gallery.answers import LONGEST_NAME, ItemDetails, encode_details, encode_name
from nearveil.gallery.codes import Longs, Singles
from nearveil.gallery.errors import CorruptedIndexError, InexactRowsError, UnknownItemError
from nearveil.gallery.items import Ids, IndexSnapshot, Item, ItemTable, LazyFeatures, StoredItem
from nearveil.gallery.migrations import migrate
from nearveil.gallery.publishing import MapPublisher
from nearveil.gallery.store import FORMAT, Header, load_binding, load_header, save_header
from nearveil.mechanisms.covers.maps import MOST_ITEMS
from nearveil.metrics import NORMALIZED, Metric, check_metric
from nearveil.privacy.checks import check_integer, normalize_rows
from nearveil.progress import Progress, Tick, no_progress
from nearveil.remote import is_remote
from nearveil.storage import Database, is_among
from nearveil.wire.frames import LONGEST_KEY, MOST_FEATURES, MOST_KEYS


class Index(MapPublisher, AbstractContextManager["Index"]):
    """Features of a gallery with names, thumbnails and originals, and the public maps that are learned from them.

    Create an index with :meth:`create`, open it again with :meth:`open`. When `add`, `delete` or `publish` returns, the
    change is on disk; if the process is killed before, nothing has changed. Any number of threads and processes may use
    an index at once: writers wait for one another, readers do not wait.

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

    def __init__(self, database: Database, location: str) -> None:
        super().__init__(database, location)
        migrate(database, location, self._migrate_features)
        header = self._header()
        self._dimension, self._extractor = header.dimension, header.extractor
        self._first_metric = header.metric  # of rows as they are stored: only the two cosines replace each other

    @staticmethod
    def create(
        location: str | Path, *, dimension: int, extractor: str = "", metric: Metric = "cosine", timeout: float = 30.0
    ) -> "Index":
        """Create an empty index.

        Parameters
        ----------
        location : str or Path
            A new or empty directory, or a URL such as ``postgresql://user@host/database``.
        extractor : str, default=""
            The fingerprint of the extractor: only features of the same extractor are comparable.
        metric : {"cosine", "dot", "euclidean"}, default="cosine"
            By which "nearest" is meant, in every way to search. For "cosine", rows are stored with norm one; for the
            others as given, up to a million in each number.
        timeout : float, default=30.0
            Seconds to wait for other writers.
        """
        dimension = check_integer(dimension, "dimension", 1, MOST_FEATURES)
        if not inputs.is_text(extractor) or len(extractor) > LONGEST_NAME:
            raise ValueError("extractor must be a fingerprint: short text")
        header = Header(FORMAT, dimension, 0, 0, 0, extractor, check_metric(metric))
        kind = _choose_store(location)
        database, shown = kind._prepare_location(str(location), timeout)
        with closing(database), database.begin_write() as connection:
            kind._create_tables(connection, shown, dimension)
            connection.execute(sa.insert(store.headers).values(header.to_row()))
        return Index.open(location, timeout=timeout)

    @staticmethod
    def open(location: str | Path, *, timeout: float = 30.0) -> "Index":
        """Open an index, with the parameters of :meth:`create`; upgrade an older format first, in one transaction.

        `location` may also be the URL of an uploaded directory: ``s3://``, ``gs://`` or ``https://``. It is copied to
        this machine, and read there; see ``docs/howto/storage.md``.
        """
        index = open_unchecked(location, timeout)
        try:
            index._check_rows()
        except BaseException:
            index.close()
            raise
        return index

    @property
    def dimension(self) -> int:
        """The dimension of the features."""
        return self._dimension

    @property
    def extractor(self) -> str:
        """The fingerprint of the extractor."""
        return self._extractor

    @property
    def metric(self) -> Metric:
        """The metric: "cosine", "dot" or "euclidean"; "centred cosine" in galleries of version 0.2."""
        return self._header().metric

    def set_metric(self, metric: Metric) -> None:
        """Change the metric; the next map has it. Rows of norm one can be compared by either cosine."""
        check_metric(metric)
        with self._database.begin_write() as connection:
            header = load_header(connection, self._location, lock=True)
            if metric != header.metric and {metric, header.metric} != NORMALIZED:
                raise ValueError(f"metric: for {metric}, not {header.metric}, index the vectors again into a new index")
            save_header(connection, replace(header, metric=metric))

    @property
    def sealed_file(self) -> Path | None:
        """The path of the index for sealed queries beside this one; None in PostgreSQL."""
        return None

    @property
    def revision(self) -> int:
        """The number of changes: grows by one with every `add` and `delete` of any process."""
        return self._header().revision

    def __len__(self) -> int:
        return self._header().count

    @property
    def is_private(self) -> bool:
        """Whether the rows are private: see :meth:`protect`."""
        with self._database.begin_read() as connection:
            return load_binding(connection, self._location) is not None

    @property
    def row_exact(self) -> bool:
        """Whether each row is a function of its own image alone, to the last bit, as stated in `add`.

        Guarantees to records require it. Always true for rows of :class:`nearveil.features.HogColor`.
        """
        with self._database.begin_read() as connection:
            return self._is_exact(connection)

    def assert_row_exact(self) -> None:
        """Raise InexactRowsError, with the remedy, unless all rows are row-exact."""
        with self._database.begin_read() as connection:
            self._require_exact(connection)

    def add(self, items: Iterable[Item], *, replace: bool = False, row_exact: bool = False) -> Ids:
        """Add items: all of them, or none if one is invalid. Return their ids, which are never reused.

        Parameters
        ----------
        replace : bool, default=False
            Whether items replace those with the same `external_id`; otherwise such an item is an error. Names and
            metadata that are not given again are kept.
        row_exact : bool, default=False
            Your statement that each row was made from its own image alone, to the last bit: by
            ``extract(images, row_exact=True)``, or in another way for which you can prove it. Rows of a private index
            must be row-exact, or InexactRowsError is raised.
        """
        table = inputs.check_items(items, self.dimension, self._first_metric)
        return self._add([table], replace, row_exact, lambda _: None)

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
        """Add many vectors at once: all of them, or none if one is invalid.

        If the metric is the cosine, rows are divided by their norms, and a row of zeros is refused: it has no
        direction.

        Parameters
        ----------
        rows : array-like of shape (n, d) or (d,)
            A NumPy array, a tensor, a data frame, a pyarrow table or column of lists, or lists of numbers.
        ids : sequence of str or int, optional
            Your own ids, unique in an index; integers become text. Use them to replace and delete items.
        names : sequence of str, optional
            For people; need not be unique.
        metadata : sequence of mappings, or a data frame, optional
            JSON values for each row. Clients get them with every match if the gallery offers metadata.
        replace : bool, default=False
            Whether rows replace items with the same ids. Items that would not change keep their id. Names and metadata
            that are not given again are kept; metadata that is given replaces all of the earlier, and ``{}`` drops it.
        progress : callable, optional
            ``progress(text, total)`` starts a stage and returns a function that is called with the number of rows done.

        Examples
        --------
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> index = Index.create(Path(folder.name) / "texts", dimension=2)
        >>> index.add_table([[3, 4], [1, 0]], ids=["a", "b"], metadata=[{"lang": "en"}, {"lang": "de"}])
        array([0, 1], dtype=uint32)
        >>> index.add_table([[0, 2], [1, 0]], ids=["a", "b"], replace=True)
        array([2, 1], dtype=uint32)
        >>> index.delete(["b"])
        >>> index.features(["a"]), index.items(["a"])[0].metadata
        (array([[0., 1.]], dtype=float32), {'lang': 'en'})
        >>> index.close(); folder.cleanup()
        """
        table = inputs.check_table(rows, ids, names, metadata, self.dimension, self._first_metric)
        return self._add([table], replace, row_exact, (progress or no_progress)("adding", len(table)))

    def add_file(
        self,
        file: VectorFile,
        *,
        replace: bool = False,
        row_exact: bool = False,
        progress: Progress | None = None,
        cluster: Any = None,
    ) -> Ids:
        """Add the vectors of a file that may be larger than memory: all of them, or none.

        Parameters
        ----------
        file : VectorFile
            From :mod:`nearveil.features`. Without ids, vectors get the ids ``FILE:0``, ``FILE:1``, and so on. Other
            arguments are those of :meth:`add_table`.
        cluster : str or dask.distributed.Client, optional
            The workers that read, check and normalise the partitions; see :func:`nearveil.cluster.connect`. They need
            the file at the same path. The ids are the same, as from :meth:`add`. PartitionError names the partition of
            an invalid row.
        """
        parts = file.cut()
        tick = (progress or no_progress)("adding", parts[-1].stop if parts else 0)
        with connect(cluster) as workers:
            tables = workers.map(
                inputs.check_part,
                parts,
                file,
                self.dimension,
                self._first_metric,
                stage="reading",
                names=inputs.name_parts(file, parts),
            )
            return self._add(tables, replace, row_exact, tick)

    def delete(self, ids: ArrayLike) -> None:
        """Delete items by ids or external ids: all, or none if one does not exist. Later answers omit them."""
        id_list = inputs.check_ids(ids)
        if not len(id_list):
            return
        with self._database.begin_write() as connection:
            header = load_header(connection, self._location, lock=True)
            numbers = np.unique(self._resolve(connection, id_list))
            chosen = is_among(connection, store.items.c.id, numbers.tolist())
            existing = connection.execute(sa.select(store.items.c.id).where(chosen))
            missing = sorted(set(numbers.tolist()) - set(existing.scalars()))
            if missing:
                raise UnknownItemError(missing)
            self._delete(connection, numbers, header.revision + 1)
            save_header(connection, _advance(header, header, removed=len(numbers)))
        self._wipe()

    def snapshot(self) -> IndexSnapshot:
        """Return all ids and features of the current revision."""
        with self._database.begin_read() as connection:
            header = load_header(connection, self._location)
            if not header.is_large:
                return self._read_snapshot(connection, header)
            ids = store.load_ids(connection, header, self._location)
        url = self._database.url
        location = self._location if self._database.is_file else url.render_as_string(hide_password=False)
        return IndexSnapshot(header.revision, ids, LazyFeatures(read_rows, location, ids, self.dimension))

    def ids(self) -> Ids:
        """Return the ids of all items, increasing."""
        with self._database.begin_read() as connection:
            return store.load_ids(connection, load_header(connection, self._location), self._location)

    def items(self, ids: ArrayLike, *, lenient: bool = False, originals: bool = True) -> list[StoredItem]:
        """Return names, thumbnails and originals, in the order of the ids.

        `ids` may be external ids. `lenient` leaves out those that do not exist instead of raising: for a server that
        answers while items are deleted. Without `originals`, those that the index itself stores are not read.
        """
        id_list = inputs.check_ids(ids)
        with self._database.begin_read() as connection:
            numbers = self._resolve(connection, id_list, lenient=lenient)
            stored = store.load_items(connection, np.unique(numbers), originals=originals)
        missing = sorted(set(numbers.tolist()) - set(stored))
        if missing and not lenient:
            raise UnknownItemError(missing)
        return [stored[number] for number in numbers.tolist() if number in stored]

    def texts(self, ids: ArrayLike, kind: Literal["names", "metadata"]) -> list[bytes]:
        """Return names, or JSON of name, external id and metadata, as answers contain them, in the order of the ids.

        The bytes are empty for an item that does not exist.
        """
        numbers = np.asarray(ids, np.int64)
        with self._database.begin_read() as connection:
            existing = sa.select(store.items).where(is_among(connection, store.items.c.id, numbers.tolist()))
            rows = connection.execute(existing).all()
        texts = {row.id: encode_name(row.name) for row in rows}
        if kind == "metadata":
            details = (ItemDetails(row.name, row.external_id, json.loads(row.metadata or "{}")) for row in rows)
            texts = dict(zip(texts, map(encode_details, details), strict=True))
        return [texts.get(number, b"") for number in numbers.tolist()]

    def metadata_keys(self) -> tuple[str, ...] | None:
        """Return the keys of the metadata of all items that were ever added, sorted: a filter may name them.

        None if there are more than 64, or one is too long or not printable.
        """
        with self._database.begin_read() as connection:
            keys = connection.execute(sa.select(store.metadata_keys.c.name)).scalars().all()
        fits = len(keys) <= MOST_KEYS and all(len(key) <= LONGEST_KEY and key.isprintable() for key in keys)
        return tuple(sorted(keys)) if fits else None

    def has_external_ids(self) -> bool:
        """Return whether any item has an external id."""
        column = store.items.c.external_id
        with self._database.begin_read() as connection:
            return connection.execute(sa.select(column).where(column.is_not(None)).limit(1)).first() is not None

    def stored_bytes(self, ids: ArrayLike, kind: Literal["thumbnail", "original"]) -> int:
        """Return the total bytes of the stored thumbnails or originals of items, without reading them."""
        total = sa.select(sa.func.coalesce(sa.func.sum(sa.func.length(store.images.c[kind])), 0))
        with self._database.begin_read() as connection:
            numbers = np.unique(self._resolve(connection, inputs.check_ids(ids))).tolist()
            return int(connection.execute(total.where(is_among(connection, store.images.c.id, numbers))).scalar_one())

    def features(self, ids: ArrayLike) -> Singles:
        """Return features, shape (n, d), float32, in the order of the ids or external ids."""
        id_list = inputs.check_ids(ids)
        with self._database.begin_read() as connection:
            numbers = self._resolve(connection, id_list)
            unique, positions = np.unique(numbers, return_inverse=True)
            rows = np.zeros((len(unique), self.dimension), np.float32)
            exist = self._fill_rows(connection, unique, rows)
        if not exist.all():
            raise UnknownItemError(unique[~exist].tolist())
        return rows[positions]

    def search(self, queries: ArrayLike, k: int = 8) -> tuple[Ids, Singles]:
        """Find the nearest items by the metric, exactly. Not private: the caller sees queries and items.

        `queries` have the shape (d,) or (q, d). Return ids and the metric's values, shape (q, k): cosines or products,
        the largest first, or distances, the smallest first; of equal values the smallest id, but any of those that tie
        for the last position.
        """
        rows = inputs.check_queries(queries, self.dimension)
        return self._search(normalize_rows(rows, "queries:") if self._first_metric in NORMALIZED else rows, k)

    def protect(self) -> None:
        """Mark the rows as private, for every process: no map of them is published, stored or served from now on.

        Published maps are deleted. Rows that are added must be row-exact. A protected gallery calls this when it first
        publishes.
        """
        self._make_private("", require_exact=False)

    def bind(self, name: str) -> str:
        """Bind private rows to a name, permanently; the first call wins. A protected gallery binds them to its account.

        The rows are private from then on, as after :meth:`protect`. Return `name`, or that of an earlier call; raise
        InexactRowsError if a row is not row-exact: then no guarantee to records holds.
        """
        return self._make_private(name, require_exact=True)

    def _make_private(self, name: str, *, require_exact: bool) -> str:
        """Mark the rows as private, bind them to `name` unless bound, and delete everything that reveals them."""
        with self._database.begin_write() as connection:
            load_header(connection, self._location, lock=True)
            if require_exact:
                self._require_exact(connection)
            binding = load_binding(connection, self._location) or name
            store.save_binding(connection, binding)
            for table in (store.parts, store.published):
                connection.execute(sa.delete(table))
        self._wipe()
        if self.sealed_file is not None:
            self.sealed_file.unlink(missing_ok=True)
        return binding

    def unprotect(self, *, rows_are_public: bool) -> None:
        """Allow the rows to be served, published and searched again. This ends the guarantees of the records.

        `rows_are_public` must be True: your statement that everybody may see every row.
        """
        if rows_are_public is not True:
            raise ValueError("rows_are_public must be True: only rows that everybody may see can be opened")
        with self._database.begin_write() as connection:
            load_header(connection, self._location, lock=True)
            store.save_binding(connection, None)

    def verify(self) -> None:
        """Read everything and compare it with its digests; raise CorruptedIndexError on a mismatch."""
        with self._database.begin_read() as connection:
            header = load_header(connection, self._location)
            self._check_pages(connection)
            store.verify_rows(connection, header, self._location)
            blocks = range(-(-header.next_id // self._block_size))
            if sum(len(self._read_block(connection, block)[0]) for block in blocks) != header.count:
                raise CorruptedIndexError(self._location, "the list of features")
            store.count_inexact(connection, self._location)
            load_binding(connection, self._location)
            for row in connection.execute(sa.select(store.published)).all():
                if store.read_map(connection, row.number) != row.digest:
                    raise CorruptedIndexError(self._location, "a published map")

    def close(self) -> None:
        """Close all connections."""
        self._database.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._location}: {self.dimension} dimensions>"

    @cached_property
    def _extractor_is_exact(self) -> bool:
        """Whether all rows of the extractor are row-exact."""
        from nearveil.features import HogColor

        return self._extractor == HogColor().fingerprint

    def _is_exact(self, connection: sa.Connection) -> bool:
        return self._extractor_is_exact or store.count_inexact(connection, self._location) == 0

    def _require_exact(self, connection: sa.Connection) -> None:
        if not self._is_exact(connection):
            raise InexactRowsError(
                f"index {self._location} has rows that are not row-exact: removing one record may change others, so no "
                "guarantee to records holds. Index the images again: `nearveil index DIR --private` into a new index; "
                "or call Index.add(items, row_exact=True) with rows from extract(images, row_exact=True)"
            )

    def _add(self, tables: Iterable[ItemTable], replacing: bool, row_exact: bool, tick: Tick) -> Ids:
        """Write items in one transaction: replace those with the same external id, keep those that do not change."""
        added, any_replaced = [np.empty(0, np.int64)], False
        with self._database.begin_write() as connection:
            first = header = load_header(connection, self._location, lock=True)
            for table in tables:
                existing = self._find_existing(connection, table, first.next_id, replacing=replacing)
                replaced_items = store.load_items(connection, np.array(list(existing.values())), originals=False)
                stored = {position: replaced_items[number] for position, number in existing.items()}
                complete = table.inherit(stored)
                unchanged = self._find_unchanged(complete, existing, stored)
                ids = np.full(len(table), -1, np.int64)
                ids[list(unchanged)] = list(unchanged.values())
                added.append(ids)
                tick(len(unchanged))
                positions = np.flatnonzero(ids < 0)
                if not len(positions):
                    continue
                new = complete.select(positions.tolist()) if unchanged else complete
                replaced = np.array(sorted(set(existing.values()) - set(unchanged.values())), np.int64)
                self._delete(connection, replaced, first.revision + 1)  # before the insert: external ids are unique
                ids[positions] = new_ids = store.allocate_ids(header, len(new))
                store.insert_items(connection, new_ids, new)
                self._insert_features(connection, new_ids, new.features, tick)
                self._mark_exact(connection, new_ids, row_exact=row_exact)
                header = _advance(first, header, added=len(new), removed=len(replaced))
                any_replaced |= len(replaced) > 0
            if header is not first:
                save_header(connection, header)
        if any_replaced:
            self._wipe()
        return np.concatenate(added).astype(np.uint32)

    def _find_existing(
        self, connection: sa.Connection, table: ItemTable, next_id: int, *, replacing: bool
    ) -> dict[int, int]:
        """Return the ids of items that rows replace, by the position of the row."""
        stored = store.find_external_ids(connection, table.external_ids)
        if not stored:
            return {}
        existing = {n: stored[text] for n, text in enumerate(table.external_ids) if text in stored}
        if not replacing:
            raise ValueError(
                f"ids: number {min(existing)} is already in the index ({len(existing):,} such rows in all): use "
                "replace=True to replace these items; nothing was changed"
            )
        repeated = [position for position, number in existing.items() if number >= next_id]
        if repeated:
            raise ValueError(f"ids: {table.external_ids[min(repeated)]!r} is repeated; nothing was changed")
        return existing

    def _find_unchanged(
        self, table: ItemTable, existing: dict[int, int], stored: dict[int, StoredItem]
    ) -> dict[int, int]:
        """Return the existing items that a table would not change."""
        if not existing or table.images:
            return {}
        numbers, positions = np.array(list(existing.values())), list(existing)
        new = dict(zip(positions, table.select(positions).rows(numbers.tolist()), strict=True))
        equal = (self.features(numbers) == table.features[positions]).all(axis=1)
        return {
            position: existing[position]
            for position, same_row in zip(positions, equal.tolist(), strict=True)
            if same_row and stored[position] == StoredItem.from_row(*new[position])
        }

    def _delete(self, connection: sa.Connection, ids: NDArray[np.int64], revision: int) -> None:
        """Delete existing items, in the caller's transaction; the caller updates the header."""
        if not len(ids):
            return
        if self._delete_features(connection, ids) != len(ids):
            raise CorruptedIndexError(self._location, "the list of features")
        store.delete_items(connection, ids, revision)

    def _mark_exact(self, connection: sa.Connection, ids: NDArray[np.int64], *, row_exact: bool) -> None:
        if row_exact or self._extractor_is_exact:
            store.mark_exact(connection, ids)
        elif load_binding(connection, self._location) is not None:
            raise InexactRowsError("items: private rows must be row-exact: pass row_exact=True to extract() and add()")

    def _resolve(self, connection: sa.Connection, ids: Longs | Sequence[str], *, lenient: bool = False) -> Longs:
        """Return ids for ids or external ids; external ids that do not exist are left out if `lenient`."""
        if isinstance(ids, np.ndarray):
            return ids
        stored = store.find_external_ids(connection, ids)
        missing = [text for text in ids if text not in stored]
        if missing and not lenient:
            raise UnknownItemError(missing)
        return np.array([stored[text] for text in ids if text in stored], np.int64)

    def _header(self) -> Header:
        with self._database.begin_read() as connection:
            return load_header(connection, self._location)

    def _read_snapshot(
        self, connection: sa.Connection, header: Header, earlier: IndexSnapshot | None = None
    ) -> IndexSnapshot:
        """Load the rows of a revision into memory, except those that an earlier snapshot has."""
        ids, start = store.load_ids(connection, header, self._location), 0
        rows = np.empty((len(ids), self.dimension), np.float32)
        if earlier is not None and len(earlier):
            remaining = np.flatnonzero(np.isin(earlier.ids, ids))
            for run in np.split(remaining, np.flatnonzero(np.diff(remaining) > 1) + 1):  # faster than one by one
                rows[start : start + len(run)] = earlier.features[run[0] : run[-1] + 1] if len(run) else 0
                start += len(run)  # ids grow, and are never used again
        if not self._fill_rows(connection, ids[start:].astype(np.int64), rows[start:]).all():
            raise CorruptedIndexError(self._location, "the list of features")
        return IndexSnapshot(header.revision, ids, rows)

    def _fill_rows(self, connection: sa.Connection, ids: NDArray[np.int64], rows: Singles) -> NDArray[np.bool_]:
        """Load the features of increasing ids into `rows`, and return which exist; rows of the others do not change."""
        exist = np.zeros(len(ids), np.bool_)
        size = self._block_size
        for block in np.unique(ids[(ids >= 0) & (ids < MOST_ITEMS)] // size).tolist():
            block_ids, features = self._read_block(connection, block)
            span = slice(*np.searchsorted(ids, (block * size, (block + 1) * size)))
            if np.array_equal(block_ids, ids[span]):  # much faster than row by row
                exist[span], rows[span] = True, features
                continue
            exist[span] = np.isin(ids[span], block_ids)
            rows[span][exist[span]] = features[np.isin(block_ids, ids[span])]
        return exist

    @classmethod
    @abstractmethod
    def _prepare_location(cls, location: str, timeout: float) -> tuple[Database, str]:
        """Return the database at a location where an index is to be created, and the location for messages."""

    @classmethod
    @abstractmethod
    def _create_tables(cls, connection: sa.Connection, location: str, dimension: int) -> None:
        """Create all tables, or raise if there is an index already."""

    @classmethod
    @abstractmethod
    def _connect(cls, location: str, timeout: float) -> tuple[Database, str]:
        """Return the database at a location, and the location for messages, without a password."""

    @abstractmethod
    def _insert_features(self, connection: sa.Connection, ids: Longs, features: Singles, tick: Tick) -> None:
        """Write features of new, consecutive ids, in the caller's transaction."""

    @abstractmethod
    def _delete_features(self, connection: sa.Connection, ids: NDArray[np.int64]) -> int:
        """Delete features of increasing ids, in the caller's transaction; return their number."""

    @property
    @abstractmethod
    def _block_size(self) -> int:
        """The number of ids in a block of features, which are read and checked together."""

    @abstractmethod
    def _read_block(self, connection: sa.Connection, block: int) -> tuple[Ids, Singles]:
        """Return the ids of a block that exist, increasing, and their features, compared with their digest."""

    @abstractmethod
    def _search(self, queries: Singles, k: int) -> tuple[Ids, Singles]:
        """Search for checked rows; `k` is not checked yet."""

    def _migrate_features(self, connection: sa.Connection, header: Header) -> None:
        """Upgrade the features of an older format, in the caller's transaction."""

    def _check_rows(self) -> None:
        """Load the rows, if this store keeps them in memory: raises if they are corrupted."""

    def _wipe(self) -> None:
        """Overwrite deleted data, as far as the store can."""

    def _check_pages(self, connection: sa.Connection) -> None:
        """Check the storage below the rows, as far as the store can."""


def _advance(first: Header, header: Header, *, added: int = 0, removed: int = 0) -> Header:
    """Return the header after a change; one transaction is one revision after the `first`."""
    count = header.count + added - removed
    return replace(header, revision=first.revision + 1, next_id=header.next_id + added, count=count)


def read_rows(location: str, ids: Ids, dimension: int) -> Singles:
    """Return the features of increasing ids, in any process that can open the index; zeros for deleted items."""
    rows = np.zeros((len(ids), dimension), np.float32)
    with open_unchecked(location) as index, index._database.begin_read() as connection:
        index._fill_rows(connection, ids.astype(np.int64), rows)
    return rows


def open_unchecked(location: str | Path, timeout: float = 30.0) -> Index:
    """Open an index without reading its rows, which are then checked when they are used."""
    kind = _choose_store(location)
    database, shown = kind._connect(str(location), timeout)
    try:
        return kind(database, shown)
    except BaseException:
        database.close()
        raise


def _choose_store(location: str | Path) -> type[Index]:
    """Return the class of a store by its location."""
    location = str(location)
    if location.startswith(("postgresql:", "postgresql+psycopg:")):
        from nearveil.gallery._postgres import PostgresIndex

        return PostgresIndex
    if ("://" in location and not is_remote(location)) or not location.strip():
        raise ValueError("location must be a directory, or a URL such as postgresql://user@host/database")
    from nearveil.gallery._directory import DirectoryIndex

    return DirectoryIndex
