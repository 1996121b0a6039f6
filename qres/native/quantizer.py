"""Makes a quantized GGUF through llama.cpp's own quantizer.

Runs in the worker process; the caller verifies and renames.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from qres.errors import NativeError
from qres.native import blocks, patterns
from qres.native.session import log

_COUNTER = re.compile(r"\[\s*(\d+)/\s*(\d+)\]")
_FAILURE = re.compile(r"failed to quantize: (.+)")
_PLANNED = re.compile(r"\[\s*\d+/\s*\d+\]\s+(.+?)\s+- \[[^\]]*\], type =\s*(\w+), size =[^(]*(?:\((\w+)\))?\s*$")
"""A line of a dry run: the tensor, its type, and the type that it would become where that is another one."""


@dataclass(frozen=True)
class Importance:
    """An importance matrix as the quantizer takes it, and what is noted of it in the file."""

    entries: Mapping[str, npt.NDArray[np.float32]]
    """Tensor -> mean squared input of each column, matrix by matrix."""
    file: str
    dataset: str = ""
    chunks: int = 0


def quantize(
    source: Path,
    target: Path,
    ftype: int,
    threads: int,
    on_tensor: Callable[[int, int], None] | None = None,
    importance: Importance | None = None,
    types: Mapping[str, str] | None = None,
) -> None:
    """Quantize a 16-bit GGUF to a level, or to a type for each tensor.

    Args:
        source: The reference model (its first shard).
        target: File to write; must not be the source, under any name (docs/facts.md, 17).
        ftype: llama.cpp's `llama_ftype` of the level.
        threads: Threads to use.
        on_tensor: Called with (tensors done, tensors in all).
        importance: For levels that need one, and to make the others better.
        types: Tensor -> ggml type, instead of the level's own choice. Give one for every tensor that llama.cpp
            quantizes: one that is left out is counted differently by the level (docs/facts.md, 22).

    Raises:
        NativeError: llama.cpp refused or failed; the partial target is removed.
    """
    if target.exists() and target.samefile(source):
        raise NativeError(f"refusing to quantize {source} onto itself")

    def follow(line: str) -> None:
        match = _COUNTER.search(line)
        if match and on_tensor:
            on_tensor(int(match[1]), int(match[2]))

    log.clear()
    log.on_line = follow
    try:
        code = _run(source, target, ftype, threads, importance, types, dry_run=False)
    finally:
        log.on_line = None
    if code != 0:
        target.unlink(missing_ok=True)
        raise NativeError(f"llama.cpp cannot quantize {source.name}: {_reason()}")


def planned_types(
    source: Path,
    ftype: int,
    threads: int,
    importance: Importance | None = None,
    types: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Tensor -> ggml type that `quantize` with the same arguments would give it, from llama.cpp's dry run.

    The importance matrix counts: levels choose other types for some tensors when there is one.

    Raises:
        NativeError: llama.cpp refused.
    """
    found: dict[str, str] = {}

    def follow(line: str) -> None:
        match = _PLANNED.search(line)
        if match:
            found[match[1]] = (match[3] or match[2]).upper()

    log.clear()
    log.on_line = follow
    try:
        code = _run(source, source.with_name("never-written"), ftype, threads, importance, types, dry_run=True)
    finally:
        log.on_line = None
    if code != 0 or not found:
        raise NativeError(f"llama.cpp cannot quantize {source.name}: {_reason()}")
    return found


def _reason() -> str:
    """llama.cpp's reason; where it drew a box around one, the line behind the box."""
    reason = log.reason()
    failures = [match for match in map(_FAILURE.search, log.lines) if match]
    return failures[-1][1] if failures and not reason.strip("=") else reason


def _run(
    source: Path,
    target: Path,
    ftype: int,
    threads: int,
    importance: Importance | None,
    types: Mapping[str, str] | None,
    *,
    dry_run: bool,
) -> int:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = ftype
    params.nthread = threads
    params.dry_run = dry_run
    if importance:  # the arrays belong to local names: they have to live as long as the call
        entries = {name: np.ascontiguousarray(entry, np.float32) for name, entry in importance.entries.items()}
        data, overrides = _imatrix_data(entries), _overrides(importance)
        params.imatrix, params.kv_overrides = data, overrides
    if types:
        rules = _rules(types)
        params.tt_overrides = rules
        # These two have fields of their own, which count before any rule.
        if "output.weight" in types:
            params.output_tensor_type = blocks.type_id(types["output.weight"])
        if "token_embd.weight" in types:
            params.token_embedding_type = blocks.type_id(types["token_embd.weight"])
    return int(llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), params))


def _rules(types: Mapping[str, str]) -> Any:  # noqa: ANN401 - a ctypes array
    """One rule for each tensor alone, and the one without a pattern that ends them."""
    rules = (llama_cpp.llama_model_tensor_override * (len(types) + 1))()
    for rule, (name, type_name) in zip(rules, types.items(), strict=False):
        rule.pattern = patterns.exact(name).encode()
        rule.type = blocks.type_id(type_name)
    return rules


def _imatrix_data(entries: Mapping[str, npt.NDArray[np.float32]]) -> Any:  # noqa: ANN401 - a ctypes array
    """`llama_model_imatrix_data` for each entry, and the one without a name that ends them."""
    data = (llama_cpp.llama_model_imatrix_data * (len(entries) + 1))()
    for one, (name, entry) in zip(data, entries.items(), strict=False):
        one.name, one.size = name.encode(), entry.size
        one.data = entry.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    return data


def _overrides(importance: Importance) -> Any:  # noqa: ANN401 - a ctypes array
    """The metadata that llama-quantize adds to a file that it makes with an importance matrix."""
    values: dict[str, str | int] = {
        "quantize.imatrix.file": importance.file,
        "quantize.imatrix.dataset": importance.dataset,
        "quantize.imatrix.entries_count": len(importance.entries),
        "quantize.imatrix.chunks_count": importance.chunks,
    }
    known = {key: value for key, value in values.items() if value}
    overrides = (llama_cpp.llama_model_kv_override * (len(known) + 1))()
    for one, (key, value) in zip(overrides, known.items(), strict=False):
        one.key = key.encode()
        if isinstance(value, int):
            one.tag, one.value.val_i64 = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT, value
        else:  # in 128 bytes with the final 0, and without the half of a character
            text = value.encode(errors="replace")[:127].decode(errors="ignore").encode()
            one.tag, one.value.val_str = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR, text
    return overrides
