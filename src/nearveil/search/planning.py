"""What a gallery, an epsilon and an answer's size allow, before anything is built."""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from nearveil.gallery.answers import ID_BYTES, Answer
from nearveil.mechanisms.base import CODE_BYTES
from nearveil.mechanisms.covers.channels import check_channel_epsilon
from nearveil.mechanisms.covers.covers import count_prototypes
from nearveil.mechanisms.covers.learning import usual_number
from nearveil.mechanisms.covers.maps import MOST_DIMENSIONS, MOST_GRADED, MOST_SETS
from nearveil.privacy.checks import is_integer
from nearveil.sealed.sizes import SealedSizes, estimate_sizes
from nearveil.search.ceiling import neighbor_ceiling, popular_floor, reference_line, utility_ceiling

WHOLE, RELEASE, NONE = "whole gallery", "covers", "none"

# Of the ceiling, by learned covers. Answers of a tenth or more: CUB and Cars, epsilon 1 to 6 (nearveil study covers).
# Smaller ones: the share falls with the answer's part of the gallery (nearveil study growth, answers of 600 items), and
# is taken to fall as fast below what was measured.
SHARES = (0.85, 0.96)
_FRACTIONS = (0.0006, 0.003, 0.01, 0.1)
_LOW_SHARES = (0.41, 0.64, 0.73, SHARES[0])
_MOST_MEASURED = 1_000_000  # items
# The part of the items that are in any set, by the sizes of all sets together as a part of the gallery: both studies.
_ROOM = (0.0, 0.4, 0.5, 0.7, 1.0, 1.2, 2.6)
_REACHES = (0.0, 0.29, 0.52, 0.64, 0.85, 0.92, 0.98)
CODE_LOSS = 0.07  # of NN-recall by codes of 128 bytes: nearveil study codes
STORAGE = 2 << 30  # bytes that a client keeps without being asked
_TOP = 8  # neighbours that NN-recall@8 counts
_NAME = 16  # bytes of a name, for estimates
_MESSAGE = 200  # bytes, about
_PROBED = 0.947  # of the true nearest that sealed search finds among 100,000 photographs: docs/results/sealed.md
_USUAL = 0.1  # of the gallery in an answer, where nothing is said: as `nearveil index`
_LARGEST_PASS = 100 << 30  # bytes that a server passes over for a question: seconds on one GPU, a minute on a core
_WORTH = 0.5  # e^eps f below this: the message moves the odds by less than the answer's smallness costs


@dataclass(frozen=True)
class SearchWay:
    """One way to ask a gallery, and what it takes."""

    name: str  # message, home or sealed
    learns: str  # what the server learns from a question
    epsilon: float
    keeps: int  # bytes that a client keeps
    sends: int  # bytes that go up for a question
    gets: int  # bytes that come back
    passes: int  # bytes that the server reads for a question
    found: tuple[float, float]  # the part of the true nearest neighbours to expect, from and to
    commands: tuple[str, ...] = ()  # what to type for it; for a message that cannot work, what would
    advised: bool = False
    why: str = ""


@dataclass(frozen=True)
class SearchPlan:
    """What :func:`plan` advises. ``str`` gives sentences.

    `release`: Which release to use: none is needed where the whole gallery's codes fit, and none works where the
    answer is too small for epsilon.
    `floor, ceiling`: What the same answer for everybody finds, and what no private release can pass.
    `popularity_known`: Whether the ceiling is one: for equally popular items it is a reference line, which hubs may
    pass.
    """

    release: str
    items: int
    epsilon: float  # what is spent: 0 where no message depends on the query
    delta: float
    candidates: float  # the fraction f that the answer affords
    expected: tuple[float, float]  # NN-recall from and to; between floor and ceiling
    floor: float
    ceiling: float
    epsilon_needed: float  # at which such an answer begins to work: ln(1/f)
    answer_needed: int  # bytes at which this epsilon begins to work: f = e^-epsilon
    answer_whole: int  # bytes of the whole gallery's codes
    popularity_known: bool
    reach: float  # the part of the items that are in any set of covers, about; the others are never returned
    dimension: int = 1280
    item_bytes: int = CODE_BYTES  # of an item in an answer, as `publish` makes it with `code_bytes` 128
    extrapolated: bool = False  # whether covers were not measured with such small answers or so many items
    ways: tuple[SearchWay, ...] = ()  # home, sealed and, unless it would be paid for nothing, a message

    @property
    def commands(self) -> tuple[str, ...]:
        """What to type for the way that is advised; none where nothing works."""
        return next((way.commands for way in self.ways if way.advised), ())

    def __str__(self) -> str:
        if self.release == WHOLE:
            return (
                f"The codes of all {self.items:,} items ({self.item_bytes} bytes each, "
                f"{write_bytes(self.answer_whole)}, and names) fit into one answer, so a message would be paid for "
                "nothing. Send them to everybody, and search at home: nothing is asked, epsilon is 0, and every "
                f"neighbour is among them. Ranking by codes of {CODE_BYTES} bytes loses up to {CODE_LOSS:.0%} on image "
                "features of 1280 dimensions. To weigh a message, plan a smaller answer."
            )
        if self.release == NONE:
            return self._refusal()
        return (
            f"By {self.release}: an answer of {self.candidates:.2%} of {self.items:,} items of {self.dimension:,} "
            f"dimensions, in codes of {self.item_bytes} bytes, at epsilon {self.epsilon:g}. Expect "
            f"{self.expected[0]:.0%} to {self.expected[1]:.0%} of the true nearest neighbours, "
            f"{self._tell_source()}. "
            f"{self._most(0).capitalize()}; the same answer for everybody finds {self.floor:.0%}. "
            f"{self._tell_reach()}"
            f"The whole gallery's codes would take {write_bytes(self.answer_whole)}, at epsilon 0."
        )

    def _tell_source(self) -> str:
        """Say where the expectation comes from."""
        if not self.extrapolated:
            return "as on image features"
        return (
            f"which is an extrapolation: covers were measured with answers of {_FRACTIONS[0]:.2%} and more, and up to "
            f"{_MOST_MEASURED:,} items"
        )

    def _tell_reach(self) -> str:
        """Say what can never be returned."""
        return (
            f"About {self.reach:.0%} of the items are in any set, and the others are never returned; "
            "reach=1 (--reach 1) puts every item into a set, at some cost in recall where epsilon is small. "
        )

    def _most(self, digits: int) -> str:
        """Say what cannot be passed, and on what condition."""
        bound = f"no private release finds more than {self.ceiling:.{digits}%}"
        return bound if self.popularity_known else f"{bound} where all items are equally popular"

    def _refusal(self) -> str:
        ways = []
        if self.answer_needed < self.answer_whole:
            ways.append(f"an answer of {write_bytes(self.answer_needed)} at this epsilon")
        if self.candidates:
            ways.append(f"epsilon {round_up(self.epsilon_needed):g} with this answer")
        ways.append(f"the whole gallery's codes, {write_bytes(self.answer_whole)}, at epsilon 0")
        hope = f"What would work: {'; '.join(ways)}."
        if not self.candidates:
            return f"No release can work here: the answer has no room for even one item. {hope}"
        if self.epsilon == 0:
            return f"At epsilon 0 no message may depend on what you look for. {hope}"
        return (
            f"No local release can work here: the answer holds {self.candidates:.2%} of the items, and epsilon "
            f"{self.epsilon:g} raises the odds of the right ones by a factor of at most {math.exp(self.epsilon):.3g}. "
            f"Whatever the mechanism, {self._most(2)}. {hope}"
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
) -> SearchPlan:
    """Say which release to use, and what to expect of it.

    The ceiling is Theorem D's. Where popularity is not known all items count as equally popular, which makes
    the ceiling a reference line and the floor f. What is expected is the share of the ceiling that
    learned covers reached on sets of images, never below the floor: `SHARES` for answers of a tenth of the
    gallery or more, and less for smaller ones (`find_shares`). Its lower end also counts what compact codes lose,
    `CODE_LOSS`. Beyond what was measured the plan says that it is an extrapolation.

    Parameters
    ----------
    items : int
        The size of the gallery.
    epsilon : float
        For one query: from 1e-6 to 40, or 0.
    answer_bytes : int, optional
        What an answer may take; by default a tenth of the gallery, as :meth:`nearveil.gallery.Index.publish` makes it.
    delta : float, default=0.0
    popularity : array-like of shape (items,), optional
        How often each item is a true neighbour.
    dimension : int, default=1280
        Of a feature. With `code_bytes` 128 a candidate takes 128 bytes, or fewer of up to 61 dimensions.
    storage : int, default=2 GiB
        Bytes that a client may keep; for search at home and sealed search.

    Returns
    -------
    SearchPlan

    Examples
    --------
    >>> print(plan(1_000_000, 1.0, 100_000))
    No local release can work here: the answer holds 0.08% of the items, and epsilon 1 raises the odds of the
    right ones by a factor of at most 2.72. Whatever the mechanism, no private release finds more than 0.21% where
    all items are equally popular. What would work: an answer of 47.1 MB at this epsilon; epsilon 7.2 with this
    answer; the whole gallery's codes, 128.0 MB, at epsilon 0.
    >>> plan(1_000, 1.0, 200_000).release
    'whole gallery'
    """
    answered = ("answer_bytes", 1 if answer_bytes is None else answer_bytes)
    for name, value in (("items", items), answered, ("dimension", dimension), ("storage", storage)):
        if not is_integer(value, 1):
            raise ValueError(f"{name} must be a whole number of at least 1")
    if epsilon != 0:
        check_channel_epsilon(epsilon)
    utility_ceiling(epsilon, delta, 0.5)  # refuses an absurd delta
    if popularity is not None and np.shape(popularity) != (items,):
        raise ValueError(f"popularity must hold one number for each of the {items} items")
    size = ID_BYTES + min(2 * int(dimension), CODE_BYTES - ID_BYTES)
    whole = Answer.header_bytes + size * items
    if answer_bytes is None:
        answer_bytes = Answer.header_bytes + size * max(1, int(_USUAL * items))
    count = min(items, max(0, answer_bytes - Answer.header_bytes) // size)
    count = items if answer_bytes >= size * items else count  # nobody shall ask for want of a header
    fraction = count / items
    floor, ceiling = _find_limits(epsilon, delta, fraction, popularity)
    works = bool(count and epsilon) and math.log(fraction) + epsilon >= math.log(_WORTH)
    release = WHOLE if count == items else RELEASE if works else NONE
    # Covers are pure: no delta helps them. And an answer of fewer than eight items cannot hold eight.
    reachable = _find_limits(epsilon, 0.0, fraction, popularity)[1]
    expected = _estimate_recall(release, floor, reachable, count, fraction)
    return SearchPlan(
        release=release,
        items=int(items),
        epsilon=0.0 if release == WHOLE else float(epsilon),
        delta=0.0 if release == WHOLE else float(delta),
        candidates=fraction,
        expected=expected,
        floor=floor,
        ceiling=ceiling,
        epsilon_needed=math.log(1 / fraction) if count else math.inf,
        answer_needed=min(whole, Answer.header_bytes + size * max(1, math.ceil(items * math.exp(-epsilon)))),
        answer_whole=whole,
        popularity_known=popularity is not None,
        reach=_estimate_reach(int(items), count, epsilon) if release == RELEASE else 1.0,
        dimension=int(dimension),
        item_bytes=size,
        extrapolated=release == RELEASE and (fraction < _FRACTIONS[0] or items > _MOST_MEASURED),
        ways=_weigh_ways(
            estimate_sizes(int(items), size + _NAME, int(dimension)),
            _estimate_map(int(items), count, float(epsilon), int(dimension)),
            *(int(items), float(epsilon), size, count, expected if works else (floor, floor), int(storage), works),
        ),
    )


def _weigh_ways(
    sizes: SealedSizes,
    map_bytes: int,
    items: int,
    epsilon: float,
    size: int,
    count: int,
    found: tuple[float, float],
    storage: int,
    works: bool,
) -> tuple[SearchWay, ...]:
    """Return home, sealed and message side by side; no message at epsilon 0, or where one answer holds all items."""
    answer, copy = Answer.header_bytes + count * size, items * (size + _NAME)
    taken = sizes.hint, sizes.question, sizes.answer, sizes.passed
    learned = f"the name of one set (epsilon {epsilon:g})"
    kept = (map_bytes, _MESSAGE, answer, answer)
    ways = [
        SearchWay("home", "nothing", 0.0, copy, 0, 0, 0, (1 - CODE_LOSS, 1.0), _write_served("codes", "home")),
        SearchWay("sealed", "nothing, if LWE is hard", 0.0, *taken, (_PROBED,) * 2, _write_served("sealed", "sealed")),
        SearchWay("message", learned, epsilon, *kept, found, _write_message(items, count, epsilon, works)),
    ]
    fits = {
        "home": copy <= storage,
        "sealed": sizes.hint <= storage and sizes.passed <= _LARGEST_PASS,
        "message": found[1] > 2 * count / items,
    }
    if not epsilon or count == items:
        ways.pop()
    best = next((way.name for way in ways if fits[way.name]), None)
    return tuple(
        replace(
            way,
            advised=way.name == best,
            why=_say_why(way, fits[way.name], works, storage),
            commands=way.commands if fits[way.name] or way.name == "message" else (),
        )
        for way in ways
    )


def _write_served(offer: str, way: str) -> tuple[str, ...]:
    """Return the commands of a way that tells a server nothing."""
    return (
        f"nearveil index DIR --into GALLERY --code-bytes {CODE_BYTES}",
        f"nearveil serve GALLERY --offer {offer}",
        *(("nearveil sync URL --token-file TOKEN",) if way == "home" else ()),
        f"nearveil query IMAGE --server URL --token-file TOKEN --by {way}",
    )


def _write_message(items: int, count: int, epsilon: float, works: bool) -> tuple[str, ...]:
    """Return the commands of a message; where it cannot work, those of a larger answer and of a larger epsilon."""
    if works:
        settings = [(count / items, epsilon)]
    else:
        settings = [(math.exp(-epsilon), epsilon)] if math.ceil(items * math.exp(-epsilon)) < items else []
        if count:
            settings.append((count / items, round_up(math.log(items / count))))
    lines = []
    for fraction, spent in settings:
        # Downwards, so that an answer stays within its bytes; nine digits name one item of a billion.
        part = f"{max(1, math.floor(fraction * 10**9)) / 10**9:.9f}".rstrip("0").rstrip(".")
        lines += [
            f"nearveil index DIR --into GALLERY --code-bytes {CODE_BYTES} --candidates {part} --epsilon {spent:g}",
            "nearveil serve GALLERY",
            f"nearveil query IMAGE --server URL --token-file TOKEN --epsilon {spent:g}",
        ]
    return tuple(lines)


def _say_why(way: SearchWay, fits: bool, works: bool, storage: int) -> str:
    """Say why a way fits, or does not."""
    if way.name == "message":
        little = "it finds less than twice what an answer finds that is the same for everybody"
        too_small = "the answer is too small for this epsilon, and here is what would work"
        return "one small request, and a map to keep" if fits else little if works else too_small
    if way.keeps > storage:
        return f"more than the {write_bytes(storage)} that a client may keep"
    if not fits:
        return "a pass over the codes takes the server too long"
    if way.name == "home":
        return "it fits, if the operator hands out all codes"
    return "it fits, also where codes are not handed out"


def find_shares(fraction: float) -> tuple[float, float]:
    """Return the share of the ceiling to expect, from and to, where answers hold a fraction of the gallery."""
    slope = (_LOW_SHARES[1] - _LOW_SHARES[0]) / math.log(_FRACTIONS[1] / _FRACTIONS[0])
    beyond = slope * math.log(max(1.0, _FRACTIONS[0] / fraction))  # below all fractions that were measured
    low = max(0.0, float(np.interp(math.log(fraction), np.log(_FRACTIONS), _LOW_SHARES)) - beyond)
    return low, low + SHARES[1] - SHARES[0]


def _estimate_recall(release: str, floor: float, ceiling: float, count: int, fraction: float) -> tuple[float, float]:
    """Return NN-recall@8 from (with what codes lose) and to (without)."""
    low, high = (
        (1.0, 1.0) if release == WHOLE else (max(floor, share * ceiling) for share in find_shares(fraction or 1.0))
    )
    room = min(1.0, count / _TOP)
    return min(room, (1 - CODE_LOSS) * low), min(room, high)


def _find_limits(epsilon: float, delta: float, fraction: float, popularity: ArrayLike | None) -> tuple[float, float]:
    """Return floor and ceiling of an answer that holds a fraction of the gallery."""
    if fraction == 0:
        return 0.0, 0.0
    if popularity is not None:
        return popular_floor(fraction, popularity), neighbor_ceiling(epsilon, fraction, popularity, delta)
    line = utility_ceiling(epsilon, delta, fraction) if delta else reference_line(epsilon, fraction)
    return fraction, line


def _estimate_reach(items: int, count: int, epsilon: float) -> float:
    """Return about which part of the items the usual number of sets holds."""
    return float(np.interp(_count_sets(items, count, epsilon) * count / items, _ROOM, _REACHES))


def _estimate_map(items: int, count: int, epsilon: float, dimension: int) -> int:
    """Return about how many bytes a client's map takes."""
    size, projected = max(1, count), min(dimension, MOST_DIMENSIONS)
    n_sets = _count_sets(items, size, epsilon)
    prototypes = min(items, count_prototypes(items, n_sets, size))
    shares = prototypes * n_sets if prototypes <= MOST_GRADED else prototypes * -(-n_sets // 8)
    return prototypes * projected + shares + 2 * dimension * projected


def _count_sets(items: int, count: int, epsilon: float) -> int:
    return usual_number(items, count, epsilon, 2, max(2, min(MOST_SETS, items)))


def round_up(epsilon: float) -> float:
    """Return an epsilon with one digit, never below what it was."""
    return math.ceil(10 * epsilon) / 10


def write_bytes(size: int) -> str:
    """Write bytes for people."""
    if not size:
        return "nothing"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"
