"""``nearveil label`` (private records vote on the labels of a public set) and ``nearveil train``."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nearveil.cli._shared import (
    PATIENCE,
    Json,
    LedgerPlace,
    Witness,
    fail,
    find_account,
    find_ledger,
    print_json,
    print_lines,
    print_table,
    report_errors,
    show_bars,
)

if TYPE_CHECKING:
    from nearveil.ledger import Account
    from nearveil.private_knn.labelling import LabelReport

_NO_ACCOUNT = "No account was charged: --account NAME keeps count of what is spent."
_FIELDS = ("classes", "features", "out", "force", "account", "epsilon", "allow_noise", "max_answered")
_OPTIONS = {name: f"--{name.replace('_', '-')}" for name in _FIELDS}


def label(
    private: Annotated[
        Path, typer.Argument(metavar="PRIVATE", help=".npz, .csv, or a folder with one folder of images a class.")
    ],
    public: Annotated[Path, typer.Argument(metavar="PUBLIC", help=".npz, .csv, or a folder of images.")],
    epsilon: Annotated[float, typer.Option(help="What all labels together may cost.")],
    delta: Annotated[float, typer.Option(help="Of the guarantee.")] = 1e-5,
    max_answered: Annotated[
        int | None, typer.Option(min=1, help="Label at most so many; all public rows by default.")
    ] = None,
    neighbors: Annotated[int | None, typer.Option(min=1, help="How many private records vote.")] = None,
    classes: Annotated[
        str | None,
        typer.Option(metavar="LIST_OR_FILE", help="The classes: a,b,c, or a file with one a line; else PRIVATE tells."),
    ] = None,
    features: Annotated[
        Literal["auto", "hog", "none"], typer.Option(help="Of images: HOG (auto), or the pixels (none).")
    ] = "auto",
    side: Annotated[int, typer.Option(min=8, max=1024, help="Images of folders become SIDE x SIDE.")] = 32,
    out: Annotated[Path, typer.Option(help="Where the labels go.")] = Path("labels.csv"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if there is one.")] = False,
    ledger: LedgerPlace = None,
    account: Annotated[str | None, typer.Option(help="The account that pays.")] = None,
    unit: Annotated[
        str,
        typer.Option(
            help='What one row of PRIVATE is; the account\'s must be the same. "person with all images" only if each '
            "person has one row."
        ),
    ] = "record",
    allow_noise: Annotated[
        bool, typer.Option("--allow-noise", help="Ask also where noise alone is to be expected.")
    ] = False,
    witness: Witness = None,
    as_json: Json = False,
) -> None:
    """Label a public set from a private one: the nearest private records vote, with noise.

    Rows on which the votes do not agree are left without a label. Everything is read and checked first, then
    paid, then answered.

    [bold]Examples[/bold]

    nearveil label patients.npz public.npz --epsilon 0.5

    nearveil label photos/ downloads/ --epsilon 1 --classes cat,dog,fox --out labels.csv

    nearveil label patients.csv public.csv --epsilon 0.5 --account archive --ledger budget.db
    """
    if not 0 < epsilon < math.inf:
        raise typer.BadParameter("must be a positive number, such as 0.5", param_hint="--epsilon")
    if not 0 < delta < 1:
        raise typer.BadParameter("must lie between 0 and 1", param_hint="--delta")
    with report_errors(**_OPTIONS), show_bars() as bars:
        from nearveil.private_knn.labelling import label_file, parse_classes

        with _open_payer(ledger, account, witness) as payer:
            report = label_file(
                private,
                public,
                out,
                epsilon=epsilon,
                delta=delta,
                max_answered=max_answered,
                n_neighbors=neighbors,
                classes=None if classes is None else parse_classes(classes),
                features=features,
                side=side,
                force=force,
                unit=unit,
                account=payer,
                allow_noise=allow_noise,
                progress=bars,
                warn=lambda text: print_lines(text, stderr=True),
            )
    notes = [note.replace("`classes`", "--classes") for note in report.notes]
    _show(report, notes if account else [*notes, _NO_ACCOUNT], None if report.lost else out, as_json=as_json)
    if report.lost:
        fail(f"{out}: {report.lost}; the labels are paid for and stand above instead: keep them")
    if report.stopped:
        done = f"{report.stopped} after {len(report.labels)} of {len(report.names)} rows"
        fail(f"{done}: all is paid for, and {out} holds their labels")


@contextmanager
def _open_payer(ledger: str | None, account: str | None, witness: Path | None) -> "Iterator[Account | None]":
    """Yield who pays; nobody if no account is named."""
    if account is None:
        if ledger is not None:
            raise ValueError("--account must name who pays, because --ledger (or NEARVEIL_LEDGER) is given")
        yield None
        return
    from nearveil.ledger import Ledger

    with Ledger(find_ledger(ledger), witness=witness, timeout=PATIENCE) as book:
        yield find_account(book, account)


def _show(report: "LabelReport", notes: list[str], out: Path | None, *, as_json: bool) -> None:
    guarantee, answered = report.guarantee, sum(map(bool, report.labels))
    counts = {
        "public_rows": len(report.names),
        "answered": answered,
        "declined": len(report.labels) - answered,
    }
    if as_json:
        stated = {"epsilon": guarantee.epsilon, "delta": guarantee.delta, "promise": str(guarantee)}
        kept = {} if out is not None else {"labels": dict(zip(report.names, report.labels, strict=False))}
        print_json({**counts, **stated, "out": None if out is None else str(out), "notes": notes, **kept})
        return
    if out is None:
        typer.echo(report.text.encode("utf-8", errors="surrogateescape"), nl=False)
        return
    from nearveil.privacy.guarantee import format_rounded_up

    rows = [(name.replace("_", " "), f"{count:,}") for name, count in counts.items()]
    rows += [("epsilon", format_rounded_up(guarantee.epsilon, 4)), ("delta", format_rounded_up(guarantee.delta))]
    print_table(["", ""], [*rows, ("labels", out)])
    print_lines(guarantee, *notes)


_TRAIN_OPTIONS = {
    "folder": "DIR",
    **{name: f"--{name.replace('_', '-')}" for name in ("held_out", "dimension", "out", "force")},
}


def train(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with one folder of images a class.")],
    out: Annotated[Path, typer.Option(help="Where the model goes, such as model.nvm.")],
    descriptors: Annotated[str, typer.Option(help="S (mean), M (largest) and G (generalised mean), combined.")] = "SG",
    dimension: Annotated[int, typer.Option(min=1, max=65_536, help="Of the features.")] = 512,
    epochs: Annotated[int, typer.Option(min=1, help="How often all images are shown.")] = 20,
    backbone: Annotated[
        Literal["efficientnet-lite0", "mobilenet-v2"], typer.Option(help="It stays as it is.")
    ] = "efficientnet-lite0",
    held_out: Annotated[
        float, typer.Option(min=0, max=1, help="Part of the classes, the last by name, kept to measure; 0 for none.")
    ] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="The same seed trains the same model.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if there is one.")] = False,
    as_json: Json = False,
) -> None:
    """Train features for your own images: those of one class come close to each other.

    Nothing protects the images that it learns from: the model tells of them. Use public images, or keep the model.

    It is measured on classes that it has not seen: how often an image of the same class is the nearest, and how often
    one is among the 8 nearest, without the head and with it.

    [bold]Examples[/bold]

    nearveil train birds/ --out birds.nvm

    nearveil train birds/ --out birds.nvm --descriptors SMG --dimension 768 --held-out 0
    """
    with report_errors(**_TRAIN_OPTIONS), show_bars() as bars:
        from nearveil.features.class_folders import train_on_folder
        from nearveil.private_knn.labelling import check_writable

        check_writable(out, force=force)
        found = train_on_folder(
            directory,
            out,
            backbone=backbone,
            descriptors=descriptors,
            dimension=dimension,
            epochs=epochs,
            held_out=held_out,
            seed=seed,
            progress=bars,
        )
    report = {
        "trained": {"classes": found.trained[0], "images": found.trained[1]},
        "held_out": {"classes": found.held_out[0], "images": found.held_out[1]},
        **{f"recall@{k}": {"before": before, "after": after} for k, (before, after) in found.recalls.items()},
        "dimension": found.model.dimension,
        "fingerprint": found.model.fingerprint,
        "out": str(out),
        "skipped": [{"file": file, "reason": reason} for file, reason in found.skipped],
    }
    if as_json:
        print_json(report)
    else:
        _show_training(report)


def _show_training(report: dict[str, Any]) -> None:
    trained, held = report["trained"], report["held_out"]
    print_lines(f"Trained on {trained['images']:,} images of {trained['classes']:,} classes.")
    recalls = [(name, f"{pair['before']:.3f}", f"{pair['after']:.3f}") for name, pair in report.items() if "@" in name]
    if recalls:
        title = f"{held['images']:,} images of {held['classes']:,} classes that it has not seen"
        print_table(["", "before", "after"], recalls, title=title, right=("before", "after"))
    print_lines(
        *(f"skipped {one['file']}: {one['reason']}" for one in report["skipped"]),
        f"The model: {report['out']} ({report['dimension']:,} dimensions).",
        "Nothing protects the images that it learned from: give it away only if they are public.",
    )
