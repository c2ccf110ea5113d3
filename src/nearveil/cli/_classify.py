"""``nearveil classify``: the classes of images by the model of a protected gallery, used at home."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nearveil.cli._asking import describe_question_error, join_certificate, read_token
from nearveil.cli._shared import (
    AUTO,
    Authorities,
    ExtractorName,
    Insecure,
    Json,
    OwnCertificate,
    OwnKey,
    TokenFile,
    TokenText,
    clean,
    report_errors,
)

if TYPE_CHECKING:
    from nearveil.privacy import Guarantee
    from nearveil.service import Classified, Client

_SHOWN = 3  # classes of an image


def classify(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Private images.")],
    server: Annotated[str, typer.Option(metavar="URL", help="Whose gallery it is: https://host:8321.")],
    token_file: TokenFile = None,
    token: TokenText = None,
    gallery: Annotated[str | None, typer.Option(help="Needed where there are several protected ones.")] = None,
    ca: Authorities = None,
    certificate: OwnCertificate = None,
    certificate_key: OwnKey = None,
    insecure: Insecure = False,
    extractor: ExtractorName = AUTO,
    as_json: Json = False,
) -> None:
    """Classify images by the model of a protected gallery. Nothing about them is sent, and nothing is paid.

    The model is fetched first; it is the same for everybody. Then the images are read, and the classes are found on
    this machine. Files that cannot be read as images are named, the others are classified, and the exit status is 1.

    [bold]Examples[/bold]

    nearveil classify scan.png --server https://scans.example:8321 --token-file token.txt

    nearveil classify *.png --server https://scans.example:8321 --token-file token.txt --gallery scans --json
    """
    with report_errors(extractor="--extractor"):
        from nearveil.features.backbones import make_extractor
        from nearveil.service import Client, QuestionError

        tls: dict[str, Any] = {
            "ca": ca,
            "certificate": join_certificate(certificate, certificate_key),
            "insecure": insecure,
            "extractor": None if extractor == AUTO else make_extractor(extractor),
        }
        try:
            with Client(server, read_token(token_file, token, server), **tls) as client:
                guarantee = client.model(gallery=gallery).guarantee  # before the first image is looked at
                tried = [(image, _classified(client, image, gallery)) for image in images]
        except QuestionError as error:
            raise ValueError(describe_question_error(error, (), local=False)) from None
    found = [(image, one) for image, one in tried if not isinstance(one, str)]
    bad = [(image, one) for image, one in tried if isinstance(one, str)]
    if as_json:
        typer.echo(json.dumps(_as_json(found, bad, guarantee), allow_nan=False))
    elif found:
        _show(found, guarantee)
    for image, reason in bad:
        typer.echo(clean(f"{image}: {reason}"), err=True)
    if bad:
        raise typer.Exit(1)


def _classified(client: "Client", image: Path, gallery: str | None) -> "Classified | str":
    """Return what an image is, or why it is none."""
    from nearveil.features import ImageError

    try:
        return client.classify(image, gallery=gallery)
    except ImageError as error:
        return error.reason


def _show(found: "list[tuple[Path, Classified]]", guarantee: "Guarantee") -> None:
    grid = Table()
    for heading in ("image", "class", "probability", "and then"):
        grid.add_column(heading, overflow="fold", justify="right" if heading == "probability" else "left")
    for image, one in found:
        (label, share), *others = sorted(one.probabilities.items(), key=lambda pair: -pair[1])[:_SHOWN]
        rest = ", ".join(f"{name} {chance:.3f}" for name, chance in others)
        grid.add_row(*(Text(clean(text)) for text in (str(image), label, f"{share:.3f}", rest)))
    console = Console(highlight=False)
    console.print(grid)
    for line in (
        found[0][1].caution,
        "The other side saw nothing that depends on an image, and nothing was paid.",
        f"It says about its records: {guarantee}",
    ):
        if line:
            console.print(Text(clean(line)), soft_wrap=True)


def _as_json(
    found: "list[tuple[Path, Classified]]", bad: list[tuple[Path, str]], guarantee: "Guarantee"
) -> dict[str, object]:
    return {
        "images": [
            {"image": str(image), "label": one.label, "probabilities": dict(one.probabilities)} for image, one in found
        ],
        "failed": [{"image": str(image), "reason": reason} for image, reason in bad],
        "caution": found[0][1].caution if found else "",
        "epsilon": 0.0,
        "paid": 0.0,
        "gallery_guarantee": str(guarantee),
    }
