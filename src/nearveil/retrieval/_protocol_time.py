"""How long the client's work may take, from public sizes alone: bounds that leave room on slow and busy machines.

Measured on one core of a server: a question takes 8 ms of processor time on a map that is held, a dummy 1 ms, a new map
6 ns a byte. Where a bound is passed all the same, on a busy machine, a client waits for its next multiple
(``docs/theory/service.md``).
"""

from nearveil.retrieval._wire_codes import code_dimension
from nearveil.retrieval._wire_public import PublicPart

_BASE = 0.1  # seconds: a debit, and whatever does not grow
_MESSAGE = 5e-3  # seconds, besides its operations
_BYTE = 2e-8  # seconds to read one
_OPERATION = 5e-9  # seconds
_NETWORK = 256  # operations for a prototype, besides its products
_CANDIDATE = 256  # operations for a candidate, besides its score


def question_period(public: PublicPart, messages: int = 1) -> float:
    """Return the seconds for reading a public part, paying and making messages.

    `messages`: The private one and dummies.
    """
    held = public.map
    features, dimensions = held.components.shape
    work = features * dimensions + len(held.prototypes) * (dimensions + _NETWORK + held.n_sets)
    size = held.components.nbytes + held.prototypes.nbytes + held.coverage.nbytes + public.table.nbytes
    return float(_BASE + _BYTE * size + messages * (_MESSAGE + _OPERATION * work))


def choice_period(public: PublicPart, answers: int, size: int) -> float:
    """Return the seconds for reading answers and choosing among their candidates.

    `size`: Bytes of all answers.
    """
    work = public.table.nbytes + answers * public.map.set_size * (code_dimension(public.table) + _CANDIDATE)
    return _BASE / 2 + _BYTE * size + _OPERATION * work
