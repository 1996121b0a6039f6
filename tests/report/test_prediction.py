"""Predicted sensitivity in the reports: marked everywhere, explained, and said where it does not exist."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any

import pytest

from qres.records import as_json
from qres.records.files import TypeShare
from qres.records.prediction import Calibration, Prediction, TensorDamage, TypeDamage
from qres.records.result import Level, Result
from qres.records.stream import NoiseFloor
from qres.records.units import Additivity, RankCorrelation
from qres.report import html, paragraphs, sections
from qres.report.charts import prediction as prediction_charts
from qres.report.formatting import PREDICTED, plus_minus, significant
from qres.report.rows import prediction as prediction_rows
from qres.report.tables import layers
from qres.report.tables import prediction as prediction_tables
from qres.report.tables import recipes as recipe_tables
from qres.report.tables.table import Table
from tests.effort import lines_run
from tests.examples.levels import changed_level, unpatched
from tests.examples.result import example
from tests.report import rendered
from tests.report.test_html import HOSTILE, Page
from tests.report.test_tables import column

NEW = {"trust", "tensors"}
GAP = "2.attention"


def found(result: Result) -> Prediction:
    return result.prediction


def without() -> Result:
    """The example without a prediction, and so without recipes."""
    levels = tuple(
        changed_level(
            level,
            calibration=None,
            trust=None,
            units=tuple(
                dataclasses.replace(unit, predicted_kld=None, predicted_se=None) for unit in level.sensitivity.units
            ),
        )
        for level in example().levels
    )
    recipes: dict[str, Any] = dict.fromkeys(("ladder", "mixes", "stock", "recoveries", "recipes"), ())
    unused = dataclasses.replace(found(example()), used=False, reason="the replay is off", tensors=())
    return dataclasses.replace(example(), prediction=unused, levels=levels, **recipes)


def with_sensitivity(**changes: object) -> Result:
    return dataclasses.replace(example(), prediction=dataclasses.replace(found(example()), **changes))  # type: ignore[arg-type]


def with_level(**changes: object) -> Result:
    first, *rest = example().levels
    return dataclasses.replace(example(), levels=(changed_level(first, **changes), *rest))


def with_gap() -> Result:
    """The example with a unit that was not patched at its first level."""
    first, *rest = example().levels
    return dataclasses.replace(example(), levels=(unpatched(first, GAP), *rest))


def added_up(level: Level) -> tuple[float, float]:
    """The KLDs of the units that were patched, and with the predictions of the others."""
    patched = [unit.kld for unit in level.sensitivity.units if unit.kld is not None]
    others = [unit.predicted_kld or 0.0 for unit in level.sensitivity.units if unit.kld is None]
    return sum(patched), sum(patched) + sum(others)


def names(result: Result) -> set[str]:
    return {part.name for part in rendered.sections(result)}


def predicted_tables(result: Result) -> list[Table]:
    return [item for part in rendered.sections(result) for item in part.items if isinstance(item, Table)]


# -- predicted is never printed as measured


def forms(result: Result) -> set[str]:
    """Every predicted number of a result as a report would write it, where it is long enough to be told."""
    values: list[tuple[float | None, float | None]] = []
    for level in result.levels:
        values += [(unit.predicted_kld, unit.predicted_se) for unit in level.sensitivity.units]
        if level.sensitivity.calibration is not None:
            values.append((level.sensitivity.calibration.predicted_kld, level.sensitivity.calibration.predicted_se))
    for row in found(result).tensors:
        values += [(damage.predicted_kld, damage.predicted_se) for damage in row.types]
    shown = {plus_minus(*pair) for pair in values} | {significant(value) for value, _ in values}
    return {text for text in shown if text != "n/a" and len(text) > 5}


def test_every_predicted_number_carries_its_sign() -> None:
    result = example()
    verified = recipe_tables.verified(result)
    cells = [
        cell
        for row in verified.rows
        for cell, col in zip(row, verified.columns, strict=True)
        if col.kind != "predicted"
    ]
    measured = rendered.text(without()) + " ".join(cells)  # what happens to read the same there cannot be told apart
    texts = (rendered.text(result), Page(rendered.page(result)).words)
    for text in texts:
        seen = 0
        for form in {form for form in forms(result) if form not in measured}:
            places = [match.start() for match in re.finditer(rf"(?<![\d.]){re.escape(form)}(?![\d])", text)]
            seen += len(places)
            unmarked = [text[place - 40 : place + 20] for place in places if text[place - 1] != PREDICTED]
            assert not unmarked, form
        assert seen > 100


def test_predicted_columns_say_so_and_hold_only_marked_numbers() -> None:
    tables = predicted_tables(example())
    columns = [(table, i) for table in tables for i, col in enumerate(table.columns) if col.kind == "predicted"]
    assert {table.name for table, _ in columns} == {
        "units-Q4_K_M",
        "units-Q5_K_M",
        "worst",
        "calibration",
        "roles",
        "tensors-Q4_K_M",
        "tensors-Q5_K_M",
        "every-tensor",
        "recipes",
        "verified",
        "all-levels",
        "recoveries",
    }
    for table, i in columns:
        assert re.search("predicted|interval", table.columns[i].title)
        for row in table.rows:
            assert row[i].startswith(PREDICTED) or row[i] in ("n/a", "—"), (table.name, row[i])
    for table in tables:
        for i, col in enumerate(table.columns):
            if col.kind == "number":
                assert not [row[i] for row in table.rows if PREDICTED in row[i]], (table.name, col.title)


def test_page_sets_predicted_numbers_apart_and_sorts_them_as_numbers() -> None:
    text = rendered.page(example())
    tags = Page(text).tags
    cells = [
        attributes
        for tag, attributes in tags
        if tag in ("td", "th", "span") and "predicted" in str(attributes.get("class"))
    ]
    assert len(cells) > 200
    assert {attributes["title"] for attributes in cells} == {"predicted, not measured"}
    assert ".predicted { font-style: italic; }" in text
    assert {a.get("data-kind") for tag, a in tags if tag == "th" and a.get("class") == "number predicted"} == {"number"}
    assert "&lt;span" not in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("≈0.0641, then", "≈0.0641"),
        ("of ≈0.00210 ± 0.00023.", "≈0.00210 ± 0.00023"),
        ("≈(5.10 ± 0.40)e−5;", "≈(5.10 ± 0.40)e−5"),
        ("≈1.23e−5 of", "≈1.23e−5"),
        ("≈95 % of", "≈95 %"),
        ("≈1,234.5", "≈1,234.5"),
    ],
)
def test_marked_takes_the_whole_number(text: str, shown: str) -> None:
    assert f'<span class="predicted" title="predicted, not measured">{shown}</span>' in html.marked(text)


def test_marked_escapes_what_is_around() -> None:
    shown = html.marked(f"{HOSTILE} ≈0.5 (≈)")
    assert "<script" not in shown
    assert "<img" not in shown
    assert shown.count("<span") == 1


# -- units


def test_units_show_both_figures_or_the_prediction_alone() -> None:
    level = with_gap().levels[0]
    table = layers.units(example(), level)
    gap = column(table, "unit").index(GAP)
    assert column(table, "KLD ± SE")[gap] == "n/a"
    for place, unit in enumerate(level.sensitivity.units):
        assert column(table, "predicted ± SE")[place] == f"≈{plus_minus(unit.predicted_kld, unit.predicted_se)}"
        if place != gap:
            assert column(table, "KLD ± SE")[place] == plus_minus(unit.kld, unit.kld_se)
    assert "9 units have both figures, 1 only a prediction" in table.note
    assert level.sensitivity.calibration is not None
    factor = level.sensitivity.calibration.measured_kld / level.sensitivity.calibration.predicted_kld
    assert f"factor {factor:.2f}" in table.note


def test_units_without_any_prediction_have_no_such_column() -> None:
    result = without()
    table = layers.units(result, result.levels[0])
    assert "predicted ± SE" not in [col.title for col in table.columns]
    assert "redicted" not in table.note
    assert len(table.rows[0]) == len(table.columns)


def test_unit_without_prediction_among_others_is_not_zero() -> None:
    units = list(example().levels[0].sensitivity.units)
    units[3] = dataclasses.replace(units[3], predicted_kld=None, predicted_se=None)
    result = with_level(units=tuple(units))
    table = layers.units(result, result.levels[0])
    assert column(table, "predicted ± SE")[3] == "n/a"
    assert table.keys[3][2] is None


# -- sections


def test_result_without_a_prediction_has_no_table_of_it() -> None:
    result = without()
    assert names(result) & NEW == {"trust"}
    for text in (rendered.text(result), rendered.page(result)):
        body = text.split("Definitions")[0] if text.startswith("#") else text.split('id="definitions-section"')[0]
        assert PREDICTED not in body


def test_unused_replay_is_one_sentence_with_its_reason() -> None:
    result = without()
    result = dataclasses.replace(
        result,
        prediction=dataclasses.replace(
            found(example()), used=False, reason="KLD 0.02 against llama.cpp, limit 0.0001.", tensors=()
        ),
    )
    parts = {part.name: part for part in rendered.sections(result)}
    assert "tensors" not in parts
    (only,) = parts["trust"].items
    assert only == (
        "There is no prediction, because the replay of the reference cannot be used (KLD 0.02 against llama.cpp, limit "
        "0.0001): measured patching is used instead."
    )


def test_trust_says_what_it_was_compared_on() -> None:
    table = prediction_tables.trust(example())
    known = example().levels[0].sensitivity.trust
    assert known is not None
    assert table.rows[0] == ("Q4_K_M", "10", "9", "0", f"{known.spearman:.2f}", f"{known.slope:.2f}")
    drawn = prediction_tables.trust(with_level(trust=dataclasses.replace(known, units=8, top=5, random=2)))
    assert drawn.rows[0][1:4] == ("8", "5", "2")
    assert "drawn from all others" in table.note
    every = dataclasses.replace(example(), settings=dataclasses.replace(example().settings, units="all"))
    assert prediction_tables.trust(every).note.startswith("All units were patched.")


def test_level_without_trust_keeps_its_row_and_is_named() -> None:
    result = with_level(trust=None)
    table = prediction_tables.trust(result)
    assert table.rows[0] == ("Q4_K_M", "n/a", "n/a", "n/a", "n/a", "n/a")
    assert "No comparison was made at Q4_K_M." in table.note
    assert set(column(prediction_tables.worst(result), "level")) == {"Q5_K_M"}
    assert "trust" in names(result)
    assert "| Q4_K_M | n/a | n/a |" in rendered.text(result)


def test_worst_units_have_both_numbers_and_their_ratio() -> None:
    table = prediction_tables.worst(example())
    level = example().levels[0]
    assert level.sensitivity.trust is not None
    assert column(table, "unit")[:3] == list(level.sensitivity.trust.worst)
    unit = next(unit for unit in level.sensitivity.units if unit.unit == level.sensitivity.trust.worst[0])
    assert unit.kld is not None
    assert unit.predicted_kld is not None
    assert table.rows[0][2] == plus_minus(unit.kld, unit.kld_se)
    assert table.keys[0][4] == pytest.approx(unit.kld / unit.predicted_kld)
    assert "(below floor)" not in table.rows[-1][2]
    last = example().levels[1].sensitivity.trust
    assert last is not None
    (kld,) = (one.kld for one in example().levels[1].sensitivity.units if one.unit == last.worst[-1])
    assert kld is not None
    noisy = dataclasses.replace(example(), noise_floor=NoiseFloor(1.1 * kld, None))
    assert "(below floor)" in prediction_tables.worst(noisy).rows[-1][2]


def test_worst_unit_that_is_gone_is_left_out() -> None:
    trust = example().levels[0].sensitivity.trust
    assert trust is not None
    result = with_level(trust=dataclasses.replace(trust, worst=("99.ffn",)))
    assert set(column(prediction_tables.worst(result), "level")) == {"Q5_K_M"}


def test_calibration_names_both_sums() -> None:
    result = with_level(calibration=Calibration(1.22, 0.0641, 0.003, 0.0779))
    assert prediction_tables.calibration(result).rows[0] == ("Q4_K_M", "≈0.0641 ± 0.0030", "0.0779", "1.22")
    assert len(prediction_tables.calibration(with_level(calibration=None)).rows) == 1


def test_replay_shows_its_own_check() -> None:
    table = prediction_tables.replay(with_sensitivity(imatrix="im.gguf", replay_nmse=None))
    rows = {name: value for name, value in table.rows}  # noqa: C416 - dict() does not take rows of any length
    assert rows["KLD against llama.cpp"] == f"{significant(found(example()).replay_kld)}, limit 1.00e−5"
    assert rows["squared error of the logits"] == "n/a of their variance"
    assert rows["text"] == "4 chunks, 252 scored positions"
    assert rows["calculated in"] == "float32 on cpu, 1.00 s"
    assert rows["importance matrix"] == "im.gguf"


# -- tensors


def test_roles_add_up_over_layers_smallest_type_first() -> None:
    table = prediction_tables.by_role(example())
    titles = [col.title for col in table.columns[3:]]
    small = ("Q2_K", "Q3_K", "IQ4_XS", "MXFP4", "IQ4_NL", "Q4_0", "Q4_K")
    assert titles == [f"predicted {name}" for name in (*small, "Q5_K", "Q6_K", "Q8_0")]
    bits = list(prediction_rows.type_bits(found(example()).tensors).values())
    assert bits == sorted(bits)
    place = column(table, "role").index("attention v")
    rows = [row for row in found(example()).tensors if row.role == "attention v"]
    total = sum(d.predicted_kld or 0.0 for row in rows for d in row.types if d.type == "Q5_K")
    assert table.keys[place][3 + titles.index("predicted Q5_K")] == pytest.approx(total)
    assert len(rows) == 4


def test_roles_say_where_a_type_does_not_fit_or_has_no_value() -> None:
    keys = [row for row in found(example()).tensors if row.role == "attention k"]
    without_k = [dataclasses.replace(row, types=tuple(d for d in row.types if d.type != "Q4_K")) for row in keys]
    types = tuple(dataclasses.replace(d, predicted_kld=None) if d.type == "Q4_0" else d for d in without_k[0].types)
    others = [row for row in found(example()).tensors if row.role != "attention k"]
    rows = (dataclasses.replace(without_k[0], types=types), *without_k[1:], *others)
    table = prediction_tables.by_role(with_sensitivity(tensors=rows))
    place = column(table, "role").index("attention k")
    titles = [col.title for col in table.columns]
    assert table.rows[place][titles.index("predicted Q4_K")] == "—"
    assert table.keys[place][titles.index("predicted Q4_K")] is None
    assert table.rows[place][titles.index("predicted Q4_0")].endswith("(3 of 4)")
    assert "rows do not hold whole blocks of the type" in table.note


def test_role_with_no_finite_value_is_not_zero() -> None:
    row = TensorDamage("x", "odd", "0.ffn", 0, 256, (TypeDamage("Q4_0", 144, None, None),))
    result = with_sensitivity(tensors=(row,))
    assert prediction_tables.by_role(result).rows == (("odd", "1", "0.0", "n/a"),)
    assert prediction_charts.tensors(result) is None
    assert "Not drawn" in rendered.text(result)


def test_most_sensitive_are_sorted_and_at_the_base_type_or_its_fallback() -> None:
    rows = [  # as of a model with rows of no whole blocks of 256 but in ffn_down
        dataclasses.replace(
            row,
            types=tuple(
                dataclasses.replace(d, type="Q5_0") if d.type == "Q4_K" and row.role != "ffn down" else d
                for d in row.types
            ),
        )
        for row in found(example()).tensors
    ]
    result = with_sensitivity(tensors=tuple(rows))
    table = prediction_tables.most_sensitive(result, result.levels[0])
    keys = [row[5] for row in table.keys]
    assert len(keys) == 20
    known = [d.predicted_kld for row in rows for d in row.types if d.type == _base(row)]
    assert keys == sorted((kld for kld in known if kld is not None), reverse=True)[:20]
    types = dict(zip(column(table, "tensor"), column(table, "type"), strict=True))
    assert types == {row.tensor: _base(row) for row in rows if row.tensor in types}
    assert set(types.values()) == {"Q4_K", "Q5_0"}
    assert "Not calibrated" in table.note
    assert prediction_rows.base_types(result) == {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K"}


def _base(row: TensorDamage) -> str:
    return "Q4_K" if row.role == "ffn down" else "Q5_0"


def test_level_of_an_unknown_recipe_is_asked_for_the_type_of_most_of_its_tensors() -> None:
    shares = example().levels[0].file.types
    result = with_level(name="mine", file_type="")
    assert prediction_rows.base_types(result)["mine"] == "Q4_K"
    most = tuple(dataclasses.replace(share, tensors=99) if share.type == "Q6_K" else share for share in shares)
    result = with_level(name="mine", file_type="", types=most)
    assert prediction_rows.base_types(result)["mine"] == "Q6_K"


def test_every_tensor_is_on_the_page_only() -> None:
    table = prediction_tables.every_tensor(example())
    assert len(table.rows) == len(found(example()).tensors) == 30
    assert "Every tensor at every type" not in rendered.text(example())
    assert "Every tensor at every type" in rendered.page(example())


def test_level_of_types_that_were_not_predicted_has_no_list() -> None:
    shares = (TypeShare("IQ1_S", 3, 30, 7),)
    result = with_level(types=shares, name="mine", file_type="ftype 99")
    assert prediction_tables.most_sensitive(result, result.levels[0]).rows == ()
    assert prediction_tables.most_sensitive(result, result.levels[1]).rows != ()


def test_used_sensitivity_without_tensors_is_said() -> None:
    text = rendered.text(with_sensitivity(tensors=()))
    assert "Not drawn: no level has a type that was predicted for." in text


def test_tensor_of_no_layer_and_no_unit_has_a_place() -> None:
    row = TensorDamage("x", "other", "", None, 256, (TypeDamage("Q5_0", 176, 0.1, None),))
    rows = prediction_rows.heat(with_sensitivity(tensors=(row,)))
    assert [(one["layer"], one["text"]) for one in rows] == [("none", "≈0.100")]


def test_hostile_names_are_inert() -> None:
    damage = (TypeDamage("Q5_0", 176, 0.1, 0.01), TypeDamage(HOSTILE, 200, 0.05, None))
    row = TensorDamage(HOSTILE, HOSTILE, HOSTILE, 0, 256, damage)
    result = with_sensitivity(tensors=(row, *found(example()).tensors), imatrix=HOSTILE, device=HOSTILE)
    text = rendered.page(result)
    tags = [tag for tag, _ in Page(text).tags]
    assert tags.count("script") == 3
    assert "img" not in tags
    assert HOSTILE in Page(text).words
    assert "<script" not in re.sub("`[^`]*`", "", rendered.text(result))
    unused = dataclasses.replace(result, prediction=dataclasses.replace(found(result), used=False, reason=HOSTILE))
    assert "img" not in [tag for tag, _ in Page(rendered.page(unused)).tags]


def with_many_tensors(n: int) -> Result:
    types = ("IQ2_S", "Q2_K", "Q3_K", "Q4_0", "IQ4_XS", "Q4_K", "Q5_0", "Q5_K", "Q6_K", "Q8_0")
    rows = tuple(
        TensorDamage(
            f"blk.{i // 30}.t{i % 30}.weight",
            f"role {i % 30}",
            f"{i // 30}.ffn",
            i // 30,
            10**6,
            tuple(TypeDamage(name, 10**5 * (k + 1), 1e-6 * (i + 1) * (10 - k), 1e-7) for k, name in enumerate(types)),
        )
        for i in range(n)
    )
    reference = dataclasses.replace(example().reference, n_layer=n // 30)
    return dataclasses.replace(with_sensitivity(tensors=rows), reference=reference)


def test_work_grows_with_the_tensors_and_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a page with little else on it: the rest is the same work for any number of tensors."""
    rest: dict[str, Any] = dict.fromkeys(("mixes", "stock", "recipes", "recoveries", "deployment"), ())
    levels = tuple(dataclasses.replace(level, points=()) for level in example().levels)
    for chart in ("ladder", "distribution", "sensitivity", "trust"):
        monkeypatch.setitem(sections._CHARTS, chart, lambda _: None)
    html.render_html(example())  # loads Vega
    few, some, many = (
        lines_run(partial(html.render_html, dataclasses.replace(with_many_tensors(n), levels=levels, **rest)))
        for n in (200, 400, 800)
    )
    assert 0 < some - few < 200 * 4000  # measured: 2700 lines for a tensor with ten types
    assert many - some < 2.25 * (some - few)  # measured: 2.03; were the work quadratic, it would be 4


# -- charts


def test_scatter_is_of_units_with_both_and_has_one_range_for_both_axes() -> None:
    rows = prediction_rows.pairs(with_gap())
    assert len(rows) == 19
    assert GAP not in {row["label"] for row in rows if row["level"] == "Q4_K_M"}
    low, high = prediction_rows.ranges(rows)["Q4_K_M"]
    chosen = [row for row in rows if row["level"] == "Q4_K_M"]
    assert all(low <= row[end] <= high for row in chosen for end in ("x", "value", "left", "right", "low", "high"))
    trust = example().levels[0].sensitivity.trust
    assert trust is not None
    assert len(set(trust.worst)) == 3
    assert {row["name"] for row in chosen} - {""} == set(trust.worst) - {GAP}
    assert all(row["guess"].startswith(PREDICTED) for row in rows)


def test_noise_floor_is_drawn_only_within_the_range() -> None:
    least, most = (
        min(unit.kld for unit in level.sensitivity.units if unit.kld) for level in reversed(example().levels)
    )
    assert 2 * least < most
    spec = prediction_charts.trust(dataclasses.replace(example(), noise_floor=NoiseFloor(1.1 * least, None)))
    assert spec is not None
    floors = [row for rows in spec["datasets"].values() for row in rows if row.get("words") == "noise floor"]
    assert {(row["level"], row["shown"]) for row in floors} == {("Q4_K_M", 0), ("Q5_K_M", 1)}


def test_heat_map_offers_the_type_of_every_level() -> None:
    spec = prediction_charts.tensors(example())
    assert spec is not None
    (param,) = spec["params"]
    assert param["bind"]["options"] == ["Q4_K", "Q5_K"]
    assert param["value"] == "Q4_K"
    one = dataclasses.replace(example(), levels=example().levels[:1])
    alone = prediction_charts.tensors(one)
    assert alone is not None
    assert "params" not in alone


def test_scatter_without_pairs_is_not_drawn() -> None:
    units = tuple(dataclasses.replace(unit, kld=0.0) for unit in example().levels[0].sensitivity.units)
    result = dataclasses.replace(example(), levels=(changed_level(example().levels[0], units=units),))
    assert prediction_charts.trust(result) is None


# -- what the stream says


def ranks(units: int, ratio: float | None, depth: float | None) -> Level:
    return changed_level(example().levels[0], rank_correlation=RankCorrelation(units, ratio, 0.4, 0.5, 0.9, depth))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.8, "Yes (rank correlation 0.80)"),
        (0.79, "Weakly (rank correlation 0.79)"),
        (0.5, "Weakly"),
        (0.49, "No (rank correlation 0.49)"),
        (-0.3, "No (rank correlation −0.30)"),
        (-0.9, "Yes, the other way round (rank correlation −0.90)"),
        (None, "Not known"),
    ],
)
def test_branch_ratio_is_judged_by_its_correlation(value: float | None, words: str) -> None:
    assert f"predict the damage? {words}" in paragraphs.paragraph(ranks(20, value, 0.1))


def test_few_units_are_not_judged() -> None:
    text = paragraphs.paragraph(ranks(7, 0.95, 0.9))
    assert "cannot be told from 7 patched branches (rank correlations: branch ratio 0.95, depth 0.90)" in text
    assert "Yes" not in text
    assert "too few to tell" in text
    assert "Yes" in paragraphs.paragraph(ranks(8, 0.95, 0.9))


def test_missing_correlations_say_why() -> None:
    assert "not known: only 3 patched branches can be ranked" in paragraphs.paragraph(ranks(3, None, None))
    bare = changed_level(example().levels[0], rank_correlation=None)
    assert "no rank correlation was computed" in paragraphs.paragraph(bare)


def test_better_predictors_stand_beside_each_other() -> None:
    level = example().levels[0]
    ranked, trust = level.sensitivity.rank_correlation, level.sensitivity.trust
    assert ranked is not None
    assert trust is not None
    text = paragraphs.paragraph(level)
    assert f"the injected error has {ranked.injected_error:.2f} on the same branches" in text
    assert f"the prediction from gradients has {trust.spearman:.2f} over 10 units" in text
    assert "gradients" not in paragraphs.paragraph(changed_level(level, trust=None))


def additive(total: float | None, injected: float | None = None) -> str:
    level = changed_level(example().levels[0], additivity=Additivity(0.05, total, injected))
    return paragraphs.paragraph(level)


def test_all_patched_units_are_added_up() -> None:
    assert "Damage is additive: the patched units, which are all, add up to 0.0540, 108 %" in additive(0.054)
    assert "Damage is roughly additive" in additive(0.06)
    assert "Damage is far from additive" in additive(0.03)
    assert "All errors injected at once, except the head's, give 0.0410." in additive(0.054, 0.041)


def test_partly_patched_units_are_completed_with_marked_predictions() -> None:
    plain = with_gap().levels[0]
    patched, whole = added_up(plain)
    assert plain.sensitivity.calibration is not None
    calibration = dataclasses.replace(plain.sensitivity.calibration, measured_kld=1.05 * whole)
    level = changed_level(plain, additivity=Additivity(1.05 * whole, None, None), calibration=calibration)
    text = paragraphs.paragraph(level)
    assert (
        f"9 of 10 units were patched and add up to {significant(patched)}; with predictions for the others that makes "
        f"≈{significant(whole)}"
    ) in text
    assert f"≈95 % of the level's measured {significant(1.05 * whole)}: damage looks additive." in text
    raw = calibration.predicted_kld
    assert (
        f"Predictions alone, not calibrated, add up to ≈{significant(raw)}, ≈{100 * raw / (1.05 * whole):.0f} % of it."
    ) in text


def test_mostly_predicted_sum_is_not_called_additive() -> None:
    level = unpatched(example().levels[0], "embedding", "0.attention", "0.ffn", "1.attention", "2.attention")
    patched, whole = added_up(level)
    assert patched < 0.5 * whole
    text = paragraphs.paragraph(changed_level(level, additivity=Additivity(whole, None, None)))
    assert "too much of that is predicted to call it additive" in text


def test_unknown_sum_is_said() -> None:
    level = changed_level(unpatched(without().levels[0], GAP), additivity=Additivity(0.0575, None, 0.0334))
    patched, _ = added_up(level)
    assert f"not known: 9 of 10 units were patched and add up to {significant(patched)}; the level has 0.0575." in (
        paragraphs.paragraph(level)
    )
    none = changed_level(level, additivity=Additivity(None, None, 0.03))
    assert "the level's KLD on the ranking text is missing" in paragraphs.paragraph(none)
    assert "was not measured" in paragraphs.paragraph(changed_level(level, additivity=None))


def test_inherited_share_is_one_minus_what_the_layers_made() -> None:
    level = example().levels[0]
    own = sum(point.generated_share or 0.0 for point in level.points)
    text = paragraphs.paragraph(level)
    assert f"{100 * own:.0f} % is made by the layers' own errors; {100 - 100 * own:.0f} % is inherited" in text


def test_more_than_all_of_the_drift_is_pulled_back() -> None:
    level = example().levels[0]
    points = tuple(dataclasses.replace(point, generated_share=1.3 / 9) for point in level.points)
    text = paragraphs.paragraph(dataclasses.replace(level, points=points))
    assert "own errors make 130 % of the final drift" in text
    assert "takes 30 % back" in text


def test_missing_shares_are_counted() -> None:
    level = example().levels[0]
    points = (dataclasses.replace(level.points[0], generated_share=None), *level.points[1:])
    assert "1 of 9 stream points have no figure" in paragraphs.paragraph(dataclasses.replace(level, points=points))
    assert "was not mapped" in paragraphs.paragraph(dataclasses.replace(level, points=()))


def test_level_about_which_nothing_is_known_has_no_paragraph() -> None:
    level = changed_level(example().levels[0], points=(), rank_correlation=None, trust=None, additivity=None)
    result = dataclasses.replace(example(), levels=(level,))
    assert paragraphs.paragraphs(result) == ()
    assert "residual" not in names(result)
    assert "residual" in names(example())


def test_json_round_trip_keeps_predictions() -> None:
    text = as_json.to_json(example())
    assert as_json.from_json(text) == example()
    assert rendered.text_anew(as_json.from_json(text)) == rendered.text(example())
