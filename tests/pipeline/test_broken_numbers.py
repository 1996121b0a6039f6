"""Files that hold or compute numbers that are none, or too large for 16 bit: whole scans, from files to reports.

What is broken is named, what is sound beside it is still measured, and nothing that is no number is printed as one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from qres.text import source
from tests import tiny
from tests.pipeline.test_run import load, qres

pytestmark = pytest.mark.model

Written = tuple[npt.NDArray[np.generic], gguf.GGMLQuantizationType | None]
BF16, Q8_0 = gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.Q8_0
DOWN = "blk.1.ffn_down.weight"
CHUNK, CHUNKS = 64, 3
SCORED = CHUNK // 2 - 1
"""Positions of a chunk with figures."""
ODD = "~"
"""A character that the texts below hold where they are told to, and nowhere else; its token is its byte."""
POSITION = 40
"""Where in the second chunk."""


# ---------------------------------------------------------------- models


def sound(name: str, values: tiny.Floats) -> Written:
    """A model that predicts, with blocks that write enough for each one's damage to stand out of the noise."""
    if name.endswith(("attn_output.weight", "ffn_down.weight")):
        values = values * np.float32(2)
    return tiny.predictive(name, values)


def q8_0(name: str, values: tiny.Floats) -> Written:
    """The same at Q8_0."""
    data, _ = sound(name, values)
    return (gguf.quantize(data.astype(np.float32), Q8_0), Q8_0) if values.ndim > 1 else (data, None)


def bf16(name: str, values: tiny.Floats) -> Written:
    data, _ = sound(name, values)
    return (gguf.quantize(data.astype(np.float32), BF16), BF16) if values.ndim > 1 else (data, None)


def with_nan(name: str, values: tiny.Floats) -> Written:
    """One weight of a matrix that writes into the stream."""
    data, kind = sound(name, values)
    if name == DOWN:
        data[3, 7] = np.nan
    return data, kind


def with_nan_scale(target: str) -> tiny.Change:
    """One block of 32 weights whose scale is NaN, in a file at Q8_0."""

    def change(name: str, values: tiny.Floats) -> Written:
        data, kind = q8_0(name, values)
        if name == target:
            blocks = data.reshape(-1, 34)  # 2 bytes of scale, 32 weights
            blocks[5, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
            data = blocks.reshape(data.shape)
        return data, kind

    return change


def with_nan_row(name: str, values: tiny.Floats) -> Written:
    """The embedding of one token."""
    data, kind = sound(name, values)
    if name == "token_embd.weight":
        data[ord(ODD)] = np.nan
    return data, kind


def dead(name: str, values: tiny.Floats) -> Written:
    """A head of zeros: all tokens are equally likely, whatever came before."""
    return sound(name, values * 0 if name == "output.weight" else values)[0] * (name != "output.weight"), None


def louder(factor: float, token: str = "") -> tiny.Change:
    """Finite weights whose last FFN has inner values that are `factor` squared as large.

    For one token only if given, and then in few channels, so that all other tokens are predicted as before.
    """

    def change(name: str, values: tiny.Floats) -> Written:
        if name in ("blk.1.ffn_gate.weight", "blk.1.ffn_up.weight"):
            values = values.copy()
            if token:
                values[:8, ord(token)] *= factor
            else:
                values *= np.float32(factor)
        if name == DOWN and not token:
            values = values * np.float32(10 / factor**2)
        return sound(name, values)

    return change


def gentler(factor: float) -> tiny.Change:
    """A candidate of `louder` for one token that does not overflow: its last FFN holds its weights as F32."""

    def change(name: str, values: tiny.Floats) -> Written:
        if name == DOWN:
            return sound(name, values)[0].astype(np.float32), None
        return louder(factor, ODD)(name, values) if "blk.1.ffn_" in name else q8_0(name, values)

    return change


def wide(name: str, values: tiny.Floats) -> Written:
    """A weight of 100,000 in an F32 and in a BF16 matrix, one of 40,000 in an F16 one; each meets inputs near 0."""
    if name.endswith(("attn_v.weight", "ffn_up.weight")):
        values = values.copy()
        values[7] *= 1e-6  # what channel 7 of the matrices below is multiplied with
    data = sound(name, values)[0].astype(np.float32) if values.ndim > 1 else values
    if name == DOWN:
        data[3, 7] = 1e5
        return data, None
    if name == "blk.0.ffn_down.weight":
        data[3, 7] = -1e5
        return gguf.quantize(data, BF16), BF16
    if name == "blk.0.attn_output.weight":
        data[3, 7] = 4e4
    return (data.astype(np.float16), None) if values.ndim > 1 else (data, None)


def loud_stream(name: str, values: tiny.Floats) -> Written:
    """Embedding and branches 2500 times as large: the norms before branches and head take it away again."""
    if name.endswith(("attn_output.weight", "ffn_down.weight")):
        values = values * np.float32(2500)
    data, kind = sound(name, values)
    return (data * np.float16(2500), kind) if name == "token_embd.weight" else (data, kind)


def tuned(name: str, values: tiny.Floats) -> Written:
    """Another fine-tune: quantizing would have left the norm alone."""
    return q8_0(name, values * np.float32(1.01) if name == "blk.0.ffn_norm.weight" else values)


def one_matrix_apart(name: str, values: tiny.Floats) -> Written:
    return sound(name, values) if name == "blk.0.ffn_down.weight" else q8_0(name, values)


AS_Q8_0, AS_BF16 = gguf.LlamaFileType.MOSTLY_Q8_0, gguf.LlamaFileType.MOSTLY_BF16
FILE_TYPES = {
    "bf16": AS_BF16,
    **dict.fromkeys(("small", "copy", "apart", "tuned", "gentle", "scale", "scale-out"), AS_Q8_0),
}
"""What the files say they are, F16 unless named here."""
MODELS: dict[str, tiny.Change] = {
    "ref": sound,
    "small": q8_0,
    "copy": q8_0,
    "apart": one_matrix_apart,
    "tuned": tuned,
    "hole": with_nan,
    "row": with_nan_row,
    "dead": dead,
    "loud": louder(400),
    "loud-once": louder(600, ODD),
    "gentle": gentler(600),
    "scale": with_nan_scale("blk.0.ffn_up.weight"),
    "scale-out": with_nan_scale(DOWN),
    "near": louder(75),
    "wide": wide,
    "bf16": bf16,
    "stream": loud_stream,
    "random": tiny.keep,
}


# ---------------------------------------------------------------- scans


@dataclass(frozen=True)
class Scan:
    """One finished command."""

    code: int
    out: str
    errors: str
    folder: Path
    result: dict[str, Any]
    """Empty where there is none."""

    def level(self, model: str) -> dict[str, Any]:
        (found,) = (level for level in self.result["levels"] if f"{model}.gguf" in level["file"]["path"])
        return dict(found)

    def of(self, record: str, model: str) -> list[dict[str, Any]]:
        """Records about one model."""
        return [row for row in self.result[record] if f"{model}.gguf" in (row.get("model") or row.get("what"))]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All the models, a text with one odd character and a cache that the scans share."""
    folder = tmp_path_factory.mktemp("broken")
    for name, change in MODELS.items():
        kind = FILE_TYPES.get(name, gguf.LlamaFileType.MOSTLY_F16)
        tiny.write_llama(folder / f"{name}.gguf", change=change, file_type=kind)
    plain = bytes(b for b in source.built_in("report").text or b"" if 32 <= b < 127).replace(b" t", b" s")
    text = bytearray(plain.replace(ODD.encode(), b"-")[: CHUNK * CHUNKS])
    text[CHUNK + POSITION] = ord(ODD)
    (folder / "text.txt").write_bytes(text)
    assert ODD.encode() not in (source.built_in("rank").text or b"")
    return folder


def scan(home: Path, name: str, *models: str, options: tuple[str, ...] = ()) -> Scan:
    settings = ("--n-ctx", CHUNK, "--chunks", CHUNKS, "--rank-chunks", 4, "--threads", 1, "--text", "text.txt")
    files = [f"{model}.gguf" for model in models]
    done = qres("scan", *files, *options, *settings, "--out", f"reports/{name}", cwd=home)
    assert "Traceback" not in done.stderr
    result = load(home, name) if done.returncode == 0 else {}
    return Scan(done.returncode, done.stdout, done.stderr, home / "reports" / name, result)


LEVELS = ("--levels", "Q4_K_M,Q8_0")


def no_number_that_is_none(found: Scan) -> None:
    """JSON without NaN was loaded strictly already; here is what people read, and what the charts draw."""
    html = (found.folder / "report.html").read_text()
    (data,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', html, re.DOTALL)

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} in the data of report.html")

    json.loads(data, parse_constant=refuse)
    texts = {
        "report.html": re.sub(r"<(script|style).*?</\1>", "", html, flags=re.DOTALL),
        "report.md": (found.folder / "report.md").read_text(),
        "standard output": found.out,
        **{path.name: path.read_text() for path in (found.folder / "charts").iterdir()},
    }
    for name, text in texts.items():
        assert not re.search(r"\b(nan|[-+]?inf|infinity|undefined)\b", text, re.IGNORECASE), name


@pytest.fixture(scope="module")
def many(home: Path) -> Scan:
    """A sound candidate among broken ones."""
    return scan(home, "many", "ref", "small", "copy", "apart", "tuned", "hole", "row", "dead", "loud")


def test_scan_goes_on_beside_broken_files(many: Scan) -> None:
    assert many.code == 0, many.errors
    assert len(many.result["levels"]) == 7  # all but the dead one
    good = many.level("small")
    assert good["output"]["nonfinite_tokens"] == 0
    assert good["output"]["tokens"] == SCORED * CHUNKS
    assert re.search(r"\((small|copy)\.gguf\)", many.result["verdict"]["level"])
    assert many.out.startswith("Ship ")


def test_scan_prints_no_number_that_is_none(many: Scan) -> None:
    no_number_that_is_none(many)


def test_scan_names_the_broken_weight(many: Scan) -> None:
    (found,) = many.of("non_finite", "hole")
    assert (found["unit"], found["layer"], found["operation"]) == ("1.ffn", 1, "MUL_MAT")
    assert (found["tensor"], found["broken_weights"]) == (DOWN, [DOWN])
    assert (found["token"], found["where"]) == (0, "chunk 1 of built-in rank text")
    output = many.level("hole")["output"]
    assert (output["tokens"], output["nonfinite_tokens"]) == (0, SCORED * CHUNKS)
    assert output["kld_mean"] is output["ppl"] is output["same_top"] is None
    assert f"the file holds values that are not finite in {DOWN}" in many.out
    assert "n/a (non-finite)" in many.out


def test_scan_leaves_out_what_one_token_breaks(many: Scan) -> None:
    """Only the chunk that the token is in: llama.cpp's attention takes masked NaN for NaN, so all of it is lost."""
    (found,) = many.of("non_finite", "row")
    assert (found["unit"], found["layer"], found["operation"]) == ("embedding", None, "GET_ROWS")
    assert (found["tensor"], found["broken_weights"]) == ("token_embd.weight", ["token_embd.weight"])
    assert (found["token"], found["where"]) == (POSITION, "chunk 2 of text.txt")
    output = many.level("row")["output"]
    lost = output["nonfinite_tokens"]
    assert CHUNK - 1 - POSITION <= lost <= SCORED
    assert output["tokens"] == SCORED * CHUNKS - lost
    # Where it is computed at all, this file is the reference.
    assert (output["kld_max"], output["same_top"]) == (0, 1)
    assert output["ppl"] == output["ppl_reference"]
    assert f"row.gguf): {lost} positions have non-finite logits" in many.out


def test_scan_says_that_an_activation_overflows(many: Scan) -> None:
    (found,) = many.of("non_finite", "loud")
    assert (found["unit"], found["tensor"], found["broken_weights"]) == ("1.ffn", DOWN, [])
    assert found["input_absmax"] > 65_504
    warning = next(text for text in many.result["warnings"] if "loud.gguf): values stop" in text)
    assert f"it is given {found['input_absmax']:,.0f}, 16-bit float ends at 65,504" in warning


def test_scan_takes_equal_logits_for_no_result(many: Scan) -> None:
    (row,) = many.of("skipped", "dead")
    assert "all logits are equal" in row["reason"]
    assert "dead.gguf" not in many.result["verdict"]["details"]
    assert not [row for row in many.result["deployment"] if "dead" in row["level"]]
    for report in ("report.md", "report.html"):
        assert "all logits are equal" in (many.folder / report).read_text()


def test_scan_finds_tensors_that_files_share(many: Scan) -> None:

    def pairs(*models: str) -> list[dict[str, Any]]:
        return [r for r in many.result["shared"] if all(f"({name}.gguf)" in r["a"] + r["b"] for name in models)]

    def pair(*models: str) -> dict[str, Any]:
        (found,) = pairs(*models)
        return found

    matrices = 2 * 7 + 2
    assert (pair("small", "copy")["tensors"], pair("small", "copy")["of"]) == (matrices, matrices)
    same = pair("small", "copy")["bytes"]
    assert same == sum(share["bytes"] for share in many.level("small")["file"]["types"] if share["type"] == "Q8_0")
    assert pair("small", "tuned")["tensors"] == matrices  # the norm is no matrix
    assert pair("small", "apart")["tensors"] == matrices - 1
    assert pair("small", "apart")["bytes"] == same - tiny.N_EMBD * tiny.N_FF // 32 * 34
    assert pair("hole", "row")["tensors"] == matrices - 2
    assert pair("apart", "hole")["tensors"] == 1  # its one F16 matrix
    assert pairs("small", "hole") == []
    assert many.level("small")["output"] == many.level("copy")["output"]
    assert "small.gguf" in (many.folder / "report.md").read_text()


def test_scan_warns_of_another_fine_tune(many: Scan) -> None:
    (warning,) = (text for text in many.result["warnings"] if "tuned.gguf" in text)
    assert "tuned.gguf was not made from ref.gguf: blk.0.ffn_norm.weight differs" in warning
    assert warning in many.errors
    assert "tuned.gguf was not made from" in many.out


# ---------------------------------------------------------------- NaN that a quantized file swallows


@pytest.fixture(scope="module")
def scales(home: Path) -> Scan:
    return scan(home, "scales", "ref", "small", "scale", "scale-out")


def test_scan_names_a_broken_scale(scales: Scan) -> None:
    (found,) = scales.of("non_finite", "scale-out")
    assert (found["unit"], found["tensor"], found["broken_weights"]) == ("1.ffn", DOWN, [DOWN])
    assert "(small.gguf)" in scales.result["verdict"]["level"]
    no_number_that_is_none(scales)


def test_scan_names_a_broken_scale_that_the_next_matrix_hides(scales: Scan) -> None:
    """ffn_down at Q8_0 rounds its input to 8 bits first: NaN from ffn_up comes out as a number."""
    assert scales.level("scale")["output"]["nonfinite_tokens"] == 0
    (found,) = scales.of("non_finite", "scale")
    assert (found["unit"], found["tensor"]) == ("0.ffn", "blk.0.ffn_up.weight")


# ---------------------------------------------------------------- the reference itself


def test_scan_makes_no_level_of_a_broken_reference(home: Path) -> None:
    before = sorted(path.name for path in (home / "cache").rglob("*.gguf"))
    found = scan(home, "refused", "hole", options=LEVELS)
    assert found.code == 3
    assert f"hole.gguf: {DOWN} holds 1 values that are not finite, the first at {3 * tiny.N_FF + 7}" in found.errors
    assert "No level can be made from it" in found.errors
    assert sorted(path.name for path in (home / "cache").rglob("*.gguf")) == before
    assert not (found.folder / "result.json").exists()


def test_scan_refuses_a_broken_reference_of_given_files(home: Path) -> None:
    found = scan(home, "refused-files", "hole", "small")
    assert found.code == 3
    assert f"in 1.ffn (MUL_MAT with {DOWN}, from token 0 of chunk 1 of built-in rank text on)" in found.errors
    assert found.out == ""
    assert not (found.folder / "result.json").exists()


@pytest.fixture(scope="module")
def overflowing(home: Path) -> Scan:
    return scan(home, "overflowing", "loud", "small")


def test_scan_refuses_a_reference_that_overflows(overflowing: Scan) -> None:
    assert overflowing.code == 3
    assert f"in 1.ffn (MUL_MAT with {DOWN}, from token 0" in overflowing.errors
    assert not (overflowing.folder / "result.json").exists()


def test_scan_says_why_a_reference_overflows(overflowing: Scan) -> None:
    """Converting it to BF16 would help; getting it again would not."""
    assert "65,504" in overflowing.errors


def test_scan_refuses_a_reference_with_equal_logits(home: Path) -> None:
    found = scan(home, "dead-reference", "dead", "small")
    assert found.code == 4
    assert "dead.gguf: all logits are equal" in found.errors
    assert not (found.folder / "result.json").exists()


def test_scan_ends_where_every_level_is_dead(home: Path) -> None:
    found = scan(home, "all-dead", "ref", "dead")
    assert found.code == 4
    assert "dead.gguf: all logits are equal" in found.errors
    assert found.out == ""
    assert not (found.folder / "result.json").exists()


@pytest.fixture(scope="module")
def once(home: Path) -> Scan:
    """A reference that overflows at one position of the text, and a candidate that does not."""
    return scan(home, "once", "loud-once", "gentle")


def test_scan_leaves_out_the_position_where_the_reference_overflows(once: Scan) -> None:
    assert once.code == 0, once.errors
    (found,) = once.result["non_finite"]
    assert (found["model"], found["unit"], found["tensor"]) == ("reference", "1.ffn", DOWN)
    assert (found["token"], found["where"], found["broken_weights"]) == (POSITION, "chunk 2 of text.txt", [])
    output = once.level("gentle")["output"]
    assert (output["tokens"], output["nonfinite_tokens"]) == (SCORED * CHUNKS - 1, 1)
    assert 0 < output["kld_mean"] < 0.05
    (warning,) = (text for text in once.result["warnings"] if text.startswith("reference"))
    assert "16-bit float ends at 65,504" in warning
    no_number_that_is_none(once)


def test_scan_does_not_blame_the_level_for_the_reference(once: Scan) -> None:
    blamed = [text for text in once.result["warnings"] if "non-finite logits" in text]
    assert [text for text in blamed if not text.startswith("reference")] == []


def test_scan_recommends_a_good_level_of_a_reference_that_overflows_once(once: Scan) -> None:
    """96 % same top token and half a percent of perplexity; the verdict says that nothing keeps 90 % and 3 %."""
    output = once.level("gentle")["output"]
    assert output["same_top"] >= 0.9
    assert output["ln_ppl_ratio"] + 2 * output["ln_ppl_ratio_se"] < 0.03
    assert "No measured level keeps" not in once.result["verdict"]["details"]


@pytest.fixture(scope="module")
def kept(home: Path) -> Scan:
    """Levels of the reference that overflows at one position."""
    return scan(home, "kept", "loud-once", options=LEVELS)


def test_scan_lists_the_input_that_overflowed(kept: Scan) -> None:
    assert kept.result["non_finite"][0]["input_absmax"] > 65_504
    assert ("input", DOWN) in {(row["what"], row["name"]) for row in kept.result["extremes"]}


def test_scan_keeps_no_unit_at_f16_that_overflowed_in_it(kept: Scan) -> None:
    """The reference is F16 there and computed NaN: the same type again is no advice."""
    types = {row["unit"]: row["type"] for level in kept.result["levels"] for row in level["sensitivity"]["keep_16bit"]}
    assert types["1.ffn"] == "BF16"


# ---------------------------------------------------------------- finite, but large for 16 bit


def keep_types(found: Scan) -> dict[str, set[str]]:
    """Unit -> the types that it is to be kept at, over all levels."""
    types: dict[str, set[str]] = {}
    for level in found.result["levels"]:
        for row in level["sensitivity"]["keep_16bit"]:
            types.setdefault(row["unit"], set()).add(row["type"])
    return types


def test_scan_keeps_wide_weights_at_bf16(home: Path) -> None:
    """Above 65,504 in F32 and in BF16, and above half of it in F16."""
    found = scan(home, "wide", "wide", options=(*LEVELS, "--units", "all"))
    assert found.code == 0, found.errors
    rows = [(row["what"], row["name"], row["absmax"]) for row in found.result["extremes"]]
    assert rows == [
        ("weight", DOWN, 1e5),
        ("weight", "blk.0.ffn_down.weight", 99_840),  # as near to 100,000 as BF16 gets
        ("weight", "blk.0.attn_output.weight", 40_000),
    ]
    (warning,) = (text for text in found.result["warnings"] if "16-bit float" in text)
    assert f"{DOWN} is 100,000" in warning
    types = keep_types(found)
    assert types.pop("1.ffn") == types.pop("0.ffn") == types.pop("0.attention") == {"BF16"}
    assert types
    assert all(found == {"F16"} for found in types.values())


def test_scan_keeps_a_bf16_reference_at_bf16(home: Path) -> None:
    found = scan(home, "bf16", "bf16", options=LEVELS)
    assert found.code == 0, found.errors
    assert found.result["extremes"] == []
    types = keep_types(found)
    assert types
    assert all(kinds == {"BF16"} for kinds in types.values())


def test_scan_names_a_stream_near_the_end_of_f16(home: Path) -> None:
    found = scan(home, "stream", "stream", options=LEVELS)
    assert found.code == 0, found.errors
    extremes = found.result["extremes"]
    assert {row["what"] for row in extremes} == {"stream", "weight"}  # the embedding is its first point
    assert [row["layer"] for row in extremes if row["what"] == "stream"] == [1, 1, 0, 0, None]
    assert all(65_504 / 2 < row["absmax"] < 65_504 for row in extremes)
    by_label = {point["label"]: point["absmax"] for point in found.result["stream"]}
    assert {row["name"]: row["absmax"] for row in extremes if row["what"] == "stream"} == by_label
    assert any("The stream reaches" in text for text in found.result["warnings"])
    types = keep_types(found)
    assert types.pop("head") == {"F16"}  # reads the stream through a norm
    assert types
    assert all(kinds == {"BF16"} for kinds in types.values())


def test_scan_names_an_input_near_the_end_of_f16(home: Path) -> None:
    found = scan(home, "near", "near", options=LEVELS)
    assert found.code == 0, found.errors
    assert found.result["non_finite"] == []
    (row,) = found.result["extremes"]
    assert (row["what"], row["name"], row["layer"]) == ("input", DOWN, 1)
    assert 65_504 / 2 < row["absmax"] < 65_504
    types = keep_types(found)
    assert types.pop("1.ffn") == {"BF16"}
    assert types
    assert all(kinds == {"F16"} for kinds in types.values())


# ---------------------------------------------------------------- a reference that predicts nothing


def test_scan_of_random_weights_gives_figures_and_no_advice(home: Path) -> None:
    found = scan(home, "random", "random", options=LEVELS)
    assert found.code == 0, found.errors
    verdict = found.result["verdict"]
    assert verdict["level"] is None
    assert verdict["headline"].startswith("No advice: the reference itself has a perplexity of ")
    assert found.out.startswith("No advice: ")
    assert "Ship" not in found.out
    assert found.result["device_advice"] == []
    assert found.result["deployment"]
    rows = [row for level in found.result["levels"] for row in level["sensitivity"]["keep_16bit"]]
    assert rows
    assert not any(row["worth_it"] for row in rows)
    for level in found.result["levels"]:
        assert level["output"]["ppl_reference"] > 258 / 10
        assert level["output"]["kld_mean"] > 0
        assert level["output"]["tokens"] == SCORED * CHUNKS
    for report in ("report.md", "report.html"):
        assert "No advice" in (found.folder / report).read_text()
    no_number_that_is_none(found)
