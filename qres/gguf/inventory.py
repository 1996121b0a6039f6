"""What a GGUF holds, over all its shards, as one record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qres import levels
from qres.gguf.format.cursor import Problem
from qres.gguf.format.metadata import Value
from qres.gguf.format.tensor import Tensor

if TYPE_CHECKING:
    from qres.records.files import TypeShare


SIXTEEN_BIT = frozenset({"F16", "BF16", "F32"})
"""Tensor types that hold 16 bits or more per weight."""

_RELEASED = {"MXFP4": "_exps.", "NVFP4": "blk."}
"""Types that models are published in -> what the names of such tensors have in common: of MXFP4 the experts, of NVFP4
matrices within the blocks."""


@dataclass(frozen=True)
class Inventory:
    """One model file, or one whole set of shards."""

    path: Path
    """The file to give to llama.cpp: of a split set the first shard, whichever was asked for."""
    shards: tuple[Path, ...]
    """All files, in order; one entry for a file that is not split. A tolerant reading leaves missing ones out."""
    version: int
    kind: str
    """`model`, `diffusion`, or something `require_language_model` refuses: `mmproj`, `lora`, `imatrix`,
    `control_vector`, `vocab_only`, `empty`, `embedding_only`, `encoder_decoder`, `audio`, `draft`, `other`."""
    architecture: str
    """Empty when the file does not say."""
    name: str
    """`general.name`, else the file's stem."""
    file_type: str
    """Level that `general.file_type` claims; empty when it does not say. Claims only: see `types`."""
    n_layer: int
    """Blocks that run: block_count without the NextN (MTP) blocks, which llama.cpp skips. 0 when unknown, as below."""
    n_embd: int
    n_ctx_train: int
    n_vocab: int
    tensors: tuple[Tensor, ...]
    """In file order, shard by shard."""
    file_bytes: int
    metadata: Mapping[str, Value]
    """Key -> value, of the first shard; arrays and very long strings as `Digest`."""
    problems: tuple[Problem, ...] = ()
    """What a tolerant reading met, over all shards; in a strict one only what llama.cpp takes, too."""
    n_block: int = 0
    """What block_count says: blocks that run, and those that llama.cpp skips."""

    @property
    def tensor_bytes(self) -> int:
        """Bytes of tensor data, without padding; tensors of unknown types count nothing."""
        return sum(tensor.n_bytes or 0 for tensor in self.tensors)

    @property
    def n_weights(self) -> int:
        """Number of weights in all tensors."""
        return sum(tensor.n_weights for tensor in self.tensors)

    @property
    def bpw(self) -> float:
        """8 * bytes / weights over the tensors whose size is known; 0 when there are none."""
        weights = sum(tensor.n_weights for tensor in self.tensors if tensor.n_bytes is not None)
        return 8 * self.tensor_bytes / weights if weights else 0.0

    @property
    def types(self) -> tuple[TypeShare, ...]:
        """What each tensor type holds, most bytes first."""
        from qres.records.files import TypeShare

        names = dict.fromkeys(tensor.type for tensor in self.tensors)
        shares = []
        for name in names:
            those = [tensor for tensor in self.tensors if tensor.type == name]
            weights, n_bytes = sum(t.n_weights for t in those), sum(t.n_bytes or 0 for t in those)
            shares.append(TypeShare(name, len(those), weights, n_bytes))
        return tuple(sorted(shares, key=lambda share: (-share.bytes, -share.weights, share.type)))

    @property
    def tied_head(self) -> bool:
        """The head is token_embd: there is no output.weight."""
        return all(tensor.name != "output.weight" for tensor in self.tensors)

    @property
    def is_16bit(self) -> bool:
        """At least 95 % of the weights in matrices are F16, BF16 or F32."""
        matrices = [tensor for tensor in self.tensors if tensor.n_dims >= 2]
        full = sum(tensor.n_weights for tensor in matrices if tensor.type in SIXTEEN_BIT)
        return bool(matrices) and full >= 0.95 * sum(tensor.n_weights for tensor in matrices)

    @property
    def quantized(self) -> Mapping[str, str]:
        """Tensor -> type of the matrices below 16 bit; tables of integers are none of them."""
        return {
            tensor.name: tensor.type for tensor in self.tensors if tensor.n_dims >= 2 and not _is_plain(tensor.type)
        }

    @property
    def released_in(self) -> str:
        """`MXFP4` or `NVFP4` where the model was published so, and this file is the original; else empty.

        No quantizer makes such files by itself: every matrix below 16 bit is of that one type and where releases have
        it, all the others are at 16 bit, and `general.file_type` says nothing else.
        """
        kinds = set(self.quantized.values())
        if len(kinds) != 1 or (kind := kinds.pop()) not in _RELEASED:
            return ""
        is_claimed = self.file_type in ("", *SIXTEEN_BIT, kind, f"{kind}_MOE")
        return kind if is_claimed and all(_RELEASED[kind] in name for name in self.quantized) else ""

    @property
    def is_original(self) -> bool:
        """Levels can be made of it: at 16 bit, or as it was released."""
        return self.is_16bit or bool(self.released_in)


def _is_plain(type_name: str) -> bool:
    """One number per weight, in no blocks."""
    traits = levels.TYPE_TRAITS.get(type_name)
    return traits is not None and traits.block_size == 1
