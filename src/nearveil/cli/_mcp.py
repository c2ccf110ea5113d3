"""``nearveil mcp``: a gallery as a tool of assistants."""

import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

from nearveil.cli import _output as output
from nearveil.cli._accounts import PaymentOptions
from nearveil.cli._options import EXTRACTOR, HOME, GalleryOptions, command, load_extractor, option


@command(url="--server", extra="mcp")
def mcp(
    options: GalleryOptions,
    payment: PaymentOptions,
    embed: str | None = option("Function that turns a text into a vector, to search by texts.", metavar="MODULE:NAME"),
    images: Path | None = option("Let the assistant search by the images of this folder.", metavar="DIR"),
    epsilon: float | None = option("Allow paid searches at this price; requires --account.", min=1e-6, max=40),
    extractor: str = EXTRACTOR,
    home: Path | None = HOME,
) -> None:
    """Let an assistant search a gallery: an MCP server on standard input and output.

    Its searches are free: in a local index or copy, or sealed. With --account and --epsilon it may pay for messages, at
    this price and up to the account's total. Every answer says what the server saw. The assistant's model sees the
    texts and the matches.

    For example:
        nearveil mcp --index texts/ --embed my_model:embed
        nearveil mcp --server https://birds.example:8321 --token-file token.txt --images photos/
        nearveil mcp --server https://birds.example:8321 --account assistant --epsilon 4
    """
    output.check(not epsilon or payment.account is not None, "requires --account, which caps the total", "--epsilon")
    from nearveil.integrations.mcp import load_embedding, make_server

    if embed is not None:
        sys.path.append(str(Path.cwd()))  # last: a file that an assistant wrote there replaces no library
    settings: dict[str, Any] = {"extractor": load_extractor(extractor), "home": home}
    with ExitStack() as stack:
        if epsilon:
            settings["account"] = stack.enter_context(payment.open()).account(str(payment.account))
        client, _ = stack.enter_context(options.open(**settings))
        with redirect_stdout(sys.stderr):  # a module may print while it loads its model
            function = None if embed is None else load_embedding(embed)
        make_server(client, embed=function, images=images, epsilon=epsilon, gallery=options.gallery).run()
