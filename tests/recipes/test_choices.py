"""What can be chosen for each tensor and what it costs, against sums made by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from qres.errors import InputError, QresError, UnsupportedError
from qres.recipes import correction
from qres.recipes.choices import MODEL_ERROR, Choices, loss_of, padded, size_of
from qres.records.recipe import Rung
from qres.records.result import Result
from tests.examples import recipe as ex
from tests.examples.levels import changed_level
from tests.examples.recipe import (
    DOWN_0,
    EMBEDDING,
    LADDER,
    NAMES,
    NORM,
    OPTIONS,
    OTHER_NORM,
    OUT_0,
    OUT_1,
    ROUTER,
    UNPREDICTED,
)

Q4 = LADDER["Q4_K_M"]


@pytest.fixture(scope="module")
def choices() -> Choices:
    return Choices(ex.example())


# ---------------------------------------------------------------- options


def test_options_are_the_predicted_types_and_16_bit(choices: Choices) -> None:
    assert [row.tensor.name for row in choices.rows] == list(NAMES)
    for name, options in OPTIONS.items():
        row = choices.by_name[name]
        assert row.quantizable
        assert dict(zip(row.types, row.losses, strict=True)) == pytest.approx(options)
        assert dict(zip(row.types, row.bytes, strict=True)) == {kind: ex.size(name, kind) for kind in options}


def test_options_are_smallest_first_and_of_one_size_the_worst_first(choices: Choices) -> None:
    assert choices.by_name[EMBEDDING].types == ("Q4_0", "IQ4_NL", "Q5_0", "Q5_1", "Q8_0", "F16")
    assert choices.by_name[OUT_1].types == ("Q4_0", "Q4_K", "IQ4_NL", "Q5_K", "Q6_K", "Q8_0", "F16")
    assert choices.by_name[DOWN_0].types == ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "BF16")


def test_a_tied_head_adds_its_damage_but_no_bytes(choices: Choices) -> None:
    row = choices.by_name[EMBEDDING]
    assert loss_of(row, "Q5_0") == pytest.approx(0.0008 + 0.0050)
    assert size_of(row, "Q5_0") == 576 * 1001 // 32 * 22
    lighter = {**Q4, EMBEDDING: "Q5_0"}
    assert choices.bytes_of(Q4) - choices.bytes_of(lighter) == 576 * 1001 // 32 * (34 - 22)


def test_each_use_of_a_tensor_has_a_correction_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = {(row.tensor, row.unit): 1.0 for row in ex.damages()}
    factors |= {(EMBEDDING, "embedding"): 2.0, (EMBEDDING, "head"): 3.0, (OUT_0, "0.ffn"): 0.5}
    monkeypatch.setattr(correction, "factors", lambda _result: factors)
    found = Choices(ex.example())
    assert loss_of(found.by_name[EMBEDDING], "Q5_0") == pytest.approx(2 * 0.0008 + 3 * 0.0050)
    assert loss_of(found.by_name[OUT_0], "Q4_K") == pytest.approx(0.0015)
    assert loss_of(found.by_name[OUT_1], "Q4_K") == pytest.approx(0.00101)
    assert loss_of(found.by_name[EMBEDDING], "F16") == 0
    unknown = Choices(ex.without_predictions(ex.example(), EMBEDDING, "Q5_0"))
    assert loss_of(unknown.by_name[EMBEDDING], "Q5_0") is None


def test_a_type_that_one_use_has_no_prediction_for_is_no_option() -> None:
    for missing in ("head", "embedding"):
        result = ex.example()
        assert result.prediction is not None
        rows = tuple(
            replace(row, types=tuple(one for one in row.types if one.type != "Q5_0")) if row.unit == missing else row
            for row in result.prediction.tensors
        )
        result = replace(result, prediction=replace(result.prediction, tensors=rows))
        assert Choices(result).by_name[EMBEDDING].types == ("Q4_0", "IQ4_NL", "Q5_1", "Q8_0", "F16")
    unknown = Choices(ex.without_predictions(ex.example(), EMBEDDING, "Q5_0"))
    assert unknown.by_name[EMBEDDING].types == ("Q4_0", "IQ4_NL", "Q5_1", "Q8_0", "F16")
    assert unknown.loss({**Q4, EMBEDDING: "Q5_0"}) is None


@pytest.mark.parametrize(
    ("name", "quantizable"), [(NORM, False), (OTHER_NORM, False), (ROUTER, False), (UNPREDICTED, True)]
)
def test_what_there_is_nothing_to_choose_for(choices: Choices, name: str, quantizable: bool) -> None:
    row = choices.by_name[name]
    assert (row.types, row.bytes, row.losses) == ((), (), ())
    assert row.quantizable is quantizable
    assert loss_of(row, "Q4_0") == 0


def test_weights_are_counted_once(choices: Choices) -> None:
    assert choices.n_weights == 576 * 1001 + 576 + 512 * 576 * 2 + 576 * 3 + 1024 * 576 * 2 + 576 * 129 + 576


# ---------------------------------------------------------------- bytes


def test_bytes_of_every_level(choices: Choices) -> None:
    for types in LADDER.values():
        assert choices.bytes_of(types) == ex.data_bytes(types)
        assert choices.file_bytes(types) == ex.file_bytes(types)
    # The embedding as Q8_0 and the unpredicted matrix as Q5_0 do not end at a multiple of 32 bytes.
    assert ex.size(EMBEDDING, "Q4_0") % 32 == 4
    assert ex.file_bytes(Q4) > ex.HEADER_BYTES + ex.data_bytes(Q4)


def test_header_is_what_a_measured_file_has_beside_its_padded_tensors(choices: Choices) -> None:
    assert choices.header_bytes == ex.HEADER_BYTES


@pytest.mark.parametrize(("n", "expected"), [(0, 0), (1, 32), (31, 32), (32, 32), (33, 64), (2**40 + 1, 2**40 + 32)])
def test_padding(n: int, expected: int) -> None:
    assert padded(n) == expected


def test_file_bytes_are_those_of_a_real_file(tmp_path: Path, choices: Choices) -> None:
    def write(name: str, types: dict[str, str]) -> int:
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        for tensor, kind in types.items():
            traits = gguf.GGMLQuantizationType[kind]
            shape = gguf.quants.quant_shape_to_byte_shape(ex.SHAPES[tensor][::-1], traits)
            writer.add_tensor(tensor, np.zeros(shape, np.uint8), raw_dtype=traits)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return (tmp_path / name).stat().st_size

    mix = {**Q4, EMBEDDING: "Q4_0", OUT_0: "Q6_K", DOWN_0: "BF16", UNPREDICTED: "Q4_0"}
    grown = write("mix.gguf", mix) - write("level.gguf", Q4)
    assert choices.file_bytes(mix) - choices.file_bytes(Q4) == grown
    assert choices.bytes_of(mix) - choices.bytes_of(Q4) != grown


# ---------------------------------------------------------------- predictions


def test_loss_is_the_sum_over_tensors(choices: Choices) -> None:
    for name in ("Q4_0", "Q4_K_S", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"):
        assert choices.loss(LADDER[name]) == pytest.approx(ex.loss(LADDER[name]), rel=1e-12)
    assert choices.loss(Q4) == pytest.approx(0.00035 + 0.0030 + 0.0004 + 0.00101 + 0.00215)


def test_loss_of_types_without_prediction_is_unknown(choices: Choices) -> None:
    assert choices.loss(LADDER["Q2_K"]) is None
    assert choices.loss({**Q4, OUT_0: "Q4_0"}) is None  # predicted for other tensors only
    assert choices.expected(None) is None


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_16_bit_and_more_is_no_damage_whichever_it_is(choices: Choices, kind: str) -> None:
    types = {**Q4, **dict.fromkeys(OPTIONS, kind)}
    assert choices.loss(types) == 0


def test_what_is_not_chosen_damages_nothing(choices: Choices) -> None:
    assert choices.loss({**Q4, UNPREDICTED: "Q8_0"}) == choices.loss({**Q4, UNPREDICTED: "Q4_0"})


def test_factor_is_that_of_the_levels_at_the_levels(choices: Choices) -> None:
    assert choices.factor(0.00691) == pytest.approx(0.0076 / 0.00691)
    assert choices.factor(0.00114) == pytest.approx(0.00099 / 0.00114)


def test_factor_between_levels_is_on_a_line_over_the_logarithm(choices: Choices) -> None:
    middle = math.sqrt(0.00691 * 0.00114)
    assert choices.factor(middle) == pytest.approx((0.0076 / 0.00691 + 0.00099 / 0.00114) / 2)
    for raw in np.geomspace(0.00115, 0.0069, 7):
        assert raw * choices.factor(raw) == pytest.approx(ex.calibrated(raw))


@pytest.mark.parametrize(("raw", "level"), [(0.0, "Q6_K"), (1e-9, "Q6_K"), (0.001, "Q6_K"), (0.02, "Q4_K_M")])
def test_factor_beyond_the_levels_is_that_of_the_last(choices: Choices, raw: float, level: str) -> None:
    assert choices.factor(raw) == pytest.approx(ex.MEASURED[level] / ex.RAW[level])


def test_factor_between_three_levels() -> None:
    levels = (*ex.example().levels, ex.level("Q5_K_M", 0.0047))  # raw 0.00235: factor 2
    found = Choices(replace(ex.example(), levels=levels))
    assert found.factor(0.00235) == pytest.approx(2)
    assert found.factor(math.sqrt(0.00235 * 0.00691)) == pytest.approx((2 + 0.0076 / 0.00691) / 2)
    assert found.factor(math.sqrt(0.00235 * 0.00114)) == pytest.approx((2 + 0.00099 / 0.00114) / 2)


def test_factor_of_one_level_is_everywhere_the_same() -> None:
    found = Choices(replace(ex.example(), levels=ex.example().levels[:1]))
    assert [found.factor(raw) for raw in (1e-6, 0.00691, 1.0)] == pytest.approx([0.0076 / 0.00691] * 3)


def test_levels_that_nothing_was_predicted_or_measured_of_calibrate_nothing() -> None:
    silent = (ex.level("Q4_K_M", 0.0076, LADDER["Q2_K"]), ex.level("Q6_K", None))
    found = Choices(replace(ex.example(), levels=silent))
    assert found.factor(0.004) == 1
    assert found.expected(0.004) is None
    one = Choices(replace(ex.example(), levels=(*silent, ex.level("Q5_K_M", 0.0047))))
    assert one.factor(0.004) == pytest.approx(2)


@pytest.mark.parametrize("kld", [1e-6, 0.0005, 0.00099, 0.002, 0.0076, 0.05, 3.0])
def test_raw_for_is_the_prediction_that_is_calibrated_to_it(choices: Choices, kld: float) -> None:
    raw = choices.raw_for(kld)
    assert raw * choices.factor(raw) == pytest.approx(kld, rel=1e-9)
    assert raw * choices.factor(raw) <= kld * (1 + 1e-12)


def test_expected_is_calibrated_and_inside_its_interval(choices: Choices) -> None:
    for raw in (1e-5, 0.00114, 0.003, 0.00691, 0.05):
        found = choices.expected(raw)
        assert found is not None
        assert found.raw_kld == raw
        assert found.kld == pytest.approx(ex.calibrated(raw))
        assert found.factor == pytest.approx(found.kld / raw)
        assert found.low < found.kld < found.high
        assert found.kld / found.low == pytest.approx(found.high / found.kld)  # as far off either way


def test_interval_has_the_errors_of_model_calibration_and_verification() -> None:
    # The level's relative error is 0.2 on 8 chunks, and so is that of a verification on 8.
    result = replace(ex.example(), levels=(ex.level("Q4_K_M", 0.0076, kld_se=0.00152), ex.level("Q6_K", 0.00099)))
    found = Choices(result).expected(0.006)  # nearer to Q4_K_M
    assert found is not None
    spread = math.sqrt(MODEL_ERROR**2 + 0.2**2 + 0.2**2)
    assert math.log(found.high / found.kld) == pytest.approx(1.96 * spread)
    near = Choices(result).expected(0.0012)  # nearer to Q6_K, whose error is 0.0003 of 0.00099
    assert near is not None
    relative = 0.0003 / 0.00099
    assert math.log(near.high / near.kld) == pytest.approx(1.96 * math.sqrt(0.1**2 + 2 * relative**2))


def test_interval_of_a_level_measured_on_more_text() -> None:
    level = ex.level("Q4_K_M", 0.0076, kld_se=0.00076)
    longer = replace(level, output=replace(level.output, chunks=32))
    found = Choices(replace(ex.example(), levels=(longer,))).expected(0.006)
    assert found is not None
    # Its own error is 0.1; on a quarter of the chunks it is twice as large.
    assert math.log(found.high / found.kld) == pytest.approx(1.96 * math.sqrt(0.1**2 + 0.1**2 + 0.2**2))


def test_interval_where_one_chunk_gives_no_standard_error() -> None:
    level = ex.level("Q4_K_M", 0.0076)
    single = replace(level, output=replace(level.output, kld_se=None, chunks=1))
    found = Choices(replace(ex.example(), levels=(single,))).expected(0.006)
    assert found is not None
    # One text is off by half; eight chunks are off by less.
    assert math.log(found.high / found.kld) == pytest.approx(1.96 * math.sqrt(0.1**2 + 0.5**2 + 0.5**2 / 8))


# ---------------------------------------------------------------- levels


def test_levels_are_smallest_first_and_have_all_tensors() -> None:
    four, six = ex.example().levels
    gap = changed_level(four, name="gap", tensor_types=(*four.file.tensor_types[:-1], ""))
    unknown = changed_level(four, name="old", tensor_types=())
    found = Choices(replace(ex.example(), levels=(six, gap, unknown, four)))
    assert [level.name for level in found.levels] == ["Q4_K_M", "Q6_K"]
    assert found.level_types(found.levels[0]) == Q4


def test_types_by_level_are_by_size_and_measured_types_count() -> None:
    changed = {**Q4, OUT_0: "Q5_K"}
    result = replace(ex.example(), levels=(ex.level("Q4_K_M", 0.005, changed), ex.level("mine", 0.1, LADDER["Q4_0"])))
    found = Choices(result).types_by_level
    assert found["Q4_K_M"] == changed
    assert found["Q5_K_M"] == LADDER["Q5_K_M"]
    assert found["mine"] == LADDER["Q4_0"]
    assert set(found) == {*LADDER, "mine"}
    sizes = [ex.data_bytes(types) for types in found.values()]
    assert sizes == sorted(sizes)


# ---------------------------------------------------------------- refusals


def _no_levels(result: Result) -> Result:
    return replace(result, levels=tuple(changed_level(level, tensor_types=()) for level in result.levels))


def _not_used(result: Result) -> Result:
    assert result.prediction is not None
    return replace(result, prediction=replace(result.prediction, used=False, reason="the replay is off by 0.3"))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            lambda r: replace(r, reference=replace(r.reference, is_16bit=False)),
            UnsupportedError,
            "trained llama was no 16-bit model",
        ),
        (_not_used, UnsupportedError, "there are none: the replay is off by 0.3"),
        (lambda r: replace(r, ladder=()), UnsupportedError, "llama.cpp cannot quantize trained llama"),
        (_no_levels, UnsupportedError, "no level was measured that it could be calibrated on"),
        (lambda r: replace(r, levels=()), UnsupportedError, "no level was measured that it could be calibrated on"),
    ],
)
def test_results_that_no_recipe_can_be_made_of(
    change: Callable[[Result], Result], error: type[QresError], words: str
) -> None:
    with pytest.raises(error) as caught:
        Choices(change(ex.example()))
    assert type(caught.value) is error
    assert words in caught.value.message


@pytest.mark.parametrize(
    "change",
    [
        lambda r: replace(r, tensors=r.tensors[:-1]),
        lambda r: replace(r, ladder=(*r.ladder[:-1], replace(r.ladder[-1], types=r.ladder[-1].types[1:]))),
        lambda r: replace(r, levels=(r.levels[0], changed_level(r.levels[1], tensor_types=("F16",)))),
    ],
)
def test_lists_of_types_that_are_not_of_all_tensors_are_refused(change: Callable[[Result], Result]) -> None:
    with pytest.raises(InputError, match="lists of tensor types differ in length"):
        Choices(change(ex.example()))


def test_levels_that_all_lack_a_tensor_are_none_to_calibrate_on() -> None:
    levels = tuple(changed_level(one, tensor_types=(*one.file.tensor_types[:-1], "")) for one in ex.example().levels)
    with pytest.raises(UnsupportedError, match="no level was measured"):
        Choices(replace(ex.example(), levels=levels))


def test_the_widest_level_says_what_is_never_quantized() -> None:
    # At a smaller level the router is quantized, at the widest one it is not, and that is what counts.
    ladder = ex.example().ladder
    first = Rung("Q2_K", tuple("Q4_0" if name == ROUTER else kind for name, kind in LADDER["Q2_K"].items()))
    assert not Choices(replace(ex.example(), ladder=(first, *ladder[1:]))).by_name[ROUTER].quantizable
    last = Rung("Q8_0", tuple("Q8_0" if name == ROUTER else kind for name, kind in LADDER["Q8_0"].items()))
    row = Choices(replace(ex.example(), ladder=(*ladder[:-1], last))).by_name[ROUTER]
    assert row.quantizable
    assert row.types == ("Q4_0", "Q8_0", "F16")
