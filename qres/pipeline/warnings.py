"""What a reader must know before believing the figures."""

from __future__ import annotations

from collections.abc import Sequence

from qres.levels import F16_MAX, TYPE_TRAITS
from qres.records.result import Level, Settings
from qres.records.stream import Extreme, NonFinite


def warnings(
    run: Settings,
    records: Sequence[Level],
    non_finite: Sequence[NonFinite],
    extremes: Sequence[Extreme],
    released_in: str = "",
) -> tuple[str, ...]:
    """What a reader must know before believing the figures; `released_in` is the reference's."""
    out = [_broken_numbers(found) for found in non_finite]
    if run.text == run.rank_text:
        out.append(
            "The text fills one chunk only: the units were ranked on the text that reports them. Give a longer one."
        )
    if run.chunks < 2:
        out.append("One chunk gives no standard errors: no difference between levels can be called significant.")
    lost = max((record.output.reference_nonfinite_tokens for record in records), default=0)
    if lost:
        out.append(f"{lost} positions are left out because the reference's own logits are not finite there.")
    for record in records:
        own = record.output.nonfinite_tokens - record.output.reference_nonfinite_tokens
        if own:
            out.append(f"{record.name}: {own} positions have non-finite logits and are left out.")
        file = record.file
        if file.nominal_bpw and file.bpw > file.nominal_bpw + 0.5:
            fell = len(file.fallback_tensors)
            why = f"{fell} tensors fell back to larger types" if fell else "it mixes types in its own way"
            if released_in and _bits(released_in) > file.nominal_bpw:
                why = f"what was released in {released_in} stays so"
            out.append(
                f"{record.name} really is {file.bpw:.2f} bits per weight (nominally {file.nominal_bpw:.2f}): {why}."
            )
    if extremes:
        out.append(_out_of_range(extremes))
    return tuple(out)


def _bits(type_name: str) -> float:
    """Per weight."""
    traits = TYPE_TRAITS[type_name]
    return 8 * traits.block_bytes / traits.block_size


def _broken_numbers(found: NonFinite) -> str:
    """Where values stop being finite, and why if that is known."""
    text = f"{found.model}: values stop being finite {found.place}"
    if found.broken_weights:
        names = ", ".join(found.broken_weights[:3]) + (" and more" if len(found.broken_weights) > 3 else "")
        return f"{text}: the file holds values that are not finite in {names}."
    if found.input_absmax is not None and found.input_absmax > F16_MAX:
        return f"{text}: it is given {found.input_absmax:,.0f}, 16-bit float ends at {F16_MAX:,.0f}."
    return f"{text}; the weights themselves are finite."


def _out_of_range(extremes: Sequence[Extreme]) -> str:
    """The largest magnitude, and how many more there are."""
    worst = extremes[0]
    what = {
        "weight": f"A weight of {worst.name} is",
        "input": f"{worst.name} is given values up to",
        "stream": f"The stream reaches, at {worst.name},",
    }[worst.what]
    others = len(extremes) - 1
    more = f" {others} more magnitude{'s are' if others > 1 else ' is'} beyond half of that." if others else ""
    return (
        f"{what} {worst.absmax:,.0f}; 16-bit float ends at {F16_MAX:,.0f}.{more} Keep such layers at BF16: back ends "
        "that compute in F16 can overflow there."
    )
