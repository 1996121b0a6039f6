"""What llama.cpp would make of a model at the usual levels, by its dry run: what recipes are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from qres.errors import NativeError
from qres.events import Listener, Logged
from qres.gguf.imatrix import Imatrix
from qres.gguf.inventory import Inventory
from qres.gguf.model_file import bytes_at
from qres.levels import LADDER, LEVELS_BY_NAME
from qres.native import worker
from qres.quantize.make import importance
from qres.quantize.original import Original
from qres.records.recipe import Rung
from qres.records.result import Skipped


def rungs(original: Original) -> tuple[tuple[Rung, ...], tuple[Skipped, ...]]:
    """The type that each usual level gives each tensor of a model, or why that is not known.

    Of a model that is quantized already, llama.cpp makes no levels, and there are none. Where there is an importance
    matrix, levels choose some types otherwise.
    """
    reference = original.reference
    if not reference.is_original:
        return (), ()
    try:
        found = planned_types(original, [LEVELS_BY_NAME[name].ftype for name in LADDER])
    except NativeError as error:
        return (), (Skipped("recipes", f"llama.cpp {version('llama-cpp-python')} cannot quantize it: {error}"),)
    names = [tensor.name for tensor in reference.tensors]
    return tuple(
        Rung(level, tuple(types.get(name, "") for name in names)) for level, types in zip(LADDER, found, strict=True)
    ), ()


def planned_types(
    original: Original, ftypes: Sequence[int], types: Mapping[str, str] | None = None
) -> list[dict[str, str]]:
    """Tensor -> type that each `llama_ftype` would give it, by llama.cpp's dry run; nothing is written.

    Args:
        original: What the files would be made from.
        ftypes: Of the levels.
        types: Tensor -> type, instead of the levels' own choice.

    Raises:
        NativeError: llama.cpp refused.
    """
    run = (original.reference.path, tuple(ftypes), original.threads, original.imatrix)
    return worker.run(_PlanTask(*run, original.types(types)), Logged())


def planned_bytes(reference: Inventory, types: Mapping[str, str]) -> int:
    """Of a file's tensors in these types; those that have none are copied."""
    return sum(bytes_at(tensor, types.get(tensor.name, tensor.type)) for tensor in reference.tensors)


# -- in the worker: only there is llama.cpp loaded


@dataclass(frozen=True)
class _PlanTask:
    """Ask llama.cpp's quantizer what it would do."""

    source: Path
    ftypes: tuple[int, ...]
    threads: int
    imatrix: Imatrix | None
    types: Mapping[str, str] | None

    def work(self, listener: Listener) -> list[dict[str, str]]:
        """Tensor -> type, for each level."""
        from qres.native.quantizer import planned_types as planned

        given = importance(self.imatrix)
        return [planned(self.source, ftype, self.threads, given, self.types) for ftype in self.ftypes]
