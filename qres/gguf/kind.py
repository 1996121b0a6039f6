"""What a GGUF is: a language model, or one of the things besides language models that come as GGUF."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from qres.errors import InputError, QresError, UnsupportedError
from qres.gguf.names import block_number

_REAL_MODEL = "give the GGUF of a language model that predicts the next token"

_EMBEDDING = frozenset({"gemma-embedding", "llama-embed", "t5encoder"})  # besides everything called *bert*
_BY_ARCHITECTURE = {
    "clip": "mmproj",
    "imatrix": "imatrix",
    "controlvector": "control_vector",
    "t5": "encoder_decoder",
    "wavtokenizer-dec": "audio",
    "pockettts": "audio",
    "eagle3": "draft",
    "dflash": "draft",
    "gemma4-assistant": "draft",
    "dream": "diffusion",
    "llada": "diffusion",
    "llada-moe": "diffusion",
    "rnd1": "diffusion",
}
_BY_GENERAL_TYPE = {"adapter": "lora", "imatrix": "imatrix", "mmproj": "mmproj"}


@dataclass(frozen=True)
class _Refusal:
    """Why a kind cannot be measured."""

    what: str
    """What the file is instead; completes "... is"."""
    instead: str
    """What to give in its place."""
    error: type[QresError] = InputError
    """InputError for what is no model, UnsupportedError for a model of another sort."""


_REFUSALS = {
    "mmproj": _Refusal("a multimodal projector (mmproj)", "give the language model that it belongs to"),
    "lora": _Refusal("a LoRA adapter", "give the base model, or merge the adapter into it with llama-export-lora"),
    "imatrix": _Refusal("an importance matrix", "give the model that it was computed from"),
    "control_vector": _Refusal("a control vector", "give the model that it steers"),
    "vocab_only": _Refusal("a vocabulary without weights", "give the whole model: convert without --vocab-only"),
    "empty": _Refusal("a GGUF without tensors", "give a file that holds the model's weights"),
    "embedding_only": _Refusal("an embedding or reranking model: it has no next token", _REAL_MODEL, UnsupportedError),
    "encoder_decoder": _Refusal("an encoder-decoder model", "give a decoder-only language model", UnsupportedError),
    "audio": _Refusal("a speech model without next-token output", _REAL_MODEL, UnsupportedError),
    "draft": _Refusal("a draft head that needs its target model", "give the target model", UnsupportedError),
    "other": _Refusal("not a language model: it has no token_embd.weight", _REAL_MODEL, UnsupportedError),
}


def kind_of(architecture: str, metadata: Mapping[str, object], tensor_names: Collection[str]) -> str:
    """The kind of a GGUF: `model`, `diffusion`, or one of those that `refusal` explains."""
    kind = _BY_ARCHITECTURE.get(architecture) or _BY_GENERAL_TYPE.get(str(metadata.get("general.type")))
    if kind:
        return kind
    if any(name.endswith((".lora_a", ".lora_b")) for name in tensor_names):
        return "lora"
    if any(key.startswith("clip.") for key in metadata):
        return "mmproj"
    if not tensor_names:
        return "vocab_only" if "tokenizer.ggml.tokens" in metadata else "empty"
    return _kind_of_weights(architecture, metadata, tensor_names)


def _kind_of_weights(architecture: str, metadata: Mapping[str, object], tensor_names: Collection[str]) -> str:
    """The kind of a file with the weights of some transformer."""
    if _is_nextn_only(architecture, metadata, tensor_names):
        return "draft"
    # Pooling 1 to 4 (mean, CLS, last, rank) is only written for embedding and reranking models; -1 and 0 mean none.
    pooled = metadata.get(f"{architecture}.pooling_type") in (1, 2, 3, 4)
    bidirectional = metadata.get(f"{architecture}.attention.causal") in (False, 0)
    if pooled or bidirectional or "bert" in architecture or architecture in _EMBEDDING:
        return "embedding_only"
    return "model" if "token_embd.weight" in tensor_names else "other"


def _is_nextn_only(architecture: str, metadata: Mapping[str, object], tensor_names: Collection[str]) -> bool:
    """The file holds only the NextN (MTP) blocks, which come last: a draft for the model they were cut from."""
    blocks, nextn = (metadata.get(f"{architecture}.{key}") for key in ("block_count", "nextn_predict_layers"))
    if type(blocks) is not int or type(nextn) is not int or nextn <= 0:
        return False
    indices = {number for number in map(block_number, tensor_names) if number is not None}
    return bool(indices) and min(indices) >= blocks - nextn


def refusal(kind: str, subject: str) -> QresError | None:
    """The error for a file of that kind, None when it can be measured; `subject` is what the message calls the file."""
    reason = _REFUSALS.get(kind)
    return reason.error(f"{subject} is {reason.what}", reason.instead) if reason else None
