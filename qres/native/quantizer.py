"""Makes a quantized GGUF through llama.cpp's own quantizer.

Runs in the worker process; the caller verifies and renames.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import llama_cpp

from qres.errors import NativeError
from qres.native.session import log

_COUNTER = re.compile(r"\[\s*(\d+)/\s*(\d+)\]")
_QUANT_SIZE = re.compile(r"quant size\s*=\s*([\d.]+) MiB")


def quantize(
    source: Path, target: Path, ftype: int, threads: int, on_tensor: Callable[[int, int], None] | None = None
) -> None:
    """Quantize a 16-bit GGUF to a level.

    Args:
        source: The reference model (its first shard).
        target: File to write; must not be the source, under any name (docs/facts.md, 17).
        ftype: llama.cpp's `llama_ftype` of the level.
        threads: Threads to use.
        on_tensor: Called with (tensors done, tensors in all).

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
        code = _run(source, target, ftype, threads, dry_run=False)
    finally:
        log.on_line = None
    if code != 0:
        target.unlink(missing_ok=True)
        raise NativeError(f"llama.cpp cannot quantize {source.name}: {log.reason()}")


def quantized_bytes(source: Path, ftype: int, threads: int) -> int:
    """Size that `quantize` would write, from llama.cpp's dry run; nothing is written.

    Raises:
        NativeError: llama.cpp refused.
    """
    log.clear()
    code = _run(source, source.with_name("never-written"), ftype, threads, dry_run=True)
    sizes = [match for match in map(_QUANT_SIZE.search, log.lines) if match]
    if code != 0 or not sizes:
        raise NativeError(f"llama.cpp cannot quantize {source.name}: {log.reason()}")
    return int(float(sizes[-1][1]) * 2**20)


def _run(source: Path, target: Path, ftype: int, threads: int, *, dry_run: bool) -> int:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = ftype
    params.nthread = threads
    params.dry_run = dry_run
    return int(llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), params))
