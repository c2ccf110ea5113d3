"""The client's half: from a private row to a message, and from an answer to neighbours."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearveil.mechanisms import Message, Release
from nearveil.privacy.noise import Source
from nearveil.retrieval._answer import Answer, AnswerError
from nearveil.retrieval._codes import Codes, Singles

_BLOCK = 1 << 13  # candidates whose codes are read at once: an answer is larger in memory than on the wire


class Client:
    """Makes messages, and chooses among the candidates that come back by the true feature.

    Parameters
    ----------
    mechanism : Release
        Fitted on the public rows, with the server's public map where it has one.
    codes : Codes
        The server's public table.
    """

    def __init__(self, mechanism: Release, codes: Codes) -> None:
        self._mechanism = mechanism
        self._codes = codes

    def ask(self, X: ArrayLike, *, rng: Source | None = None) -> Any:
        """Return the message of a row, or a list of them for a batch. Each spends the guarantee once.

        Parameters
        ----------
        X : array-like of shape (d,) or (n, d)
        rng : Source, optional

        Returns
        -------
        Message or list of Message
        """
        found: Message | list[Message] = self._mechanism.release(X, rng=rng)
        return found

    def choose(self, X: ArrayLike, answers: Sequence[Answer], k: int) -> NDArray[np.int64]:
        """Return the k best candidates of each row's answer. Local: nothing is sent, nothing is fetched.

        Parameters
        ----------
        X : array-like of shape (n, d)
        answers : sequence of n Answer
        k : int

        Returns
        -------
        ndarray of shape (n, k), int64
            Ids of the gallery, best first.
        """
        return self.ranked(X, answers, k)[0]

    def ranked(self, X: ArrayLike, answers: Sequence[Answer], k: int) -> tuple[NDArray[np.int64], Singles]:
        """Return what :meth:`choose` returns, and what it went by.

        Parameters
        ----------
        X : array-like of shape (n, d)
        answers : sequence of n Answer
        k : int

        Returns
        -------
        ids : ndarray of shape (n, k), int64
        scores : ndarray of shape (n, k), float32
            Finite, whatever the table.
        """
        # In 64 bits: a hostile table of tiny numbers would take some queries where 32-bit arithmetic is slow.
        with np.errstate(all="ignore"):
            queries = self._mechanism.features(X)
        if len(answers) != len(queries):
            raise ValueError(f"answers must be {len(queries)}, one for each row of X")
        chosen, scores = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
        groups: dict[int, list[int]] = {}
        for row, answer in enumerate(answers):
            groups.setdefault(id(answer), []).append(row)
        for rows in groups.values():
            chosen[rows], scores[rows] = self._best(queries[rows], answers[rows[0]], k)
        return chosen, scores

    def _best(self, queries: NDArray[np.float64], answer: Answer, k: int) -> tuple[NDArray[np.int64], Singles]:
        if answer.codes.shape[1] != self._codes.width:
            raise AnswerError(f"answer must have codes of {self._codes.width} bytes: fetch the public table anew")
        if len(answer.ids) < k:
            raise AnswerError(f"answer must hold at least k = {k} candidates; it holds {len(answer.ids)}")
        # A hostile table may make scores overflow for some queries and not for others. To stop there would tell which.
        with np.errstate(all="ignore"):
            parts = [
                self._codes.scores(queries, answer.codes[start : start + _BLOCK])
                for start in range(0, len(answer.ids), _BLOCK)
            ]
            scores = np.nan_to_num(np.concatenate(parts, axis=1), nan=float(np.finfo(np.float32).min))
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return answer.ids[order].astype(np.int64), np.take_along_axis(scores, order, axis=1)
