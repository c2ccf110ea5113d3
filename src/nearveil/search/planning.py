"""Plan a search: compare ways to search by gallery size, epsilon and answer size, before anything is built."""

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from nearveil.gallery import codes
from nearveil.gallery.answers import IMAGE_HEADER_BYTES, Answer
from nearveil.gallery.codes import CodeBytes
from nearveil.gallery.publishing import MapTerms
from nearveil.mechanisms.covers.channels import check_channel_epsilon
from nearveil.mechanisms.covers.maps import (
    MOST_DIMENSIONS,
    MOST_GRADED,
    MOST_SETS,
    count_least_sets,
    count_prototypes,
    usual_number,
)
from nearveil.privacy.checks import check_integer, is_integer
from nearveil.sealed.sizes import estimate_sizes
from nearveil.search.ceiling import neighbor_ceiling, popular_floor, utility_ceiling

WHOLE, RELEASE, NONE = "whole gallery", "covers", "none"

# Shares of the ceiling that learned covers reach. Answers of a tenth or more: CUB and Cars, epsilon 1 to 6 (nearveil
# study covers). Smaller ones: the share falls with the answer's fraction of the gallery (nearveil study growth, answers
# of 600 items); below the measured range, assume the same slope.
SHARES = (0.85, 0.96)
_FRACTIONS = (0.0006, 0.003, 0.01, 0.1)
_LOW_SHARES = (0.41, 0.64, 0.73, SHARES[0])
_MOST_MEASURED = 1_000_000  # items
# The fraction of items in a set, by the total size of all sets as a fraction of the gallery: both studies.
_SET_SIZES = (0.0, 0.4, 0.5, 0.7, 1.0, 1.2, 2.6)
_REACHES = (0.0, 0.29, 0.52, 0.64, 0.85, 0.92, 0.98)
# The share of that recall which is left if every item must be in a set, by the fraction that is in one without it:
# 200,000 documents at epsilon 1, 2 and 4, docs/theory/covers.md.
_WITH_ALL = ((0.29, 0.52, 0.85, 1.0), (0.36, 0.55, 0.93, 1.0))
CODE_LOSS = 0.07  # loss of NN-recall by codes of 128 bytes for 1280 features: nearveil study codes
# By the bytes of a code for each number of a row: CUB and GloVe.
_LOSSES = ((0.1, 0.2, 0.4, 0.75, 1.0), (CODE_LOSS, 0.036, 0.03, 0.03, 1 - codes.KEPT_RECALL))
_TERMS = MapTerms()  # of `nearveil index`, without options
STORAGE = 2 << 30  # bytes that a client stores by default
_TOP = 8  # neighbours in NN-recall@8
_NAME = 16 + IMAGE_HEADER_BYTES  # bytes of a name, for estimates
_MESSAGE = 140  # bytes
_PROBED = 0.989  # recall of sealed search among 100,000 photographs: docs/results/sealed.md
_LARGEST_PASS = 100 << 30  # bytes that a server scans for a query: seconds on one GPU, a minute on a core
_WORTH = 0.5  # minimum of e^eps f for a useful message
# NN-recall@8 by mechanism at four epsilons, for answers of a tenth of 5,900 photographs of birds: nearveil study
# retrieval. The most popular items, without a query, find 0.285.
_MEASURED_EPSILONS, _WITHOUT_QUERY = (1.0, 2.0, 4.0, 8.0), 0.285
_MEASURED = {
    "covers": (0.344, 0.483, 0.763, 0.945),
    "privunit": (0.155, 0.226, 0.393, 0.669),
    "analytic-gaussian": (0.108, 0.118, 0.148, 0.206),
    "latent": (0.102, 0.130, 0.171, 0.272),
    "ome": (0.073, 0.076, 0.091, 0.106),
    "privatemail (gaussian)": (0.112, 0.116, 0.125, 0.145),
    "privatemail (laplace)": (0.131, 0.138, 0.147, 0.166),
}
_REASONS = {
    "home": "it fits, if the operator shares all codes",
    "sealed": "it fits, even if the operator does not share codes",
    "message": "one small request, and a map to store",
}


@dataclass(frozen=True)
class SearchWay:
    """One way to search a gallery, and its costs per query."""

    name: str  # message, home or sealed
    server_learns: str  # from a query
    epsilon: float
    stored_bytes: int  # by the client, once
    sent_bytes: int  # by the client
    received_bytes: int  # by the client
    scanned_bytes: int  # by the server
    recall: tuple[float, float]  # expected fraction of the true nearest neighbours, from and to
    commands: tuple[str, ...] = ()  # if a message cannot work, commands of alternatives
    recommended: bool = False
    reason: str = ""


@dataclass(frozen=True)
class SearchPlan:
    """The result of :func:`plan`. ``str`` gives sentences."""

    release: str  #: to use; "whole gallery" if all codes fit into an answer, "none" if it is too small for epsilon
    items: int
    epsilon: float  #: cost of a query: 0 if no message depends on it
    delta: float
    candidates: float  #: the fraction f of the gallery that fits into the answer
    expected: tuple[float, float]  #: NN-recall, from and to; between floor and ceiling
    floor: float  #: recall of the same answer for everyone
    ceiling: float  #: the limit of every private release
    epsilon_needed: float  #: smallest useful epsilon for such an answer: ln(1/f)
    answer_needed: int  #: bytes of the smallest useful answer at this epsilon: f = e^-epsilon
    answer_whole: int  #: bytes of the whole gallery's codes
    popularity_known: bool  #: if false, the ceiling is a line for equally popular items, which hubs may exceed
    reach: float  #: fraction of items in a set, as planned; messages never return the others
    free_reach: float  #: the same with `--reach 0`, approximately
    free_expected: tuple[float, float]  #: NN-recall with `--reach 0`
    dimension: int
    n_sets: int  #: about as many sets as the map would have; 0 without a message
    code_bytes: CodeBytes  #: as planned: "auto", or a number
    item_bytes: int  #: per item in an answer; with "auto" the most likely number
    extrapolated: bool  #: whether this is beyond the measured sizes
    ways: tuple[SearchWay, ...] = ()  #: home, sealed and, if it is useful, message

    @property
    def commands(self) -> tuple[str, ...]:
        """Commands of the recommended way; empty if nothing works."""
        return next((way.commands for way in self.ways if way.recommended), ())

    def __str__(self) -> str:
        if self.release == WHOLE:
            return (
                f"The codes of all {self.items:,} items ({self.item_bytes} bytes each, "
                f"{format_bytes(self.answer_whole)}, and names) fit into one answer, so a message has no advantage. "
                "Use local search: the client downloads them once, sends no query, and epsilon is 0. "
                f"Ranking by codes loses about {self.code_loss:.0%} of the nearest items. To consider a message, plan "
                "a smaller answer."
            )
        if self.release == NONE:
            return self._suggest_alternatives()
        source = "as on image features"
        if self.extrapolated:
            source = (
                f"which is an extrapolation: covers were measured with answers of {_FRACTIONS[0]:.2%} and more, and up "
                f"to {_MOST_MEASURED:,} items"
            )
        return (
            f"By {self.release}: an answer of {self.candidates:.2%} of {self.items:,} items of {self.dimension:,} "
            f"dimensions, in codes of {self.item_bytes} bytes, at epsilon {self.epsilon:g}. Expect "
            f"{self.expected[0]:.0%} to {self.expected[1]:.0%} of the true nearest neighbours, {source}. "
            f"{self._describe_ceiling(0).capitalize()}; the same answer for everyone finds {self.floor:.0%}. "
            f"{self._describe_reach()} "
            f"The whole gallery's codes would take {format_bytes(self.answer_whole)}, at epsilon 0."
        )

    @property
    def code_loss(self) -> float:
        """The expected loss of recall by codes."""
        return float(np.interp((self.item_bytes - codes.ID_BYTES) / self.dimension, *_LOSSES))

    def _describe_reach(self) -> str:
        """Describe which items messages return, and what `--reach 0` changes."""
        low, high = self.free_expected
        share = f"about {self.free_reach:.0%} of the items are in a set, and others are never returned"
        if self.reach < 1:
            return f"This is with --reach 0: {share}."
        return f"Every item can be returned. With --reach 0 expect {low:.0%} to {high:.0%}, but {share}."

    def describe_codes(self) -> str:
        """Describe the size of codes, and what "auto" chooses from."""
        if self.code_bytes != "auto":
            return f"Codes have {self.item_bytes} bytes with the id."
        sizes = sorted(size + codes.ID_BYTES for size in codes.list_code_sizes(self.items, self.dimension))
        limit = codes.limit_code_bytes(self.items)
        download = f"The one-time download adds {_NAME} bytes for each name, and the map."
        if len(sizes) == 1:
            return f"Codes have {sizes[0]} bytes with the id, the only size for {self.items:,} items. {download}"
        return (
            f"Codes are estimated at {self.item_bytes} bytes with the id. `nearveil index` takes the smallest of "
            f"{', '.join(map(str, sizes))} that keeps {codes.KEPT_RECALL:.0%} of the 10 nearest items of your data, at "
            f"most {limit:,} bytes for {self.items:,} items, and prints its choice; --code-bytes fixes it. {download}"
        )

    def _describe_ceiling(self, digits: int) -> str:
        """Describe the ceiling and its condition."""
        bound = f"no private release finds more than {self.ceiling:.{digits}%}"
        return bound if self.popularity_known else f"{bound} if all items are equally popular"

    def _suggest_alternatives(self) -> str:
        ways = []
        if self.answer_needed < self.answer_whole:
            ways.append(f"an answer of {format_bytes(self.answer_needed)} at this epsilon")
        if self.candidates:
            ways.append(f"epsilon {round_up(self.epsilon_needed):g} with this answer")
        ways.append(f"the whole gallery's codes, {format_bytes(self.answer_whole)}, at epsilon 0")
        alternatives = f"Alternatives: {'; '.join(ways)}."
        if not self.candidates:
            return f"No release can work here: the answer has no room for even one item. {alternatives}"
        if self.epsilon == 0:
            return f"At epsilon 0 no message may depend on the query. {alternatives}"
        return (
            f"No local release can work here: the answer holds {self.candidates:.2%} of the items, and epsilon "
            f"{self.epsilon:g} raises the odds of the right ones by a factor of at most {math.exp(self.epsilon):.3g}. "
            f"For any mechanism, {self._describe_ceiling(2)}. {alternatives}"
        )


def plan(
    items: int,
    epsilon: float,
    answer_bytes: int | None = None,
    *,
    delta: float = 0.0,
    popularity: ArrayLike | None = None,
    dimension: int = 1280,
    storage: int = STORAGE,
    code_bytes: CodeBytes = _TERMS.code_bytes,
    reach: float = _TERMS.reach,
) -> SearchPlan:
    """Recommend a way to search, with its expected recall, as :class:`SearchPlan`.

    The ceiling is Theorem D's. If popularity is unknown, all items count as equally popular, the ceiling is a
    reference line and the floor is f. The expected recall is the share of the ceiling that learned covers reached on
    image data, at least the floor: `SHARES` for answers of a tenth of the gallery or more, and less for smaller ones
    (`find_shares`); with `reach` 1, the part of it that remained among 200,000 documents. Its lower end includes the
    loss by codes. Beyond measured sizes the plan states that it is an extrapolation.

    Parameters
    ----------
    epsilon : float
        Of one query: from 1e-6 to 40, or 0.
    answer_bytes : int, optional
        Maximum size of an answer; by default a tenth of the gallery, as in :meth:`nearveil.gallery.Index.publish`.
    popularity : array-like of shape (items,), optional
        How often each item is a true neighbour.
    storage : int, default=2 GiB
        Maximum bytes on the client, for local and sealed search.
    code_bytes, reach : optional
        As of :meth:`nearveil.gallery.Index.publish`, with the same defaults. The size that "auto" chooses depends on
        the data; the plan prices a byte or a little more for each number of a feature.

    Examples
    --------
    >>> print(plan(1_000_000, 1.0, 100_000, code_bytes=128))
    No local release can work here: the answer holds 0.08% of the items, and epsilon 1 raises the odds of the
    right ones by a factor of at most 2.72. For any mechanism, no private release finds more than 0.21% if all items
    are equally popular. Alternatives: an answer of 47.1 MB at this epsilon; epsilon 7.2 with this answer; the whole
    gallery's codes, 128.0 MB, at epsilon 0.
    >>> plan(1_000, 1.0, 4_000_000).release
    'whole gallery'
    """
    answer = ("answer_bytes", 1 if answer_bytes is None else answer_bytes)
    for name, value in (("items", items), answer, ("dimension", dimension), ("storage", storage)):
        check_integer(value, name, 1)
    if epsilon != 0:
        check_channel_epsilon(epsilon)
    utility_ceiling(epsilon, delta, 0.5)  # checks delta
    if popularity is not None and np.shape(popularity) != (items,):
        raise ValueError(f"popularity must hold one number for each of the {items} items")
    if not (code_bytes in (None, "auto") or is_integer(code_bytes, codes.ID_BYTES + 3)):
        raise ValueError(f'code_bytes must be "auto", None, or a whole number of at least {codes.ID_BYTES + 3}')
    if reach not in (0, 1):
        raise ValueError("reach must be 0 or 1: the recall between them is not known")
    size = codes.ID_BYTES + _count_code_bytes(code_bytes, int(items), int(dimension))
    whole = Answer.header_bytes + size * items
    if answer_bytes is None:
        answer_bytes = Answer.header_bytes + size * max(1, int(_TERMS.candidates * items))
    count = min(items, max(0, answer_bytes - Answer.header_bytes) // size)
    count = items if answer_bytes >= size * items else count  # ignore a missing header
    fraction = count / items
    floor, ceiling = _find_limits(epsilon, delta, fraction, popularity)
    works = bool(count and epsilon) and math.log(fraction) + epsilon >= math.log(_WORTH)
    release = WHOLE if count == items else RELEASE if works else NONE
    # Covers are pure, so delta does not help them. An answer of fewer than eight items cannot contain eight.
    reachable = _find_limits(epsilon, 0.0, fraction, popularity)[1]
    free_sets = _count_sets(items, count, epsilon, 0) if release == RELEASE else 0
    free_reach = float(np.interp(free_sets * fraction, _SET_SIZES, _REACHES)) if free_sets else 1.0
    search_plan = SearchPlan(
        release=release,
        items=int(items),
        epsilon=0.0 if release == WHOLE else float(epsilon),
        delta=0.0 if release == WHOLE else float(delta),
        candidates=fraction,
        expected=(0.0, 0.0),
        floor=floor,
        ceiling=ceiling,
        epsilon_needed=math.log(1 / fraction) if count else math.inf,
        answer_needed=min(whole, Answer.header_bytes + size * max(1, math.ceil(items * math.exp(-epsilon)))),
        answer_whole=whole,
        popularity_known=popularity is not None,
        reach=free_reach if reach == 0 else 1.0,
        free_reach=free_reach,
        free_expected=(0.0, 0.0),
        dimension=int(dimension),
        code_bytes=code_bytes,
        item_bytes=size,
        n_sets=_count_sets(items, count, epsilon, reach) if release == RELEASE else 0,
        extrapolated=release == RELEASE and (fraction < _FRACTIONS[0] or items > _MOST_MEASURED),
    )
    shares = (1.0, 1.0) if release == WHOLE else find_shares(fraction or 1.0)
    limits = floor, reachable, min(1.0, count / _TOP), 1 - search_plan.code_loss
    free = _estimate_recall(shares, *limits)
    part = float(np.interp(free_reach, *_WITH_ALL))
    expected = free if reach == 0 else _estimate_recall((part * shares[0], part * shares[1]), *limits)
    search_plan = replace(search_plan, expected=expected, free_expected=free)
    return replace(search_plan, ways=_weigh_ways(search_plan, count, storage))


def _count_code_bytes(code_bytes: CodeBytes, items: int, dimension: int) -> int:
    """Return the bytes of a code without its id, as codes are learned."""
    if code_bytes is None:
        return 4 * dimension
    if code_bytes == "auto":
        return codes.estimate_code_bytes(items, dimension)
    return min(2 * dimension, int(code_bytes) - codes.ID_BYTES)


def _weigh_ways(search_plan: SearchPlan, count: int, storage: int) -> tuple[SearchWay, ...]:
    """Return home, sealed and message; no message at epsilon 0, or if an answer contains all items."""
    items, epsilon, works = search_plan.items, search_plan.epsilon, search_plan.release == RELEASE
    size, dimension = search_plan.item_bytes, search_plan.dimension
    sizes = estimate_sizes(items, size + _NAME, dimension)
    public = _estimate_map(items, count, epsilon, search_plan)
    copy, kept = items * (size + _NAME) + public, sizes.kept + public
    too_large = f"it needs more than the client's storage of {format_bytes(storage)}"
    hidden = "nothing, if lattice problems are hard"
    too_slow = "a scan of the codes takes the server too long"
    problems = {
        "home": too_large if copy > storage else "",
        "sealed": too_large if kept > storage else too_slow if sizes.passed > _LARGEST_PASS else "",
    }
    sealed_bytes = kept, sizes.question + sizes.token_request, sizes.answer + sizes.token, sizes.passed
    served, recall = partial(_write_served, _write_index(search_plan)), (_PROBED, _PROBED)
    ways = [
        SearchWay("home", "nothing", 0.0, copy, 0, 0, 0, (1 - search_plan.code_loss, 1.0), served("codes", "home")),
        SearchWay("sealed", hidden, 0.0, *sealed_bytes, recall, served("sealed", "sealed")),
    ]
    if epsilon:
        recall = search_plan.expected if works else (search_plan.floor, search_plan.floor)
        little = "it finds less than twice as much as the same answer for everyone"
        too_small = "the answer is too small for this epsilon; alternatives follow"
        problems["message"] = "" if recall[1] > 2 * search_plan.candidates else little if works else too_small
        answer = Answer.header_bytes + count * size
        sent = public, _MESSAGE, answer + count * _NAME, answer
        commands = _write_message(search_plan, count, works)
        learns = f"the name of one set (epsilon {epsilon:g})"
        ways.append(SearchWay("message", learns, epsilon, *sent, recall, commands))
    best = next((way.name for way in ways if not problems[way.name]), None)
    return tuple(
        replace(
            way,
            recommended=way.name == best,
            reason=problems[way.name] or _REASONS[way.name],
            commands=() if problems[way.name] and way.name != "message" else way.commands,
        )
        for way in ways
    )


def _write_index(search_plan: SearchPlan, *options: str) -> str:
    """Return the command that makes the gallery, with the options that differ from its defaults."""
    code_bytes = () if search_plan.code_bytes in ("auto", None) else (f"--code-bytes {search_plan.code_bytes}",)
    return " ".join(("nearveil index DIR --into GALLERY", *code_bytes, *options))


def _write_served(index: str, offer: str, way: str) -> tuple[str, ...]:
    """Return the commands of a way that reveals nothing to the server."""
    return (
        index,
        f"nearveil serve GALLERY --offer {offer}",
        *(("nearveil sync URL --token-file TOKEN",) if way == "home" else ()),
        f"nearveil query IMAGE --server URL --token-file TOKEN --by {way}",
    )


def _write_message(search_plan: SearchPlan, count: int, works: bool) -> tuple[str, ...]:
    """Return the commands of a message; if it cannot work, those of a larger answer and of a larger epsilon."""
    items, epsilon = search_plan.items, search_plan.epsilon
    if works:
        settings = [(count / items, epsilon)]
    else:
        settings = [(math.exp(-epsilon), epsilon)] if math.ceil(items * math.exp(-epsilon)) < items else []
        if count:
            settings.append((count / items, round_up(math.log(items / count))))
    lines, reach = [], () if search_plan.reach == 1 else ("--reach 0",)
    for fraction, cost in settings:
        # Round down, so that an answer stays within its bytes; nine digits are enough for a billion items.
        part = f"{max(1, math.floor(fraction * 10**9)) / 10**9:.9f}".rstrip("0").rstrip(".")
        lines += [
            _write_index(search_plan, f"--candidates {part}", f"--epsilon {cost:g}", *reach),
            "nearveil serve GALLERY",
            f"nearveil query IMAGE --server URL --token-file TOKEN --epsilon {cost:g}",
        ]
    return tuple(lines)


def describe_mechanism(name: str, epsilon: float) -> str:
    """Return what messages by a mechanism of the papers find, beside covers, at the nearest measured epsilon."""
    from nearveil.mechanisms.public import check_served

    check_served(name, allow_unsound=True)
    if name not in _MEASURED:
        return f"{name} is unsound: it finds the class of the query, which messages reveal. For teaching only."
    column = int(np.argmin(np.abs(np.log(_MEASURED_EPSILONS) - math.log(max(epsilon, 1e-6)))))
    recall = _MEASURED[name][column]
    worth = "less than the most popular items, which need no query" if recall < _WITHOUT_QUERY else "less than covers"
    return (
        f"{name} finds {recall:.0%} of the 8 nearest at epsilon {_MEASURED_EPSILONS[column]:g} (a tenth of 5,900 "
        f"photographs; covers find {_MEASURED['covers'][column]:.0%}, the most popular items {_WITHOUT_QUERY:.0%}): "
        f"{worth}. Use it to compare and to teach."
    )


def find_shares(fraction: float) -> tuple[float, float]:
    """Return the expected share of the ceiling, from and to, for answers of a fraction of the gallery."""
    slope = (_LOW_SHARES[1] - _LOW_SHARES[0]) / math.log(_FRACTIONS[1] / _FRACTIONS[0])
    beyond = slope * math.log(max(1.0, _FRACTIONS[0] / fraction))  # below all measured fractions
    low = max(0.0, float(np.interp(math.log(fraction), np.log(_FRACTIONS), _LOW_SHARES)) - beyond)
    return low, low + SHARES[1] - SHARES[0]


def _estimate_recall(
    shares: tuple[float, float], floor: float, ceiling: float, most: float, kept: float
) -> tuple[float, float]:
    """Return the NN-recall@8 by shares of a ceiling, with and without the loss by codes."""
    low, high = (max(floor, share * ceiling) for share in shares)
    return min(most, kept * low), min(most, high)


def _find_limits(epsilon: float, delta: float, fraction: float, popularity: ArrayLike | None) -> tuple[float, float]:
    """Return floor and ceiling for an answer of a fraction of the gallery."""
    if fraction == 0:
        return 0.0, 0.0
    if popularity is not None:
        return popular_floor(fraction, popularity), neighbor_ceiling(epsilon, fraction, popularity, delta)
    return fraction, utility_ceiling(epsilon, delta, fraction)


def _estimate_map(items: int, count: int, epsilon: float, search_plan: SearchPlan) -> int:
    """Estimate the bytes of a client's map, with the table of codes."""
    # Without a message, a gallery still has a map: with the default terms.
    size, epsilon = (count, epsilon) if epsilon and count else (int(_TERMS.candidates * items), _TERMS.epsilon)
    dimension, size = search_plan.dimension, max(1, size)
    projected, n_sets = min(dimension, MOST_DIMENSIONS), _count_sets(items, size, epsilon, search_plan.reach)
    prototypes = min(items, count_prototypes(items, n_sets, size))
    shares = prototypes * n_sets if prototypes <= MOST_GRADED else prototypes * -(-n_sets // 8)
    table = codes.count_table_bytes(search_plan.item_bytes - codes.ID_BYTES, dimension)
    return prototypes * projected + shares + (2 * projected + 8) * dimension + table


def _count_sets(items: int, count: int, epsilon: float, reach: float) -> int:
    least = max(2, count_least_sets(items, count, 1.0)) if reach == 1 else 2
    return usual_number(items, count, epsilon, least, max(2, min(MOST_SETS, items)))


def round_up(epsilon: float) -> float:
    """Round an epsilon up to one decimal digit."""
    return math.ceil(10 * epsilon) / 10


def format_bytes(size: int) -> str:
    """Format a number of bytes for humans."""
    if not size:
        return "nothing"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"
