"""``nearveil plan``, ``cost`` and ``mechanisms``: compare ways to search, prices of releases, and mechanisms."""

import json
from dataclasses import asdict
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import typer

from nearveil.cli._budget import MECHANISM, METAVAR, SETS, PlanMechanism, read_plan
from nearveil.cli._options import JSON, argument, command, option
from nearveil.cli._output import (
    check,
    has_studies,
    is_verbose,
    print_commands,
    print_json,
    print_lines,
    print_table,
    show_bars,
)

if TYPE_CHECKING:
    from nearveil.search.planning import SearchPlan

_LEAST_DELTA = 1e-18  # for which noise is calibrated
_DELTA = 1e-6  # of many messages
_WAY_COLUMNS = ("way", "epsilon", "one-time download", "sent", "received", "server reads", "recall@8")


@command(extra="budget")
def cost(
    plan: list[str] = argument("Releases: 500x0.5 is 500 at epsilon 0.5 each.", metavar=METAVAR),
    delta: float = option("Delta of the whole plan.", default=1e-5),
    mechanism: PlanMechanism = MECHANISM,
    sets: int | None = SETS,
    as_json: bool = JSON,
) -> None:
    """Price a plan before it runs: by addition, by a Renyi filter, by RDP and by PLD, side by side.

    All releases are about the same record. For RDP and PLD their parameters are fixed before the first; a Renyi filter
    limits an account without a plan.

    For example:
        nearveil cost 500x0.5
        nearveil cost 100x1 --sets 20 --delta 1e-6
    """
    check(0 < delta < 1, "must be between 0 and 1", "--delta")
    check(delta >= _LEAST_DELTA, f"must be at least {_LEAST_DELTA:g}: smaller deltas are not supported", "--delta")
    with show_bars():
        events = read_plan(plan, mechanism, delta, sets)
        from nearveil.privacy.accounting import FILTER_ORDERS, AdditionAccountant, PldAccountant, RdpAccountant
        from nearveil.privacy.guarantee import format_factor, format_rounded_up

        prices = {}
        for name, accountant, share in (
            ("addition", AdditionAccountant(), 1),
            ("Renyi filter", RdpAccountant(orders=FILTER_ORDERS), len(FILTER_ORDERS)),  # its orders share delta
            ("RDP", RdpAccountant(), 1),
            ("PLD", PldAccountant(), 1),
        ):
            for event, count in events:
                accountant.compose(event, count)
            prices[name] = accountant.epsilon(delta / share)
    releases = sum(count for _, count in events)
    if as_json:
        print_json({"releases": releases, "mechanism": mechanism, "delta": delta, "epsilon": prices})
        return
    kind = mechanism if sets is None else f"each naming one of {sets} sets"
    print_table(
        ["composed by", "epsilon", "e^epsilon, at most"],
        [
            (name, format_rounded_up(epsilon, 5), format_factor(epsilon) if epsilon < 14 else "over a million")
            for name, epsilon in prices.items()
        ],
        title=f"{releases:,} releases ({' + '.join(plan)}), {kind}, delta {delta:g}",
        right=("epsilon", "e^epsilon, at most"),
    )
    account = "the PLD price too, with --releases gaussian" if mechanism == "gaussian" else "that of the Renyi filter"
    print_lines(
        f"An account with this plan needs the PLD price: {prices['PLD'] / prices['addition']:.1%} of plain addition. "
        f"An account without a plan needs {account}."
    )


@command(extra="gallery")
def plan(
    items: int = option("Number of items in the gallery.", min=1),
    epsilon: float = option("Epsilon of one query.", min=0, max=40),
    answer: str | None = option("Maximum size of an answer, such as 2MB; a tenth by default.", metavar="SIZE"),
    dimension: int = option("Dimension of a feature vector; EfficientNet-Lite0 has 1280.", default=1280, min=1),
    storage: str = option("Maximum size of a client's local copy, such as 2GiB.", default="2GiB", metavar="SIZE"),
    delta: float = option("Delta of one query.", default=0.0, min=0, max=1),
    code_bytes: int | None = option("Bytes of an item in an answer, as of `nearveil index`.", min=7),
    reach: float = option("Share of the items that must be in some set, as of `nearveil index`: 0 or 1.", default=1.0),
    mechanism: str | None = option("Describe messages by another mechanism than covers, too.", metavar="NAME"),
    as_json: bool = JSON,
) -> None:
    """Compare the ways to search a gallery: recall, what the server learns, and commands to run.

    A local copy and sealed queries reveal nothing to the server; a message costs epsilon. If a message cannot work, the
    commands show a larger answer and a larger epsilon. Replace DIR, GALLERY, IMAGE and URL by your own; create the
    token with `nearveil token create NAME > TOKEN`.

    For example:
        nearveil plan --items 100000 --epsilon 4
        nearveil plan --items 1000000 --epsilon 1 --answer 100kB --dimension 128 --json
        nearveil plan --items 100000 --epsilon 4 --mechanism privunit
    """
    answer_bytes = None if answer is None else _parse_size(answer, "--answer")
    limits: Any = {"dimension": dimension, "storage": _parse_size(storage, "--storage")}
    terms: Any = {"code_bytes": code_bytes or "auto", "reach": reach}
    with show_bars():
        from nearveil.search import plan as plan_search
        from nearveil.search.planning import describe_mechanism

        search_plan = plan_search(items, epsilon, answer_bytes, delta=delta, **limits, **terms)
        worth = None if mechanism is None else describe_mechanism(mechanism, epsilon)
    if as_json:
        advice = {"advice": str(search_plan), "commands": search_plan.commands, "mechanism": worth}
        print_json({**asdict(search_plan), **advice})
        return
    _print_plan(search_plan)
    if worth is not None:
        options = f"--mechanism '{mechanism}' --epsilon {epsilon:g}"
        print_lines(worth)
        print_commands(f"nearveil index DIR --into GALLERY {options}")


def _print_plan(search_plan: "SearchPlan") -> None:
    """Print the ways side by side, then each with its reason and its commands."""
    from nearveil.search.planning import format_bytes

    print_table(
        _WAY_COLUMNS,
        [
            (
                f"{way.name} *" if way.recommended else way.name,
                f"{way.epsilon:g}",
                *map(format_bytes, (way.stored_bytes, way.sent_bytes, way.received_bytes, way.scanned_bytes)),
                "-".join(dict.fromkeys(f"{100 * share:.0f}" for share in way.recall)) + "%",
            )
            for way in search_plan.ways
        ],
        title=f"One query to {search_plan.items:,} items (* recommended)",
        right=_WAY_COLUMNS[1:],
    )
    print_lines("Recall@8 was measured for the cosine of image features; other vectors and metrics may differ.")
    if is_verbose():
        print_lines(search_plan.describe_codes())
    for way in search_plan.ways:
        print_lines(f"{way.name}: the server learns {way.server_learns}; {way.reason}.")
        if way.name == "message":
            print_lines(search_plan, *(_price_messages(search_plan) if is_verbose() else ()))
        print_commands(*way.commands)
    if all(way.name != "message" for way in search_plan.ways):
        print_lines(f"message: none. {search_plan}")


def _price_messages(search_plan: "SearchPlan") -> list[str]:
    """Describe what delta buys: the cost of many messages about one image, if messages can work."""
    from nearveil.privacy.accounting import PldAccountant
    from nearveil.privacy.events import NamedSets
    from nearveil.privacy.guarantee import format_rounded_up

    if not search_plan.n_sets:
        return []
    message = NamedSets(search_plan.epsilon, search_plan.n_sets)
    costs = [
        f"{count} cost epsilon {format_rounded_up(PldAccountant().compose(message, count).epsilon(_DELTA), 3)} instead "
        f"of {count * search_plan.epsilon:g}"
        for count in (10, 100)
    ]
    return [
        f"Each message names one of about {search_plan.n_sets} sets. Planned together, with a delta of {_DELTA:g}, "
        f"{', and '.join(costs)}; nearveil cost --sets {search_plan.n_sets} prices other numbers."
    ]


def _parse_size(text: str, option: str) -> int:
    """Parse a number of bytes: 2MB is 2,000,000, 2MiB is 2,097,152."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise typer.BadParameter(f"{text!r} is not a size, such as 500kB, 2MB or 1GiB", param_hint=option) from None


@command(extra="study")
def mechanisms(as_json: bool = JSON) -> None:
    """List all mechanisms: the protected data, whether the guarantee is proved, and the message size.

    Mechanisms that protect different data are not comparable at equal epsilon: read the second column first. With
    nearveil-studies, the baselines of the papers are listed too.

    For example:
        nearveil mechanisms
    """
    listing: dict[str, Any] = json.loads(files("nearveil").joinpath("mechanisms/catalogue.json").read_text())
    rows, example = listing["mechanisms"], listing["example"]
    if has_studies():
        with show_bars():
            from nearveil.mechanisms.catalog import describe_mechanisms
            from studies.baselines import BASELINES

            rows += map(asdict, describe_mechanisms(BASELINES))
    if as_json:
        print_json(listing)
        return
    print_table(
        ["name", "protects", "guarantee", "bytes", "source"],
        [
            (
                row["name"],
                row["protects"],
                row["kind"] if row["sound"] or row["kind"] == "none" else "not proved",
                "not installed" if row["message_bytes"] is None else f"{row['message_bytes']:,}",
                row["source"],
            )
            for row in rows
        ],
        title="Mechanisms",
        right=("bytes",),
    )
    print_lines(
        f"Bytes: one message at epsilon {example['epsilon']:g}, fitted on {example['rows']} rows of "
        f"{example['features']} features in {example['classes']} classes.",
        *(f"{row['name']}: {row['reason']}." for row in rows if not row["sound"]),
    )
