"""``nearveil sync``: fetch a gallery's codes, for search at home."""

from typing import Annotated

import typer

from nearveil.cli._asking import describe_question_error, join_certificate, read_token
from nearveil.cli._shared import (
    Authorities,
    HomeFolder,
    Insecure,
    Json,
    OwnCertificate,
    OwnKey,
    TokenFile,
    TokenText,
    print_json,
    print_lines,
    report_errors,
    show_bars,
)


def sync(
    server: Annotated[str, typer.Argument(metavar="URL", help="Whose gallery it is: https://host:8321.")],
    token_file: TokenFile = None,
    token: TokenText = None,
    gallery: Annotated[str | None, typer.Option(help="Of the server; needed where it has several.")] = None,
    home: HomeFolder = None,
    most: Annotated[int, typer.Option(min=1, help="Bytes of codes beyond which nothing is fetched.")] = 2 << 30,
    ca: Authorities = None,
    certificate: OwnCertificate = None,
    certificate_key: OwnKey = None,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Fetch all codes of a gallery, or what changed of them, to search them here at epsilon 0.

    Everybody fetches the same, so nothing is told about what you look for, and nothing is paid. Run it on a schedule,
    not because of an image: the server sees when you do.

    [bold]Examples[/bold]

    nearveil sync https://birds.example:8321 --token-file token.txt

    nearveil query me.jpg --epsilon 0 --server https://birds.example:8321 --token-file token.txt
    """
    from nearveil.service import Client, QuestionError

    with report_errors(), show_bars() as start:
        tick, before = start("Fetching codes", None), 0

        def show(done: int, total: int) -> None:
            nonlocal tick, before
            if not done:
                tick, before = start("Fetching codes", total), 0
            tick(done - before)
            before = done

        tls = {"ca": ca, "certificate": join_certificate(certificate, certificate_key), "insecure": insecure}
        try:
            with Client(server, read_token(token_file, token, server), home=home, **tls) as client:  # type: ignore[arg-type]
                copy = client.sync(gallery=gallery, most=most, progress=show)
        except QuestionError as error:
            raise ValueError(describe_question_error(error, (), local=False)) from None
    size = sum(path.stat().st_size for path in copy.folder.iterdir())
    if as_json:
        print_json({"folder": str(copy.folder), "items": len(copy), "bytes": size, "fetched": copy.fetched})
    else:
        print_lines(
            f"{len(copy):,} items in {copy.folder} ({size / 1e6:,.2f} MB); {copy.fetched / 1e6:,.2f} MB were fetched.",
            "`nearveil query --epsilon 0` searches them, tells nothing and costs nothing.",
        )
