"""What `query` and `ui` both ask for: whom to ask, and how it is known."""

from pathlib import Path
from typing import Annotated

import typer

IndexPlace = Annotated[
    str | None,
    typer.Option(
        envvar="NEARVEIL_INDEX",
        metavar="PATH_OR_URL",
        help="As `nearveil index --into`; ~/.local/share/nearveil/index by default.",
    ),
]
TokenFile = Annotated[Path | None, typer.Option(help="A file with the token for the server.")]
TokenText = Annotated[
    str | None,
    typer.Option(
        envvar="NEARVEIL_TOKEN",
        help="The token itself. On a command line others may see it: prefer the file, or the variable.",
    ),
]
Authorities = Annotated[
    Path | None, typer.Option(help="Certificates that the server is known by (PEM), in place of the usual ones.")
]
OwnCertificate = Annotated[
    Path | None, typer.Option(help="Your own certificate (PEM), where the server asks clients for one.")
]
OwnKey = Annotated[Path | None, typer.Option(help="Its key (PEM), if that is in a file of its own.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Allow plain HTTP to another machine: all on the way see the token.")
]
