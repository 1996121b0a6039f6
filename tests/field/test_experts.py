"""Experts that no token reaches (C17): counted, named with their bytes, and not taken for harmless."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from qres.recipes import budget, plan
from qres.recipes.choices import Choices
from qres.recipes.wishes import Wishes
from qres.records import as_json
from tests import archs
from tests.field.test_pairs import IDS, scan
from tests.gguf.editing import Data, at, load, made, save, u32

pytestmark = pytest.mark.model

F16, F32, Q8_0 = (gguf.GGMLQuantizationType[name] for name in ("F16", "F32", "Q8_0"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five experts in each layer, the fifth never among the two that are chosen; `dead`: it is all zeros."""
    folder = tmp_path_factory.mktemp("experts")
    metadata, tensors = load(archs.make("qwen3moe-moe", folder))
    random, experts = np.random.default_rng(3), []
    for tensor in at([t for t in tensors if not t.name.endswith((".scale", ".input_scale"))], F16):
        if "_exps" in tensor.name:
            shape = (5, tensor.shape[1], tensor.shape[0])
            experts.append(made(tensor.name, random.normal(0, 0.1, shape).astype(np.float32), F16))
        elif "ffn_gate_inp" in tensor.name:
            one, other = random.normal(0, 0.1, (2, tensor.shape[0]))
            rows = np.stack([one, -one, other, -other, 0 * one]).astype(np.float32)
            experts.append(made(tensor.name, rows, F32))
        else:
            experts.append(tensor)
    keys = {**metadata, "qwen3moe.expert_count": u32(5), "qwen3moe.expert_used_count": u32(2)}
    save(folder / "five.gguf", {**keys, "general.file_type": u32(1)}, experts)
    q8 = at(experts, Q8_0)
    save(folder / "five-q8.gguf", {**keys, "general.file_type": u32(7)}, q8)
    save(folder / "dead-q8.gguf", {**keys, "general.file_type": u32(7)}, [_without_the_last(t) for t in q8])
    (folder / "ids.txt").write_text(IDS)
    return folder


def _without_the_last(tensor: Data) -> Data:
    if "_exps" not in tensor.name:
        return tensor
    size = len(tensor.raw) // 5
    return replace(tensor, raw=tensor.raw[: 4 * size] + bytes(size))


def test_c17_experts_that_no_token_reached(folder: Path) -> None:
    done, found = scan(folder, "five.gguf", "five-q8.gguf", "dead-q8.gguf", "--tokens", "ids.txt")
    assert done.returncode == 0, done.stderr
    assert [(row["layer"], row["experts"], row["unreached"]) for row in found["experts"]] == [(0, 5, 1), (1, 5, 1)]
    experts = sum(t.n_bytes for t in gguf.GGUFReader(folder / "five.gguf").tensors if "_exps" in t.name)
    assert sum(row["unreached_bytes"] for row in found["experts"]) == experts // 5
    (said,) = (text for text in found["warnings"] if "no token of the text reached" in text)
    assert said.startswith("In 2 of 2 MoE layers no token of the text reached 2 experts (")
    first, second = (level["output"]["kld_mean"] for level in found["levels"])
    assert first == second  # nothing of the fifth is in any figure


def test_c17_recipes_take_no_type_from_silence(folder: Path) -> None:
    done, _ = scan(folder, "five.gguf", "five-q8.gguf", "--tokens", "ids.txt")
    assert done.returncode == 0, done.stderr
    result = as_json.load(folder / "out" / "result.json")
    assert result.prediction.used, result.prediction.reason
    marked = [one for one in result.prediction.tensors if one.silent_experts]
    assert {one.tensor.partition(".ffn_")[2] for one in marked} == {f"{n}_exps.weight" for n in ("gate", "up", "down")}
    for one in marked:
        reached = 5 - one.silent_experts  # also one that only tokens before the scored ones were sent to is silent
        assert 1 <= one.silent_experts <= 3
        for damage in one.types:
            assert damage.predicted_kld is not None
            # A median of n is at most 2 / n of their sum.
            assert 0 < damage.silent_kld <= one.silent_experts * damage.predicted_kld * 2 / reached
    choices = Choices(result)
    rows = [row for row in choices.rows if row.silent]
    assert len(rows) == 6
    for row in rows:
        assert row.costs == pytest.approx([a + b for a, b in zip(row.losses, row.silent, strict=True)])
    recipe = plan.make(choices, budget.parse("6bpw"), Wishes())
    assert any("6 tensors with experts that no token reached" in note for note in recipe.notes)
    types = {one.name: one.type for one in recipe.tensors}
    raw = choices.loss(types)
    assert recipe.predicted is not None
    assert recipe.predicted.raw_kld == pytest.approx(raw)  # silence is in no prediction
