"""The report's numbers and tables: what is shown, how it reads, what is said about values that do not exist."""

from __future__ import annotations

import dataclasses
import doctest
import math

import pytest

from qres.records.devices import DeviceAdvice
from qres.records.files import Fallback
from qres.records.output import Group, Histogram, Output
from qres.records.result import Comparison, Level, Result
from qres.records.stream import NoiseFloor, Point
from qres.records.units import RankCorrelation
from qres.report import formatting, markdown, sections
from qres.report.charts import scan
from qres.report.rows import stream
from qres.report.tables import files, layers
from qres.report.tables import levels as levels_module
from qres.report.tables.levels import comparisons, key_numbers
from qres.report.tables.table import Table
from tests.examples.levels import NOT_PATCHED, changed_level, unpatched
from tests.examples.result import example
from tests.report import rendered


def everything(result: Result) -> list[Table]:
    return [item for part in rendered.sections(result) for item in part.items if isinstance(item, Table)]


def with_levels(*levels: Level) -> Result:
    """The example with other levels, and without what was made of its own."""
    return dataclasses.replace(example(), levels=levels, mixes=(), stock=(), recoveries=(), recipes=())


def with_output(**changes: object) -> Result:
    level = example().levels[0]
    return with_levels(dataclasses.replace(level, output=dataclasses.replace(level.output, **changes)))  # type: ignore[arg-type]


def column(table: Table, title: str) -> list[str]:
    place = [col.title for col in table.columns].index(title)
    return [row[place] for row in table.rows]


def drawn(result: Result) -> set[str]:
    return {figure.name for figure in sections.figures(rendered.sections(result))}


@pytest.mark.parametrize("module", [formatting, markdown])
def test_docstring_examples(module: object) -> None:
    failed, tried = doctest.testmod(module)  # type: ignore[arg-type]
    assert tried > 0
    assert failed == 0


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "n/a"),
        (0.0, "0"),
        (0.058234, "0.0582"),
        (0.9999, "1.000"),
        (12.345, "12.3"),
        (1234.5, "1,234"),
        (-0.5, "−0.500"),
        (9.99e-5, "9.99e−5"),
        (float("inf"), "n/a"),
    ],
)
def test_significant(value: float | None, shown: str) -> None:
    assert formatting.significant(value) == shown


@pytest.mark.parametrize(
    ("mean", "error", "shown"),
    [
        (0.0582, 0.0041, "0.0582 ± 0.0041"),
        (0.002, 0.05, "0.0020 ± 0.0500"),
        (5.1e-5, 4e-6, "(5.10 ± 0.40)e−5"),
        (0.0, 0.0, "0 ± 0"),
        (5e-324, 5e-324, "(0.00 ± 0.00)e−300"),
        (None, 0.1, "n/a"),
        (0.0582, None, "0.0582"),
    ],
)
def test_plus_minus_same_decimals(mean: float | None, error: float | None, shown: str) -> None:
    assert formatting.plus_minus(mean, error) == shown


def test_every_table_is_rectangular_and_named_once() -> None:
    found = everything(example())
    assert len({table.name for table in found}) == len(found)
    for table in found:
        width = len(table.columns)
        assert {len(row) for row in table.rows} == {width}
        assert {len(keys) for keys in table.keys} == {width}
        assert len(table.rows) == len(table.keys)
        assert all(isinstance(cell, str) for row in table.rows for cell in row)


def test_levels_marks_the_recommended_level_and_gives_multiples_of_the_floor() -> None:
    table = levels_module.levels(example())
    floor = example().noise_floor.kld_mean
    assert floor is not None
    assert table.marked == (0,)
    assert column(table, "level") == ["Q4_K_M", "Q5_K_M"]
    for place, level in enumerate(example().levels):
        out = level.output
        assert out.kld_mean is not None
        assert out.ppl is not None
        assert out.ppl_reference is not None
        assert column(table, "× noise floor")[place] == f"{out.kld_mean / floor:,.0f}×"
        assert column(table, "KLD mean ± SE")[place] == formatting.plus_minus(out.kld_mean, out.kld_se)
        change = 100 * (out.ppl / out.ppl_reference - 1)
        assert column(table, "PPL change")[place].startswith(f"{change:+.2f} ± ".replace("-", "−"))


def test_change_of_the_perplexity_has_its_standard_error() -> None:
    result = with_output(ln_ppl_ratio=math.log(1.05), ln_ppl_ratio_se=0.01)
    assert column(levels_module.levels(result), "PPL change") == ["+5.00 ± 1.05 %"]


def test_value_below_the_noise_floor_says_so() -> None:
    floor = example().noise_floor.kld_mean
    assert floor is not None
    result = with_output(kld_mean=floor / 2)
    assert column(levels_module.levels(result), "× noise floor") == ["below (0.50×)"]
    assert "below the noise floor" in key_numbers(result)[0].note
    level = example().levels[0]
    *others, last = level.sensitivity.keep_16bit
    rows = (*others, dataclasses.replace(last, kld_recovered=0.00012))
    noisy = dataclasses.replace(example(), noise_floor=NoiseFloor(0.00018, None))
    kept = layers.keep(noisy, changed_level(level, keep_16bit=rows))
    assert column(kept, "KLD recovered")[-1] == "0.000120 (below floor)"
    assert "below" not in column(kept, "KLD recovered")[0]


def test_noise_floor_missing_or_zero_is_said() -> None:
    for floor, words in ((None, "No noise floor"), (0.0, "repeats itself exactly")):
        result = dataclasses.replace(example(), noise_floor=NoiseFloor(floor, floor))
        assert words in levels_module.levels(result).note
        assert column(levels_module.levels(result), "× noise floor") == ["n/a", "n/a"]


def test_nonfinite_logits_are_named() -> None:
    table = levels_module.levels(with_output(kld_mean=None, kld_se=None, nonfinite_tokens=2040))
    assert column(table, "KLD mean ± SE") == ["n/a (non-finite)"]
    assert "Q4_K_M 2,040" in table.note


def test_keep_adds_up_the_bytes_and_states_the_cut() -> None:
    level = example().levels[0]
    table = layers.keep(example(), level)
    added = [row.bytes_added / 2**20 for row in level.sensitivity.keep_16bit]
    assert column(table, "so far") == [f"{sum(added[: place + 1]):.1f}" for place in range(len(added))]
    assert table.marked == (0,)
    assert "The first is worth" in table.note
    assert "did not choose the list" in table.note
    assert "without the errors of embedding the KLD" in table.note
    check = level.sensitivity.keep_check
    assert check is not None
    share = 100 * (1 - check.kld_without_units / check.kld_all_injected)
    assert f"recovers {share:.1f} % for {check.bytes_added / 2**20:.1f} MiB" in table.note
    two = tuple(dataclasses.replace(row, worth_it=i < 2) for i, row in enumerate(level.sensitivity.keep_16bit))
    longer = layers.keep(example(), changed_level(level, keep_16bit=two))
    assert longer.marked == (0, 1)
    assert "first 2 are worth" in longer.note


def test_units_and_what_to_keep_name_their_tensors() -> None:
    level = example().levels[0]
    units = dict(zip(column(layers.units(example(), level), "unit"), _tensors_of_units(level), strict=True))
    assert units["embedding"] == "token_embd"
    assert units["3.attention"] == "blk.3: attn_k, attn_output, attn_q, attn_v"
    assert units["3.ffn"] == "blk.3: ffn_down, ffn_gate, ffn_up"
    assert units["head"] == "output"
    keep = layers.keep(example(), level)
    assert column(keep, "tensors") == [units[name] for name in column(keep, "unit")]


@pytest.mark.parametrize(
    ("weights", "shown"),
    [
        ((), ""),
        (("blk.0.ffn_down.weight",), "blk.0: ffn_down"),
        (("blk.10.attn_q.weight", "blk.11.attn_q.weight"), "blk.10.attn_q, blk.11.attn_q"),  # no block in common
        (("blk.1.ffn_up_exps.weight", "blk.1.ffn_gate_inp.weight"), "blk.1: ffn_up_exps, ffn_gate_inp"),
        (("blk.1.ffn_up.weight", "output.weight"), "blk.1.ffn_up, output"),
        (("token_embd.weight", "output.weight"), "token_embd, output"),
        (("blk.2.a.b.weight", "blk.2.c"), "blk.2: a.b, c"),
    ],
)
def test_tensors_are_named_with_the_block_they_share(weights: tuple[str, ...], shown: str) -> None:
    level = example().levels[0]
    unit = dataclasses.replace(level.sensitivity.units[3], weights=weights)
    assert _tensors_of_units(changed_level(level, units=(unit,))) == [shown]


def _tensors_of_units(level: Level) -> list[str]:
    return column(layers.units(example(), level), "tensors")


def test_kept_unit_without_a_row_of_its_own_has_no_tensors() -> None:
    level = changed_level(example().levels[0], units=())
    rows = tuple(dataclasses.replace(row, tensors=()) for row in level.sensitivity.keep_16bit)
    level = changed_level(level, keep_16bit=rows)
    assert column(layers.keep(example(), level), "tensors") == [""] * len(rows)


def test_rank_correlations_say_among_which_units() -> None:
    ranked = example()
    assert ranked.settings.units == "ranked"
    words = "Only the patched branches are counted"
    assert words in layers.rank_correlations(ranked).note
    every = dataclasses.replace(ranked, settings=dataclasses.replace(ranked.settings, units="all"))
    assert words not in layers.rank_correlations(every).note


def test_keep_without_check_or_worthy_row_says_so() -> None:
    level = example().levels[0]
    rows = tuple(dataclasses.replace(row, worth_it=False) for row in level.sensitivity.keep_16bit)
    note = layers.keep(example(), changed_level(level, keep_16bit=rows, keep_check=None)).note
    assert "No unit is worth its bytes" in note
    assert "not checked on other text" in note


def test_unmeasured_unit_keeps_its_row_and_reason() -> None:
    table = layers.units(example(), unpatched(example().levels[0], "2.attention"))
    place = column(table, "unit").index("2.attention")
    assert column(table, "KLD ± SE")[place] == "n/a"
    assert column(table, "how")[place] == NOT_PATCHED
    assert table.note.startswith("9 of 10 units measured")
    assert "on the ranking text (built-in rank text)" in table.note
    assert layers.units(example(), example().levels[0]).note.startswith("10 of 10 units measured")


def test_rank_sentence_names_the_best_measure_and_the_rest() -> None:
    level = example().levels[0]
    strong = changed_level(level, rank_correlation=RankCorrelation(13, 0.2, 0.41, 0.55, 0.88, -0.11))
    sentence = layers.rank_sentence(strong)
    assert sentence.startswith("Q4_K_M: injected error orders the units almost as the measured KLD does (0.88")
    assert "branch ratio 0.20" in sentence
    few = changed_level(level, rank_correlation=RankCorrelation(3, None, None, None, None, None))
    assert "fewer than 4" in layers.rank_sentence(few)
    weak = changed_level(level, rank_correlation=RankCorrelation(9, 0.2, 0.3, 0.1, 0.25, 0.0))
    assert "does not order the units reliably" in layers.rank_sentence(weak)


def test_comparison_within_two_standard_errors_is_not_told_apart() -> None:
    close = Comparison("A", "B", 0.001, 0.0006)
    table = comparisons(dataclasses.replace(example(), comparisons=(close, *example().comparisons)))
    assert column(table, "told apart") == [
        "no, within 2 standard errors",
        "yes, Q5_K_M is closer to the reference",
    ]


def test_tensors_on_a_fallback_type_are_listed_with_their_level() -> None:
    level = example().levels[0]
    reason = "rows of 576 are not a multiple of 256"
    rows = tuple(Fallback(tensor.name, "Q4_K", "Q5_0", reason) for tensor in example().tensors[:9])
    few, many = (changed_level(level, fallback_tensors=rows[:n]) for n in (8, 9))
    table = files.fallbacks(many)
    assert table.rows[0] == (rows[0].tensor, "Q4_K", "Q5_0", reason)
    assert column(table, "tensor") == [row.tensor for row in rows]
    assert "9 of 39 tensors could not get" in table.note
    assert (files.fallbacks(few).folded, table.folded) == (False, True)
    names = [shown.name for shown in everything(with_levels(many, example().levels[1]))]
    assert "fallbacks-Q4_K_M" in names
    assert "fallbacks-Q5_K_M" not in names


def test_missing_numbers_are_n_a() -> None:
    level, first = example().levels[0], example().stream[0]
    health = layers.health(dataclasses.replace(example(), stream=(dataclasses.replace(first, kurtosis=None),)))
    assert column(health, "kurtosis") == ["n/a"]
    keep = tuple(dataclasses.replace(row, confidence=None, type="BF16") for row in level.sensitivity.keep_16bit[:1])
    kept = layers.keep(example(), changed_level(level, keep_16bit=keep))
    assert (column(kept, "confidence"), column(kept, "as")) == (["n/a"], ["BF16"])
    group = Group("not finite", 0, None, None)
    groups = levels_module.by_confidence(with_output(by_confidence=(group,)))
    assert groups.rows == (("Q4_K_M", "not finite", "0", "n/a", "n/a"),)
    point = dataclasses.replace(level.points[3], local_error_median=None)
    table = layers.points(example(), dataclasses.replace(level, points=(point,)))
    assert "n/a" in table.rows[0]
    bare = changed_level(level, rank_correlation=None, additivity=None, keep_16bit=(), keep_check=None)
    result = with_levels(bare)
    assert layers.rank_correlations(result).rows == layers.additivity(result).rows == ()
    assert "keep-Q4_K_M" not in [shown.name for shown in everything(result)]


def test_device_on_which_nothing_fits_is_said() -> None:
    advice = DeviceAdvice("watch, 64 MB", 2048, None, None, "no measured level fits")
    row = dataclasses.replace(example().deployment[0], device=advice.device, fits=False)
    result = dataclasses.replace(example(), device_advice=(advice,), deployment=(row,))
    assert levels_module.advice(result).rows == (
        ("watch, 64 MB", "2,048", "none fits", "n/a", "no measured level fits"),
    )
    assert column(levels_module.deployment(result), "fits") == ["no"]
    assert set(column(levels_module.deployment(example()), "fits")) == {"yes"}


def test_long_tables_are_folded() -> None:
    level = example().levels[0]
    units = (*level.sensitivity.units, *level.sensitivity.units)
    assert not layers.units(example(), level).folded
    assert layers.units(example(), changed_level(level, units=units)).folded


def test_no_recommendation_has_no_key_numbers() -> None:
    verdict = dataclasses.replace(example().verdict, level=None)
    result = dataclasses.replace(example(), verdict=verdict)
    assert key_numbers(result) == ()
    assert levels_module.levels(result).marked == ()


def test_quantized_reference_is_not_called_16_bit() -> None:
    reference = dataclasses.replace(example().reference, is_16bit=False)
    result = dataclasses.replace(example(), reference=reference)
    assert "reference file" in key_numbers(result)[2].note
    assert ("16 bit", "no: levels are compared with an already quantized model") in files.reference(result).rows


def test_exact_point_has_infinite_sqnr() -> None:
    level = example().levels[0]
    point = dataclasses.replace(level.points[0], drift_median=0.0, sqnr_db=None)
    table = layers.points(example(), dataclasses.replace(level, points=(point,)))
    assert column(table, "SQNR dB") == ["∞"]


def test_all_charts_of_the_example() -> None:
    names = {"ladder", "distribution", "recipes", "sensitivity", "trust", "tensors"}
    assert drawn(example()) == names | {"stream", "drift", "own_error", "ledger"}


def test_charts_without_mapped_points_are_left_out_with_a_sentence() -> None:
    level = dataclasses.replace(example().levels[0], points=())
    result = with_levels(level)
    assert drawn(result) == {"ladder", "distribution", "sensitivity", "trust", "tensors"}
    assert "was not mapped" in rendered.text(result)


def test_charts_without_levels() -> None:
    result = with_levels()
    assert drawn(result) == set()
    assert "No level was measured." in rendered.text(result)


def test_charts_when_every_number_is_missing() -> None:
    level = example().levels[0]
    output = {field.name: None for field in dataclasses.fields(Output) if "None" in str(field.type)}
    empty = changed_level(
        level,
        output=dataclasses.replace(level.output, kld_histogram=Histogram((), ()), **output),  # type: ignore[arg-type]
        points=tuple(
            dataclasses.replace(
                point,
                **{field.name: None for field in dataclasses.fields(Point) if "float" in str(field.type)},  # type: ignore[arg-type]
            )
            for point in level.points
        ),
        units=tuple(dataclasses.replace(unit, kld=None, kld_se=None) for unit in level.sensitivity.units),
    )
    result = with_levels(empty)
    assert drawn(result) == {"tensors"}
    assert "Not drawn" in rendered.text(result)


def test_one_level_offers_no_choice_of_level() -> None:
    result = with_levels(example().levels[0])
    for chart in (scan.stream, scan.sensitivity, scan.ledger):
        spec = chart(result)
        assert spec is not None
        assert "params" not in spec


def test_missing_value_breaks_the_line() -> None:
    level = example().levels[0]
    points = list(level.points)
    points[7] = dataclasses.replace(points[7], local_error_median=None, injected_error_median=None)
    rows = stream.own_errors(with_levels(dataclasses.replace(level, points=tuple(points))))
    assert {row["value"] is None for row in rows if row["label"] == points[7].label} == {True}
    assert {row["value"] is None for row in rows if row["label"] != points[7].label} == {False}


def test_places_spread_the_branches_of_a_layer() -> None:
    assert stream.places([None, 0, 0, 1, 1, 1]) == pytest.approx([-1, 0, 0.5, 1, 4 / 3, 5 / 3])


def test_ledger_parts_add_up_to_one() -> None:
    rows = [row for row in stream.ledgers(example()) if row["level"] == "Q4_K_M"]
    assert sum(row["value"] for row in rows) == pytest.approx(1)


def test_ledger_shows_scaling_only_where_there_is_any() -> None:
    level = example().levels[0]
    share = 0.125  # of the first branch's point, taken from what it inherited
    points = [dataclasses.replace(point, scaling_share=share if point.index == 1 else 0.0) for point in level.points]
    with_scaling = with_levels(dataclasses.replace(level, points=tuple(points)))
    rows = stream.ledgers(with_scaling)
    assert sum(row["value"] for row in rows) == pytest.approx(1)
    assert sum(row["value"] for row in rows if row["part"] == stream.SCALED) == share
    plain = {(row["layer"], row["part"]): row["value"] for row in stream.ledgers(with_levels(level))}
    assert stream.SCALED not in {part for _, part in plain}
    changed = {(row["layer"], row["part"]): row["value"] for row in rows}
    assert changed["0", stream.INHERITED] == pytest.approx(plain["0", stream.INHERITED] - share)
    cells = column(layers.points(with_scaling, with_scaling.levels[0]), "by scaling")
    assert cells == ["0.0 %", "12.5 %", *["0.0 %"] * (len(cells) - 2)]
    assert "by scaling" not in [col.title for col in layers.points(example(), level).columns]
    spec = scan.ledger(with_scaling)
    assert spec is not None
    assert "<svg" in scan.to_svg(spec, {})


def test_histogram_starting_at_zero_is_drawn_from_the_next_logarithmic_step() -> None:
    result = with_output(kld_histogram=Histogram((0.0, 1e-3, 1e-2), (3, 1)))
    assert [row["kld"] for row in stream.histograms(result)] == pytest.approx([1e-4, 1e-3, 1e-2])


def test_hundred_layers_are_drawn() -> None:
    level = example().levels[0]
    points = tuple(
        dataclasses.replace(level.points[1 + j % 2], index=j + 1, layer=j // 2, label=f"{j // 2}.{'af'[j % 2]}")
        for j in range(200)
    )
    reference = dataclasses.replace(example().reference, n_layer=100)
    result = dataclasses.replace(with_levels(dataclasses.replace(level, points=points)), reference=reference)
    spec = scan.drift(result)
    assert spec is not None
    assert "<svg" in scan.to_svg(spec, {})
