"""Quantization levels (recipes for a file) and ggml types (formats of one tensor): names, sizes, what replaces what.

Facts only, as in llama.cpp of llama-cpp-python 0.3.36: `enum llama_ftype` in llama.h, `enum ggml_type` in ggml.h, block
layouts in ggml-common.h, `tensor_type_fallback` and `tensor_requires_imatrix` in llama-quant.cpp. What a file really
holds is read from the file (`qres.gguf`), never derived from its level.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from qres import mixes
from qres.errors import UsageError


@dataclass(frozen=True)
class TypeTraits:
    """The layout of one ggml type."""

    id: int
    """`enum ggml_type`, as stored in a GGUF tensor table."""
    name: str
    block_size: int
    """Weights per block; a row must hold whole blocks."""
    block_bytes: int
    removed: bool = False
    """Once in GGUF files, refused by today's llama.cpp."""

    def bytes_of(self, weights: int) -> int:
        """What so many weights take; they are whole blocks."""
        return weights // self.block_size * self.block_bytes


@dataclass(frozen=True)
class LevelSpec:
    """A recipe that llama.cpp's quantizer knows by name."""

    name: str
    """As llama-quantize spells it, e.g. `Q4_K_M`."""
    ftype: int
    """`enum llama_ftype`, as stored in `general.file_type`."""
    nominal_bpw: float
    """Bits per weight that people expect of the level; the file's own figure depends on its shapes."""
    base: str
    """ggml type of the tensors that the recipe does not single out."""
    needs_imatrix: bool = False
    """llama.cpp refuses to make it without an importance matrix."""


_TYPES = (
    TypeTraits(0, "F32", 1, 4),
    TypeTraits(1, "F16", 1, 2),
    TypeTraits(2, "Q4_0", 32, 18),
    TypeTraits(3, "Q4_1", 32, 20),
    TypeTraits(4, "Q4_2", 16, 10, removed=True),
    TypeTraits(5, "Q4_3", 16, 12, removed=True),
    TypeTraits(6, "Q5_0", 32, 22),
    TypeTraits(7, "Q5_1", 32, 24),
    TypeTraits(8, "Q8_0", 32, 34),
    TypeTraits(9, "Q8_1", 32, 36),
    TypeTraits(10, "Q2_K", 256, 84),
    TypeTraits(11, "Q3_K", 256, 110),
    TypeTraits(12, "Q4_K", 256, 144),
    TypeTraits(13, "Q5_K", 256, 176),
    TypeTraits(14, "Q6_K", 256, 210),
    TypeTraits(15, "Q8_K", 256, 292),
    TypeTraits(16, "IQ2_XXS", 256, 66),
    TypeTraits(17, "IQ2_XS", 256, 74),
    TypeTraits(18, "IQ3_XXS", 256, 98),
    TypeTraits(19, "IQ1_S", 256, 50),
    TypeTraits(20, "IQ4_NL", 32, 18),
    TypeTraits(21, "IQ3_S", 256, 110),
    TypeTraits(22, "IQ2_S", 256, 82),
    TypeTraits(23, "IQ4_XS", 256, 136),
    TypeTraits(24, "I8", 1, 1),
    TypeTraits(25, "I16", 1, 2),
    TypeTraits(26, "I32", 1, 4),
    TypeTraits(27, "I64", 1, 8),
    TypeTraits(28, "F64", 1, 8),
    TypeTraits(29, "IQ1_M", 256, 56),
    TypeTraits(30, "BF16", 1, 2),
    # Interleaved for ARM: the same blocks in another order, so the same size as what they were made from.
    TypeTraits(31, "Q4_0_4_4", 32, 18, removed=True),
    TypeTraits(32, "Q4_0_4_8", 32, 18, removed=True),
    TypeTraits(33, "Q4_0_8_8", 32, 18, removed=True),
    TypeTraits(34, "TQ1_0", 256, 54),
    TypeTraits(35, "TQ2_0", 256, 66),
    TypeTraits(36, "IQ4_NL_4_4", 32, 18, removed=True),
    TypeTraits(37, "IQ4_NL_4_8", 32, 18, removed=True),
    TypeTraits(38, "IQ4_NL_8_8", 32, 18, removed=True),
    TypeTraits(39, "MXFP4", 32, 17),
    TypeTraits(40, "NVFP4", 64, 36),
    TypeTraits(41, "Q1_0", 128, 18),
    TypeTraits(42, "Q2_0", 64, 18),
)

F16_MAX = 65504.0
"""Largest finite 16-bit float."""

MAKEABLE = frozenset(
    traits.name
    for traits in _TYPES
    if not traits.removed and traits.name not in ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64")
)
"""Types that weights can be given: the others are of activations and numbers."""

TYPE_TRAITS: dict[str, TypeTraits] = {traits.name: traits for traits in _TYPES}
TYPES_BY_ID: dict[int, TypeTraits] = {traits.id: traits for traits in _TYPES}

FALLBACK: dict[str, str] = {
    "IQ1_S": "IQ4_NL",
    "IQ1_M": "IQ4_NL",
    "IQ2_XXS": "IQ4_NL",
    "IQ2_XS": "IQ4_NL",
    "IQ2_S": "IQ4_NL",
    "IQ3_XXS": "IQ4_NL",
    "IQ3_S": "IQ4_NL",
    "IQ4_XS": "IQ4_NL",
    "Q2_0": "Q4_0",
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "TQ1_0": "Q4_0",
    "TQ2_0": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
"""Type -> what llama.cpp takes when a row does not hold whole blocks of it; F16 when that does not fit either."""

# Bits per weight: Llama-3.1-8B, from llama.cpp's tools/quantize/README.md. Where that has none: Q4_0, Q4_1, Q5_0, Q5_1
# reckoned for the same model (its head is Q6_K), the others those of the base type, as llama-quantize lists them.
LEVELS: tuple[LevelSpec, ...] = (
    LevelSpec("Q1_0", 40, 1.125, "Q1_0"),
    LevelSpec("TQ1_0", 36, 1.69, "TQ1_0"),
    LevelSpec("IQ1_S", 24, 2.0042, "IQ1_S", needs_imatrix=True),
    LevelSpec("TQ2_0", 37, 2.06, "TQ2_0"),
    LevelSpec("IQ1_M", 31, 2.1460, "IQ1_M", needs_imatrix=True),
    LevelSpec("Q2_0", 41, 2.25, "Q2_0"),
    LevelSpec("IQ2_XXS", 19, 2.3824, "IQ2_XXS", needs_imatrix=True),
    LevelSpec("IQ2_XS", 20, 2.5882, "IQ2_XS", needs_imatrix=True),
    LevelSpec("IQ2_S", 28, 2.7403, "IQ2_XS", needs_imatrix=True),
    LevelSpec("IQ2_M", 29, 2.9294, "IQ2_S", needs_imatrix=True),
    LevelSpec("Q2_K_S", 21, 2.9697, "Q2_K", needs_imatrix=True),
    LevelSpec("Q2_K", 10, 3.1593, "Q2_K"),
    LevelSpec("IQ3_XXS", 23, 3.2548, "IQ3_XXS", needs_imatrix=True),
    LevelSpec("IQ3_XS", 22, 3.4977, "IQ3_S", needs_imatrix=True),  # its middle layers' ffn_gate and ffn_up are IQ3_XXS
    LevelSpec("Q3_K_S", 11, 3.6429, "Q3_K"),
    LevelSpec("IQ3_S", 26, 3.6606, "IQ3_S"),
    LevelSpec("IQ3_M", 27, 3.7628, "IQ3_S"),
    LevelSpec("Q3_K_M", 12, 3.9960, "Q3_K"),
    LevelSpec("MXFP4_MOE", 38, 4.25, "MXFP4"),
    LevelSpec("Q3_K_L", 13, 4.2979, "Q3_K"),
    LevelSpec("IQ4_XS", 30, 4.4597, "IQ4_XS"),
    LevelSpec("Q4_0", 2, 4.6357, "Q4_0"),
    LevelSpec("Q4_K_S", 14, 4.6672, "Q4_K"),
    LevelSpec("IQ4_NL", 25, 4.6818, "IQ4_NL"),
    LevelSpec("Q4_K_M", 15, 4.8944, "Q4_K"),
    LevelSpec("Q4_1", 3, 5.1030, "Q4_1"),
    LevelSpec("Q5_0", 8, 5.5703, "Q5_0"),
    LevelSpec("Q5_K_S", 16, 5.5704, "Q5_K"),
    LevelSpec("Q5_K_M", 17, 5.7036, "Q5_K"),
    LevelSpec("Q5_1", 9, 6.0376, "Q5_1"),
    LevelSpec("Q6_K", 18, 6.5633, "Q6_K"),
    LevelSpec("Q8_0", 7, 8.5008, "Q8_0"),
    LevelSpec("F16", 1, 16.0005, "F16"),
    LevelSpec("BF16", 32, 16.0005, "BF16"),
    LevelSpec("F32", 0, 32.0, "F32"),
)
"""Every level that llama.cpp can make, smallest first."""

PREDICTED = ("Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q4_0", "IQ4_NL", "MXFP4", "Q5_K", "Q6_K", "Q8_0")
"""Types whose damage is predicted for every matrix; its rows may need what `fitting_type` makes of them."""

FAST: dict[str, frozenset[str]] = {
    "arm": frozenset({"Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4", "Q8_0"}),
    "cpu": frozenset({"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"}),
    "gpu": frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}),
}
"""Types that llama.cpp multiplies with faster than with their neighbours. arm, cpu: those that it lays out anew for
NEON with dot products, and for AVX2 (`ggml_repack_get_optimal_repack_type` in ggml-cpu/repack.cpp); gpu: those that
CUDA decodes without a table of values (ggml-cuda/mmq.cu)."""

LADDER = (
    *("Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "IQ4_XS", "Q4_0", "Q4_K_S", "IQ4_NL", "Q4_K_M", "Q5_K_S", "Q5_K_M"),
    *("Q6_K", "Q8_0"),
)
"""Levels that recipes are compared with: the usual ones that need no importance matrix, about smallest first."""

LEVELS_BY_NAME: dict[str, LevelSpec] = {level.name: level for level in LEVELS}
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}  # as llama-quantize takes them

_FTYPE_NAMES = {level.ftype: level.name for level in LEVELS} | {
    # In files, but no longer (or, NVFP4, not) something the quantizer makes.
    4: "Q4_1_SOME_F16",
    5: "Q4_2",
    6: "Q4_3",
    33: "Q4_0_4_4",
    34: "Q4_0_4_8",
    35: "Q4_0_8_8",
    39: "NVFP4",
}
_FTYPE_GUESSED = 1024  # LLAMA_FTYPE_GUESSED: a flag, not part of the number


def parse(name: str) -> LevelSpec:
    """The level of that name, in any case; `Q4_K` means `Q4_K_M`, as for llama-quantize.

    Raises:
        UsageError: no such level; the message names the closest ones, the hint all of them. Of a publisher's mix they
            say how to measure it.
    """
    wanted = name.strip().upper().replace("-", "_")
    level = LEVELS_BY_NAME.get(_ALIASES.get(wanted, wanted))
    if level is not None:
        return level
    of_publisher = mixes.refusal(name.strip())
    if of_publisher:
        raise UsageError(*of_publisher)
    if re.search(r"[\s;:|+]", name.strip()):
        raise UsageError(f"unknown level {name!r}", "separate levels with commas, such as Q4_K_M,Q8_0")
    message = f"unknown level {name!r}{_did_you_mean(wanted, LEVELS_BY_NAME)}"
    makeable = ", ".join(level.name for level in LEVELS if not level.needs_imatrix)
    raise UsageError(message, f"levels: {makeable}")


def name_of_ftype(ftype: int) -> str:
    """The level name of a `general.file_type`, or `ftype N` for one that this version does not know."""
    number = ftype & ~_FTYPE_GUESSED
    return _FTYPE_NAMES.get(number, f"ftype {number}")


def type_name(type_id: int) -> str:
    """The ggml type's name, or `type N` for one that this version does not know."""
    traits = TYPES_BY_ID.get(type_id)
    return traits.name if traits else f"type {type_id}"


def fitting_type(name: str, row: int) -> str:
    """The type that llama.cpp gives a tensor with rows of `row` weights when `name` is asked for.

    Raises:
        UsageError: no such type, or one that llama.cpp has neither blocks nor a fallback for.
    """
    traits = TYPE_TRAITS.get(name)
    if traits is None or traits.removed:
        known = [t.name for t in _TYPES if not t.removed]
        message = f"unknown tensor type {name!r}{_did_you_mean(name.upper(), known)}"
        raise UsageError(message, "types are those of tensors, such as Q4_K, Q6_K or F16")
    if row % traits.block_size == 0:
        return name
    fallback = FALLBACK.get(name)
    if fallback is None and traits.block_size > 32:
        raise UsageError(f"rows of {row} do not hold whole {name} blocks of {traits.block_size}", "take another type")
    return fallback if fallback and row % TYPE_TRAITS[fallback].block_size == 0 else "F16"


def _did_you_mean(wanted: str, known: Iterable[str]) -> str:
    """The end of a message about a name that does not exist."""
    import difflib  # only when something was misspelled

    known = list(known)
    longer = [one for one in known if wanted and one.startswith(f"{wanted}_")]  # Q4: the usual ones of that width first
    longer.sort(key=lambda one: (not one.endswith("_K_M"), not one.endswith("_0")))
    close = longer[:3] or difflib.get_close_matches(wanted, known, n=3)
    return f", did you mean {' or '.join(close)}?" if close else ""
