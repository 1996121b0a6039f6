"""Why a file's bits per weight are not those of its level's name: an exact sum over groups of tensors.

With b the bits per weight of the base type and W all weights,

    8 * bytes / W  =  b  +  sum over groups of (8 * bytes of the group - b * weights of the group) / W

since tensors of the base type add nothing. Tensors of unknown size count on neither side.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from qres import levels
from qres.gguf.claims import level_disagreement, main_type, publishers_mix
from qres.gguf.fallbacks import fallbacks
from qres.gguf.format.tensor import Tensor
from qres.gguf.inventory import Inventory
from qres.printable import show


@dataclass(frozen=True)
class GapGroup:
    """Tensors of one type that is not the base type, for one reason."""

    reason: str
    type: str
    tensors: int
    weights: int
    bytes: int
    bpw_added: float
    """(8 * bytes - base_bpw * weights) / all weights; negative where the group is smaller."""
    example: str
    """Name of its first tensor."""


@dataclass(frozen=True)
class BpwGap:
    """`bpw` is `base_bpw` plus what the groups add, exactly but for the rounding of the floats."""

    bpw: float
    """8 * bytes of tensor data / weights."""
    nominal_bpw: float | None
    """Bits per weight people expect of the level that the file claims; None when it claims none, or is a
    publisher's mix."""
    base: str
    """The claimed level's base type; where the contents contradict the claim, the type of most weights."""
    base_bpw: float
    groups: tuple[GapGroup, ...]
    """Tensors that explain the gap, largest contribution first."""


def explain(inventory: Inventory) -> BpwGap | None:
    """The decomposition; None when no tensor's size is known."""
    level = None if publishers_mix(inventory) else levels.LEVELS_BY_NAME.get(inventory.file_type)
    base = level.base if level and not level_disagreement(inventory) else main_type(inventory)
    known = [tensor for tensor in inventory.tensors if tensor.n_bytes is not None]
    weights = sum(tensor.n_weights for tensor in known)
    if base not in levels.TYPE_TRAITS or not weights:
        return None
    base_bpw = bits_per_weight(base)
    fallen = {row.tensor for row in fallbacks(inventory)}
    members: dict[tuple[str, str], list[Tensor]] = {}
    for tensor in known:
        if tensor.type != base:
            reason = _reason(tensor, inventory.tied_head, base_bpw, fallen)
            members.setdefault((reason, tensor.type), []).append(tensor)
    groups = [_group(reason, tensors, base_bpw, weights) for (reason, _), tensors in members.items()]
    return BpwGap(
        bpw=float(Fraction(8 * sum(tensor.n_bytes or 0 for tensor in known), weights)),
        nominal_bpw=level.nominal_bpw if level else None,
        base=base,
        base_bpw=float(base_bpw),
        groups=tuple(sorted(groups, key=lambda group: -abs(group.bpw_added))),
    )


def bits_per_weight(type_name: str) -> Fraction:
    """Bits per weight of a known type, exactly."""
    traits = levels.TYPE_TRAITS[type_name]
    return Fraction(8 * traits.block_bytes, traits.block_size)


def _reason(tensor: Tensor, tied_head: bool, base_bpw: Fraction, fallen: set[str]) -> str:
    if tensor.name in ("output.weight", "token_embd.weight"):
        embedding = "tied embedding, counted once" if tied_head else "token embedding"
        role = "head" if tensor.name == "output.weight" else embedding
        return f"{role} (fallback)" if tensor.name in fallen else role
    if tensor.n_dims < 2:
        return "norms and other vectors"
    if tensor.name in fallen:
        return "fallback: row not a multiple of 256"
    return "larger by recipe" if bits_per_weight(tensor.type) > base_bpw else "smaller by recipe"


def _group(reason: str, tensors: list[Tensor], base_bpw: Fraction, all_weights: int) -> GapGroup:
    weights, n_bytes = sum(t.n_weights for t in tensors), sum(t.n_bytes or 0 for t in tensors)
    return GapGroup(
        reason=reason,
        type=tensors[0].type,
        tensors=len(tensors),
        weights=weights,
        bytes=n_bytes,
        bpw_added=float((8 * n_bytes - base_bpw * weights) / all_weights),
        example=show(tensors[0].name),
    )
