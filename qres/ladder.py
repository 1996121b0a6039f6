"""What llama.cpp would make of a model at the usual levels: what recipes are compared with."""

from __future__ import annotations

from importlib.metadata import version

from qres import quantizing
from qres.errors import NativeError
from qres.gguf_file import Inventory
from qres.imatrix import Imatrix
from qres.levels import LADDER, LEVELS_BY_NAME
from qres.recipe_records import Rung
from qres.records import Skipped


def rungs(reference: Inventory, threads: int, imatrix: Imatrix | None) -> tuple[tuple[Rung, ...], tuple[Skipped, ...]]:
    """The type that each usual level gives each tensor of the reference, or why that is not known.

    Args:
        reference: The 16-bit model; of another one, llama.cpp makes no levels, and there are none.
        threads: For llama.cpp.
        imatrix: Where there is one, levels choose some types otherwise.
    """
    if not reference.is_16bit:
        return (), ()
    try:
        found = quantizing.planned_types(reference, [LEVELS_BY_NAME[name].ftype for name in LADDER], threads, imatrix)
    except NativeError as error:
        return (), (Skipped("recipes", f"llama.cpp {version('llama-cpp-python')} cannot quantize it: {error}"),)
    names = [tensor.name for tensor in reference.tensors]
    return tuple(
        Rung(level, tuple(types.get(name, "") for name in names)) for level, types in zip(LADDER, found, strict=True)
    ), ()
