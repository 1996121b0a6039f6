"""Pairs of files from the field: what two files compute, and what is only bookkeeping between them (C1 to C4)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests import archs, tiny
from tests.gguf.editing import Data, Value, at, f32, load, made, renamed, save, u32
from tests.pipeline.test_run import qres

pytestmark = pytest.mark.model

Q8_0, F16, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q8_0", "F16", "F32"))
IDS = " ".join(str(i) for i in np.random.default_rng(7).integers(5, 120, 700))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama that predicts, its matrices at Q8_0, and token ids."""
    folder = tmp_path_factory.mktemp("pairs")
    tiny.write_llama(folder / "T.gguf", n_layer=2, change=tiny.predictive)
    metadata, tensors = load(folder / "T.gguf")
    save(folder / "T8.gguf", {**metadata, "general.file_type": u32(7)}, at(tensors, Q8_0))
    (folder / "ids.txt").write_text(IDS)
    return folder


def scan(folder: Path, *arguments: object) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """A quick scan, and its result; empty where there is none."""
    common = ("--chunks", 2, "--rank-chunks", 1, "--n-ctx", 128, "--threads", 1, "--out", "out")
    done = qres("scan", *arguments, *common, cwd=folder)
    result = folder / "out" / "result.json"
    found = json.loads(result.read_text()) if done.returncode == 0 else {}
    return done, found


def changed(folder: Path, name: str, changes: dict[str, Value | None]) -> Path:
    """T8 with other metadata; None takes a key away."""
    metadata, tensors = load(folder / "T8.gguf")
    kept = {key: value for key, value in metadata.items() if key not in changes}
    return save(folder / name, kept | {key: value for key, value in changes.items() if value}, tensors)


# ---------------------------------------------------------------- C1: what two files compute


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.rope.freq_base", f32(1e6), "is not set (llama.cpp then takes 10000) in the reference, 1000000 in"),
        ("llama.attention.layer_norm_rms_epsilon", f32(0.5), "is 1e-05 in the reference, 0.5 in the file"),
        ("llama.rope.scaling.factor", f32(4.0), "is not set (llama.cpp then takes 1) in the reference, 4 in the file"),
    ],
)
def test_c1_another_function_is_said_first_and_nothing_is_advised(
    folder: Path, key: str, value: Value, said: str
) -> None:
    more = {"llama.rope.scaling.type": ([gguf.GGUFValueType.STRING], "linear")} if "scaling" in key else {}
    changed(folder, "C1.gguf", {key: value, **more})
    done, found = scan(folder, "T.gguf", "C1.gguf")
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith("No advice: Q8_0 does not compute the same function as the reference")
    assert f"{key} {said}" in first
    assert "does not compute the same function" in done.stderr
    (level,) = found["levels"]
    assert level["output"]["kld_mean"] > 0
    assert not any(row["worth_it"] for row in level["sensitivity"]["keep_16bit"])
    assert not any(row["level"] for row in found["device_advice"])
    assert found["recipes"] == []
    assert "Keep at 16 bit" not in done.stdout


def test_c1_a_sound_level_beside_it_is_advised(folder: Path) -> None:
    changed(folder, "C1.gguf", {"llama.rope.freq_base": f32(1e6)})
    done, found = scan(folder, "T.gguf", "T8.gguf", "C1.gguf")
    assert done.stdout.startswith("Ship Q8_0 (T8.gguf)")
    assert "Left out: Q8_0 (C1.gguf) does not compute the same function" in done.stdout.splitlines()[0]
    assert [bool(level["differs"]) for level in found["levels"]] == [
        level["name"] != "Q8_0 (T8.gguf)" for level in found["levels"]
    ]


def test_c1_one_expert_instead_of_two(folder: Path) -> None:
    metadata, tensors = load(archs.make("qwen3moe-moe", folder))
    tensors = at([t for t in tensors if not t.name.endswith((".scale", ".input_scale"))], F16)
    save(folder / "moe.gguf", {**metadata, "general.file_type": u32(1)}, tensors)
    one = {"general.file_type": u32(7), "qwen3moe.expert_used_count": u32(1)}
    save(folder / "moe-q8.gguf", {**metadata, **one}, at(tensors, Q8_0))
    done, _ = scan(folder, "moe.gguf", "moe-q8.gguf", "--tokens", "ids.txt")
    assert "qwen3moe.expert_used_count is 2 in the reference, 1 in the file" in done.stdout.splitlines()[0]


def test_c1_a_key_that_changes_nothing_here_is_no_difference(folder: Path) -> None:
    changed(folder, "C1.gguf", {"llama.rope.freq_base": f32(1e4), "llama.context_length": u32(1024)})
    done, found = scan(folder, "T.gguf", "C1.gguf")
    assert done.stdout.startswith("Ship Q8_0")
    assert found["levels"][0]["differs"] == []


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (None, 8.0, "the file alone reads rope_freqs.weight"),
        (8.0, None, "the reference alone reads rope_freqs.weight"),
        (8.0, 4.0, "rope_freqs.weight holds other values"),
        (8.0, 8.0001, ""),  # each converter computes them
    ],
)
def test_c1_rope_factors(folder: Path, ours: float | None, theirs: float | None, said: str) -> None:
    for name, source, factor in (("rope", "T", ours), ("rope8", "T8", theirs)):
        metadata, tensors = load(folder / f"{source}.gguf")
        factors = [] if factor is None else [made("rope_freqs.weight", np.full(32, factor, np.float32), F32)]
        save(folder / f"{name}.gguf", metadata, [*tensors[:1], *factors, *tensors[1:]])
    done, found = scan(folder, "rope.gguf", "rope8.gguf")
    assert done.returncode == 0, done.stderr
    assert any(said in text for text in found["levels"][0]["differs"]) if said else not found["levels"][0]["differs"]


# ---------------------------------------------------------------- C2: only bookkeeping


def types(folder: Path) -> Value:
    kinds, values = load(folder / "T8.gguf")[0]["tokenizer.ggml.token_type"]
    assert isinstance(values, list)
    return kinds, [*values[:256], 4, *values[257:]]


BOOKKEEPING: dict[str, Callable[[Path], dict[str, Value | None]]] = {
    "eos": lambda _: {"tokenizer.ggml.eos_token_id": u32(10)},
    "eot": lambda _: {"tokenizer.ggml.eot_token_id": u32(257)},
    "scores": lambda _: {
        "tokenizer.ggml.scores": ([gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.FLOAT32], [0.0] * 258)
    },
    "flag": lambda _: {"tokenizer.ggml.add_bos_token": None},
    "type": lambda folder: {"tokenizer.ggml.token_type": types(folder)},
}


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    done, found = scan(folder, "T.gguf", "T8.gguf")
    assert done.returncode == 0, done.stderr
    return found


@pytest.mark.parametrize("name", BOOKKEEPING)
def test_c2_bookkeeping_is_a_remark(folder: Path, plain: dict[str, Any], name: str) -> None:
    changed(folder, f"C2-{name}.gguf", BOOKKEEPING[name](folder))
    done, found = scan(folder, "T.gguf", f"C2-{name}.gguf")
    assert done.returncode == 0, done.stderr
    assert f"C2-{name}.gguf: tokenizer.ggml." in done.stderr
    assert "the text becomes the same tokens, and the figures hold" in done.stderr
    assert found["levels"][0]["output"] == plain["levels"][0]["output"]


def test_c2_token_ids_need_no_tokenizer(folder: Path) -> None:
    change: dict[str, Value | None] = {"tokenizer.ggml.pre": ([gguf.GGUFValueType.STRING], "qwen2")}
    changed(folder, "C2-pre.gguf", change)
    done, found = scan(folder, "T.gguf", "C2-pre.gguf", "--tokens", "ids.txt")
    assert done.returncode == 0, done.stderr
    assert "token ids were given, so that no tokenizer takes part" in done.stderr
    assert found["levels"][0]["differs"] == []


def test_c2_a_tokenizer_that_makes_other_tokens_is_refused(folder: Path) -> None:
    changed(folder, "C2-bos.gguf", {"tokenizer.ggml.add_bos_token": ([gguf.GGUFValueType.BOOL], True)})
    done, _ = scan(folder, "T.gguf", "C2-bos.gguf")
    assert done.returncode == 3
    assert "C2-bos.gguf has another tokenizer than T.gguf: tokenizer.ggml.add_bos_token is False" in done.stderr
    assert "token 1 of built-in report text is" in done.stderr


# ---------------------------------------------------------------- C3: the same weights in other tensors


def fused(tensors: Sequence[Data], names: Sequence[str], whole: str) -> list[Data]:
    """Tensors of these roles one below the other in one tensor, block by block."""
    known, out = {tensor.name: tensor for tensor in tensors}, []
    for tensor in tensors:
        block, _, role = tensor.name.rpartition(f".{names[0]}.")
        if block and role == "weight":
            parts = [known[f"{block}.{name}.weight"].values for name in names]
            out.append(made(f"{block}.{whole}.weight", np.concatenate(parts, axis=-2), tensor.type))
        elif not any(f".{name}.weight" in tensor.name for name in names):
            out.append(tensor)
    return out


def pair(folder: Path, name: str) -> tuple[dict[str, Value], list[Data]]:
    """A fixture at 16 bit."""
    metadata, tensors = load(archs.make(name, folder))
    plain = [t for t in tensors if not t.name.endswith((".scale", ".input_scale"))]
    return {**metadata, "general.file_type": u32(1)}, at(plain, F16)


def test_c3_experts_gate_and_up_in_one_tensor(folder: Path) -> None:
    """The fixture's architecture is loaded apart only: a copy of the same rows is measured."""
    metadata, apart = pair(folder, "qwen3moe-moe")
    one = fused(apart, ("ffn_gate_exps", "ffn_up_exps"), "ffn_gate_up_exps")
    q8 = {**metadata, "general.file_type": u32(7)}
    for name, tensors in (("apart", apart), ("fused", one)):
        save(folder / f"{name}.gguf", metadata, tensors)
        save(folder / f"{name}-q8.gguf", q8, at(tensors, Q8_0))
    outputs = []
    for arguments in (("apart", "apart-q8"), ("apart", "fused-q8"), ("fused", "apart-q8")):
        done, found = scan(folder, *(f"{name}.gguf" for name in arguments), "--tokens", "ids.txt")
        assert done.returncode == 0, done.stderr
        (level,) = found["levels"]
        outputs.append(level["output"])
        assert level["differs"] == []
        assert level["points"]
        assert level["sensitivity"]["units"]
        assert ("ffn_gate_up_exps" in done.stderr) == ("fused" in str(arguments))
    assert outputs[0] == outputs[1] == outputs[2]


def test_c3_query_key_and_value_in_one_tensor(folder: Path) -> None:
    """llama.cpp takes both: nothing is copied, and every figure is there."""
    metadata, apart = load(folder / "T.gguf")
    whole = fused(apart, ("attn_q", "attn_k", "attn_v"), "attn_qkv")
    save(folder / "qkv.gguf", {**metadata, "general.file_type": u32(7)}, at(whole, Q8_0))
    done, found = scan(folder, "T.gguf", "qkv.gguf")
    assert done.returncode == 0, done.stderr
    assert "attn_qkv for attn_q, attn_k and attn_v (2 layers)" in done.stderr
    (level,) = found["levels"]
    assert level["differs"] == []
    assert level["output"]["same_top"] > 0.9
    assert all(level["file"]["tensor_types"])
    if not found["skipped"]:
        assert level["sensitivity"]["units"]


# ---------------------------------------------------------------- C4: a block that never runs


def test_c4_a_nextn_block_in_one_file_only(folder: Path) -> None:
    metadata, trunk = pair(folder, "glm4moe-moe")
    n_embd = trunk[0].shape[0]
    block = [renamed(t, t.name.replace("blk.1.", "blk.2.")) for t in trunk if t.name.startswith("blk.1.")]
    random = np.random.default_rng(0).normal(0, 0.02, (n_embd, 2 * n_embd)).astype(np.float32)
    block.append(made("blk.2.nextn.eh_proj.weight", random, F16))
    ones = np.ones(n_embd, np.float32)
    block += [made(f"blk.2.nextn.{name}.weight", ones, F32) for name in ("enorm", "hnorm", "shared_head_norm")]
    more: dict[str, Value] = {"glm4moe.block_count": u32(3), "glm4moe.nextn_predict_layers": u32(1)}
    q8 = {**metadata, "general.file_type": u32(7)}
    for name, keys, tensors in (("trunk", {}, trunk), ("mtp", more, [*trunk, *block])):
        save(folder / f"{name}.gguf", {**metadata, **keys}, tensors)
        save(folder / f"{name}-q8.gguf", {**q8, **keys}, at(tensors, Q8_0))
    outputs = []
    for arguments in (("trunk", "trunk-q8"), ("trunk", "mtp-q8"), ("mtp", "trunk-q8"), ("mtp", "mtp-q8")):
        done, found = scan(folder, *(f"{name}.gguf" for name in arguments), "--tokens", "ids.txt")
        assert done.returncode == 0, done.stderr
        (level,) = found["levels"]
        outputs.append(level["output"])
        blocks = [found["reference"]["not_executed"], level["file"]["not_executed"]]
        assert [bool(one) for one in blocks] == [name.startswith("mtp") for name in arguments]
        said = "block 2 (NextN" in done.stderr and "not executed" in (folder / "out" / "report.md").read_text()
        assert said == ("mtp" in str(arguments))
        assert level["differs"] == []
        assert not any("blk.2." in name for unit in level["sensitivity"]["units"] for name in unit["weights"])
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]
