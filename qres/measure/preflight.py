"""What can be found out about a scan in a second, before anything large is made or loaded: runs in the worker process.

Wrong texts, a missing GPU backend and a model that llama.cpp refuses end the scan here instead of after minutes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from qres.errors import NativeError, QresError
from qres.measure.job import Preflight
from qres.native.memory import ContextMemory, context_memory, layout
from qres.native.session import require_backend
from qres.native.vocabulary import Vocabulary
from qres.text import chunks, source
from qres.text.chunks import Fresh

_SEARCHED = 1 << 24
"""Bytes of a text that special tokens are looked for in: what is measured lies within."""


def preflight(
    model: Path,
    plan: chunks.Plan,
    contexts: Sequence[int],
    n_gpu_layers: int,
    device: str,
    others: Sequence[Path] = (),
    files: Sequence[Path] = (),
) -> Preflight:
    """Check that llama.cpp takes the model and the settings, tokenize the texts, and lay out contexts.

    Args:
        model: The reference.
        plan: Its texts.
        contexts: Context lengths to lay out, in tokens.
        n_gpu_layers: As asked for.
        device: For the prediction, as torch names it.
        others: Files with other tokenizers, to tokenize the same texts with.
        files: Given levels: llama.cpp must take one of them at least.

    Raises:
        InputError: a text or model that cannot be used.
        UnsupportedError: no GPU backend, or a model that this llama.cpp does not know.
        UsageError: torch has no such device.
        NativeError: llama.cpp failed.
    """
    require_backend(n_gpu_layers)
    if device != "cpu":
        from qres.sensitivity.device import require_device  # torch takes a second

        require_device(device)
    _require_one(files)
    memory: dict[int, tuple[int, int]] = {}
    own = None
    with layout(model) as laid_out:
        words = Vocabulary(laid_out, model.name)
        texts = chunks.texts(plan, words.tokenize, words.n_tokens, words.bos())
        try:
            own = _bytes(context_memory(laid_out, plan.n_ctx, plan.n_ctx))
            for n_ctx in contexts:
                memory[n_ctx] = _bytes(context_memory(laid_out, n_ctx))
            no_memory = ""
        except NativeError as error:  # the model can be measured without knowing what it would need elsewhere
            no_memory = error.message
        hidden = (0, ()) if plan.text.special else words.hidden((plan.text.text or b"")[:_SEARCHED])
    retokenized = {path: _other_tokens(path, plan, texts) for path in others}
    return Preflight(texts, own, memory, no_memory, retokenized, *hidden)


def _require_one(files: Sequence[Path]) -> None:
    """Refuse files none of which llama.cpp takes; where it takes one, the others are listed as not measured."""
    errors = []
    for path in files:
        try:
            with layout(path):
                return
        except QresError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _other_tokens(path: Path, plan: chunks.Plan, known: chunks.Texts) -> str:
    """Where another file's tokenizer makes other ids of the texts, in words; empty for the same ids."""
    with layout(path) as laid_out:
        words = Vocabulary(laid_out, path.name)
        texts = chunks.texts(plan, words.tokenize, words.n_tokens, words.bos())
    for ours, theirs, name in (
        (known.report, texts.report, known.report_name),
        (known.rank, texts.rank, known.rank_name),
    ):
        flat = [[token for chunk in one for token in chunk] for one in (ours, theirs)]
        for at, (a, b) in enumerate(zip(*flat, strict=False)):
            if a != b:
                return f"token {at + 1} of {name} is {a} by the reference's tokenizer, {b} by the file's"
        if len(flat[0]) != len(flat[1]):
            return f"{name} has {len(flat[0])} tokens by the reference's tokenizer, {len(flat[1])} by the file's"
    return ""


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
