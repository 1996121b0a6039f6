"""Which level to ship, or why none can be advised.

Pure functions; every threshold is explained where it stands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from qres.records.result import Level, Reference, Verdict
from qres.records.stream import NoiseFloor
from qres.records.units import Keep, KeepCheck

GOOD_SAME_TOP = 0.90
GOOD_LN_PPL_RATIO = 0.03
"""A level counts as good when it puts the same token first as the reference at 90 % of the positions and its perplexity
rises by less than 3 %, two standard errors included. No law is behind the two numbers: they are where a reader of
next-token text starts to notice, by our judgement, and every report prints them beside the measured figures so that a
reader can judge otherwise."""

ABSURD_PPL = 1000.0
"""No working language model has this perplexity on a text in a language that it knows."""


def absurd_reference(reference: Reference, levels: Sequence[Level]) -> str:
    """Why nothing can be advised: the reference itself does not predict the text. Empty when it does.

    A model that knows nothing has the perplexity of its vocabulary. One that is at half of that, or above 1000, has a
    wrong tokenizer, a wrong architecture setting or damaged weights, or was given a text that is none.
    """
    bound = min(ABSURD_PPL, reference.n_vocab / 2)
    read = [level.output.ppl_reference for level in levels if level.output.tokens]
    ppl = max((math.inf if value is None else value for value in read), default=0.0)  # None: beyond e^700
    if ppl < bound:
        return ""
    shown = "beyond all numbers" if ppl == math.inf else f"of {ppl:,.0f}"
    return f"the reference itself has a perplexity {shown} on this text (guessing has {reference.n_vocab:,})"


def without_advice(level: Level) -> Level:
    """The level with its ranking, but nothing recommended."""
    keep = tuple(replace(row, worth_it=False) for row in level.sensitivity.keep_16bit)
    return replace(level, sensitivity=replace(level.sensitivity, keep_16bit=keep))


def verdict(reference: Reference, levels: Sequence[Level], noise: NoiseFloor, absurd: str = "") -> Verdict:
    """The answer: the smallest good level, or the least damaged one with a warning.

    Args:
        reference: What was compared with.
        levels: As measured.
        noise: The reference against itself.
        absurd: Why nothing can be advised (`absurd_reference`); empty when something can.
    """
    measured = [level for level in levels if level.output.kld_mean is not None and not level.differs]
    odd = _other_functions([level for level in levels if level.differs])
    if odd and not measured:
        return Verdict(
            None,
            f"No advice: {odd}",
            "What to keep at 16 bit is unknown: the damage does not come from the bits of the weights alone.",
            "The figures stand as measured. Convert both files alike, or set the keys alike, and scan again.",
        )
    if absurd:
        return Verdict(
            None,
            f"No advice: {absurd}.{f' {odd}' if odd else ''}",
            "What to keep at 16 bit would be a guess: how much a broken model changes says nothing about a sound one.",
            "The figures stand as measured. Check the file with qres inspect, its tokenizer, and the text.",
        )
    if not measured:
        return Verdict(None, "No level could be measured.", "What to keep is unknown.", "The notes say why.")
    # A file that is not smaller than the reference is nothing to ship instead of it.
    smaller = [level for level in measured if level.file.bytes < reference.bytes] or measured
    by_size = sorted(smaller, key=lambda level: level.file.bytes)
    good = [level for level in by_size if is_good(level)]
    chosen = good[0] if good else min(smaller, key=lambda level: level.output.kld_mean or 0.0)
    out = chosen.output
    size = f"{chosen.file.bytes / 2**20:.0f} MiB, {chosen.file.bytes / reference.bytes:.0%} of the reference"
    damage = f"same top token {_percent(out.same_top)}, perplexity {_change(out.ln_ppl_ratio)}, KLD {out.kld_mean:.4f}"
    if good:
        headline = f"Ship {chosen.name} ({size}): {damage}."
    else:
        headline = f"{chosen.name} is the least damaged of what was measured ({size}), but not good: {damage}."
    if odd:
        headline += f" Left out: {odd}"
    return Verdict(chosen.name, headline, _keep_line(chosen, by_size), _details(chosen, by_size, bool(good), noise))


def _other_functions(levels: Sequence[Level]) -> str:
    return " ".join(
        f"{level.name} does not compute the same function as the reference: {'; '.join(level.differs)}."
        for level in levels
    )


def is_good(level: Level) -> bool:
    """Within both bounds above, with two standard errors to spare on the perplexity; never on a single chunk."""
    out = level.output
    if out.same_top is None or out.ln_ppl_ratio is None or out.ln_ppl_ratio_se is None:
        return False
    if level.differs or not level.sound or out.nonfinite_tokens > out.reference_nonfinite_tokens:
        return False
    return out.same_top >= GOOD_SAME_TOP and out.ln_ppl_ratio + 2 * out.ln_ppl_ratio_se < GOOD_LN_PPL_RATIO


def _keep_line(level: Level, by_size: Sequence[Level]) -> str:
    worth = [keep for keep in level.sensitivity.keep_16bit if keep.worth_it]
    if not level.sensitivity.units:
        return f"What to keep at 16 bit in {level.name} is unknown: its units could not be measured."
    if not level.sensitivity.keep_16bit:
        return f"Nothing in {level.name} needs to stay at 16 bit: no unit's damage stands out of the noise."
    if not worth:
        larger = [other.name for other in by_size if other.file.bytes > level.file.bytes]
        if not larger:
            return f"Nothing in {level.name} is sure to be worth keeping at 16 bit: measure a larger level beside it."
        return f"Nothing in {level.name} is worth keeping at 16 bit: {larger[0]} recovers more per byte."
    names = ", ".join(keep.unit for keep in worth[:5]) + (f" and {len(worth) - 5} more" if len(worth) > 5 else "")
    added = sum(keep.bytes_added for keep in worth) / 2**20
    if _shows_no_gain(level.sensitivity.keep_check):  # a list whose check failed is a ranking, not advice
        ranked = f"the ranking names {names}, but no gain shows on other text"
        return f"Nothing in {level.name} is proven worth keeping at 16 bit: {ranked}."
    return f"Keep at 16 bit in {level.name}: {names} (+{added:.1f} MiB{_proof(level.sensitivity.keep_check, worth)})."


def _shows_no_gain(check: KeepCheck | None) -> bool:
    """Was the list checked, and its gain within two standard errors of nothing?"""
    return check is not None and check.recovered_se is not None and check.recovered_share < 2 * check.recovered_se


def _proof(check: KeepCheck | None, worth: Sequence[Keep]) -> str:
    """What the list does on text that did not choose it."""
    if check is None:
        return ""
    apart = ", the head's apart," if any(keep.unit == "head" for keep in worth) else ""
    return f"; without their errors{apart} the KLD falls by {check.recovered_share:.0%} on other text"


def _details(chosen: Level, by_size: Sequence[Level], good: bool, noise: NoiseFloor) -> str:
    bound = (
        f"{GOOD_SAME_TOP:.0%} same top token and less than {GOOD_LN_PPL_RATIO:.0%} more perplexity, "
        "two standard errors included"
    )
    parts = []
    smaller = [level for level in by_size if level.file.bytes < chosen.file.bytes]
    if good:
        parts.append(f"It is the smallest measured level within {bound}")
        if smaller:
            out = smaller[-1].output
            spread = f" ± {out.ln_ppl_ratio_se:.1%}" if out.ln_ppl_ratio_se is not None else ""
            parts.append(f"{smaller[-1].name} is not ({_percent(out.same_top)}, {_change(out.ln_ppl_ratio)}{spread})")
    elif chosen.output.ln_ppl_ratio_se is None:
        parts.append("One chunk is too little to call any level good: give a longer text")
    else:
        parts.append(f"No measured level keeps {bound}: measure larger ones")
    if noise.kld_mean and chosen.output.kld_mean:
        parts.append(f"its KLD is {chosen.output.kld_mean / noise.kld_mean:,.0f} times the noise floor")
    return "; ".join(parts) + "."


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.1%}"


def _change(ln_ratio: float | None) -> str:
    if ln_ratio is None:
        return "n/a"
    return f"{np.expm1(ln_ratio):+.1%}" if ln_ratio < 20 else f"times e^{ln_ratio:.0f}"
