"""``nearveil index``: make a gallery from a folder of images or a file of vectors."""

import math
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearveil.cli._options import AUTO, CLUSTER_FIELDS, ClusterOptions, ExtractorName, Json, expand_options
from nearveil.cli._output import print_json, print_lines, print_table, report_errors, show_bars

if TYPE_CHECKING:
    from nearveil.cluster import Cluster
    from nearveil.gallery.sync import SyncReport

_TABLE_SUFFIXES = (".npy", ".npz", ".parquet", ".csv", ".zarr")
_MAX_SKIPPED = 10  # skipped files that are printed
_USUAL_MATCHES = 8  # that a query asks for


@dataclass(frozen=True)
class MapOptions:
    """Terms of the map that clients download."""

    epsilon: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            max=40,
            help="Epsilon of the queries that the map is learned for (default: previous value, or 4).",
            rich_help_panel="Map",
        ),
    ] = None
    candidates: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Share of the items in an answer (default: previous value, or 0.1).",
            rich_help_panel="Map",
        ),
    ] = None
    n_sets: Annotated[
        int | None,
        typer.Option(
            "--sets",
            min=2,
            help="Number of sets (default: previous value, or chosen automatically).",
            rich_help_panel="Map",
        ),
    ] = None
    code_bytes: Annotated[
        int | None,
        typer.Option(
            min=7,
            help="Bytes of an item in an answer (default: previous value, or its whole feature vector). 128 keeps "
            "answers small, at slightly lower recall.",
            rich_help_panel="Map",
        ),
    ] = None
    reach: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Share of the items that must be in some set (default: previous value, or 0). Other items are never "
            "returned; 1 includes every item, at lower recall for a small epsilon.",
            rich_help_panel="Map",
        ),
    ] = None


@dataclass(frozen=True)
class ColumnOptions:
    """Columns of a file of vectors."""

    ids: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Your own ids. A vector replaces the one with the same id.",
            rich_help_panel="Columns of a file",
        ),
    ] = None
    names: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Display names.", rich_help_panel="Columns of a file")
    ] = None
    metadata: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN",
            help="Metadata returned with a match; may be repeated.",
            rich_help_panel="Columns of a file",
        ),
    ] = None
    vectors: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="The vectors, if ambiguous.", rich_help_panel="Columns of a file"),
    ] = None


_OPTION_NAMES = {
    "folder": "DIR",
    "index": "--into",
    "delete": "--delete",
    "extractor": "--extractor",
    "private": "--private",
    **{field.name: f"--{field.name.replace('_', '-')}" for field in (*fields(MapOptions), *fields(ColumnOptions))},
    "n_sets": "--sets",
    **CLUSTER_FIELDS,
}


@expand_options
def index(
    map_options: MapOptions,
    columns: ColumnOptions,
    options: ClusterOptions,
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR_OR_FILE",
            help="A folder of images, with subfolders; or vectors in a .npy, .npz, .parquet or .csv file, or a .zarr "
            "folder.",
        ),
    ] = None,
    into: Annotated[
        str | None,
        typer.Option(
            envvar="NEARVEIL_INDEX",
            metavar="PATH_OR_URL",
            help="A folder or a PostgreSQL URL; ~/.local/share/nearveil/index by default.",
        ),
    ] = None,
    extractor: ExtractorName = AUTO,
    private: Annotated[
        bool,
        typer.Option(
            "--private",
            help="The images are records of a protected gallery: no map is made, the index is never served as an open "
            "gallery, and features are row-exact (slower) and computed on this machine. The index remembers this.",
        ),
    ] = False,
    delete: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Delete the vector with this id; may be repeated.")
    ] = None,
    sealed: Annotated[
        bool,
        typer.Option(
            "--sealed",
            help="Also build the index of sealed queries (`nearveil serve --offer sealed`). Later runs update it.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Index a folder of images or a file of vectors: add new items, delete missing images, publish the map.

    A second run processes only changes. Images of other folders in the same index stay. Files that can't be decoded
    are skipped and reported. The originals are not copied.

    Vectors are normalised, as queries are. Without --ids, their ids are FILE:0, FILE:1, and so on. Vectors that are no
    longer in the file stay until you --delete them.

    [bold]Examples[/bold]

    nearveil index photos/

    nearveil index photos/ --into gallery/ --candidates 0.2

    nearveil index photos/ --into postgresql://me@host/gallery --extractor hog

    nearveil index records/ --into private-index/ --private

    nearveil index emb.parquet --into texts/ --ids id --metadata text --metadata url

    nearveil index --into texts/ --delete doc-17

    nearveil index emb.parquet --into texts/ --cluster local:8
    """
    terms = asdict(map_options)
    has_columns = any(asdict(columns).values())
    is_vectors = source is None or bool(delete) or _is_table(source)
    with report_errors(**_OPTION_NAMES):
        if is_vectors and (extractor != AUTO or private):
            raise ValueError("--extractor, --private: only for images; leave them out")
        if has_columns and not is_vectors:
            raise ValueError("--ids, --names, --metadata, --vectors: a folder of images has no columns; leave them out")
        if source is None and not delete:
            raise ValueError("DIR_OR_FILE: name a folder of images or a file of vectors, or --delete an id")
        with options.connect() as cluster:
            if source is None or is_vectors:
                _index_vectors(source, into, columns, delete or [], terms, cluster, as_json=as_json)
            else:
                _index_images(source, into, extractor, terms, cluster, private=private, as_json=as_json)
            _update_sealed_index(into, cluster, create=sealed)


def _is_table(source: Path) -> bool:
    suffix = source.suffix.lower()
    return suffix in _TABLE_SUFFIXES and source.is_dir() == (suffix == ".zarr")


def _index_images(
    source: Path,
    into: str | None,
    extractor: str,
    terms: dict[str, Any],
    cluster: "Cluster",
    *,
    private: bool,
    as_json: bool,
) -> None:
    with show_bars() as bars:
        from nearveil.features.backbones import make_extractor
        from nearveil.gallery.sync import sync_folder

        chosen_extractor = None if extractor == AUTO else make_extractor(extractor)
        report = sync_folder(
            source, into, extractor=chosen_extractor, private=private, progress=bars, cluster=cluster, **terms
        )
    if as_json:
        print_json(_describe_folder(report))
    else:
        _print_folder(report)
    if report.published is not None:
        _warn_of_small_answers(report.published.map.set_size, report.items)


def _index_vectors(
    source: Path | None,
    into: str | None,
    columns: ColumnOptions,
    delete: list[str],
    terms: dict[str, Any],
    cluster: "Cluster",
    *,
    as_json: bool,
) -> None:
    with show_bars() as bars:
        from nearveil.features.vectors import VectorFile
        from nearveil.gallery.sync import sync_table

        names = asdict(columns) | {"metadata": tuple(columns.metadata or ())}
        file = None if source is None else VectorFile(source.absolute(), **names)
        report = sync_table(file, into, delete=delete, progress=bars, cluster=cluster, **terms)
    if as_json:
        columns_of_report = _list_fields(report, "extractor", "private", "row_exact")
        print_json({**columns_of_report, "vectors": report.items, **_describe_map(report)})
    else:
        _print_report(
            report,
            {
                "vectors": f"{report.items:,} ({report.added:,} added, {report.deleted:,} deleted), "
                f"{report.dimension:,} dimensions"
            },
            "vector",
        )
    assert report.published is not None
    _warn_of_small_answers(report.published.map.set_size, report.items)


def _update_sealed_index(into: str | None, cluster: "Cluster", *, create: bool) -> None:
    """Build the index of sealed queries if `create`, else update an existing one."""
    from nearveil.gallery.index import Index
    from nearveil.gallery.sync import find_index

    with show_bars() as bars, Index.open(find_index(into)) as index:
        path = index.sealed_file
        if not create and (path is None or not path.exists()):
            return
        if path is None or index.is_private:
            raise ValueError("--sealed: only for an open index in a folder; a server with PostgreSQL builds its own")
        if find_spec("cryptography") is None:
            raise ValueError('--sealed: this needs cryptography: pip install "nearveil[sealed]"')
        from nearveil.wire.sealed import keep_sealed_index

        tick = bars("Building the sealed index", 1)
        keep_sealed_index(index, cluster)
        tick(1)


def _warn_of_small_answers(answer_size: int, items: int) -> None:
    if answer_size < _USUAL_MATCHES:
        share = min(1.0, math.ceil(100 * _USUAL_MATCHES / items) / 100)
        print_lines(
            f"Warning: an answer holds {answer_size} of {items:,} items, so a message returns no more. Search so small "
            "a gallery at epsilon 0 instead: all items are compared, nothing is revealed, nothing is paid. Run "
            "`nearveil query IMAGE --epsilon 0` on this machine; clients of a server need `nearveil serve --offer "
            f"codes` and `nearveil sync`. For {min(_USUAL_MATCHES, items)} matches by message, use --candidates "
            f"{share:g}.",
            stderr=True,
        )


def _list_fields(report: "SyncReport", *others: str) -> dict[str, Any]:
    """Return the fields of a report that are JSON values."""
    omitted = {"items", "published", "learned", "skipped", *others}
    return {field.name: getattr(report, field.name) for field in fields(report) if field.name not in omitted}


def _describe_map(report: "SyncReport") -> dict[str, Any]:
    published = report.published
    if published is None:
        return {"map_learned": report.learned}
    return {
        "epsilon": float(published.release.epsilon),
        "candidates": published.map.set_size,
        "sets": published.map.n_sets,
        "reach": round(published.reach, 4),
        "map_bytes": published.map.nbytes,
        "map_learned": report.learned,
    }


def _describe_folder(report: "SyncReport") -> dict[str, Any]:
    code_bytes = {} if report.published is None else {"code_bytes": report.item_bytes}
    skipped = [
        {"file": str(path).encode("utf-8", "replace").decode(), "reason": reason} for path, reason in report.skipped
    ]
    return {**_list_fields(report), "images": report.items, **_describe_map(report), **code_bytes, "skipped": skipped}


def _print_folder(report: "SyncReport") -> None:
    skipped = report.skipped
    changes = f"{report.added:,} added, {report.deleted:,} deleted, {len(skipped):,} skipped"
    lines = {
        "images": f"{report.items:,} ({changes})",
        "features": f"{report.extractor}, {report.dimension:,} dimensions",
    }
    if report.published is None:
        note = "" if report.row_exact else "; some rows of other folders are not row-exact: index those folders again"
        lines["map"] = f"none: the images are private{note}"
    _print_report(report, lines, "image", f", {report.item_bytes:,} bytes each" if report.published else "")
    print_lines(*(f"skipped {path}: {reason}" for path, reason in skipped[:_MAX_SKIPPED]))
    if len(skipped) > _MAX_SKIPPED:
        print_lines(f"and {len(skipped) - _MAX_SKIPPED:,} more skipped; --json lists them all")


def _print_report(report: "SyncReport", lines: dict[str, str], item: str, size: str = "") -> None:
    published = report.published
    if published is not None:
        reach = f"{published.reach:.1%} of the {item}s; the others are never returned"
        lines |= {
            "map": f"{published.map.n_sets:,} sets, {published.map.nbytes:,} bytes, for epsilon "
            f"{published.release.epsilon:g}",
            "in any set": f"every {item}" if published.reach >= 1 else reach,
            "answer": f"{published.map.set_size:,} {item}s{size}",
        }
    print_table(["", ""], (lines | {"revision": f"{report.revision:,}", "index": report.index}).items())
    if not (report.added or report.deleted or report.learned):
        print_lines("Nothing new: the index is unchanged.")
