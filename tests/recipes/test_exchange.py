"""Exchanges that are worth measuring: which ones there are, and in which order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product

import pytest
from scipy import integrate, stats

from qres.recipes.choices import Choices, TensorOptions
from qres.recipes.exchange import SIDE_ERROR, Proposal, proposals
from qres.records.recipe import FileTensor
from tests.examples import recipe as ex
from tests.examples.recipe import DOWN_0, DOWN_10, EMBEDDING, LADDER, OPTIONS, OUT_1, UNPREDICTED

BEST_OF_ITS_SIZE = {
    (EMBEDDING, "Q4_0"): "IQ4_NL",
    (DOWN_0, "Q4_0"): "Q4_K",
    (OUT_1, "Q4_0"): "IQ4_NL",
    (OUT_1, "Q4_K"): "IQ4_NL",
    (DOWN_10, "Q4_K"): "IQ4_NL",
}
"""Instead of these: types of one size have tests of their own."""
SIZES = {
    tensor: {kind: damage for kind, damage in options.items() if (tensor, kind) not in BEST_OF_ITS_SIZE}
    for tensor, options in OPTIONS.items()
}
STATES = [
    {tensor: BEST_OF_ITS_SIZE.get((tensor, kind), kind) for tensor, kind in LADDER[name].items()}
    for name in ("Q4_0", "Q4_K_M", "Q6_K", "Q8_0")
]
ROOMS = [0, 1, 5_000, 36_864, 200_000, 10**9]


@pytest.fixture(scope="module")
def rows() -> list[TensorOptions]:
    found = []
    for tensor in ex.TENSORS:
        if options := SIZES.get(tensor.name):
            sizes, kinds = zip(*sorted((ex.size(tensor.name, kind), kind) for kind in options), strict=True)
            found.append(TensorOptions(tensor, True, kinds, sizes, tuple(options[kind] for kind in kinds)))
    return found


def row(name: str, **options: tuple[int, float]) -> TensorOptions:
    """A tensor with (bytes, damage) of each type, in this order."""
    sizes, losses = zip(*options.values(), strict=True)
    return TensorOptions(FileTensor(name, (256, 1), "F16", "F16"), True, tuple(options), sizes, losses)


def moves(tensor: str, now: str) -> set[str]:
    """Types that a tensor may move to: two up and two down by bytes, of those that no smaller type beats."""
    sizes = {ex.size(tensor, kind): kind for kind in SIZES[tensor]}
    assert len(sizes) == len(SIZES[tensor])
    sensible = [
        size
        for size, kind in sorted(sizes.items())
        if all(SIZES[tensor][less] > SIZES[tensor][kind] for smaller, less in sizes.items() if smaller < size)
    ]
    here = ex.size(tensor, now)
    below, above = [size for size in sensible if size < here], [size for size in sensible if size > here]
    return {sizes[size] for size in (*below[-2:], *above[:2])}


def every(types: Mapping[str, str], room: int) -> set[tuple[str, str, str, str]]:
    """Raised tensor and its type, lowered tensor and its type, of all exchanges that fit."""
    steps = [
        (tensor, kind, ex.size(tensor, kind) - ex.size(tensor, types[tensor]))
        for tensor in OPTIONS
        for kind in moves(tensor, types[tensor])
    ]
    up, down = [step for step in steps if step[2] > 0], [step for step in steps if step[2] < 0]
    found = {(tensor, kind, "", "") for tensor, kind, added in up if added <= room}
    return found | {
        (raised, to, lowered, less)
        for (raised, to, added), (lowered, less, saved) in product(up, down)
        if raised != lowered and added + saved <= room
    }


def named(found: list[Proposal]) -> set[tuple[str, str, str, str]]:
    return {
        (one.up.tensor, one.up.after, one.down.tensor if one.down else "", one.down.after if one.down else "")
        for one in found
    }


@pytest.mark.parametrize("types", STATES)
@pytest.mark.parametrize("room", ROOMS)
def test_all_that_fit_and_nothing_else(rows: list[TensorOptions], types: dict[str, str], room: int) -> None:
    found = proposals(rows, types, room)
    assert named(found) == every(types, room)
    assert len(found) == len(named(found))


@pytest.mark.parametrize("types", STATES)
def test_steps_say_what_they_change(rows: list[TensorOptions], types: dict[str, str]) -> None:
    found = proposals(rows, types, 600_000)
    assert {one.down is None for one in found} == {True, False}
    for one in found:
        assert one.steps == ((one.up, one.down) if one.down else (one.up,))
        for step in one.steps:
            assert step.before == types[step.tensor]
            assert step.bytes == ex.size(step.tensor, step.after) - ex.size(step.tensor, step.before)
            assert step.loss == pytest.approx(OPTIONS[step.tensor][step.after] - OPTIONS[step.tensor][step.before])
        after = types | {step.tensor: step.after for step in one.steps}
        assert one.bytes == ex.data_bytes(after) - ex.data_bytes(types) <= 600_000
        assert one.loss == pytest.approx(ex.loss(after) - ex.loss(types))
        assert one.up.bytes > 0
        assert one.down is None or one.down.bytes < 0


@pytest.mark.parametrize("room", ROOMS)
def test_most_promising_first_and_the_same_every_time(rows: list[TensorOptions], room: int) -> None:
    found = proposals(rows, STATES[1], room)
    assert [one.hope for one in found] == sorted((one.hope for one in found), reverse=True)
    assert proposals(list(rows), dict(STATES[1]), room) == found
    assert proposals(rows[::-1], STATES[1], room)[0].hope == found[0].hope


def test_of_equal_hope_by_name_and_type() -> None:
    pair = [row(name, A=(10, 2.0), B=(20, 1.0)) for name in ("b", "a")]
    assert [one.up.tensor for one in proposals(pair, {"a": "A", "b": "A"}, 100)] == ["a", "b"]


@pytest.mark.parametrize("types", STATES)
def test_hope_is_the_mean_of_what_is_gained_where_both_predictions_are_off(
    rows: list[TensorOptions], types: dict[str, str]
) -> None:
    for one in proposals(rows, types, 50_000)[::5]:
        spread = SIDE_ERROR * math.sqrt(sum(step.loss**2 for step in one.steps))
        change = stats.norm(-one.loss, spread)
        area, _ = integrate.quad(
            lambda gain, density=change.pdf: gain * density(gain), 0, max(0, -one.loss) + 12 * spread, epsabs=0
        )
        assert one.hope == pytest.approx(area, rel=1e-6, abs=1e-9 * spread)


def test_a_sure_loss_has_some_hope_and_a_sure_gain_is_about_itself() -> None:
    up = row("up", A=(10, 1.0), B=(20, 0.9))
    down = row("down", A=(10, 1.0), B=(20, 0.1))
    (gain,) = proposals([up], {"up": "A"}, 10)
    assert gain.hope == pytest.approx(0.1, rel=1e-3)
    assert gain.hope > 0.1
    (loss,) = proposals([up, down], {"up": "A", "down": "B"}, 0)
    assert loss.loss == pytest.approx(0.8)
    assert 0 < loss.hope < 0.01


def test_a_step_without_any_change_is_none() -> None:
    assert proposals([row("same", A=(10, 0.5), B=(20, 0.5))], {"same": "A"}, 100) == []


def test_changes_too_small_for_a_spread_are_hoped_for_as_predicted() -> None:
    least = 5e-324  # 0.35 of it is 0
    tiny = [row(name, A=(10, least), B=(20, 0.0)) for name in ("a", "b")]
    found = proposals(tiny, {"a": "A", "b": "B"}, 100)
    assert [(one.down is None, one.hope) for one in found] == [(True, least), (False, 0.0)]


def test_options_that_a_smaller_one_beats_are_no_aim() -> None:
    tensor = row("t", A=(10, 5.0), B=(20, 3.0), C=(30, 4.0), D=(40, 3.0), E=(50, 2.0), F=(60, 1.0), G=(70, 0.0))
    assert [one.up.after for one in proposals([tensor], {"t": "B"}, 100)] == ["F", "E"]
    other = row("o", A=(1, 1.0), B=(2, 0.5))
    lowered = {one.down.after for one in proposals([tensor, other], {"t": "E", "o": "A"}, 0) if one.down is not None}
    assert lowered == {"A", "B"}


def test_a_tensor_moves_from_an_option_that_another_one_beats() -> None:
    tensor = row("t", A=(10, 5.0), B=(20, 3.0), C=(30, 4.0), D=(40, 1.0))
    found = proposals([tensor], {"t": "C"}, 100)
    assert [(one.up.after, one.up.bytes, one.up.loss) for one in found] == [("D", 10, -3.0)]


def test_an_option_of_the_same_size_pays_for_nothing_and_costs_nothing() -> None:
    tensor, other = row("t", A=(10, 5.0), B=(10, 3.0), C=(20, 1.0)), row("o", A=(0, 9.0), B=(1, 0.0))
    assert [one.up.after for one in proposals([tensor], {"t": "A"}, 100)] == ["C"]
    assert [one.down for one in proposals([tensor, other], {"t": "B", "o": "A"}, 1)] == [None]


def test_an_option_of_the_same_size_does_not_take_the_place_of_a_larger_one() -> None:
    tensor = row("t", A=(10, 5.0), B=(10, 4.0), C=(10, 3.0), D=(20, 1.0), E=(30, 0.0))
    assert {one.up.after for one in proposals([tensor], {"t": "A"}, 100)} == {"D", "E"}


def test_of_options_of_one_size_the_best_is_the_one_to_go_down_to() -> None:
    tensor, other = row("t", A=(5, 9.0), B=(10, 5.0), C=(10, 4.0), D=(20, 1.0)), row("o", A=(0, 99.0), B=(1, 0.0))
    found = proposals([tensor, other], {"t": "D", "o": "A"}, 0)
    assert {one.down.after for one in found if one.down} == {"A", "C"}


def test_two_options_up_and_down_and_no_further() -> None:
    kinds = {kind: (10 * (k + 1), 10.0 - k) for k, kind in enumerate("ABCDEFG")}
    tensor, other = row("t", **kinds), row("o", A=(0, 99.0), B=(1, 0.0))
    types = {"t": "D", "o": "A"}
    found = proposals([tensor, other], types, 10**6)
    assert {one.up.after for one in found if one.up.tensor == "t"} == {"E", "F"}
    assert {one.down.after for one in found if one.down} == {"B", "C"}
    assert proposals([row("t", **kinds)], {"t": "G"}, 10**6) == []


def test_a_tensor_does_not_pay_for_itself() -> None:
    kinds = {kind: (10 * (k + 1), 10.0 - k) for k, kind in enumerate("ABCDE")}
    assert proposals([row("t", **kinds)], {"t": "C"}, 0) == []


def test_tensors_with_a_type_of_their_own_stay(rows: list[TensorOptions]) -> None:
    types = {**STATES[1], EMBEDDING: "Q2_K", DOWN_10: "F32"}
    moved = {step.tensor for one in proposals(rows, types, 10**9) for step in one.steps}
    assert moved == set(OPTIONS) - {EMBEDDING, DOWN_10}


def test_rows_that_are_given_are_those_that_may_change(rows: list[TensorOptions]) -> None:
    free = [one for one in rows if one.tensor.name != OUT_1]
    moved = {step.tensor for one in proposals(free, STATES[1], 10**9) for step in one.steps}
    assert moved == set(OPTIONS) - {OUT_1}
    whole = Choices(ex.example()).rows
    assert UNPREDICTED not in {step.tensor for one in proposals(whole, STATES[1], 10**9) for step in one.steps}
