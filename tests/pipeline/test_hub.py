"""C8: a split model as a hub's cache keeps it, links to files called after their content, works as plain files do."""

from __future__ import annotations

import hashlib
import re
from functools import partial
from pathlib import Path
from unittest import mock

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from qres.gguf import inspection, model_file
from qres.records import as_json
from tests import tiny
from tests.pipeline.test_run import IDS, qres

pytestmark = pytest.mark.model

SMALL = ("--chunks", 1, "--rank-chunks", 1, "--n-ctx", 128, "--threads", 1, "--tokens", "ids.txt")
DIGEST = re.compile(r"[0-9a-f]{40,64}\b(?!/T-)")
"""That is not the folder of a file: a name that people would have to read."""


def as_q8(_name: str, values: tiny.Floats) -> tuple[npt.NDArray[np.generic], gguf.GGMLQuantizationType | None]:
    kind = gguf.GGMLQuantizationType.Q8_0
    return (gguf.quantize(values, kind), kind) if values.ndim > 1 else (values, None)


def split(hub: Path, name: str, change: tiny.Change, file_type: gguf.LlamaFileType) -> Path:
    """The first link of a model in two parts."""
    repository = hub / "models--someone--T-GGUF"
    snapshot, blobs = repository / "snapshots" / ("0123456789" * 4), repository / "blobs"
    snapshot.mkdir(parents=True, exist_ok=True)
    blobs.mkdir(exist_ok=True)
    with mock.patch.object(gguf, "GGUFWriter", partial(gguf.GGUFWriter, split_max_tensors=16)):
        tiny.write_llama(hub / name, change=change, file_type=file_type)
    parts = sorted(hub.glob("*.gguf"))
    assert len(parts) == 2
    for part in parts:
        blob = blobs / hashlib.sha256(part.read_bytes()).hexdigest()
        part.rename(blob)
        (snapshot / part.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot / parts[0].name


def test_c8(tmp_path: Path) -> None:
    reference = split(tmp_path, "T-F16.gguf", tiny.predictive, gguf.LlamaFileType.MOSTLY_F16)
    level = split(tmp_path, "T-Q8_0.gguf", predictive_q8, gguf.LlamaFileType.MOSTLY_Q8_0)
    (tmp_path / "ids.txt").write_text(IDS)
    second = reference.with_name(reference.name.replace("00001-of", "00002-of"))
    found = qres("scan", second, level, *SMALL, "--out", "a", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert not DIGEST.search(found.stdout + found.stderr)
    result = as_json.load(tmp_path / "a" / "result.json")
    assert [one.name for one in result.levels] == ["Q8_0"]
    assert Path(result.reference.path) == reference
    assert inspection.inspect(model_file.read(level)).verdict.role == "candidate"

    made = qres("scan", reference, *SMALL, "--levels", "Q4_K_M", "--recipe", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    out = tmp_path / "reports" / "T-F16"
    assert (out / "recipes" / "same-as-Q4_K_M" / "T-F16-same-as-Q4_K_M.gguf").is_file()
    assert [path.name for path in (tmp_path / "cache").rglob("T*Q4_K_M.gguf")] == ["T-F16-Q4_K_M.gguf"]
    recipe = out / "recipes" / "same-as-Q4_K_M" / "recipe.json"
    for arguments in (
        ("build", reference, recipe, "-o", "b.gguf", "--threads", 1),
        ("verify", reference, "b.gguf", recipe, "--levels", "none", "--chunks", 1, "--threads", 1),
        ("recipe", out / "result.json", "--budget", "+0.2bpw", "--refine", "--trials", 1, "--chunks", 1),
    ):
        done = qres(*arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def predictive_q8(name: str, values: tiny.Floats) -> tuple[npt.NDArray[np.generic], gguf.GGMLQuantizationType | None]:
    """The reference's weights at Q8_0."""
    weights, _ = tiny.predictive(name, values)
    return as_q8(name, weights.astype(np.float32))
