"""Label inference: what a whole PrivateMail session, as published, tells about the target's own label."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.audit._defaults import CLASSES, Floats, gallery
from nearveil.audit._experiment import Experiment, Pair
from nearveil.mechanisms import Message, PrivateMail
from nearveil.privacy.noise import Source

_TRIALS = 2_000  # a message embeds all anchors anew


def published_session(mail: PrivateMail) -> Experiment:
    """Return the experiment of a session as published: a record is a row and its label, and either may be replaced.

    The server sees the message, aligns it with its own gallery, and ranks. It looks which class comes near.

    `mail`: Fitted, with `as_published`.
    """
    width = mail.n_features_in_
    items = gallery() if width == gallery().shape[1] else np.random.default_rng(1).standard_normal((200, width))
    labels = np.arange(len(items)) % CLASSES
    server = mail.embed_gallery(items, labels)
    row, last = np.eye(width)[0], CLASSES - 1

    def run(record: tuple[Floats, int], runs: int, source: Source) -> list[Message]:
        found: list[Message] = mail.release(np.tile(record[0], (runs, 1)), labels=np.full(runs, record[1]), rng=source)
        return found

    def numbers(messages: list[Message]) -> NDArray[Any]:
        seen = []
        for message in messages:
            near = mail.rank_each(message, server)[0]
            by_class = np.bincount(labels, near) / np.bincount(labels)
            own = message["embedding"]
            # The target itself, and how near each class of the server's items it comes.
            seen.append(np.concatenate([own[0], own[0] - own[1:].mean(axis=0), by_class, by_class / -near.mean()]))
        return np.array(seen)

    return Experiment(
        name=f"{mail.name} (as published {mail.as_published})",
        promise=mail.guarantee,
        pairs=(
            Pair("one row, labels far apart", (mail.mean_ + row, 0), (mail.mean_ + row, last)),
            Pair("opposite unit vectors, one label", (mail.mean_ + row, 0), (mail.mean_ - row, 0)),
        ),
        run=run,
        numbers=numbers,
        trials=_TRIALS,
    )
