"""Publishers' mixes, by their names: C22. Levels of llama.cpp are none, however they are spelled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from qres import levels, mixes
from qres.errors import InputError, UsageError
from qres.gguf import fallbacks, inspection, model_file
from qres.pipeline import assemble, candidates, inputs
from qres.recipes import budget
from tests import tiny
from tests.gguf.building import LLAMA, inventory
from tests.listening import Heard


@pytest.mark.parametrize(
    ("name", "mix"),
    [
        ("Qwen3-8B-UD-Q8_K_XL.gguf", "UD-Q8_K_XL"),
        ("T-UD-Q4_K_XL-00001-of-00003.gguf", "UD-Q4_K_XL"),
        ("T.ud-q4_k_m.gguf", "ud-q4_k_m"),
        ("T-UD-TQ1_0.gguf", "UD-TQ1_0"),
        ("T-UD-IQ2_XXS.gguf", "UD-IQ2_XXS"),
        ("T-Q8_K_XL.gguf", "Q8_K_XL"),
        ("T-Q2_K_XXL.gguf", "Q2_K_XXL"),
        ("T-Q6_K_L.gguf", "Q6_K_L"),
        ("T_Q4_K_L.gguf", "Q4_K_L"),
        ("T-Q3_K_XL.gguf", "Q3_K_XL"),
        ("T-Q4_K_P.gguf", "Q4_K_P"),
        ("T-Q4_K_M_P.gguf", "Q4_K_M_P"),
        ("T-IQ2_M-UD.gguf", "IQ2_M-UD"),
        ("T-Q4_K_M-dynamic.gguf", "Q4_K_M-dynamic"),
        ("T-Dynamic-Q4_K_M.gguf", "Dynamic-Q4_K_M"),
        ("T-MXFP4_MOE-UD.gguf", "MXFP4_MOE-UD"),
        ("T-Q4_K_M.gguf", ""),
        ("T-Q3_K_L.gguf", ""),
        ("T-i1-Q4_K_M.gguf", ""),
        ("UD-T-Q8_0.gguf", ""),
        ("Claude-Q8_0.gguf", ""),
        ("XL-T-F16.gguf", ""),
        ("T-XL-Q4_K_M.gguf", ""),
    ],
)
def test_mix_in_a_name(name: str, mix: str) -> None:
    assert mixes.mix_in(name) == mix


def test_no_level_and_no_type_is_a_mix() -> None:
    for name in (*levels.LEVELS_BY_NAME, *levels.TYPE_TRAITS):
        assert not mixes.mix_in(f"T-{name}.gguf"), name
        assert mixes.refusal(name) is None, name


@pytest.mark.parametrize("spelled", ["UD-Q4_K_XL", "ud_q4_k_xl", "Q6_K_L", "Q4_K_P", "IQ2_M-UD", "Q4_K_M-dynamic"])
def test_c22_words_for_a_level(spelled: str) -> None:
    for parse, name in ((levels.parse, spelled), (budget.parse, f"same-as:{spelled}")):
        with pytest.raises(UsageError) as caught:
            parse(name)
        assert caught.value.message.startswith(f"{spelled} is a publisher's mix")
        assert "did you mean" not in caught.value.message
        assert "qres scan MODEL FILE" in caught.value.hint


def _mostly_q8(name: str, values: tiny.Floats) -> tuple[tiny.Floats, gguf.GGMLQuantizationType | None]:
    if values.ndim == 1:
        return values, None
    kind = gguf.GGMLQuantizationType.F16 if "embd" in name else gguf.GGMLQuantizationType.Q8_0
    return gguf.quantize(values, kind), kind


@pytest.mark.parametrize("claim", [gguf.LlamaFileType.MOSTLY_Q8_0, gguf.LlamaFileType.MOSTLY_Q4_K_M])
def test_c22_file(tmp_path: Path, claim: gguf.LlamaFileType) -> None:
    path = tiny.write_llama(tmp_path / "T-UD-Q8_K_XL.gguf", n_layer=1, change=_mostly_q8, file_type=claim)
    found = inspection.inspect(model_file.read(path))
    assert found.disagreements == ()
    assert "by its name UD-Q8_K_XL, a publisher's mix" in found.verdict.reason
    assert "qres scan MODEL FILE" in found.verdict.instead
    assert found.gap is not None
    assert (found.gap.nominal_bpw, found.gap.base) == (None, "Q8_0")
    assert assemble.level_file(model_file.read(path), model_file.read(path)).nominal_bpw is None
    assert [one.name for one in candidates.from_files([model_file.read(path)])] == ["UD-Q8_K_XL"]
    plain = model_file.read(path.rename(tmp_path / "T-Q4_K_M.gguf"))
    assert inspection.inspect(plain).disagreements  # a level's name still has to hold what it says


def test_c22_no_fallbacks_are_told_of_a_mix(tmp_path: Path) -> None:
    found = inventory(tmp_path, LLAMA | {"general.file_type": 15}, [("blk.0.ffn_down.weight", (288, 256), 6, 0)])
    assert [one.tensor for one in fallbacks.fallbacks(found)] == ["blk.0.ffn_down.weight"]
    assert fallbacks.fallbacks(replace(found, path=tmp_path / "T-UD-Q4_K_XL.gguf")) == ()


def test_c22_a_mix_as_the_reference_is_called_by_its_name(tmp_path: Path) -> None:
    path = tiny.write_llama(
        tmp_path / "T-UD-Q8_K_XL.gguf", n_layer=1, change=_mostly_q8, file_type=gguf.LlamaFileType.MOSTLY_Q8_0
    )
    (remark,) = inputs.read_inputs(path, (), Heard()).remarks
    assert "is UD-Q8_K_XL at" in remark
    with pytest.raises(InputError, match="is UD-Q8_K_XL already"):
        candidates.require_original(model_file.read(path), recipe=False)
