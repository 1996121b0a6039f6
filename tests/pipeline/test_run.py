"""The command on tiny models, from the first argument to the files it leaves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from tests import archs, tiny
from tests.faults import Scan

pytestmark = pytest.mark.model

REPO = Path(__file__).parents[2]
IDS = " ".join(str((7 * i * i + 3 * i + 1) % 128) for i in range(400))


def qres(
    *arguments: object, cwd: Path, env: dict[str, str] | None = None, drawn: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, with a cache of its own; images of charts are drawn where they are looked at."""
    environment = {**os.environ, "QRES_CACHE": str(cwd / "cache"), **(env or {})}
    paths = [environment.get("PYTHONPATH"), str(REPO)]
    return subprocess.run(
        [sys.executable, "-m", "qres" if drawn else "tests.undrawn", *map(str, arguments)],
        cwd=cwd,
        env={**environment, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        capture_output=True,
        text=True,
        timeout=1200,  # many times what it takes
        check=False,
    )


def small(*arguments: object) -> tuple[object, ...]:
    """Options for a quick scan."""
    return (*arguments, "--n-ctx", 64, "--chunks", 2, "--rank-chunks", 2, "--threads", 1)


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one finished scan of a two-layer model."""
    folder = tmp_path_factory.mktemp("scan")
    tiny.write_llama(folder / "tiny.gguf", change=tiny.predictive)
    done = qres(*small("scan", "tiny.gguf", "--levels", "Q4_K_M,Q8_0"), cwd=folder, drawn=True)
    assert done.returncode == 0, done.stderr
    (folder / "stdout.txt").write_text(done.stdout)
    (folder / "stderr.txt").write_text(done.stderr)
    return folder


def load(folder: Path, name: str = "tiny") -> dict[str, Any]:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} in result.json")

    text = (folder / "reports" / name / "result.json").read_text()
    result: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return result


def test_scan_answers_in_three_lines(scanned: Path) -> None:
    lines = (scanned / "stdout.txt").read_text().splitlines()
    assert "Q" in lines[0]
    assert "KLD" in lines[0]
    assert "16 bit" in lines[1]
    assert lines[2].startswith("Report: reports/tiny/report.html")
    (line,) = (scanned / "stderr.txt").read_text().splitlines()  # no progress bar where there is no terminal
    assert re.fullmatch(
        r"Needs about \d+ MiB of memory beside \d+ MiB of model files \([\d.]+ [GM]iB available\) "
        r"and \d+ MiB of disk \([\d.]+ [GM]iB free\)",
        line,
    )


def test_scan_writes_every_report_and_nothing_else(scanned: Path) -> None:
    names = sorted(path.name for path in (scanned / "reports" / "tiny").iterdir())
    assert names == ["charts", "report.html", "report.md", "result.json"]
    assert not list(scanned.rglob("*.partial"))


def test_scan_names_in_result(scanned: Path) -> None:
    """The names that the issue promises to whoever reads the file."""
    result = load(scanned)
    level = result["levels"][0]
    assert {"path", "name", "architecture", "norm_placement", "n_layer", "n_embd", "n_vocab", "bytes", "bpw"} <= set(
        result["reference"]
    )
    assert {"kld_mean", "drift_median"} <= set(result["noise_floor"])
    assert {
        "kld_mean", "kld_se", "kld_median", "kld_p90", "kld_p95", "kld_p99", "kld_p999", "kld_max", "same_top",
        "same_top_se", "ppl", "ppl_reference", "ln_ppl_ratio", "ln_ppl_ratio_se", "rms_delta_p", "mean_delta_p",
    } <= set(level["output"])  # fmt: skip
    assert {
        "index", "layer", "branch", "label", "weights", "ratio_median", "ratio_p95", "drift_median", "drift_p95",
        "cosine_median", "sqnr_db", "local_error_median", "injected_error_median", "ledger_share", "absmax",
    } <= set(level["points"][0])  # fmt: skip
    assert {"unit", "kind", "layer", "branch", "kld", "kld_se", "method", "bytes_at_level", "bytes_at_16bit"} <= set(
        level["sensitivity"]["units"][0]
    )
    assert {"device", "ram_bytes", "n_ctx", "level", "needed_bytes", "fits"} <= set(result["deployment"][0])


def test_scan_levels_are_ordered_and_less_damaged(scanned: Path) -> None:
    small_level, large_level = load(scanned)["levels"]
    assert (small_level["name"], large_level["name"]) == ("Q4_K_M", "Q8_0")
    assert small_level["file"]["bytes"] < large_level["file"]["bytes"]
    assert small_level["output"]["kld_mean"] > large_level["output"]["kld_mean"] > 0


def test_scan_ledger_and_units(scanned: Path) -> None:
    for level in load(scanned)["levels"]:
        assert sum(point["ledger_share"] for point in level["points"]) == pytest.approx(1, abs=1e-6)
        units = [unit["unit"] for unit in level["sensitivity"]["units"]]
        assert units == ["embedding", "0.attention", "0.ffn", "1.attention", "1.ffn", "head"]
        assert all(
            unit["kld"] is not None for unit in level["sensitivity"]["units"]
        )  # fewer units than the least that is patched


def test_scan_uses_the_cache(scanned: Path) -> None:
    files = sorted((scanned / "cache").rglob("*.gguf"))
    assert [path.name for path in files] == ["tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf"]
    before = [path.stat().st_mtime_ns for path in files]
    assert qres(*small("scan", "tiny.gguf", "--levels", "Q4_K_M,Q8_0", "--out", "again"), cwd=scanned).returncode == 0
    assert [path.stat().st_mtime_ns for path in files] == before


def test_scan_repeats_itself(scanned: Path) -> None:
    """Everything but the time it took."""
    assert (
        qres(*small("scan", "tiny.gguf", "--levels", "Q4_K_M,Q8_0", "--out", "reports/two"), cwd=scanned).returncode
        == 0
    )
    one, two = load(scanned), load(scanned, "two")
    for result in (one, two):
        result["settings"].pop("elapsed_s")
        result["prediction"].pop("elapsed_s")
    assert one == two


def test_scan_damaged_cache_is_made_again(scanned: Path) -> None:
    cached = next((scanned / "cache").rglob("tiny-Q8_0.gguf"))
    good = cached.read_bytes()
    cached.write_bytes(good[:5000])
    done = qres(*small("scan", "tiny.gguf", "--levels", "Q8_0", "--out", "third"), cwd=scanned)
    assert done.returncode == 0, done.stderr
    assert cached.read_bytes() == good


def test_report_renders_the_same_again(scanned: Path) -> None:
    page = (scanned / "reports" / "tiny" / "report.html").read_bytes()
    assert (
        qres("report", "reports/tiny/result.json", "--format", "html", "--out", "page.html", cwd=scanned).returncode
        == 0
    )
    assert (scanned / "page.html").read_bytes() == page


def test_scan_reference_against_itself_is_zero(tmp_path: Path) -> None:
    tiny.write_llama(tmp_path / "tiny.gguf")
    (tmp_path / "copy.gguf").write_bytes((tmp_path / "tiny.gguf").read_bytes())
    assert qres(*small("scan", "tiny.gguf", "copy.gguf"), cwd=tmp_path).returncode == 0
    level = load(tmp_path)["levels"][0]
    assert level["output"]["kld_max"] == 0
    assert level["output"]["same_top"] == 1
    assert [point["drift_p95"] for point in level["points"]] == [0] * len(level["points"])
    assert {unit["kld"] for unit in level["sensitivity"]["units"]} == {0}
    assert level["sensitivity"]["keep_16bit"] == []


def crush(target: str) -> tiny.Change:
    """One tensor rounded to five values and stored as Q4_0; all others exact."""

    def change(name: str, values: tiny.Floats) -> tuple[npt.NDArray[np.generic], gguf.GGMLQuantizationType | None]:
        if name != target:
            return tiny.keep(name, values)
        step = np.abs(values).max() / 2
        coarse = (np.round(values / step) * step).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_0
        return gguf.quantize(coarse, kind), kind

    return change


def test_scan_finds_the_damaged_layer(tmp_path: Path) -> None:
    """One bad tensor in six layers: its branch is blamed, the layers behind it inherit drift and are not."""
    tiny.write_llama(tmp_path / "tiny.gguf", n_layer=6)
    tiny.write_llama(tmp_path / "bad.gguf", n_layer=6, change=crush("blk.3.ffn_down.weight"))
    assert qres(*small("scan", "tiny.gguf", "bad.gguf"), cwd=tmp_path).returncode == 0
    level = load(tmp_path)["levels"][0]
    units = sorted(level["sensitivity"]["units"], key=lambda unit: -(unit["kld"] or 0))
    assert units[0]["unit"] == "3.ffn"
    assert units[0]["kld"] > 0
    assert all(unit["kld"] == 0 for unit in units[1:])
    assert [row["unit"] for row in level["sensitivity"]["keep_16bit"]] == ["3.ffn"]
    damaged = next(point for point in level["points"] if (point["layer"], point["branch"]) == (3, "ffn"))
    for point in level["points"]:
        if point["index"] < damaged["index"]:
            assert point["drift_p95"] == 0
        if point["index"] > damaged["index"]:
            assert point["drift_median"] > 0
        if point is not damaged:
            assert point["local_error_median"] == 0
            assert point["generated_share"] == 0
    assert damaged["generated_share"] == pytest.approx(damaged["ledger_share"], abs=1e-4)  # nothing to inherit yet


@pytest.mark.parametrize("name", ["gemma2-dense", "phi2-dense", "mamba-dense", "llama-moe"])
def test_scan_other_architectures_with_ids(tmp_path: Path, name: str) -> None:
    archs.make(name, tmp_path)
    (tmp_path / "ids.txt").write_text(IDS)
    done = qres(*small("scan", f"{name}.gguf", "--tokens", "ids.txt", "--levels", "Q4_K_M"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    level = load(tmp_path, name)["levels"][0]
    assert level["output"]["kld_mean"] > 0
    assert sum(point["ledger_share"] for point in level["points"]) == pytest.approx(1, abs=1e-6)


def test_scan_bos_is_used_once_per_chunk(tmp_path: Path) -> None:
    """With BOS as the first token of every chunk the figures change; without the rule they do not."""
    tiny.write_llama(tmp_path / "plain.gguf")
    tiny.write_llama(tmp_path / "bos.gguf", bos=True)
    for name in ("plain", "bos"):
        assert qres(*small("scan", f"{name}.gguf", "--levels", "Q4_K_M"), cwd=tmp_path).returncode == 0
    plain, bos = (load(tmp_path, name)["levels"][0]["output"] for name in ("plain", "bos"))
    assert plain["ppl_reference"] != bos["ppl_reference"]


@pytest.mark.parametrize("wait_s", [1.0, 4.0])  # while starting or making a level; while measuring
def test_scan_interrupted_leaves_nothing_half_done(tmp_path: Path, wait_s: float) -> None:
    tiny.write_llama(tmp_path / "tiny.gguf", n_layer=12)
    with Scan(["scan", "tiny.gguf", "--n-ctx", 64, "--chunks", 500, "--threads", 1], tmp_path) as scan:
        scan.until(
            lambda: scan.imports("_multiarray_umath"), "under way"
        )  # before, it just ends: a busy CPU takes long
        time.sleep(wait_s)
        scan.interrupt()  # a scan that went on would end with 0, or not in time
        assert scan.popen.returncode == 130, scan.stderr
        assert scan.stderr.strip().endswith("interrupted")
        assert "Traceback" not in scan.stderr
    assert not list(tmp_path.rglob("*.partial"))
    assert not list((tmp_path / "reports").rglob("*.json"))


BAD_INPUT = [
    ("missing.gguf", (), 3, "missing.gguf"),
    ("text.gguf", (), 3, "GGUF"),
    ("cut.gguf", (), 3, "file has"),
    ("tiny.gguf", ("--levels", "Q9_X"), 2, "Q9_X"),
    ("tiny.gguf", ("--text", "short.txt"), 3, "tokens"),
    ("tiny.gguf", ("--text", "missing.txt"), 3, "missing.txt"),
    ("tiny.gguf", ("--tokens", "ids.txt", "--text", "short.txt"), 2, "exclude"),
    ("tiny.gguf", ("--tokens", "far.txt"), 3, "vocabulary"),
    ("tiny.gguf", ("--n-ctx", "4096"), 3, "512"),
    ("tiny.gguf", ("--out", "text.gguf/x"), 3, "--out"),
    ("tiny.gguf", ("--cache", "text.gguf/x"), 3, "--cache"),
    ("tiny.gguf", ("other-vocab.gguf",), 3, "tokenizer"),
    ("tiny.gguf", ("three.gguf",), 3, "not the same model"),
]


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    model = tiny.write_llama(folder / "tiny.gguf")
    tiny.write_llama(folder / "three.gguf", n_layer=3)
    tiny.write_llama(folder / "other-vocab.gguf", tokens=list(reversed(tiny.byte_tokens())))
    (folder / "text.gguf").write_text("this is no model\n" * 10)
    (folder / "cut.gguf").write_bytes(model.read_bytes()[:-100_000])
    (folder / "short.txt").write_text("Hello.")
    (folder / "ids.txt").write_text(IDS)
    (folder / "far.txt").write_text(IDS + " 99999")
    return folder


@pytest.mark.parametrize(("model", "options", "code", "words"), BAD_INPUT)
def test_scan_bad_input(bad: Path, model: str, options: tuple[str, ...], code: int, words: str) -> None:
    done = qres("scan", model, *options, "--threads", "1", cwd=bad)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    notes = ("Needs about", "other-vocab.gguf holds the same tensors")
    lines = [line for line in done.stderr.splitlines() if not line.startswith(notes)]
    assert len(lines) == 1
    assert not list(bad.rglob("*.partial"))


def test_scan_quantized_reference_is_said_first(tmp_path: Path) -> None:
    def quantized(name: str, values: tiny.Floats) -> tuple[npt.NDArray[np.generic], gguf.GGMLQuantizationType | None]:
        kind = gguf.GGMLQuantizationType.Q8_0
        return (gguf.quantize(values, kind), kind) if values.ndim > 1 else (values, None)

    tiny.write_llama(tmp_path / "ref.gguf", change=quantized)
    tiny.write_llama(tmp_path / "bad.gguf", change=crush("blk.1.ffn_down.weight"))
    done = qres(*small("scan", "ref.gguf", "bad.gguf"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "not 16 bit" in done.stdout.splitlines()[0]
    assert "not 16 bit" in load(tmp_path, "ref")["warnings"][0]


def test_scan_reference_that_is_not_finite_names_the_branch(tmp_path: Path) -> None:
    def poisoned(name: str, values: tiny.Floats) -> tuple[npt.NDArray[np.generic], gguf.GGMLQuantizationType | None]:
        if name == "blk.1.ffn_down.weight":
            values[3, 7] = np.inf
        return tiny.keep(name, values)

    tiny.write_llama(tmp_path / "bad.gguf", change=poisoned)
    tiny.write_llama(tmp_path / "good.gguf")
    done = qres(*small("scan", "bad.gguf", "good.gguf"), cwd=tmp_path)
    assert done.returncode == 3
    assert (
        "the reference's own output is not finite: its values stop being finite in 1.ffn (MUL_MAT with " in done.stderr
    )
    assert "blk.1.ffn_down.weight, from token 0 of chunk 1 of built-in rank text on)" in done.stderr
    # A broken level is a row in the reports; alone, it is no result.
    done = qres(*small("scan", "good.gguf", "bad.gguf"), cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "non-finite logits" in done.stdout
    assert load(tmp_path, "good")["verdict"]["level"] is None
