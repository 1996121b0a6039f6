"""The keep list of a level in one line: what to keep or to replace, or why nothing."""

from __future__ import annotations

from collections.abc import Sequence

from qres.gguf.inventory import SIXTEEN_BIT
from qres.gguf.names import role
from qres.records.result import Level, Reference
from qres.records.units import Keep, KeepCheck

_NAMED = 5
"""Units that are named in the line."""
_FEW = 2
"""Tensors of one unit that are named by themselves."""


def keep_line(reference: Reference, level: Level, by_size: Sequence[Level]) -> str:
    """What to keep at 16 bit in a level, or to take from the reference.

    Args:
        reference: What was compared with.
        level: The one to speak of.
        by_size: All levels that can be advised, smallest first.
    """
    name, stay = level.name, "at 16 bit" if reference.is_original else "as in the reference"
    worth = [keep for keep in level.sensitivity.keep_16bit if keep.worth_it]
    if not level.sensitivity.units:
        return f"What to keep {stay} in {name} is unknown: its units could not be measured."
    if not worth:
        return _nothing(level, by_size, stay)
    if _shows_no_gain(level.sensitivity.keep_check):  # a list whose check failed is a ranking, not advice
        ranked = f"the ranking names {_names(worth, level)}, but no gain shows on other text"
        return f"Nothing in {name} is proven worth keeping {stay}: {ranked}."
    return _advice(worth, level)


def _nothing(level: Level, by_size: Sequence[Level], stay: str) -> str:
    """Why nothing is worth keeping."""
    name, rows = level.name, level.sensitivity.keep_16bit
    if not rows and all(share.type in SIXTEEN_BIT for share in level.file.types):
        return f"Everything in {name} is at 16 bit or more already."
    if not rows:
        return f"Nothing in {name} needs to stay {stay}: no unit's damage stands out of the noise."
    own = level.output.kld_mean or 0.0
    larger = [
        other.name
        for other in by_size
        if other.file.bytes > level.file.bytes and (other.output.kld_mean or 0.0) < own  # else it recovers nothing
    ]
    if not larger:
        return f"Nothing in {name} is sure to be worth keeping {stay}: measure a larger level beside it."
    return f"Nothing in {name} is worth keeping {stay}: {larger[0]} recovers more per byte."


def _advice(worth: Sequence[Keep], level: Level) -> str:
    """What to replace, which costs nothing, and what to keep."""
    check = level.sensitivity.keep_check
    free, paid = ([keep for keep in worth if bool(keep.bytes_added) is costs] for costs in (False, True))
    lines = []
    if free:
        one = sum(len(keep.tensors) for keep in free) == 1
        types = " and ".join(dict.fromkeys(keep.type for keep in free))
        same = f"{'it is' if one else 'they are'} at {types} in both, but not the same"
        lines.append(
            f"Replace {_names(free, level)} by the reference's: {same}{_proof(check, worth, paid=bool(paid))}."
        )
    if paid:
        full = all(kind in SIXTEEN_BIT for keep in paid for kind in keep.type.split(" and "))
        stay = "at 16 bit" if full else "as in the reference"
        added = f"+{sum(keep.bytes_added for keep in paid) / 2**20:.1f} MiB{_proof(check, worth)}"
        lines.append(f"Keep {stay} in {level.name}: {_names(paid, level)} ({added}).")
    return " ".join(lines)


def _names(rows: Sequence[Keep], level: Level) -> str:
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    return ", ".join(_name(keep, level) for keep in rows[:_NAMED]) + more


def _name(keep: Keep, level: Level) -> str:
    """The unit; its tensors where only some of them are not as in the reference."""
    weights = next((unit.weights for unit in level.sensitivity.units if unit.unit == keep.unit), ())
    rest = [name for name in weights if name not in keep.tensors and role(name, keep.unit) != "router"]
    if not keep.tensors or not rest:
        return keep.unit
    if len(keep.tensors) <= _FEW:
        return ", ".join(keep.tensors)
    return f"{keep.unit} ({len(keep.tensors)} of its {len({*weights, *keep.tensors})} tensors)"


def _shows_no_gain(check: KeepCheck | None) -> bool:
    """Was the list checked, and its gain within two standard errors of nothing?"""
    return check is not None and check.recovered_se is not None and check.recovered_share < 2 * check.recovered_se


def _proof(check: KeepCheck | None, worth: Sequence[Keep], *, paid: bool = False) -> str:
    """What the whole list does on text that did not choose it; said once, with what costs bytes."""
    if check is None or paid:
        return ""
    apart = ", the head's apart," if any(keep.unit == "head" for keep in worth) else ""
    errors = "its error" if len(worth) == 1 and len(worth[0].tensors) == 1 else "their errors"
    return f"; without {errors}{apart} the KLD falls by {check.recovered_share:.0%} on other text"
