"""What one GGUF is and what it can be used for, from its header alone: the records and how they are filled.

All text in the records is fit for a terminal: what comes from the file has been through `printable.show`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qres.errors import QresError
from qres.events import Listener, in_mib
from qres.gguf import bpw_gap, claims, model_file, zeros
from qres.gguf.bpw_gap import BpwGap
from qres.gguf.format.metadata import Digest, Unreadable, Value
from qres.gguf.inventory import Inventory
from qres.native import loadable
from qres.printable import show
from qres.records.files import TypeShare

if TYPE_CHECKING:
    from qres.gguf.magnitudes import Magnitudes


_KINDS = {
    "model": "language model",
    "diffusion": "diffusion language model",
    "draft": "draft head for speculative decoding",
    "mmproj": "multimodal projector (mmproj)",
    "lora": "LoRA adapter",
    "imatrix": "importance matrix",
    "control_vector": "control vector",
    "vocab_only": "vocabulary only, no weights",
    "empty": "no weights",
    "embedding_only": "embedding or reranking model",
    "encoder_decoder": "encoder-decoder model",
    "audio": "speech model",
    "other": "not a language model",
}


@dataclass(frozen=True)
class Standing:
    """What the file can be in a scan."""

    role: str
    """`reference`, `candidate` (a quantized file to measure against a reference) or `neither`."""
    reason: str
    instead: str
    """What to do: the command to run, or what to give in the file's place; empty when the reason says it."""


@dataclass(frozen=True)
class Tokenizer:
    """What the file says about its tokenizer."""

    model: str
    """`gpt2` (BPE), `llama` (SPM), `bert`, ...; empty when the file does not say, as below."""
    pre: str
    """Name of the pre-tokenizer."""
    n_vocab: int
    bos: str
    """Whether a BOS token comes first, in words."""
    chat_template_length: int | None
    """Characters of tokenizer.chat_template, which is never run; bytes when it is longer than a mebibyte; None when
    there is none."""


@dataclass(frozen=True)
class FileProblem:
    """Something that is wrong with the file."""

    message: str
    """Completes "the file is ..."."""
    hint: str
    fatal: bool
    """False for an oddity that llama.cpp takes, too."""


@dataclass(frozen=True)
class MetadataRow:
    """One metadata value as text, shortened."""

    key: str
    value: str


@dataclass(frozen=True)
class Inspection:
    """What `qres inspect` prints."""

    verdict: Standing
    path: str
    shards: tuple[str, ...]
    """Names of all files, in order."""
    file_bytes: int
    gguf_version: int
    kind: str
    """What kind of file it is, in plain words: `language model`, `LoRA adapter`, ..."""
    architecture: str
    """Empty when the file does not say, as the texts below; numbers are then 0."""
    name: str
    file_type: str
    """Level that the file claims."""
    n_weights: int
    n_layer: int
    """Number of blocks that run."""
    n_layer_skipped: int
    """NextN (MTP) blocks, which llama.cpp skips."""
    n_embd: int
    n_ctx_train: int
    tokenizer: Tokenizer
    types: tuple[TypeShare, ...]
    gap: BpwGap | None
    """None when no tensor's size is known."""
    disagreements: tuple[str, ...]
    """Where claims, names and contents do not agree."""
    odd_values: tuple[str, ...]
    problems: tuple[FileProblem, ...]
    metadata: tuple[MetadataRow, ...]
    values: tuple[Magnitudes, ...] | None
    """One entry per tensor; None when the data was not looked at."""


def inspect_file(file: Path, *, values: bool, threads: int, listener: Listener) -> Inspection:
    """What a GGUF is, as far as it can be read.

    Args:
        file: Of a split model, any shard.
        values: Read all tensor data, too.
        threads: For reading it.
        listener: Hears of that, in MiB.

    Raises:
        InputError: a file that is missing, unreadable or no GGUF.
    """
    inventory = model_file.read(file, tolerant=True)
    refusal = _asked(inventory)
    if not values:
        return inspect(inventory, refusal=refusal)
    from qres.gguf import magnitudes  # loads numpy

    listener.stage("reading weights, MiB")
    return inspect(inventory, magnitudes.scan(inventory, in_mib(listener), threads), refusal)


def _asked(inventory: Inventory) -> QresError | None:
    """Why llama.cpp does not take a model with which nothing seems wrong; other files are not worth a process."""
    if _header_refusal(inventory):
        return None
    return loadable.refusal(inventory.path)


def inspect(
    inventory: Inventory, magnitudes: tuple[Magnitudes, ...] | None = None, refusal: QresError | None = None
) -> Inspection:
    """Put together what the header says.

    Args:
        inventory: The file.
        magnitudes: What `magnitudes.scan` found in the data.
        refusal: Why llama.cpp does not take the file; None when it does, or was not asked.
    """
    metadata = inventory.metadata
    return Inspection(
        verdict=_standing(inventory, magnitudes, refusal),
        path=show(inventory.path),
        shards=tuple(show(path.name) for path in inventory.shards),
        file_bytes=inventory.file_bytes,
        gguf_version=inventory.version,
        kind=_KINDS.get(inventory.kind, inventory.kind),
        architecture=show(inventory.architecture),
        name=show(inventory.name),
        file_type=inventory.file_type,
        n_weights=inventory.n_weights,
        n_layer=inventory.n_layer,
        n_layer_skipped=_count(metadata.get(f"{inventory.architecture}.nextn_predict_layers")),
        n_embd=inventory.n_embd,
        n_ctx_train=inventory.n_ctx_train,
        tokenizer=_tokenizer(inventory),
        types=inventory.types,
        gap=bpw_gap.explain(inventory),
        disagreements=claims.disagreements(inventory),
        odd_values=claims.odd_values(inventory),
        problems=tuple(FileProblem(p.message, p.hint, p.fatal) for p in inventory.problems),
        metadata=tuple(MetadataRow(show(key), _value_text(value)) for key, value in metadata.items()),
        values=None if magnitudes is None else tuple(replace(one, tensor=show(one.tensor)) for one in magnitudes),
    )


def _header_refusal(inventory: Inventory) -> Standing | None:
    """Why the file is of no use, as far as the header tells."""
    fatal = [problem for problem in inventory.problems if problem.fatal]
    if fatal:
        return Standing("neither", f"it is {fatal[0].message.partition(':')[0]}", fatal[0].hint)
    try:
        model_file.require_language_model(inventory, "given")
    except QresError as error:
        return Standing("neither", error.message.replace(f"the given model {show(inventory.path)}", "it"), error.hint)
    return None


def _broken_data(inventory: Inventory, magnitudes: tuple[Magnitudes, ...]) -> Standing | None:
    """Why the file is of no use, as far as its data tells."""
    try:
        zeros.require_filled(inventory)
    except QresError as error:
        return Standing("neither", error.message.replace(f"{show(inventory.path)} is", "it is"), error.hint)
    broken = [found for found in magnitudes if found.n_bad]
    if not broken:
        return None
    more = f" and {len(broken) - 1} more tensors" if len(broken) > 1 else ""
    what = f"NaN or infinities in {show(broken[0].tensor)}{more}"
    return Standing("neither", what, "get the file again, or make it again")


def _standing(inventory: Inventory, magnitudes: tuple[Magnitudes, ...] | None, refusal: QresError | None) -> Standing:
    header = _header_refusal(inventory)
    if header:
        return header
    if refusal:
        return Standing("neither", refusal.message, refusal.hint)
    broken = None if magnitudes is None else _broken_data(inventory, magnitudes)
    if broken:
        return broken
    if inventory.is_16bit:
        held = claims.main_type(inventory)
        reason = f"a {_KINDS[inventory.kind]} at {32 if held == 'F32' else 16} bit ({held})"
        return Standing("reference", reason, "measure its levels with qres scan")
    if inventory.released_in:
        where = "its experts" if inventory.released_in == "MXFP4" else "matrices of its blocks"
        reason = (
            f"a {_KINDS[inventory.kind]} as it was released: {where} at {inventory.released_in}, the rest at 16 bit"
        )
        return Standing("reference", reason, "measure its levels with qres scan: they keep these tensors as they are")
    level = f"{inventory.file_type}, " if inventory.file_type else ""
    mix = claims.publishers_mix(inventory)
    if mix:
        level = f"by its name {show(mix)}, a publisher's mix, which llama.cpp has no level for; "
    reason = f"a quantized {_KINDS[inventory.kind]} ({level}{inventory.bpw:.2f} bits per weight)"
    original = "measure it against its 16-bit original with qres scan"
    return Standing("candidate", reason, f"{original} MODEL FILE" if mix else original)


def _tokenizer(inventory: Inventory) -> Tokenizer:
    metadata = inventory.metadata
    model, pre = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    template = metadata.get("tokenizer.chat_template")
    length = template.length if isinstance(template, Digest) else len(template) if isinstance(template, str) else None
    return Tokenizer(
        model=show(model) if isinstance(model, str) else "",
        pre=show(pre) if isinstance(pre, str) else "",
        n_vocab=inventory.n_vocab,
        bos=_bos(metadata.get("tokenizer.ggml.add_bos_token"), metadata.get("tokenizer.ggml.bos_token_id")),
        chat_template_length=length,
    )


def _bos(add: Value | None, token: Value | None) -> str:
    rule = {True: "added", False: "not added"}.get(add) if isinstance(add, bool) else None
    which = f" (token {token})" if type(token) is int else ""
    return f"{rule or 'left to llama.cpp: add_bos_token is not set'}{which}"


def _count(value: Value | None) -> int:
    return value if type(value) is int and value > 0 else 0


def _value_text(value: Value) -> str:
    if isinstance(value, Unreadable):
        return f"unreadable (value type {value.type_id})"
    if isinstance(value, Digest):
        return f"{'string' if value.element_type == 'byte' else 'list'} of {value.length:,} {value.element_type}"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6g}" if isinstance(value, float) else show(value)
