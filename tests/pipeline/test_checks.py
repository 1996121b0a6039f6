"""What a scan decides before it loads anything; no model is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from qres.errors import InputError, UnsupportedError, UsageError
from qres.events import Logged
from qres.gguf import model_file
from qres.gguf.difference import Changes
from qres.pipeline import candidates, checks, inputs
from qres.pipeline.options import ScanOptions
from tests import tiny
from tests.listening import Heard


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.write_llama(tmp_path / "tiny.gguf", n_layer=1)


def as_q8(_name: str, values: tiny.Floats) -> tuple[npt.NDArray[np.generic], gguf.GGMLQuantizationType | None]:
    kind = gguf.GGMLQuantizationType.Q8_0
    return (gguf.quantize(values, kind), kind) if values.ndim > 1 else (values, None)


def write_q8(path: Path, **settings: Any) -> Path:  # noqa: ANN401 - as write_llama
    """The tiny model with its matrices at Q8_0."""
    return tiny.write_llama(path, n_layer=1, change=as_q8, file_type=gguf.LlamaFileType.MOSTLY_Q8_0, **settings)


# ---------------------------------------------------------------- which files


def test_levels_of_two_makers_get_names_of_their_own(model: Path, tmp_path: Path) -> None:
    def names(*files: Path) -> list[str]:
        return sorted(found.name for found in candidates.from_files([model_file.read(path) for path in files]))

    files = []
    for maker in ("one", "two"):
        (tmp_path / maker).mkdir()
        files.append(Path(shutil.copy(model, tmp_path / maker / "m-F16.gguf")))
    assert names(files[0]) == ["F16"]
    assert names(*files) == ["F16 (one/m-F16.gguf)", "F16 (two/m-F16.gguf)"]
    assert names(files[0], files[0]) == ["F16 (file 1)", "F16 (file 2)"]
    other = Path(shutil.copy(model, tmp_path / "one" / "n-F16.gguf"))
    assert names(files[0], other) == ["F16 (m-F16.gguf)", "F16 (n-F16.gguf)"]


def test_given_say_when_one_is_the_reference(model: Path) -> None:
    heard = Heard()
    given = inputs.read_inputs(model, (model,), heard)
    assert heard.texts("note") == ["tiny.gguf is the reference itself: every difference will be 0"]
    assert len(given.files) == 1


def test_given_order_does_not_matter(model: Path, tmp_path: Path) -> None:
    heard = Heard()
    q8 = write_q8(tmp_path / "q8.gguf")
    given = inputs.read_inputs(q8, (model,), heard)
    assert (given.reference.path, [one.path for one in given.files]) == (model, [q8])
    assert heard.texts("note") == ["Taken as the reference: tiny.gguf, the 16-bit one"]
    assert given == inputs.read_inputs(model, (q8,), heard)
    assert len(heard.calls) == 1  # nothing to say about the usual order
    copy = Path(shutil.copy(model, tmp_path / "copy.gguf"))
    with pytest.raises(UsageError, match=r"q8.gguf is not 16 bit, tiny.gguf and copy.gguf are"):
        inputs.read_inputs(q8, (model, copy), heard)


def test_given_files_count_once(model: Path, tmp_path: Path) -> None:
    heard = Heard()
    q8 = write_q8(tmp_path / "q8.gguf")
    (tmp_path / "link.gguf").symlink_to(q8)
    (tmp_path / "hard.gguf").hardlink_to(q8)
    given = inputs.read_inputs(model, (q8, tmp_path / "link.gguf", tmp_path / "hard.gguf", q8), heard)
    assert [one.path for one in given.files] == [q8]
    assert heard.texts("note") == [
        f"{name} was given twice: it is measured once" for name in ("link.gguf", "hard.gguf", "q8.gguf")
    ]


def with_change(path: Path, *names: str, kind: gguf.GGMLQuantizationType | None = None, n_layer: int = 1) -> Path:
    """The tiny model with some tensors a hundredth larger, or as they are at another type."""

    def change(name: str, values: tiny.Floats) -> tuple[npt.NDArray[np.generic], gguf.GGMLQuantizationType | None]:
        if name in names and kind is not None:
            return gguf.quantize(values, kind), kind
        return tiny.keep(name, values * np.float32(1.01) if name in names else values)

    return tiny.write_llama(path, n_layer=n_layer, change=change)


def remarks(model: Path, *files: Path) -> tuple[str, ...]:
    return inputs.read_inputs(model, files, Logged()).remarks


NORMS = ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight")
MATRICES = tuple(f"blk.0.{part}.weight" for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"))


def test_given_file_of_another_fine_tune_is_remarked(model: Path, tmp_path: Path) -> None:
    """Same shapes, same tokenizer, other weights throughout."""
    (remark,) = remarks(model, with_change(tmp_path / "other.gguf", *NORMS, *MATRICES))
    assert "other.gguf was not made from tiny.gguf: blk.0.attn_norm.weight, " in remark
    assert "and 6 more differ, although they are of the same type in both. The figures are the distance" in remark
    assert remarks(model, write_q8(tmp_path / "q8.gguf")) == ()


@pytest.mark.parametrize("name", [NORMS[1], MATRICES[-1]])
def test_c20_given_file_with_one_changed_tensor_is_remarked(model: Path, tmp_path: Path, name: str) -> None:
    given = inputs.read_inputs(model, (with_change(tmp_path / "other.gguf", name),), Logged())
    (remark,) = given.remarks
    assert f"other.gguf was not made from tiny.gguf: {name} differs, although it is of the same type in both." in remark
    assert remark.endswith("All else that quantizing copies is the same: it was changed or damaged in one of the two.")
    assert given.changes[0].tensors == (name,)


def test_c5_given_copy_of_the_reference_is_remarked(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(model, tmp_path / "copy.gguf"))
    assert remarks(model, copy) == ("copy.gguf holds the same tensors as the reference: every difference is 0.",)
    assert inputs.read_inputs(model, (copy, model), Logged()).changes == (
        Changes((), (), 12, is_copy=True),
        Changes(is_copy=True),
    )


def test_c20_given_reference_with_a_quantized_tensor_gives_way_to_a_whole_one(tmp_path: Path) -> None:
    """At 16 bit by its weights all the same, so that levels can be made of it where it is alone."""
    whole = [tiny.write_llama(tmp_path / name, n_layer=4) for name in ("a.gguf", "b.gguf")]
    mixed = with_change(tmp_path / "mixed.gguf", MATRICES[0], kind=gguf.GGMLQuantizationType.Q4_0, n_layer=4)
    heard = Heard()
    assert inputs.read_inputs(mixed, whole[:1], heard).reference.path == whole[0]
    assert heard.texts("note") == ["Taken as the reference: a.gguf, the 16-bit one"]
    assert inputs.read_inputs(mixed, whole, Logged()).reference.path == mixed  # which of the two is not known
    (remark,) = remarks(mixed)
    assert "mixed.gguf holds blk.0.attn_q.weight at Q4_0, not 16 bit: what that does is in no figure" in remark
    candidates.require_original(model_file.read(mixed), recipe=True)


def test_c6_given_reference_is_named_by_what_it_holds(tmp_path: Path) -> None:
    (remark,) = remarks(write_q8(tmp_path / "q8.gguf"))
    assert remark.startswith("The reference q8.gguf is Q8_0 at 8.5")
    half = with_change(tmp_path / "half.gguf", *MATRICES, kind=gguf.GGMLQuantizationType.Q8_0)
    (remark,) = (one for one in remarks(half) if "The reference" in one)  # the file says F16
    assert remark.startswith("The reference half.gguf is Q8_0 and F16 at ")
    with pytest.raises(UnsupportedError, match=r"half.gguf is Q8_0 and F16 already: .* no recipe can be built from it"):
        candidates.require_original(model_file.read(half), recipe=True)


def test_given_file_that_is_not_what_it_says_is_called_what_it_is(model: Path, tmp_path: Path) -> None:
    other = tiny.write_llama(tmp_path / "other.gguf", n_layer=1, change=as_q8)  # claims F16
    given = inputs.read_inputs(model, (other,), Logged())
    assert given.remarks == (
        "other.gguf: general.file_type says F16, but 100 % of the weights in the matrices of the blocks are Q8_0.",
    )
    assert [level.name for level in candidates.from_files(given.files)] == ["Q8_0"]


def test_given_quantized_reference_is_remarked(model: Path, tmp_path: Path) -> None:
    (remark,) = inputs.read_inputs(write_q8(tmp_path / "q8.gguf"), (), Logged()).remarks
    assert "not 16 bit" in remark


def test_levels_that_cannot_be_made(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="IQ1_S needs an importance matrix"):
        candidates.levels_to_make(("IQ1_S",))
    with pytest.raises(UsageError, match="names no level"):
        candidates.levels_to_make(())
    assert [level.name for level in candidates.levels_to_make(("q4_k", "Q4_K_M", "Q8_0"))] == ["Q4_K_M", "Q8_0"]
    candidates.require_original(model_file.read(model), recipe=True)
    with pytest.raises(InputError, match="no level can be made from it"):
        candidates.require_original(model_file.read(write_q8(tmp_path / "q8.gguf")), recipe=False)


# ---------------------------------------------------------------- context


@pytest.mark.parametrize(("n_ctx", "error"), [(511, UsageError), (30, UsageError), (1024, InputError)])
def test_context_that_cannot_be(model: Path, n_ctx: int, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"--n-ctx {n_ctx}"):
        checks.check_context(ScanOptions(model, n_ctx=n_ctx), model_file.read(model))


def test_context_of_a_model_trained_for_a_few_tokens(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "N_CTX", 16)
    short = model_file.read(tiny.write_llama(model.with_name("short.gguf"), n_layer=1))
    with pytest.raises(UnsupportedError, match="trained for 16 tokens"):
        checks.check_context(ScanOptions(model), short)
