"""``nearveil index``: make a gallery from a folder of images or a file of vectors."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast
from urllib.parse import urlsplit

from nearveil.cli._options import AUTO, DATA, EXTRACTOR, JSON, ClusterOptions, argument, command, load_extractor, option
from nearveil.cli._output import is_verbose, print_json, print_lines, print_table, show_bars

if TYPE_CHECKING:
    from nearveil.cluster import Cluster
    from nearveil.gallery.sync import SyncReport

_TABLE_SUFFIXES = (".npy", ".npz", ".parquet", ".csv", ".zarr")
_MAX_SKIPPED = 10  # skipped files that are printed
_USUAL_MATCHES = 8  # that a query asks for


@dataclass(frozen=True)
class MapOptions:
    """Terms of the map that clients download."""

    panel: ClassVar = "Map (later runs keep the values)"
    metric: str | None = option(
        "cosine (at first), dot or euclidean. In a gallery of version 0.2, set cosine without a source.", metavar="NAME"
    )
    epsilon: float | None = option("Epsilon of the queries that the map is for; 4 at first.", min=1e-6, max=40)
    candidates: float | None = option("Share of the items in an answer; 0.1 at first.", min=0, max=1)
    n_sets: int | None = option("Number of sets; chosen automatically at first.", "--sets", min=2)
    code_bytes: int | None = option(
        "Bytes of an item in an answer; at first the smallest codes that keep 99% of the 10 nearest.", min=7
    )
    reach: float | None = option(
        "Share of the items that messages must be able to return; 1 at first. 0 finds more on average.", min=0, max=1
    )
    mechanism: str | None = option(
        "Mechanism of messages; covers at first. Those of the papers are for comparison.", metavar="NAME"
    )
    labels: str | None = option(
        "Metadata key of the class of an item, for PrivateMail; at first the folder in its name.", metavar="KEY"
    )
    allow_unsound: bool = option("Allow a mechanism as published: its messages reveal the query.")


@dataclass(frozen=True)
class ColumnOptions:
    """Columns of a file of vectors."""

    panel: ClassVar = "Columns of a file"
    ids: str | None = option("Your own ids. A vector replaces the one with the same id.", metavar="COLUMN")
    names: str | None = option("Display names.", metavar="COLUMN")
    metadata: list[str] | None = option("Metadata returned with a match; may be repeated.", metavar="COLUMN")
    vectors: str | None = option("The vectors, if ambiguous.", metavar="COLUMN")


@command(folder="DIR", index="--into", extra="gallery")
def index(
    map_options: MapOptions,
    columns: ColumnOptions,
    options: ClusterOptions,
    source: str | None = argument(
        "A folder of images, with subfolders; or vectors in a .npy, .npz, .parquet or .csv file, also at a URL (s3://, "
        "gs://, https://), or in a .zarr folder.",
        metavar="DIR_OR_FILE",
    ),
    into: str | None = option(
        f"A folder or PostgreSQL URL; {DATA}/index by default.", envvar="NEARVEIL_INDEX", metavar="PATH_OR_URL"
    ),
    extractor: str = EXTRACTOR,
    private: bool = option(
        "The images are records of a protected gallery: no map is made, the index is never served as an open "
        "gallery, and features are row-exact (slower) and computed on this machine. The index remembers this."
    ),
    delete: list[str] | None = option("Delete the vector with this id; may be repeated.", metavar="ID"),
    sealed: bool = option("Also build the index of sealed queries (`nearveil serve --offer sealed`)."),
    as_json: bool = JSON,
) -> None:
    """Index a folder of images or a file of vectors: add new items, delete missing images, publish the map.

    A second run processes only changes. Images of other folders in the same index stay. Files that can't be decoded
    are skipped and reported. The originals are not copied.

    Without --ids, the ids of vectors are FILE:0, FILE:1, and so on. Vectors that are no longer in the file stay until
    you --delete them.

    For example:
        nearveil index photos/
        nearveil index photos/ --into postgresql://me@host/gallery --extractor hog
        nearveil index records/ --into private-index/ --private
        nearveil index emb.parquet --into texts/ --ids id --metadata text --metadata url
        nearveil index --into texts/ --delete doc-17
        nearveil index --into texts/ --sealed
        nearveil index --into old-gallery/ --metric cosine
        nearveil index emb.parquet --into texts/ --cluster local:8
    """
    from nearveil.remote import fetch_object, is_remote

    is_url = source is not None and is_remote(source)
    path = None if source is None else Path(urlsplit(source).path if is_url else source)
    is_table = path is None or bool(delete) or _is_table(path)
    if is_url and not is_table:
        raise ValueError("DIR_OR_FILE: a URL must name a .npy, .npz, .parquet or .csv file; download other data")
    if is_table and (extractor != AUTO or private):
        raise ValueError("--extractor, --private: only for images; leave them out")
    if any(asdict(columns).values()) and not is_table:
        raise ValueError("--ids, --names, --metadata, --vectors: a folder of images has no columns; leave them out")
    if source is None and not (delete or sealed or map_options.metric or map_options.mechanism):
        raise ValueError("DIR_OR_FILE: name a folder or a file, or set --delete, --sealed, --metric or --mechanism")
    with options.connect() as cluster:
        with show_bars() as bars:
            from nearveil.features.vectors import VectorFile
            from nearveil.gallery.sync import sync_folder, sync_table

            settings: dict[str, Any] = {**asdict(map_options), "progress": bars, "cluster": cluster}
            settings["allow_unsound"] = map_options.allow_unsound or None
            if is_table:
                names = asdict(columns) | {"metadata": tuple(columns.metadata or ())}
                if source is not None and is_url:
                    path = fetch_object(source)
                file = None if path is None else VectorFile(path.absolute(), **names)
                report = sync_table(file, into, delete=delete or [], **settings)
            else:
                assert path is not None
                chosen_extractor = load_extractor(extractor)
                report = sync_folder(path, into, extractor=chosen_extractor, private=private, **settings)
        if as_json:
            print_json(_describe_report(report, is_table=is_table))
        else:
            _print_report(report, is_table=is_table)
        if report.published is not None:
            _warn_of_small_answers(report.published.map.set_size, report.items)
        _update_sealed_index(into, cluster, create=sealed)


def _is_table(source: Path) -> bool:
    suffix = source.suffix.lower()
    return suffix in _TABLE_SUFFIXES and source.is_dir() == (suffix == ".zarr")


def _update_sealed_index(into: str | None, cluster: "Cluster", *, create: bool) -> None:
    """Build the index of sealed queries if `create`, else update an existing one."""
    from nearveil.gallery.index import open_unchecked
    from nearveil.gallery.sync import find_index

    with show_bars(), open_unchecked(find_index(into)) as index:
        path = index.sealed_file
        if not create and (path is None or not path.exists()):
            return
        if path is None or index.is_private:
            raise ValueError("--sealed: only for an open index in a folder; a server with PostgreSQL builds its own")
        from nearveil.wire.sealed import update_sealed_file

        update_sealed_file(index, cluster)


def _warn_of_small_answers(answer_size: int, items: int) -> None:
    if answer_size < _USUAL_MATCHES:
        share = min(1.0, math.ceil(100 * _USUAL_MATCHES / items) / 100)
        print_lines(
            f"Warning: an answer holds {answer_size} of {items:,} items, so a message returns no more. Search so small "
            "a gallery without --epsilon, at no cost; clients of a server need `nearveil serve --offer codes` and "
            f"`nearveil sync`. For {min(_USUAL_MATCHES, items)} matches by message, use --candidates {share:g}.",
            stderr=True,
        )


def _describe_report(report: "SyncReport", *, is_table: bool) -> dict[str, Any]:
    """Return a report as JSON values."""
    omitted = {"items", "published", "learned"}
    files = [(str(path).encode("utf-8", "replace").decode(), reason) for path, reason in report.skipped]
    values = {name: value for name, value in vars(report).items() if name not in omitted} | {
        "vectors" if is_table else "images": report.items,
        "map_learned": report.learned,
        "skipped": [{"file": file, "reason": reason} for file, reason in files],
    }
    published = report.published
    if published is None:
        return values
    is_covers = published.terms.mechanism == "covers"
    return values | {
        "mechanism": published.terms.mechanism,
        "epsilon": float(published.terms.epsilon),
        "candidates": published.map.set_size,
        "sets": published.map.n_sets if is_covers else None,
        "reach": round(published.reach, 4),
        "map_bytes": published.map.nbytes,
        "code_bytes": report.item_bytes,
        "code_recall": published.code_recall,
    }


def _print_report(report: "SyncReport", *, is_table: bool) -> None:
    from nearveil.client.results import format_share

    item, skipped, published = "vector" if is_table else "image", report.skipped, report.published
    replaced = f"{report.replaced:,} replaced, " if report.replaced else ""
    changes = f"{report.added:,} added, {replaced}{report.deleted:,} deleted"
    if is_table:
        lines = {"vectors": f"{report.items:,} ({changes}), {report.dimension:,} dimensions"}
    else:
        lines = {
            "images": f"{report.items:,} ({changes}, {len(skipped):,} skipped)",
            "features": f"{report.extractor}, {report.dimension:,} dimensions",
        }
    lines["metric"] = report.metric
    if published is None:
        note = "" if report.row_exact else "; some rows of other folders are not row-exact: index those folders again"
        lines["map"] = f"none: the images are private{note}"
    else:
        shared, terms = cast("Any", published.map), published.terms
        is_covers = terms.mechanism == "covers"
        kind = f"{shared.n_sets:,} sets" if is_covers else f"{len(shared.rows):,} public rows for {terms.mechanism}"
        lines["map"] = f"{kind}, for messages at epsilon {terms.epsilon:g}; {shared.nbytes:,} bytes"
        lines["answer"] = f"{shared.set_size:,} {item}s, {report.item_bytes:,} bytes each"
        if published.reach < 1 and is_covers:
            share = f"{format_share(published.reach)} of the {item}s"
            lines["reach"] = f"messages return {share} and never the others; --reach 1 includes all"
        if not (is_covers or shared.is_sound):
            lines["warning"] = "its messages reveal the query: use data that need no protection"
        if published.code_recall is not None and is_verbose():
            lines["codes"] = f"keep {format_share(published.code_recall)} of the 10 nearest"
    print_table(["", ""], (lines | {"index": report.index}).items())
    if not (report.added or report.replaced or report.deleted or report.learned):
        print_lines("Nothing new: the index is unchanged.")
    print_lines(*(f"skipped {path}: {reason}" for path, reason in skipped[:_MAX_SKIPPED]))
    if len(skipped) > _MAX_SKIPPED:
        print_lines(f"and {len(skipped) - _MAX_SKIPPED:,} more skipped; --json lists them all")
