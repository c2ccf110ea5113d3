"""``nearveil query``, ``classify`` and ``sync``: use a local index or a server, privately."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Literal

import typer

from nearveil.cli import _output as output
from nearveil.cli._accounts import LazyAccount, PaymentOptions, describe_new_account
from nearveil.cli._options import (
    EXTRACTOR,
    FORCE,
    HOME,
    JSON,
    GalleryOptions,
    ServerOptions,
    argument,
    command,
    load_extractor,
    option,
)

if TYPE_CHECKING:
    from nearveil.client.results import Classified, Match, Nearest
    from nearveil.features.images import Pixels
    from nearveil.ledger.history import Balance

_N_CLASSES = 3  # printed for each image
_TEXT, _LONGEST_CELL = "text", 160  # a key of metadata with a column of its own, and characters of a cell


@command(url="--server")
def query(
    options: GalleryOptions,
    payment: PaymentOptions,
    image: Path = argument("The private image, or a file with one vector, such as .npy.", metavar="IMAGE_OR_VECTOR"),
    epsilon: float | None = option(
        "Pay this for a message. Without it the query is free: in a local index or copy, or sealed.", min=0, max=40
    ),
    by: Literal["auto", "message", "home", "sealed"] = option(
        "auto, message (needs --epsilon), home (a local copy) or sealed.", default="auto", metavar="WAY"
    ),
    where: list[str] | None = option(
        "Keep only matches with this metadata; may be repeated. Applied on this machine.", metavar="KEY=VALUE"
    ),
    k: int | None = option("Number of matches; 8 by default, or as many as were compared.", "-k", min=1),
    candidates: float | None = option("Share of the gallery in the answer, if it has several maps.", min=0, max=1),
    extractor: str = EXTRACTOR,
    home: str | None = HOME,
    label: str | None = option("Class of the query, for a gallery with a mechanism as published. It is revealed."),
    allow_unsound: bool = option("Send a message without a guarantee, for comparison. No account pays for it."),
    key: str | None = option("Idempotency key: the same query with the same key is paid once."),
    sheet: Path | None = option("Write a contact sheet to this .png file."),
    force: bool = FORCE,
    as_json: bool = JSON,
) -> None:
    """Find the items nearest to a private image or vector. Nothing is paid without --epsilon.

    Nearest by the gallery's metric, which the answer names: cosine, dot product or Euclidean distance. A local index or
    copy is searched on this machine: a server sees nothing. Of a sealed query it sees noise, and of a message with
    --epsilon the number of one set; the account pays before the message is sent. Your image and its features stay in
    memory and are not stored, except on a contact sheet if you order one. With --server, any local index is ignored.

    For example:
        nearveil query me.jpg
        nearveil query vector.npy --index texts/ -k 20 --where lang=en
        nearveil query me.jpg --server https://birds.example:8321 --token-file token.txt
        nearveil query me.jpg --epsilon 4 --server https://birds.example:8321 --token-file token.txt --gallery birds
        nearveil query me.jpg --epsilon 4 --account holiday --ledger budget.db --json
    """
    is_free = by in ("home", "sealed")
    output.check(not (is_free and epsilon), f"--by {by} reveals nothing and costs nothing; leave it out", "--epsilon")
    output.check(by != "message" or bool(epsilon), "a message needs an epsilon above 0", "--epsilon")
    from nearveil.features import load_image
    from nearveil.features.vectors import SUFFIXES, read_vector

    is_vector = image.suffix.lower() in SUFFIXES

    if sheet is not None:
        _check_sheet(sheet, force=force, has_images=bool(epsilon) and not is_vector)
    if epsilon and not (key or allow_unsound):
        from nearveil.ledger import new_key

        key = new_key()
    payer = LazyAccount(payment)
    with payer, _name_retry(key or "", payer, local=options.server is None), output.show_bars() as start:
        chosen_extractor = load_extractor(extractor)
        pixels: Any = read_vector(image) if is_vector else load_image(image)
        with options.open(account=payer, extractor=chosen_extractor, home=home) as (client, is_stale):
            settings: Any = {"gallery": options.gallery, "thumbnails": sheet is not None, "key": key, "by": by}
            settings |= {"where": _parse_filter(where), "label": label, "allow_unsound": allow_unsound}
            start("Querying", None)
            nearest = client.nearest(pixels, k, epsilon, candidates, **settings)
            stale = nearest.way != "index" and is_stale()
        balance = payer.balance()
    answer = _describe_answer(nearest, balance, payer.new_ledger, stale=stale)
    answer |= {"server": options.server, "sheet": None if sheet is None else str(sheet)}
    # Print first: a contact sheet that cannot be written must not lose the answer.
    if as_json:
        output.print_json(answer)
    else:
        _print_answer(answer, nearest, balance)
    if sheet is not None:
        _write_sheet(answer, nearest, pixels, sheet, force=force)


def _parse_filter(pairs: list[str] | None) -> dict[str, Any] | None:
    """Return the filter of KEY=VALUE pairs; a value that is no JSON is text."""
    values: dict[str, Any] = {}
    for pair in pairs or ():
        name, separator, value = pair.partition("=")
        if not (name and separator) or name in values:
            raise ValueError(f"--where: {pair!r} must be KEY=VALUE, once for each key, such as lang=en")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values or None


@contextmanager
def _name_retry(key: str, payer: "LazyAccount", *, local: bool) -> Iterator[None]:
    """Add the option that solves a problem: --key repeats a paid query, --candidates enlarges answers."""
    from nearveil.client import QuestionError, UnansweredError

    try:
        yield
    except QuestionError as error:
        if local and error.words.endswith("of an answer"):
            error.add_note("for more, run `nearveil index DIR --candidates` with a larger share")
        raise
    except UnansweredError as error:
        retry = f"{error.reason}. The query is paid for: repeat it at no cost with --key {error.key}"
        raise ValueError(retry if error.again else str(error)) from None
    except KeyboardInterrupt:
        if payer.has_paid:
            typer.echo(f"The query is paid for: repeat it at no cost with --key {key}", err=True)
        raise


def _describe_answer(nearest: "Nearest", balance: "Balance | None", new_ledger: str, *, stale: bool) -> dict[str, Any]:
    """Return the answer and its cost as JSON values; `new_ledger` is where this query opened its account, if it did."""
    epsilon, named = nearest.guarantee.epsilon, nearest.set
    same = ["way", "metric", "code_recall", "bytes_sent", "bytes_received", "key", "repeated", "paid"]
    server_saw: dict[str, Any] = {}
    if nearest.sealed:
        server_saw = {"sealed_bytes": [len(message) for message in nearest.sealed]}
    elif nearest.way == "message":
        same += ["named_best_set", "expected_share"]
        server_saw = {
            "set": None if named is None else named + 1,  # from 1, as in the text and on the sheet
            "of": nearest.n_sets,
            "probability_of_the_right_one": nearest.hit,
            "mechanism": nearest.mechanism or None,
        }
    return {
        "found": [_describe_match(rank, match) for rank, match in enumerate(nearest.matches, 1)],
        "server_saw": server_saw,
        **{name: getattr(nearest, name) for name in same},
        "quality": nearest.quality_summary,
        "candidates": nearest.n_candidates,
        "epsilon": epsilon,
        "promise": str(nearest.guarantee),
        **{name: getattr(balance, name, None) for name in ("account", "spent", "left")},
        "opened": new_ledger or None,
        "notes": list(_write_notes(nearest, balance, new_ledger, stale=stale)),
    }


def _describe_match(rank: int, match: "Match") -> dict[str, Any]:
    values = {name: getattr(match, name) for name in ("id", "external_id", "similarity", "distance")}
    name = match.name or match.external_id or f"item {match.id}"
    return {"rank": rank, **values, "name": name, "metadata": dict(match.metadata)}


def _write_notes(nearest: "Nearest", balance: "Balance | None", new_ledger: str, *, stale: bool) -> Iterator[str]:
    from nearveil.client.questions import DEFAULT_K

    if balance is not None and new_ledger:
        yield describe_new_account(balance, new_ledger)
    if nearest.repeated:
        yield "This key was paid before: the same message was sent again, at no cost."
    if nearest.set is not None and nearest.n_candidates < DEFAULT_K:
        yield (
            f"Answers of this gallery hold {nearest.n_candidates} items, so a message returns no more. If the gallery "
            "offers it, a query without --epsilon compares all items, reveals nothing and costs nothing."
        )
    names = [match.name or match.external_id for match in nearest.matches]
    if names and nearest.way != "index" and not any(names):
        yield "Only numbers of items came back; the operator can offer ids with `nearveil serve --offer metadata`."
    if stale:
        yield "The index has changed since its map was made; run `nearveil index DIR` to include new items."


def _print_answer(answer: dict[str, Any], nearest: "Nearest", balance: "Balance | None") -> None:
    """Print the matches, the cost, the balance, and the path of the contact sheet."""
    output.print_lines(nearest.quality_summary)
    if nearest.matches:
        _print_matches(nearest)
    output.print_lines(nearest.server_view)
    if nearest.way in ("message", "sealed") or output.is_verbose():
        output.print_lines(nearest.guarantee)
    if balance is not None:
        from nearveil.ledger.budget import format_down

        law = " (with a delta, messages are priced together, not summed)" if balance.delta else ""
        output.print_lines(
            f"Paid: epsilon {nearest.paid:g}, from the account {balance.account!r}; left: {format_down(balance.left)} "
            f"of {balance.epsilon:g}{law}."
        )
    output.print_lines(*answer["notes"])
    if balance is not None:
        output.print_lines(f"Run it again with --key {nearest.key} to repeat this query at no cost.")
    if answer["sheet"] is not None:
        output.print_lines(f"Contact sheet: {answer['sheet']}")


def _print_matches(nearest: "Nearest") -> None:
    """Print the matches; columns without any content are left out."""
    from nearveil.metrics import METRIC_NAMES

    metric, rows = METRIC_NAMES[nearest.metric], []
    for rank, match in enumerate(nearest.matches, 1):
        pairs = ", ".join(f"{name}: {value}" for name, value in match.metadata.items() if name != _TEXT)
        texts = (shorten(text, _LONGEST_CELL) for text in (str(match.metadata.get(_TEXT, "")), pairs))
        number = match.external_id or ("" if match.name else f"item {match.id}")
        rows.append((str(rank), match.name, number, f"{match.value:.3f}", *texts))
    columns = zip(("", "name", "id", metric, "text", "metadata"), *rows, strict=True)
    headings, *cells = zip(*(column for column in columns if any(column[1:])), strict=True)
    output.print_table(headings, cells, right=("", metric), no_wrap=(metric,))


def _check_sheet(path: Path, *, force: bool, has_images: bool) -> None:
    """Raise if a contact sheet cannot be written, before anything is paid."""
    folder, exists = path.absolute().parent, path.exists()
    for is_valid, problem in (
        (has_images, "it shows the answer to a message about an image; pass --epsilon, or leave it out"),
        (path.suffix.lower() == ".png", "must end in .png"),
        (folder.is_dir(), f"the folder of {path} does not exist; create it, or use another path"),
        (os.access(path if exists else folder, os.W_OK), f"{path} is not writable; nothing was paid, use another path"),
        (not exists or (force and path.is_file()), f"{path} exists; use --force to overwrite it, or another path"),
    ):
        if not is_valid:
            raise ValueError(f"--sheet: {problem}")


def _write_sheet(answer: dict[str, Any], nearest: "Nearest", pixels: "Pixels", path: Path, *, force: bool) -> None:
    from nearveil.gallery.contact_sheet import ContactSheet

    if nearest.set is None:
        raise ValueError("--sheet: it shows the set of a message by covers, and this gallery has another mechanism")
    assert nearest.answer is not None
    captions = [
        f"{output.clean(Path(entry['name']).stem)}\n{entry['rank']}: {match.value:.3f}"
        for entry, match in zip(answer["found"], nearest.matches, strict=True)
    ]
    pictures = tuple(match.image or b"" for match in nearest.matches)
    contents, epsilon = nearest.answer.contents, nearest.guarantee.epsilon
    sheet = ContactSheet(pixels, nearest.set, nearest.n_sets, contents, pictures, captions, epsilon)
    sheet.save(path, force=force)


@command(url="--server")
def classify(
    options: ServerOptions,
    images: list[Path] = argument("Private images.", metavar="IMAGE"),
    server: str = option("Server of the gallery: https://host:8321.", metavar="URL"),
    extractor: str = EXTRACTOR,
    as_json: bool = JSON,
) -> None:
    """Classify images with the model of a protected gallery. Nothing about them is sent, and nothing is paid.

    The model is downloaded first; it is the same for every client. Then the images are read and classified on this
    machine. Files that can't be decoded are reported, the others are classified, and the exit code is 1.

    For example:
        nearveil classify *.png --server https://scans.example:8321 --token-file token.txt --gallery scans --json
    """
    from nearveil.features import ImageError

    results: list[tuple[Path, Classified]] = []
    failures: list[tuple[Path, str]] = []
    with output.show_bars() as start, options.connect(server, extractor=load_extractor(extractor)) as client:
        guarantee = client.model(gallery=options.gallery).guarantee  # before the first image is read
        tick = start("Classifying", len(images))
        for image in images:
            try:
                results.append((image, client.classify(image, gallery=options.gallery)))
            except ImageError as error:
                failures.append((image, error.reason))
            tick(1)
    caution = results[0][1].caution if results else ""
    if as_json:
        classes = [
            {"image": str(image), "label": result.label, "probabilities": dict(result.probabilities)}
            for image, result in results
        ]
        failed = [{"image": str(image), "reason": reason} for image, reason in failures]
        cost = {"epsilon": 0.0, "paid": 0.0, "gallery_guarantee": str(guarantee)}
        output.print_json({"images": classes, "failed": failed, "caution": caution, **cost})
    elif results:
        rows = []
        for image, result in results:
            best = sorted(result.probabilities.items(), key=lambda pair: -pair[1])[:_N_CLASSES]
            runners_up = ", ".join(f"{label} {probability:.3f}" for label, probability in best[1:])
            rows.append((image, best[0][0], f"{best[0][1]:.3f}", runners_up))
        output.print_table(["image", "class", "probability", "then"], rows, right=("probability",))
        output.print_lines(
            *filter(None, [caution]),
            "The server saw nothing that depends on an image, and nothing was paid.",
            f"Guarantee of the gallery for its records: {guarantee}",
        )
    if failures:
        output.fail("; ".join(f"{image}: {reason}" for image, reason in failures))


@command(url="URL")
def sync(
    options: ServerOptions,
    url: str | None = argument("Server of the gallery: https://host:8321.", metavar="URL"),
    server: str | None = option("The same URL, as in `nearveil query`.", metavar="URL"),
    home: str | None = HOME,
    most: int = option("Maximum download size in bytes.", default=2 << 30, min=1),
    as_json: bool = JSON,
) -> None:
    """Download the codes of a gallery, or those that changed, to search them on this machine for free.

    Every client downloads the same, so this reveals nothing about your queries and costs nothing. Run it on a
    schedule, not because of an image: the server sees when you do.

    For example:
        nearveil sync https://birds.example:8321 --token-file token.txt
        nearveil query me.jpg --server https://birds.example:8321 --token-file token.txt
    """
    if (url is None) == (server is None):
        raise ValueError("URL: give the URL of the server once, as the argument or with --server")
    with output.show_bars() as start:
        progress = output.show_done(start, "Downloading codes")
        with options.connect(url or server or "", home=home) as client:
            copy = client.sync(gallery=options.gallery, most=most, progress=progress)
    size = sum(path.stat().st_size for path in copy.folder.iterdir())
    if as_json:
        output.print_json({"folder": str(copy.folder), "items": len(copy), "bytes": size, "fetched": copy.fetched})
    else:
        output.print_lines(
            f"{len(copy):,} items in {copy.folder} ({size / 1e6:,.2f} MB); {copy.fetched / 1e6:,.2f} MB downloaded.",
            "`nearveil query IMAGE_OR_VECTOR --server URL` searches them, reveals nothing and costs nothing.",
        )
