"""What other tokenizers and layouts of two files mean, in words; copies in another layout."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from qres.errors import InputError
from qres.gguf import model_file, relaying
from qres.pipeline.inputs import Given
from qres.pipeline.tokens import tokenizer_remarks
from tests.gguf.building import ROWS, inventory
from tests.gguf.editing import Data, load, made, save

OTHER = Path("other.gguf")


def given(tmp_path: Path, *different: str) -> Given:
    return Given(inventory(tmp_path), (), (), (), {OTHER: different})


def test_the_same_tokens_are_a_remark(tmp_path: Path) -> None:
    (remark,) = tokenizer_remarks(given(tmp_path, "a is 1", "b is 2"), {OTHER: ""}, as_ids=False)
    assert remark == (
        "other.gguf: a is 1, and 1 more; the text becomes the same tokens, and the figures hold. Programs may use it "
        "otherwise."
    )


def test_ids_need_no_tokenizer(tmp_path: Path) -> None:
    (remark,) = tokenizer_remarks(given(tmp_path, "a is 1"), {}, as_ids=True)
    assert "other.gguf: a is 1; token ids were given, so that no tokenizer takes part" in remark


def test_other_tokens_are_refused(tmp_path: Path) -> None:
    said = "token 3 of notes.txt is 5 by the reference's tokenizer, 6 by the file's"
    with pytest.raises(
        InputError, match=r"other.gguf has another tokenizer than .*: a is 1; token 3 of notes.txt is 5"
    ):
        tokenizer_remarks(given(tmp_path, "a is 1"), {OTHER: said}, as_ids=False)


def test_no_other_tokenizer_no_remark(tmp_path: Path) -> None:
    assert tokenizer_remarks(Given(inventory(tmp_path), (), (), (), {}), {}, as_ids=False) == ()


# ---------------------------------------------------------------- copies in another layout


def tensors(kind: gguf.GGMLQuantizationType) -> tuple[list[Data], list[Data]]:
    """Query, key and value with biases, and two experts' gate and up: apart, and in one tensor each."""
    random = np.random.default_rng(0)
    f32, shapes = gguf.GGMLQuantizationType.F32, {"attn_q": 64, "attn_k": 32, "attn_v": 32}
    values = {name: random.normal(size=(rows, 64)).astype(np.float32) for name, rows in shapes.items()}
    experts = {name: random.normal(size=(2, 96, 64)).astype(np.float32) for name in ("ffn_gate_exps", "ffn_up_exps")}
    embedding = made("token_embd.weight", random.normal(size=(4, 64)).astype(np.float32), kind)
    apart = [
        embedding,
        *(made(f"blk.0.{name}.weight", one, kind) for name, one in values.items()),
        *(made(f"blk.0.{name}.bias", one[:, 0], f32) for name, one in values.items()),
        *(made(f"blk.0.{name}.weight", one, kind) for name, one in experts.items()),
    ]
    fused = [
        embedding,
        made("blk.0.attn_qkv.weight", np.concatenate(list(values.values())), kind),
        made("blk.0.attn_qkv.bias", np.concatenate([one[:, 0] for one in values.values()]), f32),
        made("blk.0.ffn_gate_up_exps.weight", np.concatenate(list(experts.values()), axis=1), kind),
    ]
    return apart, fused


@pytest.mark.parametrize("name", ["F16", "Q8_0", "Q4_0"])
def test_a_cut_copy_has_the_same_bytes(tmp_path: Path, name: str) -> None:
    apart, fused = tensors(gguf.GGMLQuantizationType[name])
    metadata = {
        "general.architecture": ([gguf.GGUFValueType.STRING], "llama"),
        "some.words": ([gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING], ["a", "", "é"]),
    }
    save(tmp_path / "apart.gguf", metadata, apart)
    save(tmp_path / "fused.gguf", metadata, fused)
    one, other = (model_file.read(tmp_path / f"{name}.gguf") for name in ("fused", "apart"))
    assert relaying.can_cut(one, other)
    assert not relaying.can_cut(other, one)
    assert not relaying.can_cut(other, other)
    relaying.write_cut(one, other, tmp_path / "new" / "copy.gguf")
    kept, found = load(tmp_path / "new" / "copy.gguf")
    assert kept == metadata
    assert sorted(found, key=lambda tensor: tensor.name) == sorted(apart, key=lambda tensor: tensor.name)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["copy.gguf"]


def test_a_copy_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    apart, fused = tensors(gguf.GGMLQuantizationType.F16)
    save(tmp_path / "apart.gguf", {}, apart)
    save(tmp_path / "fused.gguf", {}, fused)
    one, other = (model_file.read(tmp_path / f"{name}.gguf") for name in ("fused", "apart"))
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write"):
        relaying.write_cut(one, other, tmp_path / "file" / "copy.gguf")
    assert (tmp_path / "file").read_bytes() == b""


def test_rows_that_are_no_sum_are_left(tmp_path: Path) -> None:
    model = inventory(tmp_path, rows=ROWS)
    assert not relaying.can_cut(model, model)
