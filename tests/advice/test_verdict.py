"""Which level to ship, what is said of the keep list, and every way to have no answer."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from qres.advice import verdict
from qres.metrics.output import OutputStats, TokenScores
from qres.records.files import TypeShare
from qres.records.result import Level
from qres.records.stream import NoiseFloor
from qres.records.units import Keep, KeepCheck
from tests.examples.levels import changed_level
from tests.examples.result import example

MIB = 2**20


# ---------------------------------------------------------------- the verdict

REFERENCE = dataclasses.replace(example().reference, bytes=100 * MIB)
NOISE = NoiseFloor(1e-4, None)


def level(
    name: str,
    mib: int,
    *,
    kld: float | None = 0.05,
    same_top: float | None = 0.95,
    ln_ppl: float | None = 0.01,
    ln_ppl_se: float | None = 0.001,
    nonfinite: int = 0,
) -> Level:
    base = example().levels[1]
    output = dataclasses.replace(
        base.output,
        kld_mean=kld,
        same_top=same_top,
        ln_ppl_ratio=ln_ppl,
        ln_ppl_ratio_se=ln_ppl_se,
        nonfinite_tokens=nonfinite,
    )
    return changed_level(base, name=name, bytes=mib * MIB, output=output, keep_16bit=(), keep_check=None)


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"same_top": 0.90}, True),
        ({"same_top": 0.8999}, False),
        ({"ln_ppl": 0.0279}, True),
        ({"ln_ppl": 0.0281}, False),  # 0.0281 + 2 * 0.001 > 0.03
        ({"ln_ppl": 0.0, "ln_ppl_se": None}, False),  # one chunk proves nothing
        ({"ln_ppl": -0.5}, True),
        ({"same_top": None}, False),
        ({"ln_ppl": None}, False),
        ({"nonfinite": 1}, False),
    ],
)
def test_is_good_at_its_bounds(changes: dict[str, float | None], good: bool) -> None:
    assert verdict.is_good(level("Q4_K_M", 40, **changes)) is good  # type: ignore[arg-type]


def test_verdict_is_the_smallest_good_level() -> None:
    levels = [
        level("Q8_0", 80, kld=0.001),
        level("Q4_K_M", 40, same_top=0.8, kld=0.2),
        level("Q6_K", 60, kld=0.004),
        level("Q5_K_M", 50, kld=0.01, same_top=0.931, ln_ppl=0.02),
        level("Q2_K", 20, same_top=0.4, kld=2.0),
    ]
    found = verdict.verdict(REFERENCE, levels, NOISE)
    assert found.level == "Q5_K_M"
    assert found.headline.startswith(f"Ship Q5_K_M (50 MiB, {50 * MIB / REFERENCE.bytes:.0%} of the reference)")
    assert "same top token 93.1%, perplexity +2.0%, KLD 0.0100" in found.headline
    assert "smallest measured level within 90% same top token and less than 3% more perplexity" in found.details
    assert "Q4_K_M is not (80.0%, +1.0% ± 0.1%)" in found.details
    assert "100 times the noise floor" in found.details
    assert found.keep == "Nothing in Q5_K_M needs to stay at 16 bit: no unit's damage stands out of the noise."


def test_verdict_of_a_good_level_alone_names_no_other() -> None:
    found = verdict.verdict(REFERENCE, [level("Q8_0", 80)], NoiseFloor(None, None))
    assert found.level == "Q8_0"
    assert found.details == (
        "It is the smallest measured level within 90% same top token and less than 3% more perplexity, "
        "two standard errors included."
    )


def test_verdict_tells_the_reasons_for_keeping_nothing_apart() -> None:
    row = Keep("0.ffn", "F16", 0.01, 0.1, MIB, None, False, "")
    small = changed_level(level("Q5_K_M", 50), keep_16bit=(row,))
    unmapped = changed_level(small, units=(), keep_16bit=())

    def keep(*levels: Level) -> str:
        return verdict.verdict(REFERENCE, levels, NOISE).keep

    assert keep(small) == "Nothing in Q5_K_M is sure to be worth keeping at 16 bit: measure a larger level beside it."
    better = level("Q8_0", 80, kld=0.001)
    assert keep(small, better) == "Nothing in Q5_K_M is worth keeping at 16 bit: Q8_0 recovers more per byte."
    worse = level("Q8_0", 80, kld=0.9)  # larger, and recovers nothing
    assert keep(small, worse) == keep(small)
    assert keep(unmapped) == "What to keep at 16 bit in Q5_K_M is unknown: its units could not be measured."


def test_verdict_says_when_no_gain_shows_on_other_text() -> None:
    row = Keep("0.ffn", "F16", 0.01, 0.1, MIB, None, True, "")
    check = KeepCheck(("0.ffn",), 0.1, 0.09, 0.1, MIB, recovered_se=0.06)
    kept = changed_level(level("Q5_K_M", 50), keep_16bit=(row,), keep_check=check)
    assert "no gain shows on other text" in verdict.verdict(REFERENCE, [kept], NOISE).keep
    sure = changed_level(kept, keep_check=dataclasses.replace(check, recovered_se=0.01))
    assert "the KLD falls by 10% on other text" in verdict.verdict(REFERENCE, [sure], NOISE).keep


def test_verdict_without_good_level_is_the_least_damaged() -> None:
    levels = [
        level("Q3_K_M", 30, same_top=0.7, kld=0.3),
        level("Q4_0", 42, same_top=0.8, kld=0.1),
        level("Q4_1", 45, same_top=0.8, kld=0.11),
    ]
    found = verdict.verdict(REFERENCE, levels, NOISE)
    assert found.level == "Q4_0"
    assert "least damaged" in found.headline
    assert "not good" in found.headline
    assert "Ship" not in found.headline
    assert "measure larger ones" in found.details


def test_verdict_leaves_out_levels_without_figures() -> None:
    dead = level("Q1_0", 10, kld=None, same_top=None, ln_ppl=None, ln_ppl_se=None, nonfinite=2040)
    bad = level("Q2_K", 20, kld=1.5, same_top=0.4, nonfinite=3)
    assert verdict.verdict(REFERENCE, [dead, level("Q5_K_M", 50)], NOISE).level == "Q5_K_M"
    found = verdict.verdict(REFERENCE, [dead, bad], NOISE)
    assert found.level == "Q2_K"
    assert found.headline.startswith("Q2_K is the least damaged")


def test_verdict_with_missing_figures_still_speaks() -> None:
    found = verdict.verdict(REFERENCE, [level("Q5_K_M", 50, same_top=None, ln_ppl=None)], NOISE)
    assert "same top token n/a, perplexity n/a" in found.headline


def test_verdict_without_levels() -> None:
    for levels in ([], [level("Q1_0", 10, kld=None)]):
        found = verdict.verdict(REFERENCE, levels, NOISE)
        assert found.level is None
        assert found.headline == "No level could be measured."


def test_verdict_ships_nothing_as_large_as_the_reference() -> None:
    whole = REFERENCE.bytes // MIB + 1
    small, large = level("Q2_K", 1, same_top=0.4, kld=2.0), level("F32", whole, kld=0.0)
    assert verdict.verdict(REFERENCE, [small, large], NOISE).level == "Q2_K"
    alone = verdict.verdict(REFERENCE, [large], NOISE)
    assert alone.level is None
    assert alone.headline.startswith("Nothing to ship: F32 is not smaller than the reference (100 MiB); same top")


def test_verdict_takes_no_level_for_good_that_is_not_sound() -> None:
    broken = dataclasses.replace(level("Q5_K_M", 50), sound=False)
    assert not verdict.is_good(broken)
    assert verdict.verdict(REFERENCE, [broken, level("Q8_0", 80)], NOISE).level == "Q8_0"


def test_verdict_on_one_chunk_asks_for_more_text() -> None:
    found = verdict.verdict(REFERENCE, [level("Q5_K_M", 50, ln_ppl_se=None)], NOISE)
    assert found.details.startswith("One chunk is too little to call any level good: give a longer text; ")


def test_verdict_of_a_perplexity_beyond_percents() -> None:
    found = verdict.verdict(REFERENCE, [level("Q1_0", 10, ln_ppl=25.4)], NOISE)
    assert "perplexity times e^25" in found.headline


def worth(*units: str) -> Level:
    """The example's smaller level with a list of these units, all worth their bytes; it was checked without a head."""
    four = example().levels[0]
    listed = {row.unit: row for row in four.sensitivity.keep_16bit}
    return changed_level(four, keep_16bit=tuple(dataclasses.replace(listed[unit], worth_it=True) for unit in units))


def fall() -> str:
    """What the KLD falls by on other text without the errors of the example's list."""
    check = example().levels[0].sensitivity.keep_check
    assert check is not None
    return f"{100 * (1 - check.kld_without_units / check.kld_all_injected):.0f}%"


def added_mib(*units: str) -> str:
    """What F16 adds to the bytes of these units."""
    every = {unit.unit: unit.bytes_at_16bit - unit.bytes_at_level for unit in example().levels[0].sensitivity.units}
    return f"{sum(every[unit] for unit in units) / MIB:.1f}"


def test_verdict_names_what_is_worth_keeping() -> None:
    found = verdict.verdict(REFERENCE, [worth("embedding", "head", "0.ffn")], NOISE)
    assert found.keep == (
        f"Keep at 16 bit in Q4_K_M: embedding, head, 0.ffn (+{added_mib('embedding', 'head', '0.ffn')} MiB; without "
        f"their errors, the head's apart, the KLD falls by {fall()} on other text)."
    )


def test_verdict_says_what_was_checked_of_the_list() -> None:
    four = worth("embedding", "0.ffn")  # without the head, everything was checked
    added = added_mib("embedding", "0.ffn")
    found = verdict.verdict(REFERENCE, [four], NOISE)
    assert found.keep == (
        f"Keep at 16 bit in Q4_K_M: embedding, 0.ffn (+{added} MiB; without their errors the KLD falls by {fall()} on "
        "other text)."
    )
    found = verdict.verdict(REFERENCE, [changed_level(four, keep_check=None)], NOISE)
    assert found.keep == f"Keep at 16 bit in Q4_K_M: embedding, 0.ffn (+{added} MiB)."


def test_verdict_takes_no_notice_of_a_head_that_is_not_worth_keeping() -> None:
    four = worth("0.ffn", "head")
    ffn, head = four.sensitivity.keep_16bit
    rows = (ffn, dataclasses.replace(head, worth_it=False))
    found = verdict.verdict(REFERENCE, [changed_level(four, keep_16bit=rows)], NOISE)
    assert "head" not in found.keep
    assert f"without their errors the KLD falls by {fall()}" in found.keep


def test_verdict_counts_what_does_not_fit_the_line() -> None:
    row = example().levels[0].sensitivity.keep_16bit[0]
    keep = tuple(dataclasses.replace(row, unit=f"{i}.ffn", bytes_added=MIB, tensors=()) for i in range(7))
    found = verdict.verdict(REFERENCE, [changed_level(level("Q4_K_M", 40), keep_16bit=keep)], NOISE)
    assert found.keep == "Keep at 16 bit in Q4_K_M: 0.ffn, 1.ffn, 2.ffn, 3.ffn, 4.ffn and 2 more (+7.0 MiB)."


# ---------------------------------------------------------------- a reference that predicts nothing


def reading(ppl: float | None, name: str = "Q4_K_M", tokens: int = 2040) -> Level:
    """A level whose reference has this perplexity."""
    base = level(name, 40)
    return dataclasses.replace(base, output=dataclasses.replace(base.output, ppl_reference=ppl, tokens=tokens))


@pytest.mark.parametrize(
    ("n_vocab", "ppl", "absurd"),
    [
        (49_152, 999.99, False),  # a large vocabulary: 1000
        (49_152, 1000.0, True),
        (2_000, 1000.0, True),  # both bounds are the same here
        (2_000, 999.99, False),
        (1_998, 999.0, True),  # a small one: half of it
        (1_998, 998.99, False),
        (258, 129.01, True),
        (258, 128.99, False),
        (258, 317.0, True),  # worse than guessing
        (49_152, 18.5, False),
        (49_152, None, True),  # beyond e^700
        (49_152, 1.0, False),
    ],
)
def test_absurd_reference_at_its_bounds(n_vocab: int, ppl: float | None, absurd: bool) -> None:
    reference = dataclasses.replace(REFERENCE, n_vocab=n_vocab)
    why = verdict.absurd_reference(reference, [reading(ppl)])
    assert bool(why) == absurd
    if absurd and ppl is None:
        assert "perplexity beyond all numbers on this text" in why
    elif absurd:
        assert f"perplexity of {ppl:,.0f} on this text (guessing has {n_vocab:,})" in why


def test_absurd_reference_takes_the_worst_reading() -> None:
    """Levels leave out different positions, so that each has read the reference at others."""
    assert verdict.absurd_reference(
        REFERENCE, [reading(20.0), reading(5000.0, "Q8_0"), reading(None, "Q2_K", tokens=0)]
    )
    assert verdict.absurd_reference(REFERENCE, [reading(20.0), reading(30.0, "Q8_0")]) == ""


def test_absurd_reference_without_levels_is_unknown() -> None:
    assert verdict.absurd_reference(REFERENCE, []) == ""
    assert verdict.absurd_reference(REFERENCE, [reading(None, tokens=0)]) == ""


def test_absurd_reference_of_a_perplexity_beyond_all_numbers() -> None:
    stats = OutputStats()
    nll = np.full(10, 800.0)
    stats.update(TokenScores(np.ones(10), nll, nll, np.ones(10, dtype=np.bool_), np.zeros(10), np.zeros(10), 0))
    lost = dataclasses.replace(level("Q8_0", 40), output=stats.compute())
    assert lost.output.tokens == 10
    assert verdict.absurd_reference(REFERENCE, [lost])


def test_without_advice_keeps_the_ranking() -> None:
    four = example().levels[0]
    assert any(row.worth_it for row in four.sensitivity.keep_16bit)
    plain = verdict.without_advice(four)
    assert not any(row.worth_it for row in plain.sensitivity.keep_16bit)
    back = [
        dataclasses.replace(row, worth_it=old.worth_it)
        for row, old in zip(plain.sensitivity.keep_16bit, four.sensitivity.keep_16bit, strict=True)
    ]
    assert changed_level(plain, keep_16bit=tuple(back)) == four  # nothing else was touched
    assert verdict.without_advice(plain) == plain
    assert verdict.without_advice(level("Q8_0", 80)).sensitivity.keep_16bit == ()


@pytest.mark.parametrize("levels", [[], [level("Q5_K_M", 50)], [worth("head"), level("Q8_0", 80, kld=0.001)]])
def test_verdict_of_an_absurd_reference_names_nothing_to_ship(levels: list[Level]) -> None:
    found = verdict.verdict(REFERENCE, levels, NOISE, "the reference itself has a perplexity of 317")
    assert found.level is None
    assert found.headline == "No advice: the reference itself has a perplexity of 317."
    said = f"{found.headline} {found.keep} {found.details}"
    assert not any(name in said for name in ("Ship", "Q4_K_M", "Q5_K_M", "Q8_0", "MiB", "head"))
    assert "qres inspect" in found.details


def test_verdict_of_a_sound_reference_is_not_touched_by_the_check() -> None:
    levels = [level("Q5_K_M", 50)]
    assert verdict.verdict(REFERENCE, levels, NOISE, "") == verdict.verdict(REFERENCE, levels, NOISE)
    assert verdict.verdict(REFERENCE, levels, NOISE).level == "Q5_K_M"


# ---------------------------------------------------------------- nothing to choose from


def copy(name: str = "F16", mib: int = 100) -> Level:
    return dataclasses.replace(changed_level(level(name, mib, kld=0.0), bpw=16.01), is_copy=True)


def test_c5_verdict_of_a_copy_alone_advises_nothing() -> None:
    found = verdict.verdict(REFERENCE, [copy(mib=99)], NOISE)  # a few bytes less of metadata
    assert found.level is None
    assert found.headline == "Nothing to choose. F16 holds the same tensors as the reference."
    assert "MiB" not in f"{found.headline} {found.keep} {found.details}"
    several = verdict.verdict(REFERENCE, [copy("F16 (a.gguf)"), copy("F16 (b.gguf)")], NOISE)
    expected = "Nothing to choose. F16 (a.gguf) and F16 (b.gguf) hold the same tensors as the reference."
    assert several.headline == expected


def test_c5_verdict_of_a_copy_beside_a_level_is_the_level() -> None:
    bad = level("Q2_K", 20, same_top=0.4, kld=2.0)
    for one, start in ((level("Q5_K_M", 50), "Ship Q5_K_M (50 MiB, 50% of"), (bad, "Q2_K is the least damaged")):
        found = verdict.verdict(REFERENCE, [one, copy()], NOISE)
        assert found.level == one.name
        assert found.headline.startswith(start)
        assert found.headline.endswith(". F16 holds the same tensors as the reference.")


@pytest.mark.parametrize(("mib", "bpw"), [(100, REFERENCE.bpw), (99, REFERENCE.bpw), (200, 32.0), (101, 8.5)])
def test_c5_verdict_ships_no_file_that_is_not_smaller(mib: int, bpw: float) -> None:
    """Conversions: less metadata makes no smaller file."""
    found = verdict.verdict(REFERENCE, [changed_level(level("BF16", mib), bpw=bpw)], NOISE)
    assert found.level is None
    assert found.headline == (
        "Nothing to ship: BF16 is not smaller than the reference (100 MiB); same top token 95.0%, perplexity +1.0%, "
        "KLD 0.0500."
    )
    assert "500 times the noise floor" in found.details


def test_c5_verdict_of_several_larger_files_has_the_figures_of_the_best() -> None:
    large = [level("F32", 200, kld=0.1), level("BF16", 100, kld=0.01)]
    found = verdict.verdict(REFERENCE, [*large, copy()], NOISE)
    assert found.headline == (
        "Nothing to ship: F32 and BF16 are not smaller than the reference (100 MiB); BF16 has same top token 95.0%, "
        "perplexity +1.0%, KLD 0.0100. F16 holds the same tensors as the reference."
    )


# ---------------------------------------------------------------- a reference that is quantized itself


def share(type: str, mib: int) -> TypeShare:
    return TypeShare(type, 1, MIB, mib * MIB)


@pytest.mark.parametrize(
    ("types", "said"),
    [
        ((share("Q8_0", 99), share("F32", 1)), "Q8_0"),
        ((share("F16", 60), share("Q6_K", 39), share("F32", 1)), "Q6_K and F16"),
    ],
)
def test_c6_verdict_says_what_it_is_relative_to(types: tuple[TypeShare, ...], said: str) -> None:
    reference = dataclasses.replace(REFERENCE, is_16bit=False, types=types)
    for same_top in (0.95, 0.5):
        found = verdict.verdict(reference, [level("Q4_K_M", 50, same_top=same_top)], NOISE)
        assert found.headline.endswith(f"KLD 0.0500, relative to {said}.")
    assert "16 bit" not in f"{found.headline} {found.keep} {found.details}"
    assert "qres scan then makes levels" not in verdict.verdict(reference, [copy()], NOISE).details


def test_c7_verdict_of_a_released_model_is_relative_to_nothing() -> None:
    reference = dataclasses.replace(REFERENCE, is_16bit=False, released_in="MXFP4")
    levels = [level("Q4_K_M", 50)]
    assert verdict.verdict(reference, levels, NOISE) == verdict.verdict(REFERENCE, levels, NOISE)
