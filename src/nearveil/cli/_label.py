"""``nearveil label``: private records vote on the labels of a public set. ``nearveil train``: train features."""

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from nearveil.cli._options import FORCE, JSON, LedgerOptions, argument, command, option
from nearveil.cli._output import check, fail, print_json, print_lines, print_table, show_bars

if TYPE_CHECKING:
    from nearveil.private_knn.labelling import LabelReport


@dataclass(frozen=True)
class VoteOptions:
    """Terms of the vote on labels."""

    epsilon: float = option("Privacy cost of all labels together.")
    delta: float = option("Delta of the guarantee.", default=1e-5)
    max_answered: int | None = option("Maximum number of labels; all public rows by default.", min=1)
    n_neighbors: int | None = option("Number of private records that vote.", "--neighbors", min=1)
    features: Literal["auto", "hog", "none"] = option("Of images: HOG (auto), or pixels (none).", default="auto")
    side: int = option("Resize images of folders to SIDE x SIDE.", default=32, min=8, max=1024)
    unit: str = option("Unit of one row of PRIVATE, such as person; it must equal the account's.", default="record")
    allow_noise: bool = option("Label even if the result is expected to be pure noise.")


@command(extra="knn")
def label(
    options: VoteOptions,
    payment: LedgerOptions,
    private: Path = argument(".npz, .csv, or a folder with one subfolder of images per class.", metavar="PRIVATE"),
    public: Path = argument(".npz, .csv, or a folder of images.", metavar="PUBLIC"),
    classes: str | None = option(
        "a,b,c, or a file with one class per line; by default those of PRIVATE.", metavar="LIST_OR_FILE"
    ),
    out: Path = option("Output file.", default=Path("labels.csv")),
    force: bool = FORCE,
    account: str | None = option("Account that pays.", rich_help_panel="Ledger"),
    as_json: bool = JSON,
) -> None:
    """Label a public set from a private one: the nearest private records vote, with noise.

    Rows without a clear majority get no label. Everything is read and checked first, then paid, then answered.

    For example:
        nearveil label patients.npz public.npz --epsilon 0.5
        nearveil label photos/ downloads/ --epsilon 1 --classes cat,dog,fox --out labels.csv
        nearveil label patients.csv public.csv --epsilon 0.5 --account archive --ledger budget.db
    """
    check(0 < options.epsilon < math.inf, "must be a positive number, such as 0.5", "--epsilon")
    check(0 < options.delta < 1, "must be between 0 and 1", "--delta")
    with show_bars() as bars:
        from nearveil.private_knn.labelling import label_file, parse_classes

        if account is None and payment.ledger is not None:
            raise ValueError("--account: required with --ledger (or NEARVEIL_LEDGER)")
        with nullcontext() if account is None else payment.open() as ledger:
            report = label_file(
                private,
                public,
                out,
                **asdict(options),
                classes=None if classes is None else parse_classes(classes),
                force=force,
                account=None if ledger is None else ledger.account(str(account)),
                progress=bars,
                warn=lambda text: print_lines(text, stderr=True),
            )
    notes = [note.replace("`classes`", "--classes") for note in report.notes]
    if account is None:
        notes.append("No account was charged; use --account NAME to record the spending.")
    _print_labels(report, notes, None if report.lost else out, as_json=as_json)
    if report.lost:
        fail(f"{out}: {report.lost}; the labels are paid for and printed above instead: save them")
    if report.stopped:
        done = f"{report.stopped} after {len(report.labels)} of {len(report.names)} rows"
        fail(f"{done}; all rows are paid for, and {out} holds the labels so far")


def _print_labels(report: "LabelReport", notes: list[str], out: Path | None, *, as_json: bool) -> None:
    guarantee, answered = report.guarantee, sum(map(bool, report.labels))
    counts = {"public_rows": len(report.names), "answered": answered, "declined": len(report.labels) - answered}
    if as_json:
        figures = {"epsilon": guarantee.epsilon, "delta": guarantee.delta, "promise": str(guarantee)}
        labels = {} if out is not None else {"labels": dict(zip(report.names, report.labels, strict=False))}
        print_json({**counts, **figures, "out": None if out is None else str(out), "notes": notes, **labels})
        return
    if out is None:
        typer.echo(report.text.encode("utf-8", errors="surrogateescape"), nl=False)
        return
    from nearveil.privacy.guarantee import format_rounded_up

    rows = [(name.replace("_", " "), f"{count:,}") for name, count in counts.items()]
    rows += [("epsilon", format_rounded_up(guarantee.epsilon, 4)), ("delta", format_rounded_up(guarantee.delta))]
    print_table(["", ""], [*rows, ("labels", out)])
    print_lines(guarantee, *notes)


@dataclass(frozen=True)
class TrainOptions:
    """The trained head."""

    descriptors: str = option("Pooling: S (mean), M (max), G (generalised mean).", default="SG")
    dimension: int = option("Dimension of the features.", default=512, min=1, max=65_536)
    epochs: int = option("Passes over all images.", default=20, min=1)
    backbone: Literal["efficientnet-lite0", "mobilenet-v2"] = option(
        "Frozen backbone: efficientnet-lite0 or mobilenet-v2.", default="efficientnet-lite0", metavar="NAME"
    )
    held_out: float = option("Share of the classes, last by name, held out for the test.", default=0.5, min=0, max=1)
    seed: int = option("Random seed: the same seed trains the same model.", default=0, min=0)


@command(folder="DIR", extra="gallery")
def train(
    options: TrainOptions,
    directory: Path = argument("A folder with one subfolder of images per class.", metavar="DIR"),
    out: Path = option("Output file of the model, such as model.nvm."),
    force: bool = FORCE,
    as_json: bool = JSON,
) -> None:
    """Train features for your own images, so that images of one class are close to each other.

    The training images are not protected: the model reveals information about them. Use public images, or don't share
    the model.

    The test uses classes that the model has not seen: it prints recall@1 and recall@8 without and with the trained
    head.

    For example:
        nearveil train birds/ --out birds.nvm --descriptors SMG --dimension 768 --held-out 0
    """
    with show_bars() as bars:
        from nearveil.features.class_folders import train_on_folder
        from nearveil.private_knn.labelling import check_writable

        check_writable(out, force=force)
        result = train_on_folder(directory, out, **asdict(options), progress=bars)
    report: dict[str, Any] = {
        "trained": {"classes": result.trained[0], "images": result.trained[1]},
        "held_out": {"classes": result.held_out[0], "images": result.held_out[1]},
        **{f"recall@{k}": {"before": before, "after": after} for k, (before, after) in result.recalls.items()},
        "dimension": result.model.dimension,
        "fingerprint": result.model.fingerprint,
        "out": str(out),
        "skipped": [{"file": file, "reason": reason} for file, reason in result.skipped],
    }
    if as_json:
        print_json(report)
        return
    print_lines(f"Trained on {result.trained[1]:,} images of {result.trained[0]:,} classes.")
    if result.recalls:
        rows = [(f"recall@{k}", f"{before:.3f}", f"{after:.3f}") for k, (before, after) in result.recalls.items()]
        title = f"{result.held_out[1]:,} images of {result.held_out[0]:,} classes that the model has not seen"
        print_table(["", "before", "after"], rows, title=title, right=("before", "after"))
    print_lines(
        *(f"skipped {file}: {reason}" for file, reason in result.skipped),
        f"Model: {out} ({result.model.dimension:,} dimensions).",
        "The training images are not protected: share the model only if they are public.",
    )
