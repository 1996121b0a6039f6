"""`qres inspect` on files made by code: every kind, every contradiction, hostile and damaged ones; exact arithmetic."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from qres import levels
from qres.cli import inspect_view
from qres.cli.program import main
from qres.gguf import bpw_gap, claims, inspection, model_file, zeros
from qres.gguf.inspection import Inspection, inspect
from qres.gguf.magnitudes import Magnitudes
from qres.native import loadable
from tests.tiny import write_llama

REPO = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files here are headers with a few tensors: llama.cpp, which takes none of them, is not asked."""
    monkeypatch.setattr(loadable, "refusal", lambda _path: None)


Tensors = Mapping[str, tuple[tuple[int, ...], str]]
"""Name -> shape (row length first) and ggml type."""

NORM = "blk.0.attn_norm.weight"
MODEL: dict[str, tuple[tuple[int, ...], str]] = {
    "token_embd.weight": ((256, 8), "F16"),
    NORM: ((256,), "F32"),
    "blk.0.attn_q.weight": ((256, 256), "F16"),
    "blk.0.ffn_down.weight": ((512, 256), "F16"),
}
METADATA: dict[str, object] = {
    "general.name": "Tiny",
    "general.file_type": 1,
    "llama.block_count": 1,
    "llama.embedding_length": 256,
    "llama.context_length": 512,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": list("abcdefgh"),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ messages }}",
}


def put(
    path: Path,
    tensors: Tensors = MODEL,
    metadata: Mapping[str, object] = METADATA,
    architecture: str = "llama",
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    """A GGUF whose tensor data is a hole: as large as the header says, nothing written."""
    writer = gguf.GGUFWriter(path, architecture, endianess=endianess)
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        add[type(value)](key, value)
    n_bytes = 0
    for name, (shape, kind) in tensors.items():
        size = int(np.prod(shape)) // levels.TYPE_TRAITS[kind].block_size * levels.TYPE_TRAITS[kind].block_bytes
        writer.add_tensor_info(name, shape[::-1], np.dtype(np.float32), size, gguf.GGMLQuantizationType[kind])
        n_bytes += -(-size // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, -(-path.stat().st_size // 32) * 32 + n_bytes)
    return path


def of(kind: str, **others: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """The model with its matrices at one type, some at others: `output` adds a head, `embd` changes the embedding."""
    found = {name: (shape, kind if len(shape) > 1 else "F32") for name, (shape, _) in MODEL.items()}
    names = {"output": "output.weight", "embd": "token_embd.weight", "down": "blk.0.ffn_down.weight"}
    for part, other in others.items():
        found[names[part]] = (MODEL["token_embd.weight" if part == "output" else names[part]][0], other)
    return found


def look(path: Path) -> Inspection:
    return inspect(model_file.read(path, tolerant=True))


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `qres inspect`."""
    code: Any = 0
    try:
        main(["inspect", *map(str, arguments)])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code or 0, out, err


def strict_json(text: str) -> Any:  # noqa: ANN401 - whatever JSON holds
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


# ---------------------------------------------------------------- the verdict


@pytest.mark.parametrize(
    ("architecture", "metadata", "tensors", "role", "words"),
    [
        ("llama", {}, MODEL, "reference", "a language model at 16 bit (F16)"),
        ("llama", {}, of("BF16"), "reference", "at 16 bit (BF16)"),
        ("llama", {}, of("F32"), "reference", "at 32 bit (F32)"),
        ("dream", {}, MODEL, "reference", "a diffusion language model at 16 bit"),
        ("llama", {"general.file_type": 15}, of("Q4_K"), "candidate", "quantized language model (Q4_K_M, 4.54 bits"),
        ("llada", {"general.file_type": 7}, of("Q8_0"), "candidate", "a quantized diffusion language model (Q8_0, 8.5"),
        ("clip", {}, MODEL, "neither", "a multimodal projector (mmproj)"),
        ("llama", {"general.type": "adapter"}, MODEL, "neither", "a LoRA adapter"),
        ("llama", {}, {"blk.0.attn_q.weight.lora_a": ((64, 4), "F16")}, "neither", "a LoRA adapter"),
        ("llama", {"general.type": "imatrix"}, MODEL, "neither", "an importance matrix"),
        ("controlvector", {}, {"direction.1": ((256,), "F32")}, "neither", "a control vector"),
        ("llama", {}, {}, "neither", "a vocabulary without weights"),
        ("bert", {}, MODEL, "neither", "an embedding or reranking model"),
        ("t5", {}, MODEL, "neither", "an encoder-decoder model"),
        ("wavtokenizer-dec", {}, MODEL, "neither", "a speech model"),
        ("eagle3", {}, MODEL, "neither", "a draft head"),
        ("flux", {}, {NORM: ((256,), "F32")}, "neither", "not a language model"),
        ("", {}, MODEL, "neither", "does not name its architecture"),
    ],
)
def test_verdict(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    architecture: str,
    metadata: dict[str, object],
    tensors: Tensors,
    role: str,
    *,
    words: str,
) -> None:
    path = put(tmp_path / "m.gguf", tensors, METADATA | metadata, architecture)
    code, out, err = run(capsys, path)
    assert (code, err) == (0, "")
    first = out.splitlines()[0]
    assert first.startswith(f"{role.capitalize()}: ")
    assert words in first
    assert "the given model" not in first
    assert first.count(". ") == 1, "the reason, and what to do"
    kind = look(path).kind
    assert kind in inspection._KINDS.values()
    assert kind in out


def test_every_kind_has_words() -> None:
    from qres.gguf.kind import _BY_ARCHITECTURE, _BY_GENERAL_TYPE, _REFUSALS

    kinds = {*_BY_ARCHITECTURE.values(), *_BY_GENERAL_TYPE.values(), *_REFUSALS, "model"}
    assert kinds <= set(inspection._KINDS)


@pytest.mark.parametrize(
    ("type_id", "words"),
    [
        (
            31,
            "type Q4_0_4_4",
        ),
        (99, "type 99, first 'blk.0.attn_q.weight', unknown to this qres"),
    ],
)
def test_types_that_llama_cpp_does_not_read(tmp_path: Path, type_id: int, words: str) -> None:
    path = put(tmp_path / "m.gguf", of("Q4_0"), METADATA | {"general.file_type": 2})
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 2 * 8
    data[at : at + 4] = struct.pack("<I", type_id)
    path.write_bytes(data)
    found = look(path)
    assert found.verdict.role == "neither"
    assert words in found.verdict.reason
    assert found.verdict.instead
    assert found.gap, "the sizes that are known are explained"


# ---------------------------------------------------------------- bits per weight


def exact(path: Path) -> tuple[Fraction, Fraction]:
    """Bits per weight counted in the file, and as the sum of the explanation, both exactly."""
    inventory = model_file.read(path, tolerant=True)
    gap = bpw_gap.explain(inventory)
    assert gap
    known = [tensor for tensor in inventory.tensors if tensor.n_bytes is not None]
    weights = sum(tensor.n_weights for tensor in known)
    base = bpw_gap.bits_per_weight(gap.base)
    parts = [Fraction(8 * group.bytes - base * group.weights) / weights for group in gap.groups]
    assert [float(part) for part in parts] == [group.bpw_added for group in gap.groups]
    real = Fraction(8 * sum(tensor.n_bytes or 0 for tensor in known), weights)
    assert gap.bpw == float(real)
    assert sum(group.tensors for group in gap.groups) == sum(tensor.type != gap.base for tensor in known)
    return real, base + sum(parts)


GROWN = {"blk.1.attn_v.weight": ((256, 64), "Q6_K"), "blk.1.attn_k.weight": ((256, 64), "Q3_K")}
NARROW = {f"blk.0.{part}.weight": ((96, 256), "Q5_0") for part in ("attn_k", "attn_v", "attn_output")}


@pytest.mark.parametrize(
    ("tensors", "rows"),
    [
        (of("Q4_K"), {("norms and other vectors", "F32")}),
        (of("Q4_K", embd="Q6_K"), {("tied embedding, counted once", "Q6_K"), ("norms and other vectors", "F32")}),
        (
            of("Q4_K", embd="Q3_K", output="Q6_K"),
            {("token embedding", "Q3_K"), ("head", "Q6_K"), ("norms and other vectors", "F32")},
        ),
        (
            of("Q4_K") | GROWN,
            {("larger by recipe", "Q6_K"), ("smaller by recipe", "Q3_K"), ("norms and other vectors", "F32")},
        ),
        (
            of("Q4_K")
            | NARROW
            | {"token_embd.weight": ((96, 256), "Q8_0"), "blk.0.ssm_conv1d.weight": ((4, 96), "F32")},
            {
                ("fallback: row not a multiple of 256", "Q5_0"),
                ("tied embedding, counted once (fallback)", "Q8_0"),
                ("norms and other vectors", "F32"),
                ("larger by recipe", "F32"),
            },
        ),
    ],
)
def test_groups_of_a_quantized_file(tmp_path: Path, tensors: Tensors, rows: set[tuple[str, str]]) -> None:
    path = put(tmp_path / "m.gguf", tensors, METADATA | {"general.file_type": 15})
    real, explained = exact(path)
    assert real == explained
    gap = look(path).gap
    assert gap
    assert (gap.base, gap.base_bpw, gap.nominal_bpw) == ("Q4_K", 4.5, 4.8944)
    assert {(group.reason, group.type) for group in gap.groups} == rows
    assert [group.bpw_added for group in gap.groups] == sorted((g.bpw_added for g in gap.groups), key=lambda b: -abs(b))
    assert all(tensors[group.example][1] == group.type for group in gap.groups)


@pytest.mark.parametrize(
    ("file_type", "tensors", "base"),
    [(15, of("Q8_0"), "Q8_0"), (None, of("Q6_K"), "Q6_K"), (1, of("F16"), "F16"), (99, of("BF16"), "BF16")],
)
def test_base_is_what_the_file_holds_when_the_claim_is_wrong(
    tmp_path: Path, file_type: int | None, tensors: Tensors, base: str
) -> None:
    metadata = {key: value for key, value in METADATA.items() if key != "general.file_type"}
    path = put(tmp_path / "m.gguf", tensors, metadata | ({"general.file_type": file_type} if file_type else {}))
    gap = look(path).gap
    assert gap
    assert gap.base == base


KNOWN = [t.name for t in levels.TYPE_TRAITS.values() if t.name in gguf.GGMLQuantizationType.__members__]
NAMES = ["token_embd.weight", "output.weight", "output_norm.weight", *(f"blk.{i}.attn_q.weight" for i in range(6))]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(KNOWN), st.sampled_from([256, 512, 768]), st.integers(1, 9)), min_size=1, max_size=9
    ),
    st.sampled_from([None, *(level.ftype for level in levels.LEVELS)]),
)
def test_the_sum_is_exact_for_any_mix(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, int, int]], file_type: int | None
) -> None:
    tensors = {name: ((row, n), kind) for name, (kind, row, n) in zip(NAMES, rows, strict=False)}
    path = tmp_path_factory.getbasetemp() / "mix.gguf"
    put(path, tensors, {} if file_type is None else {"general.file_type": file_type})
    real, explained = exact(path)
    assert real == explained


def test_nothing_to_explain(tmp_path: Path) -> None:
    assert look(put(tmp_path / "m.gguf", {})).gap is None


# ---------------------------------------------------------------- claims against contents


@pytest.mark.parametrize(
    ("file_type", "tensors", "words"),
    [
        ("Q4_K_M", of("Q4_K"), ""),
        ("Q4_K_M", of("Q8_0"), "says Q4_K_M, but 100 % of the weights in the matrices of the blocks are Q8_0"),
        ("F16", of("BF16"), "says F16, but 100 % of the weights in the matrices of the blocks are BF16"),
        ("Q4_K_M", of("Q5_0"), "are Q5_0"),  # the fallback, but the rows hold whole blocks
        ("Q4_K_M", of("Q5_0") | {"blk.1.attn_q.weight": ((96, 2100), "Q5_0")}, ""),
        (
            "Q2_K",
            of("Q2_K") | {"blk.0.ffn_up.weight": ((256, 700), "F16")},
            "says Q2_K (nominally 3.16 bits per weight",
        ),
        ("Q4_K_M", {"token_embd.weight": ((256, 8), "F16")}, ""),  # no blocks, so no contradiction
        ("MXFP4_MOE", of("Q8_0"), "are Q8_0"),
    ],
)
def test_file_type_against_contents(tmp_path: Path, file_type: str, tensors: Tensors, words: str) -> None:
    ftype = levels.LEVELS_BY_NAME[file_type].ftype
    path = put(tmp_path / "m.gguf", tensors, METADATA | {"general.file_type": ftype})
    found = look(path).disagreements
    assert len(found) == bool(words)
    assert words in "".join(found)


@pytest.mark.parametrize(
    ("file", "name", "file_type", "words"),
    [
        ("model-Q4_K_M.gguf", "Tiny", 15, ""),
        ("model.q4_k_m.gguf", "Tiny", 15, ""),
        ("model-Q4_K.gguf", "Tiny", 15, ""),  # short for it
        ("UD-Q4_K_XL.gguf", "Tiny", 15, ""),
        ("model-F16-to-Q4_K_M.gguf", "Tiny", 15, ""),  # the longest
        ("model-4bit.gguf", "q4_kernel Xq8_0 BF160", 15, ""),  # not words of their own
        ("model-Q8_0.gguf", "Tiny", 15, "the file's name says Q8_0, general.file_type says Q4_K_M"),
        ("IQ4_XS-model.gguf", "Tiny", 15, "says IQ4_XS"),
        (
            "m.gguf",
            "Tiny bf16",
            15,
            "general.name says BF16, general.file_type says Q4_K_M, the weights are mostly Q4_K",
        ),
        ("m-Q4-K-S.gguf", "Tiny", 15, "says Q4_K_S"),
        ("m-Q4_K_S.gguf", "Tiny", None, ""),
        (
            "m-Q8_0.gguf",
            "Tiny",
            None,
            "the file's name says Q8_0, general.file_type is not set, the weights are mostly",
        ),
    ],
)
def test_names_against_contents(tmp_path: Path, file: str, name: str, file_type: int | None, words: str) -> None:
    metadata = METADATA | {"general.name": name}
    metadata = {k: v for k, v in metadata.items() if k != "general.file_type"}
    found = look(put(tmp_path / file, of("Q4_K"), metadata | ({"general.file_type": file_type} if file_type else {})))
    assert len(found.disagreements) == bool(words)
    assert words in "".join(found.disagreements)


@pytest.mark.parametrize(
    ("metadata", "tensors", "words"),
    [
        ({}, {}, None),
        ({"llama.scale": float("nan")}, {}, "llama.scale is NaN"),
        ({"llama.scale": float("-inf")}, {}, None),  # llama.cpp writes it for "no bound"
        ({"general.file_type": 777}, {}, "general.file_type is 777, unknown"),
        ({"llama.embedding_length": 64}, {}, "embedding_length is 64, the rows of token_embd.weight have 256"),
        ({"tokenizer.ggml.tokens": list("abc")}, {}, "the tokenizer has 3 tokens, token_embd.weight has 8 rows"),
        ({"tokenizer.ggml.bos_token_id": 8}, {}, "the BOS token is 8, the vocabulary has 8 tokens"),
        ({"llama.block_count": 3}, {}, "block_count is 3, the tensors are of 1 blocks"),
        ({}, {"blk.0.none.weight": ((0,), "F32")}, "1 tensors have no weights, first blk.0.none.weight"),
    ],
)
def test_odd_values(tmp_path: Path, metadata: dict[str, object], tensors: Tensors, words: str | None) -> None:
    found = look(put(tmp_path / "m.gguf", MODEL | dict(tensors), METADATA | metadata)).odd_values
    assert len(found) == (words is not None)
    assert (words or "") in "".join(found)


# ---------------------------------------------------------------- what is printed


def test_golden_words(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    metadata = METADATA | {"general.file_type": 15, "llama.nextn_predict_layers": 1, "llama.block_count": 2}
    path = put(tmp_path / "tiny-Q4_K_M.gguf", of("Q4_K", output="Q6_K") | GROWN, metadata)
    code, out, err = run(capsys, path)
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[:13] == [
        "Candidate: a quantized language model (Q4_K_M, 4.62 bits per weight). "
        "Measure it against its 16-bit original with qres scan.",
        "",
        f"file {path} (0.1 MiB, GGUF 3)",
        "kind language model, llama",
        "name Tiny",
        "parameters 233,728",
        "layers 1 (and 1 NextN that never run), width 256",
        "context 512 tokens",
        "tokenizer gpt2, smollm, 8 tokens",
        "BOS added (token 1)",
        "chat template 14 characters, not run",
        "",
        "Tensor types",
    ]
    for line in (
        "type tensors weights MiB of bytes",
        "Q4_K 3 198,656 0.1 82.8 % █████████████████",
        "Bits per weight: 4.62, nominally 4.89 for Q4_K_M",
        "4.5000 Q4_K base type",
        "+0.1446 1 0.0 Q6_K larger by recipe blk.1.attn_v.weight",
        "4.6183 together",
        "Values: the tensor data was not looked at (--values does)",
        "metadata value",
        "general.architecture llama",
        "tokenizer.ggml.tokens list of 8 string",
        "tokenizer.ggml.add_bos_token true",
    ):
        assert line in lines, line
    assert "disagree" not in out
    assert "Problems" not in out
    assert "\x1b" not in out


def test_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=80, soft_wrap=True, highlight=False)
    monkeypatch.setattr(inspect_view, "answer_console", lambda: console)
    metadata = METADATA | {"general.file_type": 15, "llama.attention.a_very_long_key_of_no_known_meaning": "x" * 500}
    inspect_view.show_inspection(look(put(tmp_path / "m.gguf", of("Q4_K", embd="Q8_0") | NARROW, metadata)))
    verdict, *lines = screen.getvalue().splitlines()
    assert verdict.startswith("Candidate: ")
    assert max(map(cell_len, lines)) <= 80
    figures = [line.split()[:3] for line in lines if line.startswith("+")]
    assert len(figures) == 3
    assert all("…" not in "".join(row) for row in figures)


def test_real_model_with_values(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf")
    code, out, err = run(capsys, path, "--values")
    assert (code, err) == (0, "")  # the progress bar is for terminals
    assert out.startswith("Reference: a language model at 16 bit (F16). Measure its levels with qres scan.\n")
    assert "Values: 21 of 21 tensors looked at, all finite, largest magnitude " in out


def test_values_beyond_f16_and_broken_ones(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    large = {"blk.0.attn_q.weight": 40000.0, "blk.0.attn_k.weight": -70000.0}

    def change(name: str, values: Any) -> Any:  # noqa: ANN401 - as tiny.Change
        values = values.copy()
        values.flat[0] = large.get(name, values.flat[0])
        return values, None

    path = write_llama(tmp_path / "large.gguf", n_layer=1, change=change)
    code, out, _ = run(capsys, path, "--values")
    assert (code, out.split(":")[0]) == (0, "Reference")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "blk.0.attn_q.weight 40,000 more than half of 65,504, where F16 ends" in lines
    assert "blk.0.attn_k.weight 70,000 beyond 65,504: does not fit F16" in lines
    large["blk.0.attn_k.weight"] = float("nan")
    write_llama(path, n_layer=1, change=change)
    code, out, _ = run(capsys, path, "--values")
    assert code == 0
    assert out.startswith("Neither: NaN or infinities in blk.0.attn_k.weight. Get the file again")
    assert "1 NaN, 0 infinite, the first at 0" in out


def test_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    metadata = METADATA | {"llama.scale": float("nan"), "llama.bound": float("inf"), "general.file_type": 15}
    path = put(tmp_path / os.fsdecode(b"m\xff-Q8_0.gguf"), of("Q4_K"), metadata)
    code, out, err = run(capsys, path, "--json")
    assert (code, err) == (0, "")
    found = strict_json(out)
    assert found["verdict"]["role"] == "candidate"
    assert found["path"].endswith("m\ufffd-Q8_0.gguf")
    assert found["types"][0]["type"] == "Q4_K"
    assert found["gap"]["groups"][0]["reason"] == "norms and other vectors"
    assert found["disagreements"] == [
        "the file's name says Q8_0, general.file_type says Q4_K_M, the weights are mostly Q4_K"
    ]
    assert {"key": "llama.scale", "value": "nan"} in found["metadata"]
    assert found["odd_values"] == ["llama.scale is NaN"]
    assert (found["problems"], found["values"]) == ([], None)


def test_json_with_values(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, put(tmp_path / "m.gguf"), "--json", "--values")
    assert (code, err) == (0, "")
    values = strict_json(out)["values"]
    assert [row["tensor"] for row in values] == list(MODEL)
    assert values[0] == {
        "tensor": "token_embd.weight",
        "absmax": 0.0,
        "n_nan": 0,
        "n_inf": 0,
        "first_bad": None,
        "not_checked": "",
    }


@pytest.mark.parametrize(
    ("add", "token", "said"),
    [
        (True, 1, "added (token 1)"),
        (False, 1, "not added (token 1)"),
        (None, 1, "left to llama.cpp: add_bos_token is not set (token 1)"),
        (None, None, "left to llama.cpp: add_bos_token is not set"),
    ],
)
def test_bos(tmp_path: Path, add: bool | None, token: int | None, said: str) -> None:
    changed = {"tokenizer.ggml.add_bos_token": add, "tokenizer.ggml.bos_token_id": token}
    metadata = {key: value for key, value in (METADATA | changed).items() if value is not None}
    assert look(put(tmp_path / "m.gguf", metadata=metadata)).tokenizer.bos == said


# ---------------------------------------------------------------- hostile and damaged files

HOSTILE = "\x1b[31m<script>\n\r\x07[bold]\u202egnp.\x9b2J\u200b\ud7ff"


def test_hostile_text_is_shown_and_does_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    metadata = {
        **METADATA,
        "general.name": HOSTILE,
        "general.file_type": 15,
        f"llama.{HOSTILE}": HOSTILE,
        "tokenizer.ggml.model": HOSTILE,
        "tokenizer.ggml.pre": "[link=file:///etc/passwd]x[/link]",
        "tokenizer.chat_template": "{{ 7 * 7 }}" * 300_000,
    }
    tensors = of("Q4_K") | {f"blk.0.{HOSTILE[:20]}": ((256, 4), "Q6_K")}
    path = put(tmp_path / "[red]m.gguf", tensors, metadata, architecture="llama[b]")
    for arguments in ([path], [path, "--values"], [path, "--json", "--values"]):
        code, out, err = run(capsys, *arguments)
        assert (code, err) == (0, "")
        assert all(c.isprintable() or c == "\n" for c in out)
        assert "<script>" in out, "shown as it is"
        assert "[bold]" in out
        assert "[red]m.gguf" in out
        assert "49" not in out.split("chat_template")[-1][:80]


@pytest.mark.parametrize("keep", [40, 400, -1000])
def test_damaged_files_are_shown_as_far_as_they_go(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, keep: int
) -> None:
    path = put(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    code, out, err = run(capsys, path)
    assert (code, err) == (0, "")
    assert out.startswith("Neither: it is ")
    assert "\nProblems\n- " in out
    code, out, _ = run(capsys, path, "--values", "--json")
    found = strict_json(out)
    assert code == 0
    assert found["problems"][0]["fatal"]
    if keep == -1000:
        assert found["problems"][0]["message"].startswith("truncated: tensor 'blk.0.ffn_down.weight'")
        assert [row["not_checked"] for row in found["values"]] == ["", "", "", "the file ends before it does"]


def test_unreadable_metadata(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = put(tmp_path / "m.gguf", metadata=METADATA | {"llama.strange": 7})
    data = bytearray(path.read_bytes())
    at = data.index(b"llama.strange") + len("llama.strange")
    data[at : at + 4] = struct.pack("<I", 77)
    path.write_bytes(data)
    code, out, _ = run(capsys, path)
    assert code == 0
    assert out.startswith("Neither: it is damaged")
    assert "unreadable (value type 77)" in out


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (None, 3, "does not exist"),
        (b"", 3, "is empty"),
        (b"<html>", 3, "a web page"),
        (b"GGUF\1\0\0\0", 4, "version 1"),
    ],
)
def test_what_is_no_gguf_at_all(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes | None, code: int, words: str
) -> None:
    path = tmp_path / "m.gguf"
    if content is not None:
        path.write_bytes(content)
    found, out, err = run(capsys, path)
    assert (found, out) == (code, "")
    assert words in err
    assert err.count("\n") == 1


def test_big_endian(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, put(tmp_path / "m.gguf", endianess=gguf.GGUFEndian.BIG))
    assert (code, out) == (4, "")
    assert "big-endian" in err


# ---------------------------------------------------------------- shards, and files that are too large to read


def split(folder: Path) -> list[Path]:
    """The model in two files, by llama.cpp's names."""
    rows = list(MODEL.items())
    paths = []
    for number, part in enumerate((rows[:2], rows[2:])):
        head = METADATA if number == 0 else {}
        metadata = {**head, "split.no": number, "split.count": 2, "split.tensors.count": 4}
        paths.append(put(folder / f"tiny-{number + 1:05d}-of-00002.gguf", dict(part), metadata))
    return paths


def test_any_shard_gives_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first, second = split(tmp_path)
    outputs = {run(capsys, path, *flags)[:2] for path in (first, second) for flags in ((), ())}
    assert len(outputs) == 1
    code, out = outputs.pop()
    assert code == 0
    assert out.startswith("Reference: a language model at 16 bit (F16).")
    assert "(2 shards, " in out
    found = look(second)
    assert found.shards == (first.name, second.name)
    assert found.n_weights == sum(int(np.prod(shape)) for shape, _ in MODEL.values())
    assert [row["tensor"] for row in strict_json(run(capsys, second, "--values", "--json")[1])["values"]] == list(MODEL)


def test_incomplete_shards(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first, second = split(tmp_path)
    second.unlink()
    code, out, _ = run(capsys, first)
    assert code == 0
    assert out.startswith("Neither: it is ")
    assert "tiny-00002-of-00002.gguf" in out


class CountingFile(io.FileIO):
    """Counts what is read from the disk, over all files."""

    n_bytes = 0

    def readinto(self, buffer: Any) -> int | None:  # noqa: ANN401 - any writable buffer
        n_bytes = super().readinto(buffer)
        CountingFile.n_bytes += n_bytes or 0
        return n_bytes


def test_of_100_gb_only_the_header_is_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = {f"blk.{i}.ffn_down.weight": ((32768, 32768), "BF16") for i in range(50)}
    metadata = METADATA | {"general.file_type": 32, "llama.block_count": 50}
    path = put(tmp_path / "large.gguf", MODEL | large, metadata)
    assert path.stat().st_size > 100e9

    def open_counting(self: Path, mode: str = "r", buffering: int = -1, **_: object) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(CountingFile(self), max(buffering, 8192))

    run(capsys, path)  # what is loaded for the first time reads files of its own
    monkeypatch.setattr(Path, "open", open_counting)
    code, out, _ = run(capsys, path)
    assert code == 0
    assert out.startswith("Reference: ")
    assert "53.69 B" in out
    assert 0 < CountingFile.n_bytes < 2 << 20


def test_inspecting_loads_nothing_that_computes(tmp_path: Path) -> None:
    path = put(tmp_path / "m.gguf")
    run = f"from qres.cli.program import main; main(['inspect', {str(path)!r}])"
    code = f"import sys; {run}; print(*sys.modules, file=sys.stderr)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert not {"gguf", "llama_cpp", "torch", "msgspec", "qres.gguf.magnitudes"} & set(ended.stderr.split())


def test_values_are_part_of_the_verdict_only_when_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeros, "require_filled", lambda _inventory: None)  # the file's own data is zeros
    inventory = model_file.read(put(tmp_path / "m.gguf"))
    fine = tuple(Magnitudes(name, absmax=70000.0) for name in MODEL)
    assert inspect(inventory, fine).verdict.role == "reference"
    broken = (*fine[:2], Magnitudes(NORM, n_inf=3, first_bad=0), Magnitudes("x", n_nan=1, first_bad=0))
    assert inspect(inventory, broken).verdict.reason == f"NaN or infinities in {NORM} and 1 more tensors"
    assert claims.main_type(inventory) == "F16"
