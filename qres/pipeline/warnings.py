"""What a reader must know before believing the figures."""

from __future__ import annotations

from collections.abc import Sequence

from qres.levels import F16_MAX, TYPE_TRAITS
from qres.printable import counted
from qres.records.experts import ExpertUse
from qres.records.result import Level, Settings
from qres.records.stream import Extreme, NonFinite


def warnings(
    run: Settings,
    records: Sequence[Level],
    non_finite: Sequence[NonFinite],
    extremes: Sequence[Extreme],
    floor: float | None,
    released_in: str = "",
) -> tuple[str, ...]:
    """What a reader must know before believing the figures.

    Args:
        run: What was run.
        records: The levels.
        non_finite: Where values stop being finite.
        extremes: Magnitudes near the end of 16-bit float.
        floor: Noise floor of the KLD, if there is one.
        released_in: Type that the reference was published in, if it was quantized then.
    """
    found = [_other_function(one) if one.differs else _unexplained(one, floor or 0.0) for one in records]
    out = [text for text in found if text]
    out += [_broken_numbers(found) for found in non_finite]
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


def unreached(experts: Sequence[ExpertUse], all_bytes: int) -> tuple[str, ...]:
    """Experts that the text did not reach, with what they take of the reference."""
    layers = [row for row in experts if row.unreached]
    if not layers:
        return ()
    count, share = sum(row.unreached for row in layers), sum(row.unreached_bytes for row in layers) / max(all_bytes, 1)
    where = f"{len(layers)} of {counted(len(experts), 'MoE layer')}"
    them = "it" if count == 1 else "them"
    return (
        f"In {where} no token of the text reached {counted(count, 'expert')} ({share:.1%} of the reference's bytes): "
        f"what quantizing does to {them} is in no figure. A longer text reaches more.",
    )


_FAR = 2.0
"""Factor from which on it is said that what was measured is not what the weights' errors, or predictions, say."""
_FLOORS = 10.0
"""Times the noise floor that a KLD must have before it is: closer to the floor, arithmetic is part of it."""


def _other_function(level: Level) -> str:
    return f"{level.name} does not compute the same function as the reference: {'; '.join(level.differs)}."


def _unexplained(level: Level, floor: float) -> str:
    """Damage that the level's weights do not explain, whatever the graphs say; empty when they do."""
    found, kld = level.sensitivity, level.output.kld_mean
    if kld is None or kld < _FLOORS * floor:
        return ""
    added, factor = found.additivity, found.calibration.factor if found.calibration else None
    head = next((unit.kld for unit in found.units if unit.kind == "head" and unit.kld is not None), 0.0)
    if added is not None and added.kld_level is not None and added.kld_all_injected is not None:
        explained = added.kld_all_injected + head
        if added.kld_level > _FAR * explained:
            return (
                f"{level.name}: the errors of its weights explain a KLD of {explained:.3g}, {added.kld_level:.3g} was "
                "measured. The rest of the damage does not come from the bits of its weights: compare how the two "
                "files were converted."
            )
    if factor is not None and not 1 / _FAR <= factor <= _FAR:
        return (
            f"{level.name}: its KLD is {factor:.2g} times what is predicted from its weights. Predictions still rank "
            "tensors, but do not take their sizes as given."
        )
    return ""


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
