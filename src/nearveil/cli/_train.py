"""``nearveil train``: a head of global descriptors for one's own images."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from nearveil.cli._shared import Json, print_json, print_lines, print_table, report_errors, show_bars

_OPTIONS = {
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
    with report_errors(**_OPTIONS), show_bars() as bars:
        from nearveil.features.class_folders import train_on_folder
        from nearveil.votes.labelling import check_free

        check_free(out, force=force)
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
        _show(report)


def _show(report: dict[str, Any]) -> None:
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
