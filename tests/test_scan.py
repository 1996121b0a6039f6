"""What a scan decides before it loads anything; no model is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from qres import gguf_file, scan
from qres.errors import InputError, UnsupportedError, UsageError
from qres.scan import ScanOptions
from tests import tiny


class Silent:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def stage(self, title: str, total: int | None) -> None:
        """Not kept."""

    def step(self, done: int, total: int, doing: str = "") -> None:
        """Not kept."""

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.write_llama(tmp_path / "tiny.gguf", n_layer=1)


def candidates(model: Path, *files: Path) -> list[str]:
    found, _ = scan._candidates(ScanOptions(model, files), gguf_file.read(model), Silent())
    return sorted(name for name, _ in found)


def test_candidates_of_two_makers_get_names_of_their_own(model: Path, tmp_path: Path) -> None:
    files = []
    for maker in ("one", "two"):
        (tmp_path / maker).mkdir()
        files.append(Path(shutil.copy(model, tmp_path / maker / "m-F16.gguf")))
    assert candidates(model, files[0]) == ["F16"]
    assert candidates(model, *files) == ["F16 (one/m-F16.gguf)", "F16 (two/m-F16.gguf)"]
    assert candidates(model, files[0], files[0]) == ["F16 (file 1)", "F16 (file 2)"]
    other = Path(shutil.copy(model, tmp_path / "one" / "n-F16.gguf"))
    assert candidates(model, files[0], other) == ["F16 (m-F16.gguf)", "F16 (n-F16.gguf)"]


def test_candidates_say_when_one_is_the_reference(model: Path) -> None:
    listener = Silent()
    scan._candidates(ScanOptions(model, (model,)), gguf_file.read(model), listener)
    assert listener.notes == ["F16 is the reference itself: every difference will be 0"]


def test_levels_that_need_an_importance_matrix_are_refused(model: Path) -> None:
    with pytest.raises(UsageError, match="IQ1_S needs an importance matrix"):
        scan._candidates(ScanOptions(model, levels=("IQ1_S",)), gguf_file.read(model), Silent())


@pytest.mark.parametrize(("n_ctx", "error"), [(511, UsageError), (30, UsageError), (1024, InputError)])
def test_context_that_cannot_be(model: Path, n_ctx: int, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"--n-ctx {n_ctx}"):
        scan._check_context(ScanOptions(model, n_ctx=n_ctx), gguf_file.read(model))


def test_context_of_a_model_trained_for_a_few_tokens(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "N_CTX", 16)
    short = gguf_file.read(tiny.write_llama(model.with_name("short.gguf"), n_layer=1))
    with pytest.raises(UnsupportedError, match="trained for 16 tokens"):
        scan._check_context(ScanOptions(model), short)
