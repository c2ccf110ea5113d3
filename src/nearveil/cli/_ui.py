"""``nearveil ui``: a page on this machine."""

import html
import os
import tempfile
import threading
import webbrowser
from contextlib import ExitStack
from pathlib import Path

import typer

from nearveil.cli._accounts import PaymentOptions, describe_new_account, find_or_open_account
from nearveil.cli._options import EXTRACTOR, GalleryOptions, command, load_extractor, option
from nearveil.cli._output import show_bars

_SERVER_SETTINGS = {"timeout": 20.0, "retries": 2}  # short: a person waits in front of the page
_EXIT_DELAY = 5.0  # seconds between Ctrl-C and the end, before uvicorn logs the requests that it cancels


@command(url="--server", extra="images,service")
def ui(
    options: GalleryOptions,
    payment: PaymentOptions,
    extractor: str = EXTRACTOR,
    port: int = option("Port on 127.0.0.1; 0 for a free one.", default=8322, min=0, max=65535),
    browser: bool = option("Open the page in a browser.", "--browser/--no-browser", default=True),
) -> None:
    """Open a page on this machine: drop an image, see the matches and everything the server saw.

    The page is served at 127.0.0.1 only. Its address holds a token that admits one browser. Your image stays on
    this machine and is never saved to disk. Press Ctrl-C to stop.

    For example:
        nearveil ui
        nearveil ui --server https://birds.example:8321 --token-file token.txt
    """
    with ExitStack() as stack:
        starting = stack.enter_context(ExitStack())
        starting.enter_context(show_bars())
        from nearveil.gallery.sync import describe_location, find_index
        from nearveil.ui import serve_page
        from nearveil.ui.session import PageSession, RecordingPayer

        payer = RecordingPayer()
        settings = {"extractor": load_extractor(extractor), "account": payer}
        client, _ = stack.enter_context(options.open(timeouts=_SERVER_SETTINGS, **settings))
        ledger = stack.enter_context(payment.open(create=payment.account is None))
        payer.account, is_new = find_or_open_account(ledger, payment.account)
        if is_new:
            typer.echo(describe_new_account(payer.account.balance(), describe_location(payment.location)))
        location = options.server or describe_location(find_index(options.index))
        session = PageSession(client, payer, ledger, location, gallery=options.gallery)
        files = stack.enter_context(ExitStack())

        def announce(address: str) -> None:
            starting.close()
            typer.echo(f"{payer.account.balance()}")
            typer.echo("The page is on this machine only. The address works in one browser. Press Ctrl-C to stop.")
            typer.echo(address)  # last, on its own line: programs wait for it
            if browser:
                _open_browser(address, files)

        serve_page(session, port=port, ready=announce, stopping=lambda: _exit_soon(files))


_REDIRECT = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0;url={address}"><title>nearveil: opening the page</title>
<p><a href="{address}">Open the page</a></p></html>
"""


def _open_browser(address: str, files: ExitStack) -> None:
    """Open a browser with a private file that redirects to the address; `files` removes the file."""
    # All users of the machine can read the command line of the browser, and the address holds the token.
    from nearveil.storage import make_data_folder

    try:
        descriptor, name = tempfile.mkstemp(".html", "ui-", make_data_folder())  # created with mode 0600
        path = Path(name)
        files.callback(path.unlink, missing_ok=True)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(_REDIRECT.format(address=html.escape(address)))
    except OSError as error:
        typer.echo(f"No browser was opened: {error.strerror}. Open the address yourself.", err=True)
        return
    # In a thread: some browsers return only when the page is loaded, or when they exit.
    threading.Thread(target=webbrowser.open, args=(path.as_uri(),), daemon=True).start()


def _exit_soon(files: ExitStack) -> None:
    """Exit soon, even if a server never answers: a paid query is on disk and can be repeated."""
    files.close()
    timer = threading.Timer(_EXIT_DELAY, os._exit, (130,))
    timer.daemon = True
    timer.start()
