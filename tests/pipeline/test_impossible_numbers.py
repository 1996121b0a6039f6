"""Scans whose numbers cannot be: nothing rests on them, the reason is said, and the scan ends as it should."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from qres import api
from qres.gguf import model_file
from tests import tiny
from tests.pipeline.test_run import load, qres, small

pytestmark = pytest.mark.model

IDS = [int(i) for i in np.random.default_rng(7).integers(5, 120, 300)]
FIRST_RANKED = 128
"""Two chunks of 64 report, the next one ranks."""
LAYERS = 8
"""At each norm of a token whose stream is 0 its gradient grows 300 times: that many are beyond float32."""


def zero_row(name: str, values: tiny.Floats) -> tuple[np.ndarray, gguf.GGMLQuantizationType | None]:
    """A model that embeds the first token of the ranking text as zeros."""
    data, kind = tiny.predictive(name, values)
    if name == "token_embd.weight":
        data[IDS[FIRST_RANKED]] = 0
    return data, kind


def broken(target: str) -> tiny.Change:
    """A file at Q8_0 with one matrix whose scales are all NaN."""

    def change(name: str, values: tiny.Floats) -> tuple[np.ndarray, gguf.GGMLQuantizationType | None]:
        data, kind = tiny.predictive(name, values)
        if values.ndim < 2:
            return data, kind
        packed = gguf.quantize(data.astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
        if name == target:
            packed = packed.copy()
            packed.reshape(-1, 34)[:, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
        return packed, gguf.GGMLQuantizationType.Q8_0

    return change


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("impossible")
    (folder / "ids.txt").write_text(" ".join(map(str, IDS)))
    tiny.write_llama(folder / "zero.gguf", n_layer=LAYERS, change=zero_row)
    tiny.write_llama(folder / "ref.gguf", change=tiny.predictive)
    q8_0 = gguf.LlamaFileType.MOSTLY_Q8_0
    tiny.write_llama(folder / "head.gguf", change=broken("output.weight"), file_type=q8_0)
    tiny.write_llama(folder / "ffn.gguf", change=broken("blk.1.ffn_down.weight"), file_type=q8_0)
    return folder


def test_c21_prediction_that_is_not_finite_is_left_out(home: Path) -> None:
    options = ("--levels", "Q4_K_M", "--tokens", "ids.txt", "--out", "reports/zero")
    done = qres(*small("scan", "zero.gguf"), *options, cwd=home)
    assert done.returncode == 0, done.stderr
    needs, note = done.stderr.splitlines()
    assert needs.startswith("Needs about")
    assert note.startswith(
        "No predictions, units are ranked by patching: the backward pass has no finite result for blk."
    )
    assert "a token's values are all 0 there" in note
    assert "DLASCL" not in done.stdout
    assert "≈" not in done.stdout
    result = load(home, "zero")
    assert result["prediction"]["used"] is False
    assert result["prediction"]["tensors"] == []
    assert result["prediction"]["reason"] in note
    (level,) = result["levels"]
    assert level["output"]["kld_mean"] > 0
    assert level["sensitivity"]["calibration"] is level["sensitivity"]["trust"] is None
    assert [unit for unit in level["sensitivity"]["units"] if unit["method"] == "patched"]


def test_c14_scan_without_figures_of_any_level_fails_with_its_reports(home: Path) -> None:
    done = qres(*small("scan", "ref.gguf", "head.gguf", "ffn.gguf"), "--out", "reports/none", cwd=home)
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert last.startswith("qres: no level could be measured: at no position of the text is the KLD of Q8_0 (")
    assert "--resume" not in done.stderr
    assert done.stdout.startswith(
        "No level could be measured.\nWhat to keep is unknown.\nReport: reports/none/report.html"
    )
    assert "the file holds values that are not finite in blk.1.ffn_down.weight" in done.stdout
    for words in ("Ship", "≈", "Without a prediction"):
        assert words not in done.stdout
    assert sorted(path.name for path in (home / "reports" / "none").iterdir()) == [
        "charts",
        "report.html",
        "report.md",
        "result.json",
    ]
    result = load(home, "none")
    assert result["verdict"]["level"] is None
    assert [level["output"]["kld_mean"] for level in result["levels"]] == [None, None]
    assert result["recipes"] == result["mixes"] == []
    assert ("recipes", "no recipe: no level was measured that it could be calibrated on") in {
        (row["what"], row["reason"]) for row in result["skipped"]
    }


def test_c14_one_broken_level_beside_a_sound_one_is_no_failure(home: Path) -> None:
    tiny.write_llama(home / "sound.gguf", change=broken(""), file_type=gguf.LlamaFileType.MOSTLY_Q8_0)
    done = qres(*small("scan", "ref.gguf", "head.gguf", "sound.gguf"), "--out", "reports/one", cwd=home)
    assert done.returncode == 0, done.stderr
    assert "Q8_0 (sound.gguf)" in done.stdout.splitlines()[0]


def test_c14_from_python_gives_the_result(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QRES_CACHE", str(home / "cache"))
    options = api.ScanOptions(home / "ref.gguf", (home / "head.gguf",), n_ctx=64, chunks=2, rank_chunks=1, threads=1)
    found = api.scan(options)
    assert found.verdict.level is None
    assert found.levels[0].output.kld_mean is None
    assert model_file.read(Path(found.levels[0].file.path)).file_type == "Q8_0"
