"""What a model needs in memory beside its weights, by llama.cpp's own accounting. Runs in the worker process."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp

from qres.errors import NativeError, QresError
from qres.native.session import loaded_model, log

_CACHE = re.compile(r"^llama_(?:kv_cache|memory)\w*: size\s*=\s*([\d.]+) MiB")
_COMPUTE = re.compile(r"compute buffer size\s*=\s*([\d.]+) MiB")


@dataclass(frozen=True)
class ContextMemory:
    """Memory of one context."""

    n_ctx: int
    cache_bytes: int
    """Keys and values, and recurrent state."""
    compute_bytes: int
    """Scratch buffers for one batch."""


def layout(path: Path) -> AbstractContextManager[Any]:
    """A model laid out but not loaded: llama.cpp checks every tensor's name and shape, and allocates nothing.

    Raises:
        QresError: llama.cpp refuses the model, as `session.loaded_model`.
    """
    return loaded_model(path, no_alloc=True, load_mode=llama_cpp.LLAMA_LOAD_MODE_NONE, n_gpu_layers=0)


def refusal(path: Path) -> str:
    """Why llama.cpp does not take a model's tensors; empty when it does."""
    try:
        with layout(path):
            return ""
    except QresError as error:
        return error.message


def context_memory(model: Any, n_ctx: int, n_batch: int | None = None) -> ContextMemory:  # noqa: ANN401 - a pointer
    """Memory of a context of a model from `layout`; buffers are laid out, not allocated.

    Args:
        model: As `layout` gave it.
        n_ctx: Context length in tokens.
        n_batch: Tokens that one graph computes; None for llama.cpp's default of 512.

    Raises:
        NativeError: llama.cpp refuses the context.
    """
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = n_ctx
    if n_batch:
        params.n_batch = params.n_ubatch = n_batch
    log.clear()
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise NativeError(f"llama.cpp cannot make a context of {n_ctx} tokens: {log.reason()}")
    llama_cpp.llama_free(context)
    return ContextMemory(n_ctx, _sum(_CACHE), _sum(_COMPUTE))


def _sum(pattern: re.Pattern[str]) -> int:
    return int(sum(float(match[1]) for match in map(pattern.search, log.lines) if match) * 2**20)
