"""Whole scans of copies, quantized references, released formats and single damaged tensors: rows C5, C6, C7 and C20."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest

from tests import archs, tiny
from tests.pipeline.test_run import qres

pytestmark = pytest.mark.model

Q = gguf.GGMLQuantizationType
DAMAGED = "blk.2.ffn_down.weight"
OPTIONS = ("--n-ctx", 128, "--chunks", 2, "--rank-chunks", 1, "--threads", 1)


def scan(folder: Path, *arguments: object) -> tuple[list[str], str, dict[str, Any]]:
    """Lines of the answer, the Markdown report and the result of a scan that ends well."""
    done = qres("scan", *arguments, *OPTIONS, "--out", "out", cwd=folder)
    assert done.returncode == 0, done.stderr
    return (
        done.stdout.splitlines(),
        (folder / "out" / "report.md").read_text(),
        json.loads((folder / "out" / "result.json").read_text()),
    )


def model(path: Path, change: tiny.Change = tiny.predictive, n_layer: int = 4) -> Path:
    return tiny.write_llama(path, n_layer=n_layer, change=change)


def damaged(how: Callable[[tiny.Floats], tuple[Any, Q | None]], name: str = DAMAGED) -> tiny.Change:
    """The model that predicts, with one tensor made otherwise."""

    def change(tensor: str, values: tiny.Floats) -> tuple[Any, Q | None]:
        data, kind = tiny.predictive(tensor, values)
        return how(np.asarray(data, np.float32)) if tensor == name else (data, kind)

    return change


def at(*, matrices: Q) -> tiny.Change:
    """The model that predicts with its matrices at a type."""

    def change(tensor: str, values: tiny.Floats) -> tuple[Any, Q | None]:
        data, kind = tiny.predictive(tensor, values)
        return (gguf.quantize(np.asarray(data, np.float32), matrices), matrices) if data.ndim > 1 else (data, kind)

    return change


def noisy(values: tiny.Floats) -> tuple[Any, Q | None]:
    noise = np.random.default_rng(1).normal(0, values.std() / 4, values.shape)
    return (values + noise).astype(np.float16), None


def low(values: tiny.Floats) -> tuple[Any, Q | None]:
    return gguf.quantize(values, Q.Q4_0), Q.Q4_0


def stretched(values: tiny.Floats) -> tuple[Any, Q | None]:
    values[:64] *= 3
    return values, None


def test_c5_a_copy_is_called_a_copy(tmp_path: Path) -> None:
    shutil.copy(model(tmp_path / "ref.gguf"), tmp_path / "copy.gguf")
    lines, report, result = scan(tmp_path, "ref.gguf", "copy.gguf")
    assert lines[0] == "Nothing to choose. F16 holds the same tensors as the reference."
    assert "Ship" not in report
    assert "**Nothing to choose." in report
    assert (result["verdict"]["level"], result["device_advice"], result["recipes"]) == (None, [], [])
    assert "Is 16 bit worth its bytes?" not in report
    (level,) = result["levels"]
    assert level["is_copy"]
    assert level["output"]["kld_mean"] == 0


def test_c6_a_quantized_reference_is_named_and_its_types_are_all_that_is_advised(tmp_path: Path) -> None:
    model(tmp_path / "ref.gguf", at(matrices=Q.Q8_0))
    model(tmp_path / "small.gguf", at(matrices=Q.Q4_0))
    lines, report, result = scan(tmp_path, "ref.gguf", "small.gguf")
    assert "is Q8_0 and F16" in lines[0] or "is Q8_0 at" in lines[0]
    assert lines[1].endswith(", relative to Q8_0.")
    (level,) = result["levels"]
    for unit in level["sensitivity"]["units"]:
        assert unit["bytes_at_16bit"] * 18 == unit["bytes_at_level"] * 34  # Q8_0 against Q4_0
    assert {row["type"] for row in level["sensitivity"]["keep_16bit"]} == {"Q8_0"}
    assert "## What must stay as in the reference" in report
    assert "MiB in the reference" in report
    refused = qres("scan", "ref.gguf", "small.gguf", "--recipe", *OPTIONS, cwd=tmp_path)
    assert refused.returncode == 4
    assert "so that no recipe can be built from it" in refused.stderr
    late = qres("recipe", "out/result.json", "--budget", "same-as:Q4_0", cwd=tmp_path)
    assert late.returncode == 4
    assert "llama.cpp quantizes no weights a second time" in late.stderr


def editor() -> ModuleType:
    spec = importlib.util.spec_from_file_location("edit", archs.need("cases/edit.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model whose experts were released in MXFP4, scanned with recipes."""
    folder = tmp_path_factory.mktemp("released")
    edit = editor()
    metadata, tensors = edit.load(archs.make("gpt-oss-moe", folder))
    held = [one for one in tensors if not one[0].endswith((".scale", ".input_scale"))]
    types = [Q.MXFP4 if "_exps.weight" in t[0] else Q.BF16 if edit.is_matrix(t) else None for t in held]
    native = [one if kind is None else edit.to(one, kind) for one, kind in zip(held, types, strict=True)]
    edit.save(folder / "native.gguf", {**metadata, "general.file_type": edit.u32(38)}, native)
    (folder / "ids.txt").write_text(" ".join(map(str, np.random.default_rng(7).integers(5, 120, 700))))
    tokens = ("--tokens", "ids.txt", "--levels", "Q4_K_M,Q8_0", "--recipe")
    lines, _, _ = scan(folder, "native.gguf", *tokens)
    (folder / "answer.txt").write_text("\n".join(lines))
    return folder


def test_c7_levels_and_recipes_keep_what_was_released_in_4_bit(released: Path) -> None:
    result = json.loads((released / "out" / "result.json").read_text())
    experts = [i for i, tensor in enumerate(result["tensors"]) if "_exps.weight" in tensor["name"]]
    assert len(experts) == 6
    assert [level["name"] for level in result["levels"]] == ["Q4_K_M", "Q8_0"]
    for row in (*result["levels"], *result["ladder"]):
        types = row["file"]["tensor_types"] if "file" in row else row["types"]
        assert {types[i] for i in experts} == {"MXFP4"}
        assert "BF16" not in types
    assert result["recipes"]
    for recipe in result["recipes"]:
        kept = {tensor["name"]: tensor for tensor in recipe["tensors"]}
        assert {kept[result["tensors"][i]["name"]]["type"] for i in experts} == {"MXFP4"}
        assert recipe["built"]["tensor_bytes"] == recipe["bytes"] == sum(one["bytes"] for one in kept.values())
    predicted = {row["tensor"]: row["types"] for row in result["prediction"]["tensors"]}
    assert not any(predicted.get(result["tensors"][i]["name"]) for i in experts)
    assert predicted["token_embd.weight"]


def test_c7_nothing_is_said_of_damage_in_the_original(released: Path) -> None:
    result = json.loads((released / "out" / "result.json").read_text())
    said = (released / "answer.txt").read_text() + (released / "out" / "report.md").read_text()
    assert result["reference"]["released_in"] == "MXFP4"
    assert not any(words in said for words in ("already damaged", "already quantized", "relative to"))
    assert not any("native.gguf" in warning for warning in result["warnings"])
    for level in result["levels"]:
        kept = [name for row in level["sensitivity"]["keep_16bit"] for name in row["tensors"]]
        assert kept
        assert not any("_exps" in name for name in kept)
        moe = [unit for unit in level["sensitivity"]["units"] if unit["unit"].endswith(".moe")]
        assert all(unit["bytes_at_16bit"] == unit["bytes_at_level"] for unit in moe)
    assert "but for what was released in MXFP4, which levels keep as it is" in said


def test_c20_one_quantized_tensor_is_the_advice_with_its_bytes(tmp_path: Path) -> None:
    model(tmp_path / "ref.gguf")
    model(tmp_path / "odd.gguf", damaged(low))
    lines, report, result = scan(tmp_path, "ref.gguf", "odd.gguf")
    added = tiny.N_EMBD * tiny.N_FF * 2 - tiny.N_EMBD * tiny.N_FF // 32 * 18
    (row,) = result["levels"][0]["sensitivity"]["keep_16bit"]
    assert (row["unit"], row["tensors"], row["bytes_added"], row["worth_it"]) == ("2.ffn", [DAMAGED], added, True)
    assert lines[1].startswith(f"Keep at 16 bit in F16: {DAMAGED} (+{added / 2**20:.1f} MiB")
    assert "measure a larger level" not in report
    assert result["recoveries"] == []  # 16 bit is worth its bytes here: nothing is said to the contrary


@pytest.mark.parametrize(
    ("how", "name", "type"), [(noisy, DAMAGED, "F16"), (stretched, "blk.1.ffn_norm.weight", "F32")]
)
def test_c20_damage_at_the_same_type_is_to_be_replaced(
    tmp_path: Path, how: Callable[[tiny.Floats], tuple[Any, Q | None]], name: str, type: str
) -> None:
    model(tmp_path / "ref.gguf")
    model(tmp_path / "odd.gguf", damaged(how, name))
    lines, report, result = scan(tmp_path, "ref.gguf", "odd.gguf")
    assert lines[0].startswith("Nothing to ship: F16 is not smaller than the reference")
    assert lines[1].startswith(f"Replace {name} by the reference's: it is at {type} in both, but not the same")
    (row,) = result["levels"][0]["sensitivity"]["keep_16bit"]
    assert (row["tensors"], row["bytes_added"], row["type"], row["worth_it"]) == ([name], 0, type, True)
    assert row["gap_share"] > 0.5
    assert "no unit's damage stands out" not in report
