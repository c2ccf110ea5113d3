"""``nearveil serve`` and ``nearveil protect``: commands of an operator."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import typer

from nearveil.cli._options import JSON, argument, command, option
from nearveil.cli._output import print_json, print_lines, print_table, show_bars
from nearveil.cli._token import has_tokens, suggest_token

if TYPE_CHECKING:
    from nearveil.private_knn.discriminant import Forecast
    from nearveil.server import Settings
    from nearveil.server.settings import GallerySettings


@dataclass(frozen=True)
class ServeOptions:
    """Settings of a server that a command line can override."""

    host: str | None = option("Address to listen on; 127.0.0.1 by default.")
    port: int | None = option("Port to listen on; 8321 by default, 0 for a free one.")
    tokens: str | None = option("Token store; ~/.local/share/nearveil/tokens.db by default.", metavar="PATH_OR_URL")
    tls_client_ca: Path | None = option("CA of required client certificates (PEM).", "--ca", rich_help_panel="TLS")
    tls_cert: Path | None = option("Certificate (PEM).", "--cert", rich_help_panel="TLS")
    tls_key: Path | None = option("Private key (PEM).", "--cert-key", rich_help_panel="TLS")
    insecure: bool | None = option("Listen beyond loopback without TLS, behind a TLS proxy.", rich_help_panel="TLS")
    workers: int | None = option("Number of processes, which share the limits; 1 by default.", min=1)
    log_level: str | None = option("debug, info, warning or error.")
    log_file: Path | None = option("File for the JSON log; stderr by default.")


@command(rename=False, extra="service")  # a setting may come from a file or a variable
def serve(
    options: ServeOptions,
    index: str | None = argument(
        "A folder, its URL in an object store, or a PostgreSQL URL, served as one open gallery.", metavar="INDEX"
    ),
    config: Path | None = option("A TOML file; see deploy/nearveil.toml.", envvar="NEARVEIL_CONFIG"),
    name: str | None = option("Name of the gallery; that of its folder or database by default."),
    offer: list[str] | None = option(
        "Also offer originals, metadata, codes (for local search) or sealed (encrypted queries); may be repeated."
    ),
) -> None:
    """Serve galleries to clients, until Ctrl-C or SIGTERM.

    Clients need a token: create one with `nearveil token create`. Settings come from options, else from variables
    NEARVEIL_SERVER_*, else from the file.

    For example:
        nearveil serve gallery/ --offer codes --offer sealed
        nearveil serve --config nearveil.toml
        nearveil serve gallery/ --host 0.0.0.0 --cert cert.pem --cert-key key.pem
    """
    overrides: dict[str, Any] = {key: value for key, value in asdict(options).items() if value is not None}
    from nearveil.server import Settings
    from nearveil.server import serve as run_server

    if index is not None:
        offers = ("names", "thumbnails", *(offer or ()))
        overrides["galleries"] = [{"name": name or _name_gallery(index), "index": index, "offers": offers}]
    elif name is not None or offer:
        raise ValueError("--name, --offer: only with INDEX")
    settings = Settings.load(config, **overrides)
    _check_log(settings)
    if settings.galleries and not has_tokens(settings.tokens):
        print_lines(f"No token yet, so no client can connect: {suggest_token(settings.tokens)}", stderr=True)
    for gallery in settings.galleries:
        if "codes" in gallery.offers:
            print_lines(f"{gallery.name} offers all its codes: every client can download every code.", stderr=True)
    with ExitStack() as starting:
        starting.enter_context(show_bars())

        def announce(address: str) -> None:
            starting.close()
            typer.echo(f"nearveil serves at {address}")  # programs wait for this line: the server accepts requests

        run_server(settings, ready=announce)


def _name_gallery(index: str) -> str:
    """Return the name of the index's folder or database. The rest of a URL may contain a password."""
    from nearveil.remote import is_remote
    from nearveil.server.settings import make_gallery_name
    from nearveil.storage import parse_url

    path = urlsplit(index).path if is_remote(index) else parse_url(index, "INDEX").database
    return make_gallery_name(Path("/", path or ""))


def _check_log(settings: "Settings") -> None:
    """Raise if the log is not writable: a running server would only count the lines that it drops."""
    if settings.log_file is None:
        return
    from nearveil.storage import open_private

    try:
        with open(settings.log_file, "ab", opener=open_private):
            pass
    except OSError as error:
        raise ValueError(f"log_file: {settings.log_file} is not writable: {error.strerror}") from None


@command(extra="service")
def protect(
    name: str | None = argument("A protected gallery of the file.", metavar="NAME"),
    config: Path | None = option("The TOML file of `nearveil serve`.", envvar="NEARVEIL_CONFIG"),
    publish: bool = option("Pay for a publication, and publish the model."),
    allow_noise: bool = option("Publish even if the result is expected to be pure noise."),
    as_json: bool = JSON,
) -> None:
    """Forecast the accuracy of the model of a protected gallery; with --publish, publish the model.

    The forecast is computed from the private records and is not protected by noise. Do not show it to anyone, and do
    not log it. Without --publish, nothing is paid and nothing changes. Each publication uses one of those that the
    gallery was opened for. A running server loads the new model by itself.

    For example:
        nearveil protect --config nearveil.toml
        nearveil protect scans --config nearveil.toml --publish
    """
    from nearveil.server import Settings
    from nearveil.server.serving import open_protected

    settings = Settings.load(config)
    chosen = _choose_gallery(settings.galleries, name)
    with closing(open_protected(chosen, settings.database_timeout)) as gallery:
        with show_bars() as start:
            start("Forecasting the accuracy", None)
            forecast = gallery.forecast()
        if not as_json:
            _print_forecast(forecast, chosen)
        model = gallery.publish(allow_noise=allow_noise or bool(chosen.allow_noise)) if publish else None
        if as_json:
            published = None if model is None else {"number": model.number, "version": model.version}
            counts = {"published": published, "publications_left": gallery.publications_left}
            print_json({"gallery": chosen.name, "forecast": asdict(forecast), **counts})
            return
        if model is not None:
            print_lines(f"Published: model {model.number} of {chosen.name}, version {model.version[:16]}.")
        print_lines(f"Publications left: {gallery.publications_left}.")


def _choose_gallery(galleries: "tuple[GallerySettings, ...]", name: str | None) -> "GallerySettings":
    protected = {gallery.name: gallery for gallery in galleries if gallery.kind == "protected"}
    names = list(protected) if name is None else [name]
    if len(names) != 1 or names[0] not in protected:
        raise ValueError(f"NAME: must be a protected gallery of the file: {', '.join(protected) or 'there is none'}")
    return protected[names[0]]


def _print_forecast(forecast: "Forecast", settings: "GallerySettings") -> None:
    noise = f"± {forecast.noise_per_class:,.1f}"
    accuracies = {label: f"{accuracy:.2f}" for label, accuracy in forecast.class_accuracy.items()}
    print_table(
        ["class", "records", "noise on the count", "accuracy"],
        [
            (label, f"{count:,}", noise, accuracies.get(label, ""))
            for label, count in forecast.records_per_class.items()
        ],
        title="For you only: computed from the records, without protection",
        right=("records", "noise on the count", "accuracy"),
    )
    total = f"All models together: epsilon {settings.epsilon:g}, delta {settings.delta:g}."
    print_lines(*_describe_forecast(forecast), total)


def _describe_forecast(forecast: "Forecast") -> Iterator[str]:
    low, high = forecast.accuracy_range
    yield (
        f"Expected accuracy: {forecast.accuracy:.2f}, and between {low:.2f} and {high:.2f} in 8 of 10 draws of the "
        f"noise; without noise {forecast.without_noise:.2f}; by guessing {forecast.floor:.2f}. Each class counts the "
        "same."
    )
    if forecast.is_noise:
        yield "The model would be pure noise: the noise hides the records of each class."
    elif small := len(forecast.small_classes):
        yield (
            f"{small} of {len(forecast.records_per_class)} classes have fewer than five times as many records as there "
            "is noise on their count. That is too few to rely on: collect more, merge classes, or open the gallery "
            "with a larger epsilon or fewer publications."
        )
