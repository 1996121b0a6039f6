"""The tensors of two files of one model, paired by what they are: by name, or as the same rows cut otherwise.

Converters and quantizers lay the same weights out in several ways: query, key and value in one tensor or three, an
expert's gate and up in one or two, MLA's key and value projections together or apart, a head of its own that equals the
embedding. Blocks that llama.cpp never runs (NextN, for multi-token prediction) belong to a file,
not to what it computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qres.gguf.difference import same_data
from qres.gguf.format.tensor import Tensor
from qres.gguf.inventory import Inventory
from qres.gguf.names import BLOCK, block_number
from qres.printable import show
from qres.records.files import NotExecuted

HEAD, EMBEDDING = "output.weight", "token_embd.weight"

_FUSED: Mapping[str, tuple[str, ...]] = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
    "attn_kv_b": ("attn_k_b", "attn_v_b"),
    "ssm_in": ("attn_qkv", "attn_gate"),
    "ssm_ba": ("ssm_beta", "ssm_alpha"),
}
"""One tensor -> the tensors that hold the same weights apart, within a block."""
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Written by some converters and not by others; a graph that reads them differs from one that does not."""


@dataclass(frozen=True)
class Place:
    """Where another file has a tensor of the reference."""

    type: str
    """ggml type; of several tensors the one with the most weights."""
    n_bytes: int
    """Bytes that the reference's weights take there."""
    tensors: tuple[str, ...]
    """Names in that file; of a part of a tensor, the whole one."""


@dataclass
class PairedTensors:
    """How another file's tensors are the reference's."""

    places: dict[str, Place] = field(default_factory=dict)
    """By the reference's names, those of executed blocks; a tensor that the other file lacks has none."""
    fused: Counter[str] = field(default_factory=Counter)
    """How weights are laid out otherwise, in words -> in how many blocks."""
    problem: str = ""
    """Why the two are not the same model; empty when they are."""

    @property
    def remark(self) -> str:
        """What is laid out otherwise, completing "FILE ..."; empty when nothing is."""
        said = [f"{what} ({n} layer{'s' if n > 1 else ''})" for what, n in self.fused.items()]
        return f"holds the same weights in other tensors: {'; '.join(said)}" if said else ""


def executed(inventory: Inventory) -> list[Tensor]:
    """The tensors less those of blocks that llama.cpp never runs."""
    return [tensor for tensor in inventory.tensors if not _skipped(inventory, tensor)]


def not_executed(inventory: Inventory) -> tuple[NotExecuted, ...]:
    """The blocks that llama.cpp never runs, with what they take."""
    found: dict[int, list[Tensor]] = {}
    for tensor in inventory.tensors:
        if _skipped(inventory, tensor):
            found.setdefault(block_number(tensor.name) or 0, []).append(tensor)
    return tuple(
        NotExecuted(block, len(tensors), sum(tensor.n_bytes or 0 for tensor in tensors))
        for block, tensors in sorted(found.items())
    )


def _skipped(inventory: Inventory, tensor: Tensor) -> bool:
    block = block_number(tensor.name)
    return block is not None and 0 < inventory.n_layer <= block < inventory.n_block


def pair(reference: Inventory, other: Inventory) -> PairedTensors:
    """Pair the executed tensors of two files.

    A file with a head of its own where the reference's is tied to the embedding is legal; so is one without, where the
    reference's head equals its embedding.

    Raises:
        InputError: the reference cannot be read.
    """
    found = PairedTensors()
    ours, theirs = ({tensor.name: tensor for tensor in executed(one)} for one in (reference, other))
    if reference.n_layer != other.n_layer and reference.n_layer and other.n_layer:
        found.problem = (
            f"the model has {reference.n_layer} layers in the reference, {other.n_layer} in the quantized file"
        )
        return found
    for name, tensor in ours.items():
        twin = theirs.get(name)
        if twin is None:
            continue
        if _shape(tensor) != _shape(twin):
            pair = f"{list(tensor.shape)} in the reference, {list(twin.shape)} in the quantized file"
            found.problem = f"tensor {show(name)!r} has the shape {pair}"
            return found
        found.places[name] = Place(twin.type, twin.n_bytes or 0, (name,))
    paired = _pair_fused(found, ours, theirs)
    tied = theirs.get(EMBEDDING)
    if HEAD in ours and HEAD not in theirs and tied is not None and same_data(reference, HEAD, EMBEDDING):
        found.places[HEAD] = Place(tied.type, tied.n_bytes or 0, (EMBEDDING,))
    missing = next((name for name in ours if name not in found.places and name not in ROPE_FACTORS), None)
    extra = next((n for n in theirs if n not in ours and n not in paired and n not in (HEAD, *ROPE_FACTORS)), None)
    if missing is not None:
        found.problem = f"tensor {show(missing)!r} is missing in the quantized file"
    elif extra is not None:
        found.problem = f"tensor {show(extra)!r} is missing in the reference"
    if found.problem and reference.architecture != other.architecture:
        names = f"{show(repr(reference.architecture))} in the reference, {show(repr(other.architecture))}"
        found.problem = f"the architecture is {names} in the quantized file"
    return found


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions without trailing ones: a vector stored as [n, 1] is one of [n]."""
    return tensor.shape[: tensor.n_dims]


def _pair_fused(found: PairedTensors, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> set[str]:
    """Pair what one file holds in one tensor and the other in several; returns names of the other file's tensors."""
    paired: set[str] = set()
    for whole, parts in cuts((*ours, *theirs)):
        if whole in ours and all(part in theirs for part in parts) and whole not in theirs:
            apart = [theirs[part] for part in parts]
            if _is_sum(ours[whole], apart):
                found.places[whole] = _together(apart)
                found.fused[f"{_role(parts)} for {_role([whole])}"] += whole.endswith(".weight")
                paired.update(parts)
        elif whole in theirs and all(part in ours for part in parts) and whole not in ours:
            fused, apart = theirs[whole], [ours[part] for part in parts]
            if _is_sum(fused, apart):
                for part in apart:
                    n_bytes = (fused.n_bytes or 0) * part.n_weights // max(fused.n_weights, 1)
                    found.places[part.name] = Place(fused.type, n_bytes, (whole,))
                found.fused[f"{_role([whole])} for {_role(parts)}"] += whole.endswith(".weight")
                paired.add(whole)
    return paired


def cuts(names: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Names of tensors that may be cut otherwise, with those of their parts, over all blocks that the names are of."""
    out = []
    for name in dict.fromkeys(names):
        match = BLOCK.match(name)
        stem, _, suffix = match[2].rpartition(".") if match else ("", "", "")
        begin = name[: len(name) - len(match[2])] if match else ""
        for whole, parts in _FUSED.items():
            if stem in (whole, parts[0]):
                out.append((f"{begin}{whole}.{suffix}", tuple(f"{begin}{part}.{suffix}" for part in parts)))
    return list(dict.fromkeys(out))


def _is_sum(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    return whole.n_weights == sum(part.n_weights for part in parts)


def _together(parts: Sequence[Tensor]) -> Place:
    weights: Counter[str] = Counter()
    for part in parts:
        weights[part.type] += part.n_weights
    main = max(weights, key=weights.__getitem__)
    return Place(main, sum(part.n_bytes or 0 for part in parts), tuple(part.name for part in parts))


def _role(names: Sequence[str]) -> str:
    """Names without block and ending, for a remark."""
    stems = []
    for name in names:
        match = BLOCK.match(name)
        stems.append((match[2] if match else name).rpartition(".")[0])
    return ", ".join(stems[:-1]) + (" and " if len(stems) > 1 else "") + stems[-1]
