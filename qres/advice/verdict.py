"""Which level to ship, or why none can be advised.

Pure functions; every threshold is explained where it stands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from qres.advice.keep_line import keep_line
from qres.records.files import main_types
from qres.records.result import Level, Reference, Verdict
from qres.records.stream import NoiseFloor

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
    copies, others = ([level for level in measured if level.is_copy is copy] for copy in (True, False))
    if not others:
        return _only_copies(reference, copies)
    by_size = sorted((one for one in others if is_smaller(one, reference)), key=lambda level: level.file.bytes)
    if not by_size:
        return _none_smaller(reference, others, copies, noise)
    good = [level for level in by_size if is_good(level)]
    chosen = good[0] if good else min(by_size, key=lambda level: level.output.kld_mean or 0.0)
    size = f"{chosen.file.bytes / 2**20:.0f} MiB, {chosen.file.bytes / reference.bytes:.0%} of the reference"
    damage = _damage(reference, chosen)
    if good:
        headline = f"Ship {chosen.name} ({size}): {damage}."
    else:
        headline = f"{chosen.name} is the least damaged of what was measured ({size}), but not good: {damage}."
    details = _details(chosen, by_size, bool(good), noise)
    said = [headline, *_of_copies(copies), *([f"Left out: {odd}"] if odd else [])]
    return Verdict(chosen.name, " ".join(said), keep_line(reference, chosen, by_size), details)


def is_smaller(level: Level, reference: Reference) -> bool:
    """A file that holds as many bits as the reference is nothing to ship instead of it; metadata counts for nothing."""
    return level.file.bytes < reference.bytes and level.file.bpw < reference.bpw


def _only_copies(reference: Reference, copies: Sequence[Level]) -> Verdict:
    (said,) = _of_copies(copies)
    return Verdict(
        None, f"Nothing to choose. {said}", "What to keep is no question: nothing in it differs.", _instead(reference)
    )


def _none_smaller(reference: Reference, others: Sequence[Level], copies: Sequence[Level], noise: NoiseFloor) -> Verdict:
    """Files of the size of the reference, or beyond: conversions, and such as were changed or damaged."""
    least = min(others, key=lambda level: level.output.kld_mean or 0.0)
    names = " and ".join(level.name for level in others)
    verb = "is not" if len(others) == 1 else "are not"
    which = f"{least.name} has " if len(others) > 1 else ""
    headline = (
        f"Nothing to ship: {names} {verb} smaller than the reference ({reference.bytes / 2**20:.0f} MiB); "
        f"{which}{_damage(reference, least)}."
    )
    floors = _floors(least, noise)
    details = f"{_instead(reference)}{f' The KLD of {least.name} is {floors}.' if floors else ''}"
    return Verdict(None, " ".join([headline, *_of_copies(copies)]), keep_line(reference, least, others), details)


def _of_copies(copies: Sequence[Level]) -> list[str]:
    if not copies:
        return []
    names, verb = " and ".join(level.name for level in copies), "holds" if len(copies) == 1 else "hold"
    return [f"{names} {verb} the same tensors as the reference."]


def _instead(reference: Reference) -> str:
    """What to do where no file can be advised."""
    if reference.is_original:
        return "Give quantized files of this reference, or none: qres scan then makes levels."
    return "Give smaller files of this model."


def _damage(reference: Reference, level: Level) -> str:
    """The figures of the headline, and what they are relative to where that is no original."""
    out = level.output
    said = f"same top token {_percent(out.same_top)}, perplexity {_change(out.ln_ppl_ratio)}, KLD {out.kld_mean:.4f}"
    return said if reference.is_original else f"{said}, relative to {main_types(reference.types)}"


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
    floors = _floors(chosen, noise)
    if floors:
        parts.append(f"its KLD is {floors}")
    return "; ".join(parts) + "."


def _floors(level: Level, noise: NoiseFloor) -> str:
    """The level's KLD in noise floors; empty where there is nothing to divide."""
    if not noise.kld_mean or not level.output.kld_mean:
        return ""
    return f"{level.output.kld_mean / noise.kld_mean:,.0f} times the noise floor"


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.1%}"


def _change(ln_ratio: float | None) -> str:
    if ln_ratio is None:
        return "n/a"
    return f"{np.expm1(ln_ratio):+.1%}" if ln_ratio < 20 else f"times e^{ln_ratio:.0f}"
