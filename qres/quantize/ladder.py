"""What llama.cpp would make of a model at the usual levels, by its dry run: what recipes are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from qres.errors import NativeError
from qres.gguf.imatrix import Imatrix
from qres.gguf.inventory import Inventory
from qres.gguf.model_file import bytes_at
from qres.levels import LADDER, LEVELS_BY_NAME
from qres.native import worker
from qres.quantize.make import importance
from qres.records.recipe import Rung
from qres.records.result import Skipped


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
        found = planned_types(reference, [LEVELS_BY_NAME[name].ftype for name in LADDER], threads, imatrix)
    except NativeError as error:
        return (), (Skipped("recipes", f"llama.cpp {version('llama-cpp-python')} cannot quantize it: {error}"),)
    names = [tensor.name for tensor in reference.tensors]
    return tuple(
        Rung(level, tuple(types.get(name, "") for name in names)) for level, types in zip(LADDER, found, strict=True)
    ), ()


def planned_types(
    reference: Inventory,
    ftypes: Sequence[int],
    threads: int,
    imatrix: Imatrix | None,
    types: Mapping[str, str] | None = None,
) -> list[dict[str, str]]:
    """Tensor -> type that each `llama_ftype` would give it, by llama.cpp's dry run; nothing is written.

    Raises:
        NativeError: llama.cpp refused.
    """
    return worker.run(_planned, lambda _: None, reference.path, ftypes, threads, imatrix, types)


def planned_bytes(reference: Inventory, types: Mapping[str, str]) -> int:
    """Of a file's tensors in these types; those that have none are copied."""
    return sum(bytes_at(tensor, types.get(tensor.name, tensor.type)) for tensor in reference.tensors)


# -- in the worker: only there is llama.cpp loaded


def _planned(
    _emit: Callable[[object], None],
    source: Path,
    ftypes: Sequence[int],
    threads: int,
    imatrix: Imatrix | None,
    types: Mapping[str, str] | None,
) -> list[dict[str, str]]:
    from qres.native.quantizer import planned_types as planned

    weighted = importance(imatrix)
    return [planned(source, ftype, threads, weighted, types) for ftype in ftypes]
