"""``nearveil index``: a folder of images, or a file of vectors, becomes a gallery that can be asked privately."""

import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nearveil.cli._shared import (
    AUTO,
    CLUSTER_OPTIONS,
    ClusterAuthorities,
    ClusterOptions,
    ClusterPlace,
    ExtractorName,
    InsecureCluster,
    Json,
    OwnCertificate,
    OwnKey,
    connect_cluster,
    print_json,
    print_lines,
    print_table,
    report_errors,
    show_bars,
)

if TYPE_CHECKING:
    from nearveil.cluster import Cluster
    from nearveil.gallery.folder import FolderReport
    from nearveil.gallery.tables import TableReport

_TABLES = (".npy", ".npz", ".parquet", ".csv", ".zarr")
_SHOWN = 10  # skipped files in the table
_FEW = 8  # matches that a question asks for
_OPTIONS = {
    "folder": "DIR",
    "index": "--into",
    "ids": "--ids",
    "names": "--names",
    "metadata": "--metadata",
    "vectors": "--vectors",
    "delete": "--delete",
    "extractor": "--extractor",
    "private": "--private",
    "epsilon": "--epsilon",
    "candidates": "--candidates",
    "n_sets": "--sets",
    "code_bytes": "--code-bytes",
    "reach": "--reach",
    **CLUSTER_OPTIONS,
}


def index(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR_OR_FILE",
            help="A folder of images, also in folders below it; or vectors in a .npy, .npz, .parquet or .csv "
            "file, or a .zarr folder.",
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
    epsilon: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            max=40,
            help="Of the queries that the map is learned for (default: previous value, or 4).",
        ),
    ] = None,
    candidates: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Part of the images that an answer holds (default: previous value, or 0.1)."),
    ] = None,
    sets: Annotated[
        int | None, typer.Option(min=2, help="Number of sets (default: previous value, or chosen automatically).")
    ] = None,
    code_bytes: Annotated[
        int | None,
        typer.Option(
            min=7,
            help="Bytes of an image in an answer (default: previous value, or its whole feature). 128 keeps answers "
            "small, and finds a little less.",
        ),
    ] = None,
    reach: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Part of the images that must be in some set (default: previous value, or 0). An image in none is "
            "never returned; with 1 every one can be, which finds less where epsilon is small.",
        ),
    ] = None,
    extractor: ExtractorName = AUTO,
    private: Annotated[
        bool,
        typer.Option(
            "--private",
            help="The images are records of a protected gallery: no map is made, the index is never served as an open "
            "one, and features are row-exact, which takes longer, and made on this machine. The index remembers it.",
        ),
    ] = False,
    ids: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Of a file: your own ids. Vectors replace those with the same ids."),
    ] = None,
    names: Annotated[str | None, typer.Option(metavar="COLUMN", help="Of a file: names, for people.")] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Of a file: what comes back with a match; may be given several times."),
    ] = None,
    vectors: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Of a file: the vectors, where that is not clear.")
    ] = None,
    delete: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Delete the vector with this id; may be given several times."),
    ] = None,
    sealed: Annotated[
        bool,
        typer.Option(
            "--sealed",
            help="Also make what sealed questions need (`nearveil serve --offer sealed`), in a file of the index. "
            "Later runs keep it in step.",
        ),
    ] = False,
    cluster: ClusterPlace = None,
    ca: ClusterAuthorities = None,
    cert: OwnCertificate = None,
    key: OwnKey = None,
    insecure: InsecureCluster = False,
    as_json: Json = False,
) -> None:
    """Index a folder of images, or vectors of a file: add what is new, delete what is gone, publish the map.

    A second run does only what has changed. Images of other folders in the same index stay. Files that are no sound
    images are skipped, with the reason. The originals stay where they are.

    Vectors are divided by their norms, as those of questions are. Without --ids they are called FILE:0, FILE:1, and so
    on. Vectors that a file no longer holds stay: --delete takes them out.

    [bold]Examples[/bold]

    nearveil index photos/

    nearveil index photos/ --into gallery/ --candidates 0.2

    nearveil index photos/ --into postgresql://me@host/gallery --extractor hog

    nearveil index records/ --into private-index/ --private

    nearveil index emb.parquet --into texts/ --ids id --metadata text --metadata url

    nearveil index --into texts/ --delete doc-17

    nearveil index emb.parquet --into texts/ --cluster local:8
    """
    at = ClusterOptions(cluster, ca, cert, key, insecure)
    columns = {"ids": ids, "names": names, "metadata": tuple(metadata or ()), "vectors": vectors}
    asked = {"epsilon": epsilon, "candidates": candidates, "n_sets": sets}
    terms: dict[str, Any] = {**asked, "code_bytes": code_bytes, "reach": reach}
    with report_errors(**_OPTIONS):
        if source is None or delete or _is_table(source):
            if extractor != AUTO or private:
                raise ValueError("--extractor, --private: they are for images: leave them out")
            with connect_cluster(at) as workers:
                index_vectors(source, into, columns, delete or [], terms, workers, as_json=as_json)
                _keep_sealed(into, workers, wanted=sealed)
            return
        if any(columns.values()):
            raise ValueError("--ids, --names, --metadata, --vectors: a folder of images has no columns: leave them out")
        with connect_cluster(at) as workers:
            index_images(source, into, extractor, terms, workers, private=private, as_json=as_json)
            _keep_sealed(into, workers, wanted=sealed)


def index_images(
    source: Path,
    into: str | None,
    extractor: str,
    terms: dict[str, Any],
    workers: "Cluster",
    *,
    private: bool,
    as_json: bool,
) -> None:
    """Index a folder of images."""
    with show_bars() as bars:
        from nearveil.features.backbones import make_extractor
        from nearveil.gallery.folder import sync_folder

        tool = None if extractor == AUTO else make_extractor(extractor)
        report = sync_folder(source, into, extractor=tool, private=private, progress=bars, cluster=workers, **terms)
    figures = _describe(report)
    if as_json:
        print_json(figures)
    else:
        _show(figures)
    if not figures["private"]:
        _warn_of_few(figures["candidates"], figures["images"])


def _warn_of_few(answer: int, items: int) -> None:
    """Say what to do where an answer holds too few items to be of use."""
    if answer < _FEW:
        print_lines(
            f"Warning: an answer holds {answer} of {items:,} items, and a message finds no more than these. Search so "
            "small a gallery at home, at epsilon 0: all items are compared, nothing is told, nothing is paid. Here "
            "that is `nearveil query IMAGE --epsilon 0`; for clients of a server, `nearveil serve --offer codes` and "
            f"`nearveil sync`. A message needs --candidates {min(1.0, math.ceil(100 * _FEW / items) / 100):g} for "
            f"{min(_FEW, items)} matches.",
            stderr=True,
        )


def _keep_sealed(into: str | None, workers: "Cluster", *, wanted: bool) -> None:
    """Make the index for sealed questions, or bring the one that is there in step."""
    from nearveil.gallery.folder import find_index
    from nearveil.gallery.index import Index

    with show_bars() as bars, Index.open(find_index(into)) as held:
        path = held.sealed_file
        if not wanted and (path is None or not path.exists()):
            return
        if path is None or held.is_private:
            raise ValueError("--sealed: only an open index in a folder has one; a server of PostgreSQL makes its own")
        if find_spec("cryptography") is None:
            raise ValueError('--sealed: this needs cryptography: pip install "nearveil[sealed]"')
        from nearveil.wire.sealed import keep_sealed_index

        tick = bars("sealed questions", 1)
        keep_sealed_index(held, workers)
        tick(1)


def index_vectors(
    source: Path | None,
    into: str | None,
    columns: dict[str, Any],
    delete: list[str],
    terms: dict[str, Any],
    workers: "Cluster",
    *,
    as_json: bool,
) -> None:
    """Index the vectors of a file, and delete some."""
    with show_bars() as bars:
        from nearveil.features.vectors import VectorFile
        from nearveil.gallery.tables import sync_table

        if source is None and not delete:
            raise ValueError("DIR_OR_FILE: give a folder of images or a file of vectors, or --delete an id")
        file = None if source is None else VectorFile(source.absolute(), **columns)
        report = sync_table(file, into, delete=delete, progress=bars, cluster=workers, **terms)
    published = report.published
    figures = {
        "index": report.index,
        "vectors": report.items,
        "added": report.added,
        "deleted": report.deleted,
        "dimension": report.dimension,
        "epsilon": float(published.release.epsilon),
        "candidates": published.map.set_size,
        "sets": published.map.n_sets,
        "reach": round(published.reach, 4),
        "map_bytes": published.map.nbytes,
        "map_learned": report.learned,
        "revision": report.revision,
    }
    if as_json:
        print_json(figures)
    else:
        _show_vectors(report, figures)
    _warn_of_few(published.map.set_size, report.items)


def _show_vectors(report: "TableReport", figures: dict[str, Any]) -> None:
    published = report.published
    changes = f"{report.added:,} added, {report.deleted:,} deleted"
    lines = {
        "vectors": f"{report.items:,} ({changes}), {report.dimension:,} dimensions",
        "map": f"{published.map.n_sets:,} sets, {published.map.nbytes:,} bytes, for epsilon {figures['epsilon']:g}",
        "in any set": _tell_reach(published.reach, "vector"),
        "an answer": f"{published.map.set_size:,} vectors",
        "revision": f"{report.revision:,}",
        "index": report.index,
    }
    print_table(["", ""], lines.items())
    if not report.learned:
        print_lines("Nothing new: nothing was done.")


def _is_table(source: Path) -> bool:
    kind = source.suffix.lower()
    return kind in _TABLES and source.is_dir() == (kind == ".zarr")


def _describe(report: "FolderReport") -> dict[str, Any]:
    """Return a report as plain values."""
    names = ("index", "images", "added", "deleted", "extractor", "dimension", "private", "row_exact")
    published, map_figures = report.published, {}
    if published is not None:
        map_figures = {
            "epsilon": float(published.release.epsilon),
            "candidates": published.map.set_size,
            "sets": published.map.n_sets,
            "reach": round(published.reach, 4),
            "map_bytes": published.map.nbytes,
            "code_bytes": report.item_bytes,
        }
    return {
        **{name: getattr(report, name) for name in names},
        **map_figures,
        "map_learned": report.learned,
        "revision": report.revision,
        "skipped": [
            {"file": str(path).encode("utf-8", "replace").decode(), "reason": reason} for path, reason in report.skipped
        ],
    }


def _show(figures: dict[str, Any]) -> None:
    skipped = figures["skipped"]
    changes = f"{figures['added']:,} added, {figures['deleted']:,} deleted, {len(skipped):,} skipped"
    lines = {
        "images": f"{figures['images']:,} ({changes})",
        "features": f"{figures['extractor']}, {figures['dimension']:,} dimensions",
        **_describe_map(figures),
        "revision": f"{figures['revision']:,}",
        "index": figures["index"],
    }
    print_table(["", ""], lines.items())
    print_lines(*(f"skipped {one['file']}: {one['reason']}" for one in skipped[:_SHOWN]))
    if len(skipped) > _SHOWN:
        print_lines(f"and {len(skipped) - _SHOWN:,} more skipped: --json lists them all")
    if not (figures["added"] or figures["deleted"] or figures["map_learned"]):
        print_lines("Nothing new: nothing was done.")


def _tell_reach(reach: float, kind: str) -> str:
    return f"{reach:.1%} of the {kind}s; the others are never returned" if reach < 1 else f"every {kind}"


def _describe_map(figures: dict[str, Any]) -> dict[str, str]:
    if figures["private"]:
        others = "" if figures["row_exact"] else "; some rows, of other folders, are not row-exact: index those again"
        return {"map": f"none: the images are private{others}"}
    return {
        "map": f"{figures['sets']:,} sets, {figures['map_bytes']:,} bytes, for epsilon {figures['epsilon']:g}",
        "in any set": _tell_reach(figures["reach"], "image"),
        "an answer": f"{figures['candidates']:,} images, {figures['code_bytes']:,} bytes each",
    }
