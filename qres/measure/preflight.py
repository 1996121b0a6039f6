"""What can be found out about a scan in a second, before anything large is made or loaded: runs in the worker process.

Wrong texts, a missing GPU backend and a model that llama.cpp refuses end the scan here instead of after minutes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from qres.errors import NativeError
from qres.measure.job import Preflight
from qres.native.memory import ContextMemory, context_memory, layout
from qres.native.session import require_backend
from qres.native.vocabulary import Vocabulary
from qres.text import chunks, source
from qres.text.chunks import Fresh


def preflight(
    model: Path,
    plan: chunks.Plan,
    contexts: Sequence[int],
    n_gpu_layers: int,
    device: str,
) -> Preflight:
    """Check that llama.cpp takes the model and the settings, tokenize the texts, and lay out contexts.

    Args:
        model: The reference.
        plan: Its texts.
        contexts: Context lengths to lay out, in tokens.
        n_gpu_layers: As asked for.
        device: For the prediction, as torch names it.

    Raises:
        InputError: a text that cannot be used.
        UnsupportedError: no GPU backend.
        UsageError: torch has no such device.
        NativeError: llama.cpp refuses the model.
    """
    require_backend(n_gpu_layers)
    if device != "cpu":
        from qres.sensitivity.device import require_device  # torch takes a second

        require_device(device)
    memory: dict[int, tuple[int, int]] = {}
    own = None
    with layout(model) as laid_out:
        words = Vocabulary(laid_out, model.name)
        texts = chunks.texts(plan, words.tokenize, words.n_tokens, words.bos())
        try:
            own = _bytes(context_memory(laid_out, plan.n_ctx, plan.n_ctx))
            for n_ctx in contexts:
                memory[n_ctx] = _bytes(context_memory(laid_out, n_ctx))
        except NativeError as error:  # the model can be measured without knowing what it would need elsewhere
            return Preflight(texts, own, memory, error.message)
    return Preflight(texts, own, memory, "")


def fresh_text(model: Path, sources: Sequence[source.Source], n_ctx: int, used: Collection[str], limit: int) -> Fresh:
    """Chunks of texts that took no part in what is to be checked with them, by the model's tokenizer.

    Raises:
        InputError: a text that is too short, or all of which was used.
        NativeError: llama.cpp refuses the model.
    """
    with layout(model) as laid_out:
        words = Vocabulary(laid_out, model.name)
        return chunks.fresh(sources, words.tokenize, words.n_tokens, words.bos(), n_ctx, used, limit)


def _bytes(found: ContextMemory) -> tuple[int, int]:
    return found.cache_bytes, found.compute_bytes
