"""``nearveil query``, ``classify`` and ``sync``: ask an index here, or a server, privately."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nearveil.cli._asking import (
    AccountName,
    LazyAccount,
    describe_opening,
    describe_question_error,
    join_certificate,
    open_client,
    read_token,
)
from nearveil.cli._shared import (
    AUTO,
    Authorities,
    ExtractorName,
    HomeFolder,
    IndexPlace,
    Insecure,
    Json,
    LedgerPlace,
    OwnCertificate,
    OwnKey,
    TokenFile,
    TokenText,
    Witness,
    clean,
    print_json,
    print_lines,
    print_table,
    report_errors,
    show_bars,
)

if TYPE_CHECKING:
    from nearveil.client import Nearest
    from nearveil.client.clients import Client
    from nearveil.client.results import Classified
    from nearveil.features.images import Pixels
    from nearveil.ledger.history import Balance
    from nearveil.privacy import Guarantee


def query(
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="The private image, or a vector in a .npy file.")],
    epsilon: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=40,
            help="What the question may cost; 4 by default. 0 searches the copy that `nearveil sync` fetched; without "
            "a copy it asks a sealed question, if the gallery answers them.",
        ),
    ] = None,
    by: Annotated[
        Literal["auto", "message", "home", "sealed"],
        typer.Option(help="How to ask. home and sealed cost nothing: epsilon is 0."),
    ] = "auto",
    k: Annotated[
        int | None, typer.Option("-k", min=1, help="How many to find; 8, or as many as an answer holds.")
    ] = None,
    index: IndexPlace = None,
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask a server instead of an index here: https://host:8321.")
    ] = None,
    token_file: TokenFile = None,
    token: TokenText = None,
    gallery: Annotated[str | None, typer.Option(help="Of the server; needed where it has several.")] = None,
    ca: Authorities = None,
    certificate: OwnCertificate = None,
    certificate_key: OwnKey = None,
    insecure: Insecure = False,
    candidates: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="The part of the gallery that the answer holds; there must be a map for it."),
    ] = None,
    extractor: ExtractorName = AUTO,
    home: HomeFolder = None,
    ledger: LedgerPlace = None,
    account: AccountName = None,
    key: Annotated[
        str | None, typer.Option(help="Names this question: again with the same image and key, nothing is paid.")
    ] = None,
    sheet: Annotated[Path | None, typer.Option(help="Where a contact sheet goes; a .png.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the contact sheet if there is one.")] = False,
    witness: Witness = None,
    as_json: Json = False,
) -> None:
    """Find the images nearest to a private one. The other side sees the name of one set, and nothing else.

    With --by sealed it sees noise; with --by home, nothing. The account pays before the question exists. The image and
    its feature stay in memory: neither is written down, unless you ask for a contact sheet. With --server, an index
    here plays no part.

    [bold]Examples[/bold]

    nearveil query me.jpg

    nearveil query me.jpg --epsilon 2 -k 4 --sheet found.png

    nearveil query me.jpg --account holiday --ledger budget.db --json

    nearveil query me.jpg --server https://birds.example:8321 --token-file token.txt --gallery birds

    nearveil query me.jpg --epsilon 0 --server https://birds.example:8321 --token-file token.txt

    nearveil query me.jpg --by sealed --server https://birds.example:8321 --token-file token.txt
    """
    if by in ("home", "sealed") and epsilon:
        raise typer.BadParameter(f"by {by} nothing is told and nothing is paid: leave it out", param_hint="--epsilon")
    if by == "message" and epsilon == 0:
        raise typer.BadParameter("a message needs an epsilon above 0", param_hint="--epsilon")
    with report_errors(extractor="--extractor"):
        from nearveil.features import load_image
        from nearveil.features.backbones import make_extractor
        from nearveil.features.vectors import read_vector
        from nearveil.ledger import new_key

        number, payer = key or new_key(), LazyAccount(ledger, account, witness)
        if epsilon is None:
            epsilon = 0.0 if by in ("home", "sealed") else 4.0
        if sheet is not None and image.suffix.lower() == ".npy":
            raise ValueError("--sheet: a vector has no picture: leave it out")
        _check_sheet(sheet, force=force)
        if sheet is not None and epsilon == 0:
            raise ValueError("--sheet: at epsilon 0 no images come, only names: leave it out")
        tool = None if extractor == AUTO else make_extractor(extractor)
    with report_errors(epsilon="--epsilon"), payer, _name_options(number, payer, local=server is None):
        pixels: Any = read_vector(image) if image.suffix.lower() == ".npy" else load_image(image)
        common: dict[str, Any] = {"account": payer, "extractor": tool, "home": home}
        tls = {"ca": ca, "certificate": join_certificate(certificate, certificate_key), "insecure": insecure}
        with open_client(server, index, gallery, read_token(token_file, token, server), common, tls) as (client, held):
            nearest = client.nearest(
                pixels,
                k,
                epsilon,
                candidates,
                gallery=gallery,
                thumbnails=sheet is not None,
                key=number,
                by=by,
            )
            stale = held is not None and held.current().stale
        answer = PaidAnswer(nearest, payer.account.balance() if epsilon else None, payer.opened, stale, server)
    # What was paid for is shown first: a sheet that cannot be written must not lose it.
    _show(answer, sheet, as_json=as_json)
    if sheet is not None:
        with report_errors():
            _write_sheet(answer, pixels, sheet, force=force)


@contextmanager
def _name_options(key: str, payer: "LazyAccount", *, local: bool) -> Iterator[None]:
    """Say what is wrong in the words of the command line."""
    from nearveil.client import QuestionError, UnansweredError

    try:
        yield
    except QuestionError as error:
        raise ValueError(describe_question_error(error, local=local)) from None
    except UnansweredError as error:
        again = f"{error.reason}. It is paid for: --key {error.key} asks the same again"
        raise ValueError(again if error.again else str(error)) from None
    except KeyboardInterrupt:
        if payer.has_paid:
            typer.echo(f"It is paid for: --key {key} asks the same again", err=True)
        raise


@dataclass(frozen=True)
class PaidAnswer:
    """One question and what came of it."""

    nearest: "Nearest"
    balance: "Balance | None"  # of the account that paid; None where nothing was asked
    opened: str  # the ledger in which the account was opened just now; empty if it was there
    stale: bool  # whether the index has changed since its map was learned
    server: str | None = None  # who was asked; None for an index here

    @property
    def names(self) -> list[str]:
        """Of the images that were found."""
        return [match.name or match.external_id or f"item {match.id}" for match in self.nearest.matches]

    @property
    def similarities(self) -> list[float]:
        """Of the images that were found."""
        return [match.similarity for match in self.nearest.matches]

    @property
    def guarantee(self) -> "Guarantee":
        """Of the message."""
        return self.nearest.guarantee

    @property
    def paid(self) -> float:
        """What this run cost."""
        return 0.0 if self.nearest.repeated else self.guarantee.epsilon

    @property
    def right(self) -> float:
        """How often a message names the set that suits its image."""
        from nearveil.gallery.contact_sheet import right_set

        return 1.0 if self.nearest.set is None else right_set(self.guarantee.epsilon, self.nearest.n_sets)

    @property
    def notes(self) -> list[str]:
        """What else there is to say."""
        from nearveil.client.questions import USUAL

        balance = self.balance
        notes = []
        if balance is not None and self.opened:
            notes.append(describe_opening(balance, self.opened))
        if self.nearest.repeated:
            notes.append("This key was paid before: the same message was sent again, for nothing.")
        if self.nearest.set is not None and self.nearest.n_candidates < USUAL:
            notes.append(
                f"Answers of this gallery hold {self.nearest.n_candidates} items, and a message finds no more than "
                "these. --epsilon 0 compares all items, tells nothing and costs nothing, where it is offered."
            )
        if self.stale:
            notes.append("The index has changed since its map was made: run `nearveil index DIR` to find what is new.")
        return notes


def _show(answer: PaidAnswer, sheet: Path | None, *, as_json: bool) -> None:
    """Print what was found, what it cost, what is left, and where the contact sheet will be."""
    if as_json:
        print_json(_make_answer_dict(answer, sheet))
        return
    from nearveil.ledger.budget import format_down

    balance, nearest = answer.balance, answer.nearest
    pairs = enumerate(zip(answer.names, answer.similarities, strict=True), 1)
    rows = [(rank, name, f"{similarity:.3f}") for rank, (name, similarity) in pairs]
    print_lines(nearest.quality_summary)
    print_table(["", "name", "similarity"], rows, right=("", "similarity"))
    if balance is None:
        print_lines(_describe_seen(answer), str(answer.guarantee), *answer.notes)
        return
    print_lines(
        _describe_seen(answer),
        str(answer.guarantee),
        f"Paid: epsilon {answer.paid:g}, from the account {balance.account!r}; left: {format_down(balance.left)} of "
        f"{balance.epsilon:g}.",
        *answer.notes,
        f"To see this answer again, for nothing: --key {nearest.key}, with the same query.",
        *([] if sheet is None else [f"Contact sheet: {sheet}"]),
    )


def _describe_seen(answer: PaidAnswer) -> str:
    """Return what the other side knows now."""
    nearest, count = answer.nearest, answer.nearest.n_candidates
    if nearest.sealed:
        sizes = " and ".join(f"{len(one):,}" for one in nearest.sealed)
        return (
            f"The other side saw that a question was asked, and when: two sealed messages of {sizes} bytes, all noise."
        )
    if nearest.set is None:
        return f"The other side saw nothing. A copy of all {count:,} items was searched on this machine, at no cost."
    return (
        f"The other side saw: set {nearest.set + 1} of {nearest.n_sets}, and sent all {count:,} items of "
        f"it; these were chosen here. A message names the set that suits its query with probability "
        f"{answer.right:.2f}, and else any other."
    )


def _check_sheet(path: Path | None, *, force: bool) -> None:
    """Raise unless a contact sheet may be written here, or none is wanted; before anything is paid."""
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise ValueError("--sheet: it must end in .png")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--sheet: the folder of {path} does not exist; make it, or give another path")
    if not os.access(path.absolute().parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise ValueError(f"--sheet: {path} cannot be written; nothing was paid, give another path")
    if path.is_dir() or (path.exists() and not force):
        raise ValueError(f"--sheet: {path} exists; --force replaces a file, or give another path")


def _write_sheet(answer: PaidAnswer, pixels: "Pixels", path: Path, *, force: bool) -> None:
    """Draw the contact sheet of an answer, and write it."""
    from nearveil.gallery.contact_sheet import ContactSheet

    pairs = zip(answer.names, answer.similarities, strict=True)
    captions = [
        f"{clean(Path(name).stem)}\n{rank}: {similarity:.3f}" for rank, (name, similarity) in enumerate(pairs, 1)
    ]
    found, nearest = answer.nearest.found, answer.nearest
    assert nearest.set is not None
    sheet = ContactSheet(
        query=pixels,
        named=nearest.set,
        n_sets=nearest.n_sets,
        candidates=found.answer.images,
        found=found.images,
        captions=captions,
        epsilon=answer.guarantee.epsilon,
    )
    sheet.save(path, force=force)


def _make_answer_dict(answer: PaidAnswer, sheet: Path | None) -> dict[str, object]:
    from nearveil.ledger.views import replace_infinity

    nearest, names = answer.nearest, answer.names
    return {
        "found": [
            {"rank": rank, "id": one.id, "name": name, "similarity": one.similarity}
            for rank, (one, name) in enumerate(zip(nearest.matches, names, strict=True), 1)
        ],
        "server": answer.server,
        "server_saw": {
            # From 1, as in the text and on the sheet.
            "set": None if nearest.set is None else nearest.set + 1,
            "of": nearest.n_sets,
            "probability_of_the_right_one": answer.right,
        },
        "named_best_set": nearest.named_best_set,
        "expected_share": nearest.expected_share,
        "worth": nearest.quality_summary,
        "candidates": nearest.n_candidates,
        "bytes_sent": nearest.bytes_sent,
        "bytes_received": nearest.bytes_received,
        "epsilon": answer.guarantee.epsilon,
        "promise": str(answer.guarantee),
        "paid": answer.paid,
        "account": None if answer.balance is None else answer.balance.account,
        "spent": None if answer.balance is None else replace_infinity(answer.balance.spent),
        "left": None if answer.balance is None else answer.balance.left,
        "opened": answer.opened or None,
        "key": nearest.key,
        "repeated": nearest.repeated,
        "sheet": None if sheet is None else str(sheet),
        "notes": answer.notes,
    }


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
        from nearveil import Client
        from nearveil.client import QuestionError
        from nearveil.features.backbones import make_extractor

        tls: dict[str, Any] = {
            "ca": ca,
            "certificate": join_certificate(certificate, certificate_key),
            "insecure": insecure,
            "extractor": None if extractor == AUTO else make_extractor(extractor),
        }
        try:
            with Client(server, read_token(token_file, token, server), **tls) as client:
                guarantee = client.model(gallery=gallery).guarantee  # before the first image is looked at
                tried = [(image, _classify_image(client, image, gallery)) for image in images]
        except QuestionError as error:
            raise ValueError(describe_question_error(error, local=False)) from None
    found = [(image, one) for image, one in tried if not isinstance(one, str)]
    bad = [(image, one) for image, one in tried if isinstance(one, str)]
    if as_json:
        print_json(_make_classes_dict(found, bad, guarantee))
    elif found:
        _show_classes(found, guarantee)
    print_lines(*(f"{image}: {reason}" for image, reason in bad), stderr=True)
    if bad:
        raise typer.Exit(1)


def _classify_image(client: "Client", image: Path, gallery: str | None) -> "Classified | str":
    """Return what an image is, or why it is none."""
    from nearveil.features import ImageError

    try:
        return client.classify(image, gallery=gallery)
    except ImageError as error:
        return error.reason


def _show_classes(found: "list[tuple[Path, Classified]]", guarantee: "Guarantee") -> None:
    rows = []
    for image, one in found:
        (label, share), *others = sorted(one.probabilities.items(), key=lambda pair: -pair[1])[:_SHOWN]
        rest = ", ".join(f"{name} {chance:.3f}" for name, chance in others)
        rows.append((image, label, f"{share:.3f}", rest))
    print_table(["image", "class", "probability", "and then"], rows, right=("probability",))
    lines = (
        found[0][1].caution,
        "The other side saw nothing that depends on an image, and nothing was paid.",
        f"It says about its records: {guarantee}",
    )
    print_lines(*filter(None, lines))


def _make_classes_dict(
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
    from nearveil import Client
    from nearveil.client import QuestionError

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
            raise ValueError(describe_question_error(error, local=False)) from None
    size = sum(path.stat().st_size for path in copy.folder.iterdir())
    if as_json:
        print_json({"folder": str(copy.folder), "items": len(copy), "bytes": size, "fetched": copy.fetched})
    else:
        print_lines(
            f"{len(copy):,} items in {copy.folder} ({size / 1e6:,.2f} MB); {copy.fetched / 1e6:,.2f} MB were fetched.",
            "`nearveil query --epsilon 0` searches them, tells nothing and costs nothing.",
        )
