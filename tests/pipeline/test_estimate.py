"""What a scan is said to need: the words at every border, and the sizes against what llama.cpp writes."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from qres import levels
from qres.gguf import model_file
from qres.gguf.inventory import Inventory
from qres.pipeline import estimate
from qres.pipeline.estimate import GIB, Estimate
from qres.quantize.ladder import planned_bytes
from tests import tiny

MIB = 2**20


def need(files: int, memory: int, available: int, disk: int = 0, free: int = 0) -> Estimate:
    return Estimate(files=files, memory=memory, memory_available=available, disk=disk, disk_free=free)


# ---------------------------------------------------------------- the words


def test_estimate_says_what_is_needed() -> None:
    text = str(need(500 * MIB, 2 * GIB, 10 * GIB, 300 * MIB, 61 * GIB))
    assert text == (
        "Needs about 2.0 GiB of memory beside 500 MiB of model files (10.0 GiB available) and 300 MiB of disk "
        "(61.0 GiB free)"
    )


def test_estimate_of_given_files_says_nothing_about_the_disk() -> None:
    assert str(need(5 * GIB, 300 * MIB, GIB, 0, 61 * GIB)) == (
        "Needs about 300 MiB of memory beside 5.0 GiB of model files (1.0 GiB available)"
    )


@pytest.mark.parametrize(
    ("size", "text"), [(GIB - 1, "1024 MiB"), (GIB, "1.0 GiB"), (0, "0 MiB"), (1536 * MIB, "1.5 GiB")]
)
def test_estimate_sizes_at_the_border_of_a_gib(size: int, text: str) -> None:
    assert f"about {text} of memory" in str(need(0, size, 0))


@pytest.mark.parametrize(
    ("files", "memory", "words"),
    [
        (0, 1000, ""),  # exactly what there is
        (400, 600, ""),
        (401, 600, "again and again"),
        (10**9, 1000, "again and again"),
        (0, 1001, "smaller --n-ctx or fewer levels"),
        (10**9, 1001, "smaller --n-ctx or fewer levels"),  # the graver one only
    ],
)
def test_warning_at_its_borders(files: int, memory: int, words: str) -> None:
    warning = need(files, memory, 1000).warning
    assert words in warning
    assert bool(warning) == bool(words)


def test_warning_of_a_disk_that_is_too_small() -> None:
    assert need(0, 0, 0, disk=GIB, free=GIB).warning == ""
    warning = need(0, 1, 0, disk=3 * GIB, free=2 * GIB).warning  # the graver one only
    assert warning == "The levels need about 3.0 GiB of disk, 2.0 GiB are free: use --cache"


def test_warnings_name_the_figures() -> None:
    warning = need(GIB, 9 * GIB, 8 * GIB).warning
    assert "about 9.0 GiB of memory beside the models, 8.0 GiB are available" in warning
    warning = need(7 * GIB, 2 * GIB, 8 * GIB).warning
    assert "models take 7.0 GiB and the scan about 2.0 GiB more, 8.0 GiB of memory are available" in warning


# ---------------------------------------------------------------- from files to an estimate

Q4, Q8 = levels.LEVELS_BY_NAME["Q4_K_M"], levels.LEVELS_BY_NAME["Q8_0"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=7 * GIB))
    return model_file.read(tiny.write_llama(tmp_path / "tiny.gguf"))


def total(model: Inventory, *wanted: levels.LevelSpec, n_ctx: int = 512, context: tuple[int, int] | None = None) -> int:
    return estimate.estimate(model, (), wanted, n_ctx, 4, context, Path("cache")).memory


def test_estimate_of_levels_to_make(model: Inventory, tmp_path: Path) -> None:
    found = estimate.estimate(model, (), (Q4, Q8), 512, 4, (MIB, MIB), tmp_path / "not" / "there" / "yet")
    made = [estimate.level_bytes(model, level) for level in (Q4, Q8)]
    assert found.disk == sum(made)
    assert found.files == model.file_bytes + sum(made)
    assert found.memory_available == 7 * GIB
    assert found.disk_free == pytest.approx(psutil.disk_usage(str(tmp_path)).free, abs=GIB)
    assert found.warning == ""


def test_estimate_looks_at_the_disk_that_the_cache_will_be_on(
    model: Inventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def disk_usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=1)

    monkeypatch.setattr("shutil.disk_usage", disk_usage)
    for folder in (tmp_path / "not" / "there" / "yet", tmp_path):
        assert estimate.estimate(model, (), (Q4,), 512, 4, None, folder).disk_free == 1
    assert asked == [tmp_path, tmp_path]


def test_estimate_of_given_files_takes_no_disk(model: Inventory) -> None:
    found = estimate.estimate(model, (model, model), (), 512, 4, None, Path("cache"))
    assert found.disk == 0
    assert found.files == model.file_bytes + 2 * model.tensor_bytes


def test_estimate_grows_with_what_is_held(model: Inventory) -> None:
    """One chunk's logits per model; of few layers the prediction takes more than the streams that are measured."""
    logits = 4 * 512 * model.n_vocab
    point = 4 * 512 * model.n_embd
    repacked = estimate.level_bytes(model, Q8)
    assert total(model, Q4, Q8) - total(model, Q4) == logits + repacked
    assert total(model, Q4, n_ctx=1024) - total(model, Q4) == 6 * logits + (2 * 4 + 100) * point
    assert total(model, Q4, context=(3 * MIB, 5 * MIB)) - total(model, Q4) == 3 * 8 * MIB
    wide = dataclasses.replace(model, n_vocab=model.n_vocab + 1000)
    assert total(wide, Q4) - total(model, Q4) == 6 * 4 * 512 * 1000


def test_estimate_of_many_layers_grows_with_the_streams(model: Inventory) -> None:
    """The stream of the reference and a level, and one error per branch and level."""
    deep = dataclasses.replace(model, n_layer=1000)
    logits, point = 4 * 512 * model.n_vocab, 4 * 512 * model.n_embd
    repacked = estimate.level_bytes(model, Q8)
    assert total(deep, Q4, Q8) - total(deep, Q4) == logits + 2001 * point + repacked
    deeper = dataclasses.replace(model, n_layer=1001)
    assert total(deeper, Q4) - total(deep, Q4) == (2 * 4 + 2) * point  # two branches, twice: points and branches
    processes = 415 * MIB
    streams = (2 * 4001 + 2001) * point
    assert total(deep, Q4) == processes + 4 * logits + streams + estimate.level_bytes(model, Q4)


def test_estimate_of_a_model_whose_header_says_nothing(model: Inventory) -> None:
    bare = dataclasses.replace(model, n_layer=0, n_embd=0, n_vocab=0)
    assert 0 < total(bare, Q4) < total(model, Q4)


# ---------------------------------------------------------------- sizes against llama.cpp's own


def write_wide(path: Path, monkeypatch: pytest.MonkeyPatch, n_embd: int, n_ff: int, n_layer: int) -> Inventory:
    """A model where the blocks, not the vocabulary, are most of the file, as in real ones."""
    monkeypatch.setattr(tiny, "N_EMBD", n_embd)
    monkeypatch.setattr(tiny, "N_FF", n_ff)
    return model_file.read(tiny.write_llama(path, n_layer=n_layer))


def llama_bytes(model: Inventory, level: levels.LevelSpec) -> int:
    """What the quantizer's dry run says."""
    from qres.native.quantizer import planned_types

    return planned_bytes(model, planned_types(model.path, level.ftype, 1))


MAKEABLE = [level for level in levels.LEVELS if not level.needs_imatrix]


@pytest.mark.model
@pytest.mark.parametrize("level", MAKEABLE, ids=lambda level: level.name)
def test_level_bytes_are_llama_cpps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: levels.LevelSpec) -> None:
    model = write_wide(tmp_path / "wide.gguf", monkeypatch, 256, 768, 8)
    assert estimate.level_bytes(model, level) == pytest.approx(llama_bytes(model, level), rel=0.12)


@pytest.mark.model
@pytest.mark.parametrize("name", ["Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "IQ4_XS", "Q4_0", "Q2_K"])
def test_level_bytes_with_fallbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Rows of 288 hold no whole block of 256: everything becomes another type."""
    model = write_wide(tmp_path / "odd.gguf", monkeypatch, 288, 800, 4)
    level = levels.LEVELS_BY_NAME[name]
    assert estimate.level_bytes(model, level) == pytest.approx(llama_bytes(model, level), rel=0.1)


@pytest.mark.model
@pytest.mark.parametrize("name", ["Q4_K_M", "Q2_K", "Q8_0", "F16"])
def test_level_bytes_of_a_large_vocabulary(tmp_path: Path, name: str) -> None:
    words = [*tiny.byte_tokens(), *(f"word{i}" for i in range(8000))]
    model = model_file.read(tiny.write_llama(tmp_path / "words.gguf", tokens=words))
    level = levels.LEVELS_BY_NAME[name]
    assert estimate.level_bytes(model, level) == pytest.approx(llama_bytes(model, level), rel=0.1)


def test_level_bytes_leave_vectors_alone(model: Inventory) -> None:
    vectors = sum(tensor.n_bytes or 0 for tensor in model.tensors if tensor.n_dims < 2)
    assert vectors > 0
    exact = sum(model_file.bytes_at(tensor, "Q8_0") for tensor in model.tensors if tensor.n_dims >= 2)
    assert estimate.level_bytes(model, Q8) == exact + vectors


def sizes(model: Inventory, **types: str) -> int:
    """Bytes of the tensors of these names, without endings, at these types."""
    by_name = {tensor.name.removesuffix(".weight"): tensor for tensor in model.tensors}
    return sum(model_file.bytes_at(by_name[name], kind) for name, kind in types.items())


def test_level_bytes_of_a_head_are_those_of_6_bits_or_more(model: Inventory) -> None:
    """Of the embedding where the head is tied to it."""
    q8, q4 = (estimate.level_bytes(model, level) for level in (Q8, levels.LEVELS_BY_NAME["Q4_0"]))
    head, rest = {"output"}, {t.name.removesuffix(".weight") for t in model.tensors if t.n_dims > 1}
    assert q8 - q4 == sizes(model, **dict.fromkeys(rest, "Q8_0")) - (
        sizes(model, **dict.fromkeys(head, "Q6_K")) + sizes(model, **dict.fromkeys(rest - head, "Q4_0"))
    )
    tied = dataclasses.replace(model, tensors=tuple(t for t in model.tensors if t.name != "output.weight"))
    assert tied.tied_head
    assert estimate.level_bytes(model, Q4) - estimate.level_bytes(tied, Q4) == (
        sizes(model, output="Q6_K", token_embd="Q4_K") - sizes(model, token_embd="Q6_K")
    )


def test_level_bytes_of_levels_that_mix(model: Inventory) -> None:
    """Q3_K_L is about Q4_K; MXFP4_MOE is Q8_0 but for the experts."""
    mixed, moe = (levels.LEVELS_BY_NAME[name] for name in ("Q3_K_L", "MXFP4_MOE"))
    assert estimate.level_bytes(model, mixed) == estimate.level_bytes(model, levels.LEVELS_BY_NAME["Q4_K_S"])
    assert estimate.level_bytes(model, moe) == estimate.level_bytes(model, Q8)
    up, down = "blk.0.ffn_up", "blk.0.ffn_down"
    experts = tuple(
        dataclasses.replace(t, name=t.name.replace(".weight", "_exps.weight"))
        if t.name.removesuffix(".weight") in (up, down)
        else t
        for t in model.tensors
    )
    saved = sizes(model, **{up: "Q8_0", down: "Q8_0"}) - sizes(model, **{up: "MXFP4", down: "MXFP4"})
    of_experts = estimate.level_bytes(dataclasses.replace(model, tensors=experts), moe)
    assert estimate.level_bytes(model, Q8) - of_experts == saved


# ---------------------------------------------------------------- memory against a scan that is watched


def watched(folder: Path, *arguments: object) -> tuple[str, int]:
    """Run a command; what it says on standard error, and the most that it and its children had in memory at once."""
    with (folder / "errors.txt").open("w") as errors:
        command = [sys.executable, "-m", "qres", *map(str, arguments)]
        child = psutil.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=errors)
        peak = 0
        while child.poll() is None:
            with suppress(psutil.Error):  # one that ends between two calls
                family = [child, *child.children(recursive=True)]
                peak = max(peak, sum(process.memory_info().rss for process in family))
            time.sleep(0.1)
    said = (folder / "errors.txt").read_text()
    assert child.returncode == 0, said
    return said, peak


def bytes_of(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"MiB": MIB, "GiB": GIB}[unit]


@pytest.mark.model
@pytest.mark.parametrize(("n_embd", "n_layer", "n_vocab"), [(256, 2, 30_000), (512, 12, 258)], ids=["words", "stream"])
def test_estimate_is_within_a_factor_of_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_embd: int, n_layer: int, n_vocab: int
) -> None:
    """Resident memory, mapped files included. The peak is often that of the first minute, hence one short chunk."""
    monkeypatch.setattr(tiny, "N_EMBD", n_embd)
    monkeypatch.setattr(tiny, "N_FF", 64)  # less to compute; the stream is as wide and the branches as many
    words = [*tiny.byte_tokens(), *(f"word{i}" for i in range(n_vocab - 258))]
    tiny.write_llama(tmp_path / "model.gguf", n_layer=n_layer, tokens=words)
    options = ("--levels", "Q8_0", "--chunks", 1, "--rank-chunks", 1, "--threads", 1, "--cache", tmp_path / "cache")
    said, peak = watched(tmp_path, "scan", "model.gguf", *options)
    (sizes,) = re.findall(r"Needs about (\d\S* .iB) of memory beside (\d\S* .iB) of model files", said)
    told = sum(map(bytes_of, sizes))
    assert told / 2 < peak < told * 2, f"{told / MIB:.0f} MiB were told, {peak / MIB:.0f} MiB measured"
