"""From measurements to a result: what is put where, what is warned of, and what is not said where nothing is known."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from qres.files import stamp
from qres.gguf import difference, magnitudes, model_file
from qres.gguf.format.tensor import Tensor
from qres.gguf.inventory import Inventory
from qres.gguf.magnitudes import Magnitudes
from qres.levels import F16_MAX, PREDICTED
from qres.measure.job import Measured, MeasuredLevel
from qres.pipeline import assemble, sizes
from qres.pipeline import warnings as warnings_module
from qres.pipeline.assemble import Inputs
from qres.pipeline.candidates import Candidate
from qres.pipeline.options import ScanOptions
from qres.records import as_json
from qres.records.files import SharedTensors
from qres.records.prediction import Prediction
from qres.records.recipe import FileTensor, Rung
from qres.records.result import Result, Settings, Skipped
from qres.records.stream import Extreme, NoiseFloor, NonFinite
from qres.text import chunks
from tests import tiny
from tests.examples.result import example

HALF = F16_MAX / 2
EXAMPLE = example()
DOWN = "blk.1.ffn_down.weight"
TEXTS = chunks.Texts(rank=((1, 2), (3, 4)), report=((5, 6), (3, 4)), rank_name="rank", report_name="report", unused=5)
ONE_CHUNK = dataclasses.replace(TEXTS, report=TEXTS.report[:1])
NOT_PREDICTED = Prediction(False, "not tried", None, None, 1e-5, 0, 0, 1, "", "cpu", "", 0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Inventory:
    return model_file.read(tiny.write_llama(tmp_path_factory.mktemp("assemble") / "tiny.gguf"))


def measured_level(name: str = "Q4_K_M", **output: Any) -> MeasuredLevel:  # noqa: ANN401 - fields of Output
    """The example's level under another name, with other figures."""
    level = EXAMPLE.levels[0]
    sensitivity = dataclasses.replace(level.sensitivity, calibration=None, trust=None)
    return MeasuredLevel(name, dataclasses.replace(level.output, **output), level.points, sensitivity)


def measured(*levels: MeasuredLevel, **changes: Any) -> Measured:  # noqa: ANN401 - fields of Measured
    plain = Measured(
        norm_placement="pre",
        unmapped="",
        system="CPU",
        n_layer=2,
        n_embd=256,
        n_vocab=49_152,
        n_ctx_train=512,
        massive_tokens=1,
        noise_floor=EXAMPLE.noise_floor,
        stream=(),
        inputs={},
        non_finite=(),
        failed={},
        levels=levels or (measured_level(),),
        comparisons=(),
        prediction=NOT_PREDICTED,
    )
    return dataclasses.replace(plain, **changes)


def halved(model: Inventory) -> Inventory:
    """The same in a smaller file: only such files are advised."""
    tensors = tuple(dataclasses.replace(t, n_bytes=(t.n_bytes or 0) // 2) for t in model.tensors)
    return dataclasses.replace(model, tensors=tensors, file_bytes=model.file_bytes // 2)


def inputs(model: Inventory, *names: str, **changes: Any) -> Inputs:  # noqa: ANN401 - fields of Inputs
    plain = Inputs(
        reference=model,
        levels=tuple(Candidate(name, halved(model)) for name in names or ("Q4_K_M",)),
        values=tuple(Magnitudes(tensor.name, 1.0) for tensor in model.tensors),
        broken={},
        shared=(),
        memory={512: (1000, 2000)},
        remarks=(),
        skipped=(),
        ladder=(),
    )
    return dataclasses.replace(plain, **changes)


def settings(found: Measured, texts: chunks.Texts = TEXTS) -> Settings:
    return assemble.settings(ScanOptions(Path("m.gguf"), threads=2), found, texts, 1.26)


def result(
    model: Inventory,
    found: Measured,
    texts: chunks.Texts = TEXTS,
    **changes: Any,  # noqa: ANN401 - fields of Inputs
) -> Result:
    names = (*(level.name for level in found.levels), *found.failed)
    return assemble.result(inputs(model, *names, **changes), found, settings(found, texts))


def broken(**changes: Any) -> NonFinite:  # noqa: ANN401 - fields of NonFinite
    plain = NonFinite("Q4_K_M", "1.ffn", 1, "MUL_MAT", "ffn_out-1", DOWN, 40, "chunk 2 of t.txt", 6.7)
    return dataclasses.replace(plain, **changes)


# ---------------------------------------------------------------- a sound scan


def test_result_of_a_sound_scan_warns_of_nothing(model: Inventory) -> None:
    found = result(model, measured(measured_level(ln_ppl_ratio=0.001, same_top=0.99)))
    assert found.warnings == ()
    assert found.skipped == ()
    assert found.extremes == ()
    assert found.non_finite == ()
    assert found.verdict.level == "Q4_K_M"
    assert found.device_advice
    assert found.levels[0].sensitivity.keep_16bit == EXAMPLE.levels[0].sensitivity.keep_16bit
    assert found.reference.bytes == model.file_bytes
    assert found.levels[0].file.bytes == halved(model).file_bytes
    assert (found.reference.n_vocab, found.reference.architecture) == (49_152, "llama")


def test_settings_count_every_scored_position() -> None:
    found = measured(measured_level(tokens=100, nonfinite_tokens=20), measured_level("b", tokens=110))
    assert settings(found).scored_tokens == 120
    assert settings(measured(failed={"a": "why"}, levels=())).scored_tokens == 0
    assert (settings(found).elapsed_s, settings(found).units) == (1.3, "ranked")


def test_settings_name_every_decoded_chunk_once() -> None:
    names = settings(measured()).chunk_digests
    assert names == tuple(chunks.digest(chunk) for chunk in ((1, 2), (3, 4), (5, 6)))
    assert len(set(names)) == 3


def test_model_file_knows_its_bytes_and_stamps(model: Inventory) -> None:
    stamps = {path: stamp(path) for path in model.shards}
    found = sizes.model_file("Q8_0", model, stamps)
    assert found.stamps == tuple(stamps.values())
    assert sum(found.tensor_bytes.values()) == model.tensor_bytes
    assert (found.tensor_types[DOWN], found.tensor_types["output_norm.weight"]) == ("F16", "F32")
    assert Path(found.path).is_absolute()
    exact = sizes.bytes_16bit(model)
    assert DOWN in exact
    assert "output_norm.weight" not in exact
    assert exact[DOWN] == 2 * tiny.N_EMBD * tiny.N_FF
    assert sizes.bytes_q8_0(model)[DOWN] == exact[DOWN] // 2 + exact[DOWN] // 32


def test_result_passes_the_prediction_and_the_ladder_on(model: Inventory) -> None:
    rung = Rung("Q4_K_M", tuple("Q4_K" for _ in model.tensors))
    found = result(model, measured(), ladder=(rung,))
    assert found.prediction == NOT_PREDICTED
    assert found.ladder == (rung,)
    assert (found.mixes, found.stock, found.recoveries, found.recipes) == ((), (), (), ())


def test_result_names_the_tensors_of_the_reference_in_file_order(model: Inventory) -> None:
    found = result(model, measured())
    assert [tensor.name for tensor in found.tensors] == [tensor.name for tensor in model.tensors]
    known = {tensor.name: tensor for tensor in found.tensors}
    assert known[DOWN] == FileTensor(DOWN, (tiny.N_FF, tiny.N_EMBD), "F16", "F16")
    assert known["output_norm.weight"] == FileTensor("output_norm.weight", (tiny.N_EMBD,), "F32", "")
    assert found.fingerprint == difference.fingerprint(model)


def test_large_weights_are_bf16_at_16_bit(model: Inventory) -> None:
    found = result(model, measured(), values=with_absmax(model, {DOWN: 1e5}))
    types = {tensor.name: tensor.type_16bit for tensor in found.tensors}
    assert types[DOWN] == "BF16"
    assert types["blk.0.ffn_down.weight"] == "F16"


def test_levels_say_the_type_of_every_tensor_and_where_one_is_missing(model: Inventory) -> None:
    lacking = dataclasses.replace(model, tensors=tuple(t for t in model.tensors if t.name != "output.weight"))
    names = [tensor.name for tensor in model.tensors]
    levels = (Candidate("whole", model), Candidate("tied", lacking))
    found = result(model, measured(measured_level("whole"), measured_level("tied")), levels=levels)
    whole, tied = (level.file.tensor_types for level in found.levels)
    assert whole == tuple(tensor.type for tensor in model.tensors)
    assert len(tied) == len(names)
    assert [name for name, held in zip(names, tied, strict=True) if not held] == ["output.weight"]


def test_predicted_types_are_those_that_fit_and_those_of_the_levels(model: Inventory, tmp_path: Path) -> None:
    """Types that change nothing are left out: the reference's own and what holds it."""
    iq1 = gguf.GGMLQuantizationType.TQ1_0

    def change(name: str, data: tiny.Floats) -> tuple[npt.NDArray[np.generic], gguf.GGMLQuantizationType | None]:
        return (gguf.quantize(data, iq1), iq1) if name == DOWN else tiny.keep(name, data)

    level = model_file.read(tiny.write_llama(tmp_path / "level.gguf", change=change))
    found = sizes.predicted_types(model, [level])
    assert found[DOWN] == (*PREDICTED, "TQ1_0")
    assert found["blk.0.attn_q.weight"] == PREDICTED
    assert "output_norm.weight" not in found


def test_predicted_types_of_a_bf16_reference_with_odd_rows(tmp_path: Path) -> None:
    """F16 is an error there; rows of no whole blocks get what llama.cpp falls back to, once."""
    tensors = (Tensor("a.weight", (96, 4), "BF16", 30, 384, 768, 0), Tensor("b.weight", (4, 4), "F32", 0, 16, 64, 0))
    inventory = dataclasses.replace(model_file.read(tiny.write_llama(tmp_path / "x.gguf")), tensors=tensors)
    found = sizes.predicted_types(inventory, [inventory])
    assert found == {"a.weight": ("Q4_0", "IQ4_NL", "Q5_0", "MXFP4", "Q5_1", "Q8_0"), "b.weight": ()}


# ---------------------------------------------------------------- not measured


def test_result_lists_everything_that_was_left_out(model: Inventory) -> None:
    crashed = Skipped("Q2_K", "llama.cpp died")
    found = result(
        model,
        measured(
            measured_level(),
            failed={"Q8_0": "all logits are equal"},
            unmapped="two streams",
            noise_floor=NoiseFloor(None, None, reason="x", drift_reason="x"),
        ),
        skipped=(crashed,),
    )
    assert found.skipped == (
        crashed,
        Skipped("Q8_0", "all logits are equal"),
        Skipped("residual stream, drift, units", "two streams"),
        Skipped("noise floor", "x"),
    )
    assert [level.name for level in found.levels] == ["Q4_K_M"]
    assert {row.level for row in found.deployment} == {"Q4_K_M"}


def test_result_keeps_remarks_first(model: Inventory) -> None:
    found = result(model, measured(), ONE_CHUNK, remarks=("another model",))
    assert found.warnings[0] == "another model"
    assert len(found.warnings) > 1


def test_result_passes_shared_tensors_on(model: Inventory) -> None:
    row = SharedTensors("Q4_K_M", "Q5_K_M", 3, 16, 12_345)
    assert result(model, measured(), shared=(row,)).shared == (row,)


# ---------------------------------------------------------------- an absurd reference


@pytest.mark.parametrize(("ppl", "absurd"), [(999.9, False), (1000.0, True), (None, True)])
def test_result_without_advice(model: Inventory, ppl: float | None, absurd: bool) -> None:
    found = result(model, measured(measured_level(ppl_reference=ppl)))
    assert (found.verdict.level is None) == absurd
    assert bool(found.device_advice) != absurd
    assert any(row.worth_it for row in found.levels[0].sensitivity.keep_16bit) != absurd
    assert found.deployment
    assert found.levels[0].output.kld_mean == EXAMPLE.levels[0].output.kld_mean
    assert [row.unit for row in found.levels[0].sensitivity.keep_16bit] == [
        row.unit for row in EXAMPLE.levels[0].sensitivity.keep_16bit
    ]


# ---------------------------------------------------------------- values that are not finite


def test_result_names_the_broken_tensors_of_each_model(model: Inventory) -> None:
    values = tuple(Magnitudes(t.name, 1.0, n_nan=int(t.name == DOWN)) for t in model.tensors)
    found = result(
        model,
        measured(measured_level("a"), measured_level("b"), non_finite=(broken(model="reference"), broken(model="a"))),
        values=values,
        broken={"a": ("x.weight", "y.weight"), "b": ("z.weight",)},
    )
    assert [(row.model, row.broken_weights) for row in found.non_finite] == [
        ("reference", (DOWN,)),
        ("a", ("x.weight", "y.weight")),
    ]
    assert found.warnings[0].startswith("reference: values stop being finite in 1.ffn (MUL_MAT with ")
    assert f"not finite in {DOWN}" in found.warnings[0]
    assert "x.weight, y.weight" in found.warnings[1]


def test_result_with_infinite_values_counts_them_as_broken(model: Inventory) -> None:
    values = tuple(Magnitudes(t.name, 1.0, n_inf=int(t.name == DOWN)) for t in model.tensors)
    (row,) = result(model, measured(non_finite=(broken(model="reference"),)), values=values).non_finite
    assert row.broken_weights == (DOWN,)


BROKEN = [
    ({"broken_weights": ("a", "b")}, "not finite in a, b.", "and more"),
    ({"broken_weights": ("a", "b", "c", "d"), "input_absmax": 1e6}, "a, b, c and more", "65,504"),
    ({"input_absmax": 1e6}, "given 1,000,000, 16-bit float ends at 65,504", "themselves are finite"),
    ({"input_absmax": 65_504.0}, "themselves are finite", "65,504"),
    ({"input_absmax": None}, "themselves are finite", "None"),
    ({"token": None}, "in chunk 2 of t.txt)", "token"),
    ({"token": 0}, "from token 0 of chunk 2 of t.txt on)", "None"),
    ({"unit": "", "layer": 3}, "finite in layer 3 (MUL_MAT", "None"),
    ({"unit": "", "layer": 0}, "finite in layer 0 (MUL_MAT", "before"),
    ({"unit": "", "layer": None}, "a place before the first layer", "None"),
    ({"tensor": "", "operation": "SOFT_MAX"}, "(SOFT_MAX, from token 40", "with"),
]


@pytest.mark.parametrize(("changes", "words", "not_words"), BROKEN)
def test_warning_of_broken_numbers(model: Inventory, changes: dict[str, Any], words: str, not_words: str) -> None:
    (warning,) = warnings_module.warnings(settings(measured()), [], [broken(**changes)], [], None)
    assert warning.startswith("Q4_K_M: values stop being finite")
    assert words in warning
    assert not_words not in warning


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"report": ONE_CHUNK.report}, "no standard errors"),
        ({"report_name": "rank"}, "ranked on the text that reports them"),
    ],
)
def test_warnings_of_a_thin_text(model: Inventory, changes: dict[str, Any], words: str) -> None:
    warnings = result(model, measured(), dataclasses.replace(TEXTS, **changes)).warnings
    assert [words in warning for warning in warnings] == [True]


def test_warning_of_positions_that_are_left_out(model: Inventory) -> None:
    words, warnings = "31 positions", result(model, measured(measured_level(nonfinite_tokens=31))).warnings
    assert [words in warning for warning in warnings] == [True]


# ---------------------------------------------------------------- beyond 16-bit float


def with_absmax(model: Inventory, absmax: dict[str, float]) -> tuple[Magnitudes, ...]:
    return tuple(Magnitudes(t.name, absmax.get(t.name, 1.0)) for t in model.tensors)


def test_extremes_are_the_largest_first(model: Inventory) -> None:
    points = [dataclasses.replace(EXAMPLE.stream[0], layer=i, label=f"p{i}", absmax=50_000.0 + i) for i in range(2)]
    found = result(
        model,
        measured(
            stream=(*points, dataclasses.replace(points[0], absmax=None), dataclasses.replace(points[0], absmax=HALF)),
            inputs={DOWN: 1e6, "output.weight": 40_000.0, "blk.0.ffn_up.weight": HALF, "blk.0.attn_q.weight": 1.0},
        ),
        values=with_absmax(model, {"token_embd.weight": 1e5, DOWN: 33_000.0, "output.weight": HALF}),
    )
    assert found.extremes == (
        Extreme("reference", "input", 1, DOWN, 1e6),
        Extreme("reference", "weight", None, "token_embd.weight", 1e5),
        Extreme("reference", "stream", 1, "p1", 50_001.0),
        Extreme("reference", "stream", 0, "p0", 50_000.0),
        Extreme("reference", "input", None, "output.weight", 40_000.0),
        Extreme("reference", "weight", 1, DOWN, 33_000.0),
    )
    (warning,) = found.warnings
    assert f"{DOWN} is given values up to 1,000,000" in warning
    assert "BF16" in warning


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("weight", "weight of token_embd.weight is 70,000"),
        ("input", "token_embd.weight is given values up to 70,000"),
        ("stream", "stream reaches, at token_embd.weight, 70,000"),
    ],
)
def test_warning_of_extremes_names_the_largest(what: str, words: str) -> None:
    row = Extreme("reference", what, None, "token_embd.weight", 70_000.0)
    (warning,) = warnings_module.warnings(
        settings(measured()), [], [], [row, dataclasses.replace(row, absmax=40_000.0)], None
    )
    assert words in warning
    assert "65,504" in warning


def test_types_16bit_by_type_and_range(tmp_path: Path) -> None:
    """BF16 stays; F32 and F16 become it in the upper half of the range of F16; vectors are not asked for."""
    bf16 = gguf.GGMLQuantizationType.BF16
    values = {"blk.0.ffn_down": 1e5, "blk.0.ffn_up": 40_000.0, "blk.0.attn_q": HALF, "blk.0.attn_k": HALF + 16}
    stored = {"blk.0.ffn_down": "F32", "blk.1.ffn_down": "F32", "blk.0.attn_output": "BF16"}

    def change(full: str, data: tiny.Floats) -> tuple[npt.NDArray[np.generic], gguf.GGMLQuantizationType | None]:
        name = full.removesuffix(".weight")
        if name in values:
            data = data.copy()
            data.flat[5] = -values[name]
        if stored.get(name) == "F32":
            return data, None
        if stored.get(name) == "BF16":
            return gguf.quantize(data, bf16), bf16
        return tiny.keep(full, data)

    inventory = model_file.read(tiny.write_llama(tmp_path / "mixed.gguf", change=change))
    found = sizes.types_16bit(inventory, magnitudes.scan(inventory))
    wide = {name.removesuffix(".weight") for name, kind in found.items() if kind == "BF16"}
    assert wide == {"blk.0.ffn_down", "blk.0.ffn_up", "blk.0.attn_k", "blk.0.attn_output"}
    assert set(found.values()) == {"F16", "BF16"}
    assert "output_norm.weight" not in found


# ---------------------------------------------------------------- the file


def test_result_with_every_oddity_is_strict_json(model: Inventory) -> None:
    odd = dataclasses.replace(EXAMPLE.stream[0], absmax=70_000.0, kurtosis=None)
    found = result(
        model,
        measured(
            measured_level("a", kld_mean=None, same_top=None, ppl_reference=None, nonfinite_tokens=9),
            measured_level("b"),
            failed={"c": "died"},
            stream=(odd,),
            inputs={DOWN: 3e38},
            non_finite=(broken(model="a", input_absmax=None, token=None, layer=None),),
        ),
        broken={"a": (DOWN,)},
        shared=(SharedTensors("a", "b", 1, 2, 3),),
    )
    text = as_json.to_json(found)
    for word in ("NaN", "Infinity", "nan"):
        assert word not in text
    assert as_json.from_json(text) == found
