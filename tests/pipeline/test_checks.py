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


def test_given_file_of_another_fine_tune_is_remarked(model: Path, tmp_path: Path) -> None:
    """Same shapes, same tokenizer, other norms: quantizing does not touch these."""

    def tuned(name: str, values: tiny.Floats) -> tuple[npt.NDArray[np.generic], gguf.GGMLQuantizationType | None]:
        return tiny.keep(name, values * np.float32(1.01) if name == "blk.0.ffn_norm.weight" else values)

    other = tiny.write_llama(tmp_path / "other.gguf", n_layer=1, change=tuned)
    (remark,) = inputs.read_inputs(model, (other,), Logged()).remarks
    assert "other.gguf was not made from tiny.gguf: blk.0.ffn_norm.weight differs" in remark
    same = write_q8(tmp_path / "q8.gguf")
    assert inputs.read_inputs(model, (same,), Logged()).remarks == ()


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
