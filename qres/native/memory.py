"""What a model needs in memory beside its weights, by llama.cpp's own accounting. Runs in the worker process."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import llama_cpp

from qres.errors import NativeError
from qres.native.session import log

_CACHE = re.compile(r"^llama_(?:kv_cache|memory)\w*: size\s*=\s*([\d.]+) MiB")
_COMPUTE = re.compile(r"compute buffer size\s*=\s*([\d.]+) MiB")


@dataclass(frozen=True)
class ContextMemory:
    """Memory of one context."""

    n_ctx: int
    cache_bytes: int
    """Keys and values, and recurrent state."""
    compute_bytes: int
    """Scratch buffers for a batch of 512 tokens."""


def context_memory(path: Path, contexts: Sequence[int]) -> tuple[ContextMemory, ...]:
    """Memory of contexts of several lengths; nothing is allocated, llama.cpp only lays the buffers out.

    Args:
        path: Model file.
        contexts: Context lengths in tokens.

    Raises:
        NativeError: llama.cpp refused the model or the context.
    """
    params = llama_cpp.llama_model_default_params()
    params.no_alloc = True
    params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
    params.n_gpu_layers = 0
    log.clear()
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise NativeError(f"llama.cpp cannot load {path.name}: {log.reason()}")
    try:
        return tuple(_measure(model, n_ctx) for n_ctx in contexts)
    finally:
        llama_cpp.llama_model_free(model)


def _measure(model: llama_cpp.llama_model_p, n_ctx: int) -> ContextMemory:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = n_ctx
    log.clear()
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise NativeError(f"llama.cpp cannot make a context of {n_ctx} tokens: {log.reason()}")
    llama_cpp.llama_free(context)
    return ContextMemory(n_ctx, _sum(_CACHE), _sum(_COMPUTE))


def _sum(pattern: re.Pattern[str]) -> int:
    return int(sum(float(match[1]) for match in map(pattern.search, log.lines) if match) * 2**20)
