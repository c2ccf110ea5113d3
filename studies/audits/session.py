"""The audit of a session of PrivateMail as published: a server sees where a message lies among its classes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearveil.audit import Experiment, Pair
from nearveil.audit._experiment import CLASSES, ROWS, draw_gallery
from nearveil.mechanisms import Message
from nearveil.privatemail import PrivateMail

_TRIALS = 2_000  # each message embeds all anchors


def make_session_experiment(mail: PrivateMail) -> Experiment:
    """Return the experiment of a session as published: row or label is replaced, and a server sees the near classes."""
    width = mail.n_features_in_
    labels = np.arange(ROWS) % CLASSES
    server = mail.embed_gallery(draw_gallery(width), labels)
    row, last = np.eye(width)[0], CLASSES - 1

    def numbers(messages: list[Message]) -> NDArray[Any]:
        features = []
        for message in messages:
            near = mail.rank_each(message, server)[0]
            by_class = np.bincount(labels, near) / np.bincount(labels)
            target, anchors = message["embedding"][0], message["embedding"][1:]
            features.append(np.concatenate([target, target - anchors.mean(axis=0), by_class, by_class / -near.mean()]))
        return np.array(features)

    return Experiment(
        name=f"{mail.name} (as published {mail.as_published})",
        guarantee=mail.guarantee,
        pairs=(
            Pair("one row, labels far apart", (mail.mean_ + row, 0), (mail.mean_ + row, last)),
            Pair("opposite unit vectors, one label", (mail.mean_ + row, 0), (mail.mean_ - row, 0)),
        ),
        run=lambda record, runs, rng: mail.release(
            np.tile(record[0], (runs, 1)), labels=np.full(runs, record[1]), rng=rng
        ),
        numbers=numbers,
        trials=_TRIALS,
    )
