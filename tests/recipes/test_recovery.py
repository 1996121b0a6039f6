"""What 16 bit is worth, against every set of layers and every mix of types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from qres.recipes import recovery
from qres.recipes.choices import Choices
from qres.records.recipe import Recovery, Rung
from qres.records.result import Level, Result
from tests.examples import recipe as ex
from tests.examples.recipe import DOWN_0, DOWN_10, EMBEDDING, LADDER, OPTIONS, OUT_0, OUT_1, UNPREDICTED

MIXES = ex.mixes()
LAYERS = {
    "layer 0": (OUT_0, DOWN_0),
    "layer 1": (OUT_1,),
    "layer 10": (DOWN_10,),
    "token_embd": (EMBEDDING,),
}
MANY = (0.02, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 0.95, 0.999, 1.0)


def recovered(*levels: Level, ladder: tuple[Rung, ...] | None = None) -> dict[tuple[str, float], Recovery]:
    result: Result = replace(ex.example(), levels=levels) if levels else ex.example()
    result = result if ladder is None else replace(result, ladder=ladder)
    return {(row.level, row.share): row for row in recovery.recoveries(Choices(result))}


def of(name: str, types: Mapping[str, str] | None = None) -> Level:
    """A level of that name, measured to be as bad as predicted."""
    held = types or LADDER[name]
    return ex.level(name, ex.loss(held) or 1e-5, held)


def cheapest_layers(types: Mapping[str, str], left: float) -> tuple[tuple[str, ...], int] | None:
    """The set of layers that costs the least at 16 bit and leaves no more damage, of all sets."""
    damage = {layer: sum(OPTIONS[name][types[name]] for name in names) for layer, names in LAYERS.items()}
    added = {
        layer: sum(ex.size(name, "F16") - ex.size(name, types[name]) for name in names)
        for layer, names in LAYERS.items()
    }
    sets = [set(chosen) for n in range(len(LAYERS) + 1) for chosen in combinations(LAYERS, n)]
    able = [
        (sum(added[layer] for layer in kept), tuple(layer for layer in LAYERS if layer in kept))
        for kept in sets
        if sum(damage[layer] for layer in LAYERS if layer not in kept) <= left * (1 + 1e-12)
    ]
    return min(((layers, cost) for cost, layers in able), key=lambda pair: pair[1], default=None)


def cheapest_mix(types: Mapping[str, str], left: float, raised: bool) -> int:
    """Bytes beside the level's of the smallest mix with no more damage, of all mixes."""
    allowed = left * (1 + 1e-12) >= MIXES.losses
    if raised:
        larger = [
            all(ex.size(name, kind) >= ex.size(name, types[name]) for name, kind in zip(OPTIONS, choice, strict=True))
            for choice in MIXES.choices
        ]
        allowed &= np.array(larger)
    # The mixes have what is not chosen at Q4_K_M.
    return int(MIXES.bytes[allowed].min()) - ex.data_bytes({**types, UNPREDICTED: LADDER["Q4_K_M"][UNPREDICTED]})


@pytest.mark.parametrize("level", ["Q4_0", "Q4_K_S", "Q4_K_M", "Q5_K_M", "Q6_K"])
def test_nothing_recovers_as_much_with_fewer_bytes(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "SHARES", MANY)
    types, whole = LADDER[level], ex.loss(LADDER[level])
    found = recovered(of(level))
    assert list(found) == [(level, share) for share in MANY]
    for share in MANY:
        row, left = found[level, share], (1 - share) * whole
        assert (row.layers, row.layers_bytes) == cheapest_layers(types, left)
        assert row.raised_bytes == cheapest_mix(types, left, raised=True)
        assert row.free_bytes == cheapest_mix(types, left, raised=False)


def test_larger_types_are_never_dearer_than_16_bit_and_any_types_never_dearer_than_larger_ones() -> None:
    for row in recovered().values():
        assert row.free_bytes is not None
        assert row.raised_bytes is not None
        assert row.layers_bytes is not None
        assert row.free_bytes <= row.raised_bytes <= row.layers_bytes
        assert row.raised_bytes > 0


def test_a_better_mix_may_be_smaller_than_the_level() -> None:
    assert (recovered()["Q4_K_M", 0.10].free_bytes or 0) < 0


def test_recovering_more_never_costs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "SHARES", tuple(np.linspace(0, 1, 41)))
    for level in ("Q4_K_M", "Q6_K"):
        rows = [row for (name, _), row in recovered().items() if name == level]
        for costs in ([row.layers_bytes for row in rows], [row.raised_bytes for row in rows]):
            known = [cost for cost in costs if cost is not None]
            assert known == sorted(known)
            assert len(known) == 41
        free = [row.free_bytes or 0 for row in rows]
        assert free == sorted(free)
        assert [row.kld for row in rows] == sorted((row.kld for row in rows), reverse=True)
        assert (rows[0].layers, rows[0].layers_bytes, rows[0].raised_bytes) == ((), 0, 0)


def test_layers_are_by_number_then_what_is_outside_them() -> None:
    row = recovered(of("Q4_K_S"))["Q4_K_S", 0.5]
    assert row.layers == ("layer 0",)
    every = recovery._recovery(Choices(ex.example()), of("Q4_K_M"), LADDER["Q4_K_M"], 1.0)
    assert every.layers == ("layer 0", "layer 1", "layer 10", "token_embd")
    assert sorted(("output", "layer 10", "layer 9", "layer 100", "a"), key=recovery._place) == [
        *("layer 9", "layer 10", "layer 100", "a", "output")
    ]


def test_layers_that_are_at_16_bit_or_more_cost_nothing_and_are_not_listed() -> None:
    types = {**LADDER["Q4_K_M"], DOWN_10: "F32", OUT_1: "F16"}
    row = recovery._recovery(Choices(ex.example()), of("Q4_K_M", types), types, 1.0)
    assert row.layers == ("layer 0", "token_embd")
    assert row.layers_bytes == sum(
        ex.size(name, "F16") - ex.size(name, types[name]) for name in (OUT_0, DOWN_0, EMBEDDING)
    )
    # The same damage in half of the bytes: F32 becomes F16.
    assert row.free_bytes == row.layers_bytes - 2 * math.prod(ex.SHAPES[DOWN_10])
    assert row.raised_bytes == row.layers_bytes


def test_what_cannot_be_recovered_has_no_price() -> None:
    row = recovery._recovery(Choices(ex.example()), of("Q4_K_M"), LADDER["Q4_K_M"], 1.5)
    assert (row.layers, row.layers_bytes, row.raised_bytes, row.free_bytes, row.ladder_bytes) == (
        *((), None, None, None, None),
    )


def test_what_is_left_is_calibrated() -> None:
    found = recovered()
    for level, whole in ex.RAW.items():
        for share in (0.10, 0.25, 0.50):
            assert found[level, share].kld == pytest.approx(ex.calibrated((1 - share) * whole))


def test_each_measured_level_and_share_smallest_first() -> None:
    levels = ex.example().levels
    assert list(recovered(*levels[::-1])) == [
        (name, share) for name in ("Q4_K_M", "Q6_K") for share in (0.10, 0.25, 0.50)
    ]


def test_levels_without_predictions_or_without_damage_are_left_out() -> None:
    half = {**LADDER["Q4_K_M"], **dict.fromkeys(OPTIONS, "F16")}
    unknown = ex.level("Q2_K", 0.2, LADDER["Q2_K"])
    found = recovered(unknown, of("F16", half), of("Q4_K_M"))
    assert {level for level, _ in found} == {"Q4_K_M"}


# ---------------------------------------------------------------- going to larger levels


def line(level: str, left: float, *names: str) -> float:
    """Bytes beside the level's on the line through these, in ln damage over bytes, by interpolation."""
    levels = [LADDER[name] for name in (level, *names)]
    sizes = [ex.data_bytes(types) for types in levels]
    logs = [math.log(ex.loss(types)) for types in levels]
    return float(np.interp(-math.log(left), [-x for x in logs], sizes)) - sizes[0]


def test_ladder_is_a_line_through_the_larger_levels() -> None:
    found = recovered()
    four, six = 0.00691, 0.00114
    # By hand, half of Q4_K_M's damage: 152,100 bytes to Q5_K_M, whose damage is 0.00235.
    by_hand = 152_100 * math.log(2) / math.log(0.00691 / 0.00235)
    assert found["Q4_K_M", 0.5].ladder_bytes == round(by_hand) == 97_749
    assert found["Q4_K_M", 0.1].ladder_bytes == round(line("Q4_K_M", 0.9 * four, "Q5_K_M"))
    assert found["Q6_K", 0.5].ladder_bytes == round(line("Q6_K", 0.5 * six, "Q8_0"))


def test_ladder_goes_over_several_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "SHARES", MANY)
    larger = ("Q5_K_M", "Q6_K", "Q8_0")
    for (_, share), row in recovered(of("Q4_K_M")).items():
        left = (1 - share) * 0.00691
        expected = round(line("Q4_K_M", left, *larger)) if left >= 0.00042 else None
        assert row.ladder_bytes == expected
    assert sum(row.ladder_bytes is None for row in recovered(of("Q4_K_M")).values()) == 3  # 0.95, 0.999 and 1


def test_ladder_is_unknown_beyond_the_largest_level() -> None:
    assert recovered(of("Q8_0"))["Q8_0", 0.10].ladder_bytes is None


def test_ladder_ends_at_the_largest_level_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    share = 1 - ex.loss(LADDER["Q8_0"]) / ex.loss(LADDER["Q6_K"])
    monkeypatch.setattr(recovery, "SHARES", (share - 1e-9, share + 1e-9))
    before, beyond = recovered(of("Q6_K")).values()
    assert before.ladder_bytes == ex.data_bytes(LADDER["Q8_0"]) - ex.data_bytes(LADDER["Q6_K"])
    assert beyond.ladder_bytes is None


def test_levels_that_are_larger_but_no_better_are_not_on_the_ladder() -> None:
    worse = {**LADDER["Q4_K_M"], DOWN_0: "Q5_K", UNPREDICTED: "F16"}
    assert ex.data_bytes(worse) > ex.data_bytes(LADDER["Q4_K_M"])
    assert ex.loss(worse) > ex.loss(LADDER["Q4_K_M"])
    ladder = (Rung("Q5_K_S", tuple(worse.values())), *ex.example().ladder)
    for share in (0.10, 0.50):
        with_it, without = recovered(of("Q4_K_M"), ladder=ladder), recovered(of("Q4_K_M"))
        assert with_it["Q4_K_M", share].ladder_bytes == without["Q4_K_M", share].ladder_bytes


def test_levels_that_are_better_but_no_larger_are_not_on_the_ladder() -> None:
    worse = {**LADDER["Q4_K_M"], DOWN_0: "Q5_K", UNPREDICTED: "F16"}  # larger than Q4_K_M, and worse
    sizes, logs = zip(
        *((ex.data_bytes(types), -math.log(ex.loss(types))) for types in (worse, LADDER["Q5_K_M"])), strict=True
    )
    expected = np.interp(-math.log(0.75 * ex.loss(worse)), logs, sizes) - sizes[0]
    assert recovered(of("Q5_K_S", worse))["Q5_K_S", 0.25].ladder_bytes == round(expected) > 0


def test_only_the_usual_levels_are_on_the_ladder() -> None:
    mix = {**LADDER["Q4_K_M"], OUT_0: "Q5_K"}  # a file of someone's own, better than any level of its size
    assert ex.loss(mix) < 0.005
    found = recovered(of("Q4_K_M"), of("mine", mix))
    assert found["Q4_K_M", 0.25].ladder_bytes == recovered(of("Q4_K_M"))["Q4_K_M", 0.25].ladder_bytes
