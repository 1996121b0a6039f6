"""What to keep at 16 bit: order, cut, noise, confidence, and what holds for any units."""

from __future__ import annotations

import dataclasses
import math
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from qres.advice.keep import NOISE_FACTOR, NextLevel, UnitDamage, keep_list
from qres.metrics import means
from qres.records.units import Keep
from tests.search import searched


def unit(
    name: str, kld: float, mib: float = 1.0, chunks: int = 8, spread: float = 0.0, type: str = "F16"
) -> UnitDamage:
    """A unit with `kld` on average, alternating by `spread` between chunks of 100 tokens."""
    sums = tuple(100 * (kld + (spread if i % 2 else -spread)) for i in range(chunks))
    return UnitDamage(name, sums, (100,) * chunks, int(mib * MIB), type)


def names(rows: tuple[Keep, ...]) -> list[str]:
    return [row.unit for row in rows]


# ---------------------------------------------------------------- the list


def test_keep_list_is_ordered_by_kld_per_byte() -> None:
    units = [unit("cheap", 0.02, 0.5), unit("big", 0.05, 4), unit("best", 0.03, 0.5), unit("small", 0.02, 1)]
    rows = keep_list(units, 0.2, None, None)
    assert names(rows) == ["best", "cheap", "small", "big"]
    assert [row.kld_recovered for row in rows] == pytest.approx([0.03, 0.02, 0.02, 0.05])
    assert [row.gap_share for row in rows] == pytest.approx([0.15, 0.1, 0.1, 0.25])
    assert [row.bytes_added for row in rows] == [MIB // 2, MIB // 2, MIB, 4 * MIB]
    assert all(row.worth_it for row in rows)


def test_keep_list_is_cut_where_the_next_level_is_cheaper() -> None:
    units = [unit("a", 0.04), unit("b", 0.03), unit("c", 0.02), unit("d", 0.01)]
    rows = keep_list(units, 0.2, None, NextLevel("Q5_K_M", 0.1, 4 * MIB))  # 0.025 per MiB
    assert [(row.unit, row.worth_it) for row in rows] == [("a", True), ("b", True), ("c", False), ("d", False)]
    assert rows[0].reason == "0.04 nats per MiB; Q5_K_M: 0.025"
    assert rows[2].reason == "0.02 nats per MiB; Q5_K_M: 0.025"


def test_keep_list_tie_with_the_next_level_is_not_worth_it() -> None:
    (row,) = keep_list([unit("a", 0.5)], 1.0, None, NextLevel("Q8_0", 0.5, MIB))
    assert not row.worth_it


def test_keep_list_next_level_without_more_bytes_cuts_nothing() -> None:
    (row,) = keep_list([unit("a", 0.04)], 0.2, None, NextLevel("Q5_K_M", 0.1, 0))
    assert row.worth_it


def test_keep_list_leaves_out_what_noise_could_explain() -> None:
    units = [unit("above", 0.0031), unit("below", 0.0029)]
    assert names(keep_list(units, 0.2, 0.001, None)) == ["above"]
    assert names(keep_list(units, 0.2, None, None)) == ["above", "below"]
    assert names(keep_list(units, 0.2, 0.0, None)) == ["above", "below"]


def test_keep_list_leaves_out_what_two_standard_errors_could_explain() -> None:
    # Means alternate by +-spread over 8 chunks: the standard error is spread / sqrt(7).
    kld = 0.01
    just = kld * math.sqrt(7) / 2
    units = [unit("clear", kld, spread=just * 0.99), unit("unclear", kld, spread=just * 1.01)]
    assert names(keep_list(units, 0.2, None, None)) == ["clear"]


def test_keep_list_leaves_out_units_damaged_in_one_chunk_alone() -> None:
    one = UnitDamage("one", (80.0, *(0.0,) * 7), (100,) * 8, MIB, "F16")
    assert keep_list([one], 0.2, None, None) == ()


def test_keep_list_leaves_out_units_that_cost_nothing_to_keep() -> None:
    assert keep_list([unit("same", 0.1, mib=0), unit("smaller", 0.1, mib=-1)], 0.2, None, None) == ()


def test_keep_list_leaves_out_units_without_damage() -> None:
    assert keep_list([unit("none", 0.0)], 0.2, None, None) == ()


def test_keep_list_leaves_out_units_without_tokens() -> None:
    assert keep_list([UnitDamage("none", (), (), MIB, "F16")], 0.2, None, None) == ()


def test_keep_list_of_nothing() -> None:
    assert keep_list([], 0.2, 0.001, NextLevel("Q5_K_M", 0.1, MIB)) == ()


def test_keep_list_of_a_level_without_damage_has_no_shares() -> None:
    (row,) = keep_list([unit("a", 0.1)], 0.0, None, None)
    assert row.gap_share == 0.0


def test_keep_list_weighs_chunks_by_their_tokens() -> None:
    uneven = UnitDamage("a", (10.0, 30.0), (100, 300), MIB, "BF16")
    (row,) = keep_list([uneven], 1.0, None, None)
    assert row.kld_recovered == pytest.approx(0.1)
    assert row.type == "BF16"


# ---------------------------------------------------------------- confidence


def test_confidence_of_clear_differences_is_1() -> None:
    rows = keep_list([unit("a", 0.04), unit("b", 0.02)], 0.2, None, NextLevel("Q5_K_M", 0.03, MIB))
    assert [row.confidence for row in rows] == [1.0, 1.0]


def test_confidence_is_low_where_one_chunk_decides() -> None:
    steady = unit("steady", 0.2)
    lucky = UnitDamage("lucky", (115.0, *(15.0,) * 7), (100,) * 8, MIB, "F16")  # 0.275 with, 0.15 without that chunk
    rows = keep_list([steady, lucky], 1.0, None, NextLevel("Q5_K_M", 0.25, MIB))
    assert [(row.unit, row.worth_it) for row in rows] == [("lucky", True), ("steady", False)]
    # It is first only where that chunk is drawn at all.
    assert rows[0].confidence == pytest.approx(1 - (7 / 8) ** 8, abs=0.05)
    assert rows[1].confidence == 1.0  # never below its second place


def test_confidence_of_an_even_race_is_a_half() -> None:
    # Each is ahead in every other chunk; one byte less puts `a` before `b`, and the cut between them.
    a = UnitDamage("a", tuple(10.0 + i % 2 for i in range(40)), (100,) * 40, MIB - 1, "F16")
    b = UnitDamage("b", tuple(11.0 - i % 2 for i in range(40)), (100,) * 40, MIB, "F16")
    rows = keep_list([a, b], 1.0, None, NextLevel("Q5_K_M", 0.105, MIB))
    assert [(row.unit, row.worth_it) for row in rows] == [("a", True), ("b", False)]
    assert rows[0].confidence == pytest.approx(0.5, abs=0.1)


def test_confidence_is_the_same_every_time() -> None:
    units = [
        UnitDamage(f"{i}.ffn", tuple(10.0 + (i * 7 + j * 3) % 5 for j in range(6)), (100,) * 6, MIB, "F16")
        for i in range(5)
    ]
    first, second = (keep_list(units, 1.0, None, NextLevel("Q5_K_M", 0.121, MIB)) for _ in range(2))
    assert first == second
    assert any(row.confidence not in {0.0, 1.0} for row in first)


@pytest.mark.parametrize(("chunks", "known"), [(1, False), (2, False), (3, True)])
def test_confidence_needs_three_chunks(chunks: int, known: bool) -> None:
    (row,) = keep_list([unit("a", 0.1, chunks=chunks)], 0.2, None, None)
    assert (row.confidence is not None) == known


# ---------------------------------------------------------------- the keep list


@dataclasses.dataclass(frozen=True)
class Question:
    """What `keep_list` is asked."""

    units: list[UnitDamage]
    level_kld: float
    noise: float | None
    alternative: NextLevel | None

    def ask(self) -> tuple[Keep, ...]:
        return keep_list(self.units, self.level_kld, self.noise, self.alternative)


MIB = 2**20


@st.composite
def questions(draw: st.DrawFn) -> Question:
    """Units so alike that draws of chunks order them differently; some are below the noise, some hit in one chunk.

    The values are seeded: searched for one by one they would nearly all be equal, and no order would be in doubt.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    chunks, n = draw(st.sampled_from([1, 2, 3, 3, 3, 6])), draw(st.sampled_from([0, 1, 4, 8, 8]))
    tokens = tuple(int(x) for x in rng.choice([255, 255, 255, 255, 100, 0], chunks))
    units = []
    for i in range(n):
        mean = rng.choice([1e-3, 1e-3, 1e-3, 2e-3, 0.1, 1e-6, 0.0])
        factors = rng.choice([0.0, 0.0, 5.0], chunks) if rng.random() < 0.2 else rng.uniform(0.5, 1.5, chunks)
        sums = tuple(float(mean * factor * n) for factor, n in zip(factors, tokens, strict=True))
        added = int(rng.choice([MIB, MIB, MIB, MIB + 1, 3 * MIB // 2, 64 * MIB, 0, -1]))
        units.append(UnitDamage(f"{i}.ffn", sums, tokens, added, "F16"))
    other = draw(st.sampled_from([(1e-3, MIB), (1e-3, MIB), (1e-3, MIB), (0.1, 4 * MIB), (0.1, 0), (0.1, -MIB), None]))
    noise = draw(st.sampled_from([None, 0.0, 1e-5, 3e-4]))
    level_kld = draw(st.floats(1e-6, 5) | st.just(0.0))
    return Question(units, level_kld, noise, other and NextLevel("Q6_K", *other))


@searched
@given(questions())
def test_keep_list_lists_what_stands_out_in_order(question: Question) -> None:
    rows = question.ask()
    assert question.ask() == rows
    by_name = {unit.unit: unit for unit in question.units}
    for row in rows:
        unit = by_name[row.unit]
        error = means.clustered_se(unit.kld_sums, unit.tokens)
        assert row.bytes_added == unit.bytes_added > 0
        assert row.kld_recovered == pytest.approx(sum(unit.kld_sums) / sum(unit.tokens))
        assert row.kld_recovered > max(NOISE_FACTOR * (question.noise or 0.0), 2 * (error or 0.0), 0.0)
        assert row.gap_share * question.level_kld == pytest.approx(row.kld_recovered if question.level_kld else 0.0)
    for name in by_name.keys() - {row.unit for row in rows}:  # and nothing that stands out is left out
        unit = by_name[name]
        error = means.clustered_se(unit.kld_sums, unit.tokens) or 0.0
        assert unit.bytes_added <= 0 or unit.kld <= max(NOISE_FACTOR * (question.noise or 0.0), 2 * error)
    rates = [row.kld_recovered / row.bytes_added for row in rows]
    assert rates == sorted(rates, reverse=True)
    worth = [row.worth_it for row in rows]
    assert worth == sorted(worth, reverse=True)  # cut once
    other = question.alternative
    least = other.kld_recovered / other.bytes_added if other and other.bytes_added > 0 else 0.0
    assert worth == [rate > least for rate in rates]


@searched
@given(questions())
def test_confidence_is_a_share_of_draws(question: Question) -> None:
    rows = question.ask()
    if not rows or len(question.units[0].tokens) < 3:
        assert all(row.confidence is None for row in rows)
        return
    shares = [row.confidence for row in rows if row.confidence is not None]
    assert len(shares) == len(rows)
    assert all(0 <= share <= 1 for share in shares)
    assert shares[-1] == 1.0  # the last place, and every place of a list that is not cut, holds whatever is drawn
    cut = sum(row.worth_it for row in rows)
    by_name = {unit.unit: unit for unit in question.units}
    rates = np.array([by_name[row.unit].kld_sums for row in rows]) / [[row.bytes_added] for row in rows]
    for i, share in enumerate(shares):
        places = cut if i < cut else i + 1
        ahead = rates > rates[i] * (1 + 1e-9)  # [units, chunks]
        level_with = rates >= rates[i] * (1 - 1e-9)
        # Only those that recover as much per byte in some chunk can pass it where chunks are drawn again.
        assert share == 1.0 or level_with.any(axis=1).sum() - 1 >= places
        # Of three chunks, every 27th draw is one chunk thrice: what is behind in it cannot be always ahead.
        assert len(question.units[0].tokens) > 3 or share < 1.0 or ahead.sum(axis=0).max() < places


@searched
@given(questions(), st.randoms(use_true_random=False))
def test_keep_list_does_not_depend_on_the_order_of_units(question: Question, random: Random) -> None:
    rows = question.ask()
    rates = [row.kld_recovered / row.bytes_added for row in rows]
    assume(len(set(rates)) == len(rates))
    shuffled = list(question.units)
    random.shuffle(shuffled)
    assert dataclasses.replace(question, units=shuffled).ask() == rows


@searched
@given(questions(), st.integers(0, 8))
def test_units_that_are_not_listed_change_nothing(question: Question, at: int) -> None:
    assume(question.units)
    tokens = question.units[0].tokens
    silent = UnitDamage("silent", (0.0,) * len(tokens), tokens, 1, "F16")
    free = UnitDamage("free", (1e3,) * len(tokens), tokens, 0, "F16")
    units = [*question.units[:at], silent, free, *question.units[at:]]
    assert dataclasses.replace(question, units=units).ask() == question.ask()


@searched
@given(questions())
def test_keep_list_does_not_depend_on_the_units_of_bytes_and_nats(question: Question) -> None:
    def scaled(kld: float, size: int) -> Question:
        units = [
            dataclasses.replace(u, kld_sums=tuple(s * kld for s in u.kld_sums), bytes_added=u.bytes_added * size)
            for u in question.units
        ]
        other = question.alternative
        return Question(
            units,
            question.level_kld * kld,
            None if question.noise is None else question.noise * kld,
            other and NextLevel(other.name, other.kld_recovered * kld, other.bytes_added * size),
        )

    def choice(rows: tuple[Keep, ...]) -> list[tuple[str, float, float | None, bool]]:
        return [(row.unit, row.gap_share, row.confidence, row.worth_it) for row in rows]

    rows = question.ask()
    for kld, size in ((2.0, 1), (0.25, 1), (1.0, 4), (8.0, 2)):  # powers of two: no rounding of their own
        assert choice(scaled(kld, size).ask()) == choice(rows)


# ---------------------------------------------------------------- what costs nothing


def changed(name: str, kld: float, mib: float = 0.0) -> UnitDamage:
    """A unit that the level holds otherwise than the reference."""
    return dataclasses.replace(unit(name, kld, mib), tensors=(f"{name}.weight",))


def test_c20_keep_list_begins_with_what_is_free_to_mend() -> None:
    rows = keep_list([unit("costly", 0.5), changed("less", 0.01), changed("more", 0.02)], 0.6, 0.001, None)
    assert [(row.unit, row.bytes_added, row.worth_it) for row in rows] == [
        ("more", 0, True),
        ("less", 0, True),
        ("costly", MIB, True),
    ]
    assert rows[0].tensors == ("more.weight",)
    assert rows[0].reason == "it takes no more bytes in the reference"
    assert rows[0].confidence == 1.0


def test_c20_what_is_free_is_worth_it_whatever_a_larger_level_does() -> None:
    rows = keep_list([changed("free", 0.01), changed("dear", 0.02, mib=1)], 0.2, None, NextLevel("Q8_0", 0.2, MIB))
    assert [(row.unit, row.worth_it) for row in rows] == [("free", True), ("dear", False)]


def test_c20_a_difference_within_the_noise_is_no_damage() -> None:
    assert keep_list([changed("quiet", 0.0029)], 0.2, 0.001, None) == ()
