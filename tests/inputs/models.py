"""Cases about what a GGUF is: kinds that are no language model, and pairs that do not belong together."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.gguf.building import Row, build, put, strings
from tests.inputs.case import ACCEPTED, FULL, HEADER, ROOM, SMALL, Build, case, full, inspect, pair, scan, small

ADAPTER: list[Row] = [("blk.0.attn_q.weight.lora_a", (64, 4), 1, 0), ("blk.0.attn_q.weight.lora_b", (4, 64), 1, 512)]


def of(architecture: str, **more: object) -> bytes:
    """A file of another architecture."""
    return full({"general.architecture": architecture, **more})


KINDS: dict[str, tuple[bytes, int, str, str, str]] = {
    "mmproj": (of("clip"), 3, "a multimodal projector (mmproj)", "Give the language model", "multimodal projector"),
    "mmproj-by-type": (
        full({"general.type": "mmproj"}),
        3,
        "projector",
        "Give the language model",
        "multimodal projector",
    ),
    "mmproj-by-key": (
        full({"clip.has_vision_encoder": True}),
        3,
        "projector",
        "Give the language model",
        "multimodal projector",
    ),
    "lora": (full({"general.type": "adapter"}), 3, "a LoRA adapter", "base model", "LoRA adapter"),
    "lora-by-tensors": (full(rows=ADAPTER), 3, "a LoRA adapter", "llama-export-lora", "LoRA adapter"),
    "imatrix": (full({"general.type": "imatrix"}), 3, "an importance matrix", "computed from", "importance matrix"),
    "control-vector": (of("controlvector"), 3, "a control vector", "the model that it steers", "control vector"),
    "vocabulary": (build(HEADER), 3, "a vocabulary without weights", "without --vocab-only", "vocabulary only"),
    "no-tensors": (build({"general.architecture": "llama"}), 3, "a GGUF without tensors", "Give a file", "no weights"),
    "nothing-at-all": (build(), 3, "a GGUF without tensors", "Give a file", "no weights"),
    "no-architecture": (full({"general.architecture": ""}), 3, "does not name its architecture", "Convert", "language"),
    "bert": (of("bert"), 4, "an embedding or reranking model", "predicts the next token", "embedding or reranking"),
    "pooling": (
        full({"llama.pooling_type": 3}),
        4,
        "an embedding or reranking",
        "next token",
        "embedding or reranking",
    ),
    "not-causal": (full({"llama.attention.causal": False}), 4, "an embedding", "next token", "embedding or reranking"),
    "t5": (of("t5"), 4, "an encoder-decoder model", "Give a decoder-only language model", "encoder-decoder"),
    "speech": (of("wavtokenizer-dec"), 4, "a speech model", "predicts the next token", "speech model"),
    "draft": (of("eagle3"), 4, "a draft head", "Give the target model", "draft head"),
    "picture": (build(HEADER, FULL[1:], ROOM), 4, "not a language model", "predicts the next token", "not a language"),
}
"""Bytes, exit code, what a refusal says it is, what it says to give, what an inspection calls it."""

NO_MODELS = [
    *(
        case(f"reference-{name}", f"{name} to scan", scan(data), "the reference model m.gguf ", what, give, code=code)
        for name, (data, code, what, give, _) in KINDS.items()
    ),
    *(
        case(
            f"candidate-{name}",
            f"{name} as a level",
            pair(full(), data),
            "the candidate model cand.gguf",
            what,
            "Give quantized files of this reference",
            code=code,
        )
        for name, (data, code, what, _, _) in KINDS.items()
    ),
    *(
        case(f"inspect-{name}", f"{name} to look at", inspect(data), "Neither: it", give, f"kind {called}", code=0)
        for name, (data, _, _, give, called) in KINDS.items()
    ),
]

# ---------------------------------------------------------------- pairs

TOKENIZERS: dict[str, dict[str, object]] = {
    "model": {"tokenizer.ggml.model": "llama"},
    "pre": {"tokenizer.ggml.pre": "llama-bpe"},
    "one-token": {"tokenizer.ggml.tokens": strings(["a", "b", "", "e"])},
    "merges": {"tokenizer.ggml.merges": strings(["b a"])},
    "bos-id": {"tokenizer.ggml.bos_token_id": 2},
    "eos-id": {"tokenizer.ggml.eos_token_id": 2},
    "bos-rule": {"tokenizer.ggml.add_bos_token": False},
    "hidden": {"tokenizer.ggml.pre": "a\n\x1b[2J"},
    "scores": {"tokenizer.ggml.scores": strings(["1", "2", "3", "4"])},
}
"""Whether these matter is for the text to say: llama.cpp tokenizes it with both (tests/pipeline/test_inputs.py)."""
OTHER_ROWS: dict[str, tuple[list[Row], tuple[str, ...]]] = {
    "tensor-missing": (SMALL[:2], ("tensor 'blk.0.ffn_up.weight' is missing in the quantized file",)),
    "tensor-too-many": ([*SMALL, ("blk.0.x.weight", (64,), 0, 704)], ("'blk.0.x.weight' is missing in the reference",)),
    "other-shape": (
        [*SMALL[:2], ("blk.0.ffn_up.weight", (64, 1), 8, 544)],
        ("'blk.0.ffn_up.weight' has the shape [64, 2] in the reference, [64, 1] in the quantized file",),
    ),
}
NEXTN = (
    {"llama.block_count": 2, "llama.nextn_predict_layers": 1},
    [*SMALL, ("blk.1.nextn.enorm.weight", (64,), 0, 704)],
)
NO_VOCABULARY = {"tokenizer.ggml.model": "none", "tokenizer.ggml.tokens": "", "tokenizer.ggml.merges": ""}
OTHER_MODEL = ("cand.gguf is not the same model as ref.gguf: ", "Give quantized files of this reference")


def sizes(n: int) -> dict[str, object]:
    """No token list, only a number."""
    return {**NO_VOCABULARY, "llama.vocab_size": n}


def files(arguments: str, **contents: bytes) -> Build:
    """A command line and its files; a name's underscore stands for a dot."""

    def make(folder: Path) -> Sequence[str]:
        for name, data in contents.items():
            put(folder, data, name.replace("_", "."))
        return arguments.split()

    return make


def linked(make: Callable[[Path, Path], object]) -> Build:
    """A reference and a second name for it."""

    def change(folder: Path) -> Sequence[str]:
        make(put(folder, full(), "ref.gguf"), folder / "link.gguf")
        return ["scan", "ref.gguf", "link.gguf"]

    return change


PAIRS = [
    *(
        case(
            f"tokenizer-{name}",
            f"a candidate with another {name}",
            pair(full(), small(change)),
            "passed",
            code=ACCEPTED,
        )
        for name, change in TOKENIZERS.items()
    ),
    case(
        "vocabulary-size",
        "no token lists, two sizes",
        pair(full(sizes(7)), small(sizes(8))),
        "ref.gguf has no tokenizer",
        "Give token ids with --tokens",
    ),
    *(
        case(name, f"a candidate with a {name}", pair(full(), small(rows=rows)), *OTHER_MODEL, *words)
        for name, (rows, words) in OTHER_ROWS.items()
    ),
    case(
        "layers",
        "a candidate with another layer count",
        pair(full(), small({"llama.block_count": 2})),
        *OTHER_MODEL,
        "the model has 1 layers in the reference, 2 in the quantized file",
    ),
    case(
        "architecture",
        "a candidate of another one",
        pair(full(), small({"general.architecture": "qwen2"}, rows=SMALL[:2])),
        *OTHER_MODEL,
        "the architecture is 'llama' in the reference, 'qwen2' in the quantized file",
    ),
    case(
        "architecture-of-another-name",
        "the same tensors under another architecture's name: the graphs say whether they compute the same",
        pair(full(), small({"general.architecture": "qwen2"})),
        "passed",
        code=ACCEPTED,
    ),
    case(
        "hyperparameter",
        "another rope base: measured, and said to compute another function",
        pair(full(), small({"llama.rope.freq_base": 5e5})),
        "passed",
        code=ACCEPTED,
    ),
    case(
        "block-that-never-runs",
        "one file with a NextN block",
        pair(full(), small(*NEXTN)),
        "cand.gguf: block 1 (NextN, 0.0 MiB) is not executed: no figure depends on it",
        code=ACCEPTED,
    ),
    case(
        "rope-factors",
        "only one of them has rope factors",
        pair(full(), small(rows=[*SMALL, ("rope_freqs.weight", (4,), 0, 704)])),
        "passed",
        code=ACCEPTED,
    ),
    case(
        "second-of-three",
        "one bad file behind a good one",
        files("scan r.gguf a.gguf b.gguf", r_gguf=full(), a_gguf=small(), b_gguf=small(rows=SMALL[:2])),
        "b.gguf is not the same model as r.gguf",
        "'blk.0.ffn_up.weight'",
    ),
    case(
        "quantized-alone",
        "nothing to make levels from",
        scan(small()),
        "m.gguf is Q8_0 already: no level can be made from it",
        "Give the 16-bit model, or quantized files",
    ),
    case(
        "two-full-behind-a-level",
        "which is the reference?",
        files("scan q.gguf a.gguf b.gguf", q_gguf=small(), a_gguf=full(), b_gguf=full({"general.name": "other"})),
        "q.gguf is not 16 bit, a.gguf and b.gguf are",
        "Give the one to compare with first",
        code=2,
    ),
    case(
        "order-reversed",
        "the level first",
        files("scan q.gguf r.gguf", q_gguf=small(), r_gguf=full()),
        "Taken as the reference: r.gguf",
        "passed",
        code=ACCEPTED,
    ),
    case(
        "order-reversed-with-an-error",
        "the level first, and they do not match",
        files("scan q.gguf r.gguf", q_gguf=small(rows=SMALL[:2]), r_gguf=full()),
        "q.gguf is not the same model as r.gguf",
        "is missing in the quantized file",
    ),
    case(
        "level-twice",
        "one file given twice",
        files("scan r.gguf q.gguf ./q.gguf", r_gguf=full(), q_gguf=small()),
        "q.gguf was given twice: it is measured once",
        "passed",
        code=ACCEPTED,
    ),
    case(
        "level-twice-and-first",
        "the same in another order",
        files("scan q.gguf r.gguf ./q.gguf", r_gguf=full(), q_gguf=small()),
        "q.gguf was given twice",
        code=ACCEPTED,
    ),
    case(
        "reference-itself",
        "the reference as its own level",
        files("scan r.gguf ./r.gguf", r_gguf=full()),
        "r.gguf is the reference itself: every difference will be 0",
        code=ACCEPTED,
    ),
    case("hard-link", "the reference by another name", linked(os.link), "reference itself", code=ACCEPTED),
    case("symbolic-link", "the same", linked(lambda a, b: b.symlink_to(a)), "reference itself", code=ACCEPTED),
    case("copy", "a copy of the reference", linked(shutil.copy), "passed", code=ACCEPTED, without=("itself",)),
    case(
        "quantized-reference",
        "two levels and no 16-bit model",
        files("scan a.gguf b.gguf", a_gguf=small(), b_gguf=small({"general.name": "b"})),
        "The reference a.gguf is Q8_0 at",
        "passed",
        code=ACCEPTED,
    ),
]

# ---------------------------------------------------------------- what llama.cpp cannot load

_NORM_AT_F16: list[Row] = [FULL[0], ("blk.0.attn_norm.weight", (64,), 1, 512), ("blk.0.ffn_up.weight", (64, 2), 1, 640)]
_BEHIND = ROOM
UNLOADABLE_ROWS: dict[str, tuple[list[Row], tuple[str, ...]]] = {
    "vision-tower": ([*FULL, ("v.blk.0.attn_q.weight", (64,), 0, _BEHIND)], ("1 tensors of a vision or audio tower",)),
    "projector": ([*FULL, ("mm.0.weight", (64,), 0, _BEHIND)], ("vision or audio tower", "'mm.0.weight'", "--mmproj")),
    "audio-tower": ([*FULL, ("a.conv1d.weight", (64,), 0, _BEHIND)], ("vision or audio tower", "cannot load them")),
    "long-name": ([*FULL, ("n" * 64, (64,), 0, _BEHIND)], ("has a name of 64 bytes, llama.cpp takes 63",)),
    "norm-at-f16": (_NORM_AT_F16, ("the norm 'blk.0.attn_norm.weight' as F16", "computes norms with F32 only")),
    "gap": (
        [FULL[0], ("blk.0.attn_norm.weight", (64,), 0, 544), ("blk.0.ffn_up.weight", (64, 2), 1, 800)],
        ("tensor 'blk.0.attn_norm.weight' is at byte", "right behind the one before", "gguf-py"),
    ),
    "other-order": ([FULL[1], FULL[0], FULL[2]], ("tensor 'blk.0.attn_norm.weight' is at byte", "expects it at")),
    "two-in-one-place": (
        [FULL[0], FULL[1], ("blk.0.ffn_up.weight", (64, 2), 1, 512)],
        ("'blk.0.ffn_up.weight' is at",),
    ),
}
UNLOADABLE_KEYS: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "no-blocks": ({"llama.block_count": 0}, ("says it has 0 blocks, possible are 1 to 512",)),
    "too-many-blocks": ({"llama.block_count": 513}, ("says it has 513 blocks",)),
}


_SPACE = 2048


def _roomy(rows: Sequence[Row] = FULL, keys: dict[str, object] | None = None, zeros_from: int = _SPACE) -> bytes:
    """A 16-bit model with room for more tensors, its data ones up to some byte and zeros from there on."""
    header = build(HEADER | (keys or {}), rows, _SPACE)[:-_SPACE]
    return header + b"\1" * zeros_from + bytes(_SPACE - zeros_from)


UNLOADABLE_DATA: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "zeros-throughout": (
        _roomy(zeros_from=0),
        ("is unfinished: its last 3 tensors hold only zeros", "token_embd.weight on"),
    ),
    "zeros-at-the-end": (
        _roomy([*FULL, ("output.weight", (64, 2), 1, _BEHIND)], zeros_from=768),
        ("is unfinished: its last 2 tensors hold only zeros, from blk.0.ffn_up.weight on", "fetch it again"),
    ),
}
UNLOADABLE_FILES = {
    **{name: (_roomy(rows), words) for name, (rows, words) in UNLOADABLE_ROWS.items()},
    **{name: (_roomy(keys=keys), words) for name, (keys, words) in UNLOADABLE_KEYS.items()},
}
UNLOADABLE = [
    *(
        case(f"unloadable-{name}", f"a model with {name}", scan(data), "m.gguf", *words)
        for name, (data, words) in (UNLOADABLE_FILES | UNLOADABLE_DATA).items()
    ),
    *(
        case(f"unloadable-{name}-as-a-level", f"a level with {name}", pair(full(), data), "cand.gguf")
        for name, (data, _) in UNLOADABLE_FILES.items()
    ),
    *(
        case(f"inspect-unloadable-{name}", f"{name} to look at", inspect(data), "Neither: it", *words[:1], code=0)
        for name, (data, words) in UNLOADABLE_FILES.items()
    ),
    *(
        case(f"inspect-{name}", f"{name} to look at", inspect(data, "--values"), "Neither: it is unfinished", code=0)
        for name, (data, _) in UNLOADABLE_DATA.items()
    ),
    case(
        "one-matrix-of-zeros",
        "a single matrix of zeros at the end may be meant: it is named",
        inspect(_roomy(zeros_from=768), "--values"),
        "Reference: ",
        "blk.0.ffn_up.weight",
        "holds only zeros",
        code=0,
    ),
]
