import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.main import get_group

from nearveil.cli import app
from nearveil.gallery.answers import Answer
from nearveil.gallery.codes import ID_BYTES, count_table_bytes, make_codes
from nearveil.mechanisms import Covers
from nearveil.mechanisms.base import CODE_BYTES
from nearveil.search import plan as plan_search
from nearveil.search.ceiling import neighbor_ceiling, popular_floor, reference_line
from nearveil.search.planning import CODE_LOSS, SHARES, find_shares

plan = partial(plan_search, code_bytes=CODE_BYTES, reach=0)  # as the studies were measured


def test_a_release_where_the_answer_is_large_enough() -> None:
    found = plan(100_000, 4.0, 2_000_000)
    assert found.release == "covers"
    assert found.candidates == (2_000_000 - 12) // 128 / 100_000
    assert found.ceiling == pytest.approx(reference_line(4.0, found.candidates))
    assert found.floor == found.candidates
    assert found.expected[0] == pytest.approx((1 - CODE_LOSS) * SHARES[0] * found.ceiling)
    assert found.expected[1] == pytest.approx(SHARES[1] * found.ceiling)
    assert "if all items are equally popular" in str(found)
    assert "12.8 MB" in str(found)


def test_the_whole_gallery_where_it_fits() -> None:
    found = plan(1000, 3.0, 1000 * 128 + 22)
    assert found.release == "whole gallery"
    assert found.epsilon == 0
    assert found.expected == (1 - CODE_LOSS, 1.0)
    assert "sends no query" in str(found)
    assert plan(1000, 3.0, 1000 * 128).release == "whole gallery"  # nobody asks for want of a header
    assert plan(1000, 3.0, 1000 * 128 - 1).release == "covers"


def test_nothing_where_nothing_can_work_and_what_would() -> None:
    found = plan(1_000_000, 1.0, 100_000)
    assert found.release == "none"
    assert found.epsilon_needed == pytest.approx(math.log(1_000_000 / 781))
    assert "No local release can work" in str(found)
    assert plan(1_000_000, found.epsilon_needed, 100_000).release == "covers"
    assert plan(1_000_000, 1.0, found.answer_needed).release == "covers"
    assert plan(1_000_000, 1.0, found.answer_whole).release == "whole gallery"


@pytest.mark.parametrize("dimension", [8, 61, 62, 90, 128, 500])
def test_bytes_are_those_that_publish_makes(dimension: int) -> None:
    rows = np.random.default_rng(0).standard_normal((400, dimension)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    found = plan(400, 2.0, 20_000, dimension=dimension)
    assert found.item_bytes == ID_BYTES + make_codes(rows, CODE_BYTES).width
    assert f"{found.item_bytes} bytes" in str(found)
    assert found.dimension == dimension


def test_every_way_that_is_advised_is_a_command_that_works() -> None:
    known_plans = (
        plan(100_000, 4.0, 2_000_000),
        plan(1000, 3.0, 10**6),
        plan(100, 4.0, 5000, dimension=16),
        plan(10**9, 0.1, 10_000),
        plan(1000, 1.0, 50),
    )
    for found in known_plans:
        assert found.commands == next((way.commands for way in found.ways if way.recommended), ())
        for line in (line for way in found.ways for line in way.commands):
            program, name, *words = line.split()
            assert program == "nearveil"
            command = get_group(app).commands[name]
            known = {option for parameter in command.params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known
    words = plan(100_000, 4.0, 2_000_000).ways[2].commands[0].split()
    assert words[-2:] == ["--reach", "0"]  # for which the recall is stated
    fraction = float(words[8])
    assert fraction * 100_000 * 128 + 12 <= 2_000_000


def test_a_message_that_cannot_work_names_settings_that_do() -> None:
    refused = plan(1_000_000, 1.0, 100_000)
    settings = [line.split() for line in refused.ways[2].commands if "--candidates" in line]
    assert len(settings) == 2
    for words in settings:
        candidates, epsilon = float(words[8]), float(words[-1])
        assert plan(1_000_000, epsilon, int(candidates * 1_000_000 * 128) + 1000).release == "covers"


def test_no_room_for_one_item() -> None:
    found = plan(1_000, 1.0, 50)
    assert found.release == "none"
    assert found.candidates == 0
    assert "no room for even one item" in str(found)
    assert "inf" not in str(found)


def test_popularity_raises_floor_and_ceiling() -> None:
    popularity = np.random.default_rng(0).pareto(1.2, 1000)
    found = plan(1000, 2.0, 128 * 100 + 22, popularity=popularity)
    assert found.floor == pytest.approx(popular_floor(0.1, popularity))
    assert found.ceiling == pytest.approx(neighbor_ceiling(2.0, 0.1, popularity))
    assert found.ceiling > plan(1000, 2.0, 128 * 100 + 22).ceiling
    assert "equally popular" not in str(found)


def test_delta_counts() -> None:
    assert plan(1000, 1.0, 20_000, delta=0.1).ceiling > plan(1000, 1.0, 20_000).ceiling


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 10**7), st.just(0.0) | st.floats(1e-6, 40), st.integers(1, 10**9))
def test_plans_are_consistent(items: int, epsilon: float, answer: int) -> None:
    found = plan(items, epsilon, answer)
    assert 0 <= found.floor <= found.ceiling <= 1
    assert 0 <= found.expected[0] <= found.expected[1] <= 1
    assert found.expected[1] <= found.ceiling + 1e-12 or found.release == "none"
    assert found.answer_needed <= found.answer_whole
    assert "nan" not in str(found)
    for way in found.ways:
        assert (way.epsilon > 0) == (way.name == "message")
        assert 0 <= way.recall[0] <= way.recall[1] <= 1
        assert all(float(line.split()[8]) < 1 for line in way.commands if "--candidates" in line)
    assert ("message" in [way.name for way in found.ways]) == (epsilon > 0 and found.release != "whole gallery")
    more = plan(items, epsilon, 2 * answer)
    assert more.ceiling >= found.ceiling


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((0, 1.0, 10), {}, "items must be"),
        ((1.5, 1.0, 10), {}, "items must be"),
        ((10, 1.0, 0), {}, "answer_bytes must be"),
        ((10, -1.0, 10), {}, "epsilon must be"),
        ((10, math.nan, 10), {}, "epsilon must be"),
        ((10, 41.0, 10), {}, "epsilon must be from 1e-06 to 40"),
        ((10, 1.0, 10), {"delta": 2.0}, "delta must be"),
        ((10, 1.0, 10), {"popularity": [1, 2]}, "popularity must hold one number for each of the 10 items"),
        ((2, 1.0, 200), {"popularity": [1, -2]}, "popularity must be finite"),
    ],
)
def test_absurd_input(arguments: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(*arguments, **options)


def test_less_is_expected_of_smaller_answers() -> None:
    shares = [find_shares(fraction) for fraction in (0.0001, 0.001, 0.01, 0.02, 0.05, 0.1, 1.0)]
    assert shares == sorted(shares)
    assert shares[-1] == shares[-2] == pytest.approx(SHARES)
    slope = (find_shares(0.003)[0] - find_shares(0.0006)[0]) / math.log(5)
    assert find_shares(0.0006)[0] - find_shares(0.0001)[0] == pytest.approx(slope * math.log(6))
    assert find_shares(1e-30) == pytest.approx((0.0, SHARES[1] - SHARES[0]))


def test_what_is_expected_is_what_was_measured() -> None:
    """The shares of small answers and the part of the items in any set are those of the studies' pages."""
    folder = Path(__file__).parents[2] / "docs" / "results" / "study"
    growth, covers = (json.loads((folder / f"{name}.json").read_text())["rows"] for name in ("growth", "covers"))
    small = [row for row in growth if row["part"] == "growth" and row["f"] < 0.1]
    assert len(small) == 5
    for row in small:
        low, high = find_shares(row["f"])
        assert low - 0.01 <= row["share"] <= high
    assert any(find_shares(row["f"])[0] == pytest.approx(row["share"], abs=0.011) for row in small if row["f"] < 0.001)
    off = []
    for row in [*growth, *covers]:
        found = plan(row["items"], row["epsilon"], 128 * math.floor(row["f"] * row["items"]) + 140)
        if found.release == "covers":
            off.append(found.reach - row["reach"])
    assert len(off) > 40
    assert abs(np.mean(off)) < 0.04
    assert np.abs(off).max() < 0.2


def test_a_plan_says_what_is_never_returned_and_where_it_guesses() -> None:
    found = plan(60_000, 2.0, 6_000 * 128 + 100)
    assert found.reach == pytest.approx(0.5, abs=0.05)
    words = "of the items are in a set, and others are never returned"
    assert "This is with --reach 0: about 5" in str(found)
    assert words in str(found)
    whole = plan(60_000, 2.0, 6_000 * 128 + 100, reach=1)
    assert (whole.reach, whole.free_reach, whole.free_expected) == (1.0, found.reach, found.expected)
    assert 0.5 < whole.expected[1] / found.expected[1] < 0.6  # .31 / .56 of 200,000 documents
    low, high = (f"{share:.0%}" for share in found.expected)
    assert f"Every item can be returned. With --reach 0 expect {low} to {high}, but about 5" in str(whole)
    assert words in str(whole)
    assert "extrapolation" not in str(found)
    for guessed in (plan(1_000_000, 8.0, 500 * 128), plan(2_000_000, 4.0, 40_000 * 128)):
        assert guessed.release == "covers"
        assert guessed.extrapolated
        assert "an extrapolation: covers were measured with answers of 0.06% and more" in str(guessed)
    assert not plan(1_000, 1.0, 200_000).extrapolated


def test_a_plan_explains_codes_with_one_size_and_the_download() -> None:
    text = plan_search(1_000_000, 4.0).describe_codes()
    assert "Codes have 268 bytes with the id, the only size for 1,000,000 items." in text
    for items in (1000, 1_000_000):
        assert (
            "The one-time download adds 20 bytes for each name, and the map."
            in plan_search(items, 4.0).describe_codes()
        )


def test_the_map_takes_about_as_many_bytes_as_a_plan_says() -> None:
    rows = np.random.default_rng(0).standard_normal((1000, 12)).astype(np.float32)
    for fraction in (0.1, 0.02):
        made = Covers(4.0, fraction).fit(rows).index(rows).map_
        found = plan(1000, 4.0, int(fraction * 1000) * 32 + 40, dimension=12).ways[2].stored_bytes
        assert found == pytest.approx(made.nbytes, rel=0.5)
    small = plan(1_000_000, 7.5, 600 * 128 + 100).ways[2].stored_bytes
    assert (
        2**21 < small - count_table_bytes(124, 1280) < 2**23
    )  # 28,000 prototypes of 64 numbers, and a bit for each of 1,200 sets


def test_what_is_expected_fits_into_the_answer_and_needs_no_delta() -> None:
    assert plan(100_000, 20.0, 400).expected[1] <= 3 / 8  # three candidates
    assert plan(100_000, 4.0, 2_000_000, delta=0.5).expected == plan(100_000, 4.0, 2_000_000).expected


@pytest.mark.parametrize(
    ("items", "storage", "advised"),
    [
        (10_000, 1 << 30, "home"),
        (100_000_000, 1 << 30, "sealed"),
        (100_000, 1_000_000, "message"),
        (10**10, 1 << 30, None),
    ],
)
def test_three_ways_are_weighed_and_one_is_advised(items: int, storage: int, advised: str | None) -> None:
    found = plan(items, 6.0, 1_000_000, dimension=64, storage=storage)
    assert [way.name for way in found.ways] == ["home", "sealed", "message"]
    assert [way.name for way in found.ways if way.recommended] == ([] if advised is None else [advised])
    home, sealed, message = found.ways
    assert (home.epsilon, sealed.epsilon, message.epsilon) == (0.0, 0.0, 6.0)
    assert home.sent_bytes == home.received_bytes == 0
    assert message.recall[1] <= found.ceiling


def test_nothing_is_paid_for_an_answer_that_holds_everything() -> None:
    for epsilon, answer in ((4.0, 2_000_000), (0.0, 2_000_000), (0.0, 20_000)):
        found = plan(5000, epsilon, answer)
        assert [way.name for way in found.ways] == ["home", "sealed"]
        assert found.ways[0].recall == (1 - CODE_LOSS, 1.0)
        assert not any("--candidates" in line for way in found.ways for line in way.commands)
    assert "At epsilon 0 no message" in str(found)
    assert "an answer of" not in str(found)  # at epsilon 0 it would be the whole gallery
    assert "epsilon 3.5 with this answer" in str(found)


def test_an_answer_is_a_tenth_of_the_gallery_unless_it_is_said() -> None:
    found = plan(5000, 4.0)
    assert (found.candidates, found.release) == (0.1, "covers")
    assert found.ways[2].scanned_bytes == Answer.header_bytes + 500 * 128
    assert found.ways[2].received_bytes == found.ways[2].scanned_bytes + 500 * 20  # with names
    assert plan(3, 4.0).candidates == pytest.approx(1 / 3)


def test_a_large_answer_is_never_called_too_small() -> None:
    message = plan(1000, 1.0, 64_000).ways[2]
    assert message.recall[1] > 0.6
    assert "less than twice" in message.reason
    assert "too small" not in message.reason


def test_sizes_of_sealed_search_are_those_of_an_index() -> None:
    from nearveil.sealed import SealedClient, SealedIndex
    from nearveil.sealed.sizes import estimate_sizes

    million = estimate_sizes(1_000_000, 140, 128)
    assert (million.kept // 10**5, million.question // 10**5, million.passed // 10**6) == (13, 13, 335)
    assert (million.token_request // 10**4, million.token // 10**4, million.answer // 10**4) == (69, 26, 18)
    rows = np.random.default_rng(0).normal(size=(900, 70))
    index = SealedIndex.build(rows, records=[b"x" * 40] * 900)
    planned, tokens = estimate_sizes(900, 40, 70), index.get_public_tokens()
    client = SealedClient(index.layout.to_bytes(), tokens)
    request = client.begin_pads()
    token = index.answer(request.data)
    client.finish_pads(request, token)
    questions = [client.ask(rows[0]).data, client.ask_records(range(32)).data]
    for size, frames in (
        (planned.question, questions),
        (planned.answer, [*map(index.answer, questions)]),
        (planned.kept, [tokens, index.layout.to_bytes()]),
        (planned.token_request, [request.data]),
        (planned.token, [token]),
    ):
        assert size <= sum(map(len, frames)) <= size + 1000
    assert index._records is not None
    assert index.nbytes + index._records.nbytes == planned.passed
