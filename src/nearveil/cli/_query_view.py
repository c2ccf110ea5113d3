"""What ``nearveil query`` prints and draws."""

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nearveil.cli._budget import place
from nearveil.cli._budget_view import clean, number
from nearveil.features.images import Pixels
from nearveil.gallery.contact_sheet import ContactSheet, right_set
from nearveil.ledger import Balance
from nearveil.ledger.budget import format_down
from nearveil.privacy import Guarantee

if TYPE_CHECKING:
    from nearveil.service._results import Nearest

_NAMELESS = "(no name)"


@dataclass(frozen=True)
class Outcome:
    """One question and what came of it."""

    nearest: "Nearest"
    balance: Balance
    opened: str  # the ledger in which the account was opened just now; empty if it was there
    stale: bool  # whether the index has changed since its map was learned
    server: str | None = None  # who was asked; None for an index here

    @property
    def names(self) -> list[str]:
        """Of the images that were found."""
        return [match.name or _NAMELESS for match in self.nearest.matches]

    @property
    def similarities(self) -> list[float]:
        """Of the images that were found."""
        return [match.similarity for match in self.nearest.matches]

    @property
    def promise(self) -> Guarantee:
        """Of the message."""
        return self.nearest.guarantee

    @property
    def paid(self) -> float:
        """What this run cost."""
        return 0.0 if self.nearest.repeated else self.promise.epsilon

    @property
    def right(self) -> float:
        """How often a message names the set that suits its image."""
        return right_set(self.promise.epsilon, self.nearest.n_sets)

    @property
    def notes(self) -> list[str]:
        """What else there is to say."""
        balance = self.balance
        notes = []
        if self.opened:
            where = "" if self.opened == place(None) else f" --ledger {shlex.quote(self.opened)}"
            notes.append(
                f"Opened the account {balance.account!r} in {self.opened}: epsilon {balance.epsilon:g} at delta "
                f"{balance.delta:g} for all questions together. See `nearveil budget show{where}`."
            )
        if self.nearest.repeated:
            notes.append("This key was paid before: the same message was sent again, for nothing.")
        if self.stale:
            notes.append("The index has changed since its map was made: run `nearveil index DIR` to find what is new.")
        return notes


def show(outcome: Outcome, sheet: Path | None, *, as_json: bool) -> None:
    """Print what was found, what it cost and what is left.

    `sheet`: Where the contact sheet will be.
    """
    if as_json:
        typer.echo(json.dumps(_as_json(outcome, sheet), allow_nan=False))
        return
    balance, nearest = outcome.balance, outcome.nearest
    grid = Table()
    grid.add_column("", justify="right")
    grid.add_column("name", overflow="fold")
    grid.add_column("similarity", justify="right")
    for rank, (name, similarity) in enumerate(zip(outcome.names, outcome.similarities, strict=True), 1):
        grid.add_row(f"{rank}", Text(clean(name)), f"{similarity:.3f}")
    console = Console(highlight=False)
    console.print(grid)
    for line in (
        _seen(outcome),
        str(outcome.promise),
        f"Paid: epsilon {outcome.paid:g}, from the account {balance.account!r}; left: {format_down(balance.left)} of "
        f"{balance.epsilon:g}.",
        *outcome.notes,
        f"To see this answer again, for nothing: --key {nearest.key}, with the same image.",
        *([] if sheet is None else [f"Contact sheet: {sheet}"]),
    ):
        console.print(Text(clean(line)), soft_wrap=True)


def _seen(outcome: Outcome) -> str:
    """Return what the other side knows now."""
    nearest = outcome.nearest
    if nearest.set is None:
        return (
            f"The other side saw: {len(nearest.sets)} messages in random order, one of them about your image, and sent "
            f"the {nearest.candidates:,} images of their sets; these were chosen here. Yours names the set that suits "
            f"its image with probability {outcome.right:.2f}, and else any other."
        )
    return (
        f"The other side saw: set {nearest.set + 1} of {nearest.n_sets}, and sent all {nearest.candidates:,} images of "
        f"it; these were chosen here. A message names the set that suits its image with probability "
        f"{outcome.right:.2f}, and else any other."
    )


def check_sheet(path: Path | None, *, force: bool, among_dummies: bool) -> None:
    """Raise unless a contact sheet may be written here, or none is wanted; before anything is paid."""
    if path is None:
        return
    if among_dummies:
        raise ValueError("--sheet: it shows one message, and --dummies sends many: leave one of them out")
    if path.suffix.lower() != ".png":
        raise ValueError("--sheet: it must end in .png")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--sheet: the folder of {path} does not exist; make it, or give another path")
    if path.is_dir() or (path.exists() and not force):
        raise ValueError(f"--sheet: {path} exists; --force replaces a file, or give another path")


def write_sheet(outcome: Outcome, pixels: Pixels, path: Path, *, force: bool) -> None:
    """Draw the contact sheet and write it, readable by its owner alone: it shows the private image.

    `pixels`: The private image.
    `force`: Whether a file is replaced.
    """
    pairs = zip(outcome.names, outcome.similarities, strict=True)
    captions = [
        f"{clean(Path(name).stem)}\n{rank}: {similarity:.3f}" for rank, (name, similarity) in enumerate(pairs, 1)
    ]
    found, nearest = outcome.nearest.found, outcome.nearest
    content = ContactSheet(
        query=pixels,
        named=nearest.sets[0],
        n_sets=nearest.n_sets,
        candidates=found.answer.images,
        found=found.images,
        captions=captions,
        epsilon=outcome.promise.epsilon,
    ).to_png()
    if force:
        path.unlink(missing_ok=True)  # so that the new one has its own rights, and a link is not written through
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as out:
        out.write(content)


def _as_json(outcome: Outcome, sheet: Path | None) -> dict[str, object]:
    nearest, names = outcome.nearest, outcome.names
    return {
        "found": [
            {"rank": rank, "id": one.id, "name": name, "similarity": one.similarity}
            for rank, (one, name) in enumerate(zip(nearest.matches, names, strict=True), 1)
        ],
        "server": outcome.server,
        "server_saw": {
            # From 1, as in the text and on the sheet.
            "set": None if nearest.set is None else nearest.set + 1,
            "sets": [one + 1 for one in nearest.sets],
            "of": nearest.n_sets,
            "probability_of_the_right_one": outcome.right,
        },
        "candidates": nearest.candidates,
        "bytes_sent": nearest.bytes_sent,
        "bytes_received": nearest.bytes_received,
        "epsilon": outcome.promise.epsilon,
        "promise": str(outcome.promise),
        "paid": outcome.paid,
        "account": outcome.balance.account,
        "spent": number(outcome.balance.spent),
        "left": outcome.balance.left,
        "opened": outcome.opened or None,
        "key": nearest.key,
        "repeated": nearest.repeated,
        "sheet": None if sheet is None else str(sheet),
        "notes": outcome.notes,
    }
