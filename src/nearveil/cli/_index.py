"""``nearveil index``: a folder of images becomes a gallery that can be asked privately."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from sqlalchemy.engine import make_url

from nearveil.cli import _budget
from nearveil.cli._budget_view import clean
from nearveil.cli._index_sync import (
    Change,
    Skipped,
    Terms,
    check_terms,
    files_below,
    is_text,
    synchronise,
)
from nearveil.cli._label import _bars
from nearveil.features import (
    Extractor,
    FeatureCache,
    OnnxExtractor,
    default_extractor,
    gallery_features,
    load_extractor,
)
from nearveil.features.backbones import EXTRACTORS, find_extractor
from nearveil.gallery import Index, IndexStoreError, Published
from nearveil.gallery.codes import ID_BYTES
from nearveil.gallery.errors import NotAnIndexError
from nearveil.storage import data_folder, make_data_folder

_SHOWN = 10  # skipped files in the table


AUTO = "auto"

_FILES: dict[str, Callable[[Path], Extractor]] = {".nvm": load_extractor, ".onnx": OnnxExtractor}

Which: TypeAlias = Annotated[
    str,
    typer.Option(
        "--extractor",
        metavar="NAME_OR_FILE",
        help="What makes features: efficientnet-lite0, mobilenet-v2, hog, a model of `nearveil train` (.nvm) or an "
        "ONNX file; auto takes the index's, or the best that there is.",
    ),
]


def index(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of images, also in folders below it.")],
    into: Annotated[
        str | None,
        typer.Option(
            envvar="NEARVEIL_INDEX",
            metavar="PATH_OR_URL",
            help="A folder or a PostgreSQL URL; ~/.local/share/nearveil/index by default.",
        ),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Of the queries that the map is learned for; as before, or 4.")
    ] = None,
    candidates: Annotated[
        float | None, typer.Option(help="The part of the images that an answer holds; as before, or 0.1.")
    ] = None,
    sets: Annotated[
        int | None, typer.Option(help="Into how many sets the map parts the images; as before, or what is found best.")
    ] = None,
    code_bytes: Annotated[
        int | None,
        typer.Option(
            min=7,
            help="Bytes of an image in an answer; as before, or its whole feature. 128 keeps answers small, and finds "
            "a little less.",
        ),
    ] = None,
    extractor: Which = AUTO,
    private: Annotated[
        bool,
        typer.Option(
            "--private",
            help="The images are records of a protected gallery: no map is made, the index is never served as an open "
            "one, and features are row-exact, which takes longer. The index remembers it.",
        ),
    ] = False,
    as_json: _budget.Json = False,
) -> None:
    """Index a folder of images: add what is new, delete what is gone, publish the map.

    A second run does only what has changed. Images of other folders in the same index stay. Files that are no sound
    images are skipped, with the reason. The originals stay where they are.

    [bold]Examples[/bold]

    nearveil index photos/

    nearveil index photos/ --into gallery/ --candidates 0.2

    nearveil index photos/ --into postgresql://me@host/gallery --extractor hog

    nearveil index records/ --into private-index/ --private
    """
    where = place(into)
    terms = {"epsilon": epsilon, "candidates": candidates, "n_sets": sets, "code_bytes": code_bytes}
    with words(), _bars() as bar, ExitStack() as stack:
        root = _root(directory)
        held = _opened(where)
        if held is not None:
            stack.enter_context(held)
        private = _is_private(held, terms, asked=private)
        tool = chosen(extractor, None if held is None else held.extractor)
        if into is None:
            make_data_folder()
        cache = _cache_place(where)
        files, refused = files_below(root, leave_out=(cache.resolve(), Path(where).resolve()))
        progress = bar("reading", len(files))
        found = gallery_features(files, tool, row_exact=private, cache=FeatureCache(cache), progress=progress)
        if not found.paths:
            raise ValueError(
                f"DIR: there is no image below {root}; nothing was changed. To empty an index, delete {shown(where)}"
            )
        if held is None:
            if not private:
                check_terms(len(found.paths), Terms().but(**terms))
            held = stack.enter_context(_created(where, tool))
        if private:
            held.protect()
        change = synchronise(held, root, found, bar, **terms)
        report = _report(held, change, refused, tool, where)
    if as_json:
        typer.echo(json.dumps(report, allow_nan=False))
    else:
        _show(report)


def place(given: str | None) -> str:
    """Return where the index is: as given, or the default."""
    if given is None:
        return str(data_folder() / "index")
    return given if "://" in given else str(Path(given).expanduser().absolute())


def shown(where: str) -> str:
    """Return a place without its password."""
    return make_url(where).render_as_string(hide_password=True) if "://" in where else where


@contextmanager
def words() -> Iterator[None]:
    """Turn what a user can mend into a sentence and exit code 1."""
    with _budget._words():
        try:
            yield
        except (IndexStoreError, ModuleNotFoundError) as error:  # the latter's text says what to install
            _budget._fail(str(error))


def named(name: str) -> Extractor:
    """Return the extractor of a name or of a model file."""
    if name in EXTRACTORS:
        return EXTRACTORS[name]()
    path = Path(name)
    if path.suffix not in _FILES or not path.is_file():
        raise ValueError(
            f"--extractor must be one of {', '.join((AUTO, *EXTRACTORS))}, or a model file that is there (.nvm, .onnx)"
        )
    return _FILES[path.suffix](path)


def chosen(name: str, fingerprint: str | None) -> Extractor:
    """Return an extractor: the one named, which must be the index's, or the index's own, or the best.

    `fingerprint`: Of the extractor that made the index; None if there is none yet.
    """
    if name != AUTO:
        found = named(name)
        if fingerprint not in (None, found.fingerprint):
            raise ValueError(
                f"--extractor: the index has features of another extractor than {found.name}, and they do not "
                "compare: leave it out, or make another index"
            )
        return found
    if fingerprint is None:
        return default_extractor()
    try:
        return find_extractor(fingerprint)
    except ValueError as error:
        raise ValueError(f"--extractor: {error}; or make another index") from None


def _root(directory: Path) -> Path:
    if not directory.is_dir():
        raise ValueError(f"DIR: there is no folder at {directory}")
    root = directory.resolve()
    if not is_text(root):
        raise ValueError("DIR: its path is not text: rename the folder")
    return root


def _is_private(held: Index | None, terms: dict[str, Any], *, asked: bool) -> bool:
    """Return whether the rows are private: as is asked for, or as the index itself says."""
    known = held is not None and held.is_private
    if asked and held is not None and not known and len(held):
        raise ValueError(
            "--private: this index was made for an open gallery, and its images may have been shown: give --into "
            "another place"
        )
    if (asked or known) and any(value is not None for value in terms.values()):
        raise ValueError("--epsilon, --candidates, --sets, --code-bytes: private images have no map: leave them out")
    return asked or known


def _opened(where: str) -> Index | None:
    try:
        return Index.open(where)
    except NotAnIndexError:
        return None


def _created(where: str, tool: Extractor) -> Index:
    if "://" not in where:
        Path(where).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Index.create(where, dimension=tool.dimension, extractor=tool.fingerprint)


def _cache_place(where: str) -> Path:
    """Return the folder of the cache: beside the index, or in the default folder if that is in a database."""
    return data_folder() / "features" if "://" in where else Path(f"{where}.features")


def _report(held: Index, change: Change, refused: Sequence[Skipped], tool: Extractor, where: str) -> dict[str, Any]:
    return {
        "index": shown(where),
        "images": len(held),
        "added": change.added,
        "deleted": change.deleted,
        "extractor": tool.name,
        "dimension": held.dimension,
        "private": held.is_private,
        "row_exact": held.row_exact,
        **({} if change.published is None else _map_report(change.published)),
        "map_learned": change.learned,
        "revision": held.revision,
        "skipped": [{"file": _printable(path), "reason": reason} for path, reason in (*refused, *change.skipped)],
    }


def _map_report(published: Published) -> dict[str, Any]:
    return {
        "epsilon": float(published.release.epsilon),
        "candidates": published.map.set_size,
        "sets": published.map.n_sets,
        "map_bytes": published.map.nbytes,
        "code_bytes": published.table.width + ID_BYTES,
    }


def _map_lines(report: dict[str, Any]) -> dict[str, str]:
    if report["private"]:
        others = "" if report["row_exact"] else "; some rows, of other folders, are not row-exact: index those again"
        return {"map": f"none: the images are private{others}"}
    return {
        "map": f"{report['sets']:,} sets, {report['map_bytes']:,} bytes, for epsilon {report['epsilon']:g}",
        "an answer": f"{report['candidates']:,} images, {report['code_bytes']:,} bytes each",
    }


def _printable(path: Path) -> str:
    return str(path).encode("utf-8", "replace").decode()


def _show(report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    grid = Table(show_header=False)
    changes = f"{report['added']:,} added, {report['deleted']:,} deleted, {len(report['skipped']):,} skipped"
    lines = {
        "images": f"{report['images']:,} ({changes})",
        "features": f"{report['extractor']}, {report['dimension']:,} dimensions",
        **_map_lines(report),
        "revision": f"{report['revision']:,}",
        "index": report["index"],
    }
    for name, text in lines.items():
        grid.add_row(name, Text(clean(text), overflow="fold"))
    console.print(grid)
    for one in report["skipped"][:_SHOWN]:
        console.print(Text(clean(f"skipped {one['file']}: {one['reason']}")), soft_wrap=True)
    if len(report["skipped"]) > _SHOWN:
        console.print(f"and {len(report['skipped']) - _SHOWN:,} more skipped: --json lists them all")
    if not (report["added"] or report["deleted"] or report["map_learned"]):
        console.print("Nothing new: nothing was done.")
