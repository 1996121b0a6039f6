"""Recipes in the reports: what is said of them, predicted and measured apart, and what 16 bit is worth."""

from __future__ import annotations

import dataclasses
import math
import re
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import pytest

from qres import levels
from qres.records import as_json
from qres.records.recipe import Expected, FileTensor, Measure, Mix, PlannedTensor, Recipe, Recovery, Stock, Verification
from qres.records.result import Result
from qres.report.charts import recipes as recipe_charts
from qres.report.charts import scan as scan_charts
from qres.report.charts import themes
from qres.report.formatting import PREDICTED, mib, percent, plus_minus, significant
from qres.report.tables import recipes as recipe_tables
from qres.report.tables.table import Table
from tests.examples.result import example
from tests.report import rendered
from tests.report.test_html import HOSTILE, Page
from tests.report.test_tables import column

SVG = "{http://www.w3.org/2000/svg}"
KINDS = [
    *(recipe_charts.MIXES, recipe_charts.LEVEL, recipe_charts.RECIPE),
    *(recipe_charts.LEVEL_MEASURED, recipe_charts.RECIPE_MEASURED),
]


def changed(**changes: Any) -> Result:  # noqa: ANN401 - fields of Result
    return dataclasses.replace(example(), **changes)


def without() -> Result:
    """The example of a model that llama.cpp cannot quantize."""
    return changed(ladder=(), mixes=(), stock=(), recoveries=(), recipes=())


def recipe(place: int = 0, **changes: Any) -> Recipe:  # noqa: ANN401 - fields of Recipe
    return dataclasses.replace(example().recipes[place], **changes)


def unverified() -> Result:
    """The example of a scan that built nothing."""
    return changed(recipes=tuple(dataclasses.replace(one, verification=None) for one in example().recipes))


def verification(**changes: Any) -> Verification:  # noqa: ANN401 - fields of Verification
    found = example().recipes[0].verification
    assert found is not None
    return dataclasses.replace(found, **changes)


def measured(**changes: Any) -> Result:  # noqa: ANN401 - fields of the recipe's Measure
    """One recipe verified, with other measurements; the others are not."""
    own = dataclasses.replace(verification().recipe, **changes)
    return changed(recipes=(recipe(verification=verification(recipe=own)), *unverified().recipes[1:]))


def expected(kld: float) -> Expected:
    return Expected(kld, kld / 1.3, kld * 1.3, kld / 1.2, 1.2)


def recovery(**changes: Any) -> Recovery:  # noqa: ANN401 - fields of Recovery
    plain = Recovery("Q4_K_M", 0.25, 0.04, ("layer 0", "layer 3"), 12_582_912, 1_048_576, 524_288, 2_097_152)
    return dataclasses.replace(plain, **changes)


def row_of(table: Table, place: int = 0) -> dict[str, str]:
    return {col.title: cell for col, cell in zip(table.columns, table.rows[place], strict=True)}


def keys_of(table: Table, title: str) -> list[float | None]:
    place = [col.title for col in table.columns].index(title)
    return [row[place] for row in table.keys]


def names(result: Result) -> list[str]:
    return [part.name for part in rendered.sections(result)]


def test_json_round_trip_keeps_recipes() -> None:
    text = as_json.to_json(example())
    assert as_json.from_json(text) == example()
    assert as_json.from_json(as_json.to_json(without())) == without()


# -- predicted is never printed as measured


def forms(result: Result) -> set[str]:
    """Every predicted number of a result's recipes as a report would write it, where it is long enough to be told."""
    found = [one.predicted for one in result.recipes if one.predicted]
    found += [one.predicted for one in result.stock if one.predicted]
    values = [value for one in found for value in (one.kld, one.low, one.high, one.raw_kld)]
    values += [row.kld for row in result.recoveries] + [mix.kld for mix in result.mixes]
    return {text for text in map(significant, values) if len(text) > 5}


@pytest.mark.parametrize("verified", [True, False])
def test_every_predicted_number_carries_its_sign(verified: bool) -> None:
    result = example() if verified else unverified()
    before = rendered.text(without())  # what happens to read the same there cannot be told apart
    shown = {text for text in forms(result) if text not in before}
    measurements: set[str] = set()
    for found in (one.verification for one in example().recipes):
        assert found is not None
        measurements |= {significant(one.kld) for one in (found.recipe, *found.levels)}
        measurements |= {significant(abs(pair.kld_difference or 0.0)) for pair in found.pairs}
    for text in (rendered.text(result), Page(rendered.page(result)).words):
        seen = 0
        for form in shown - measurements:
            places = [match.start() for match in re.finditer(rf"(?<![\d.]){re.escape(form)}(?!\d)", text)]
            seen += len(places)
            assert not [text[at - 40 : at + 20] for at in places if text[at - 1] != PREDICTED], form
        assert seen >= 15


def test_predicted_columns_say_so_and_hold_only_marked_numbers() -> None:
    made = [recipe_tables.recipes, recipe_tables.verified, recipe_tables.levels, recipe_tables.recoveries]
    for table in (make(example()) for make in made):
        assert any(col.kind == "predicted" for col in table.columns)
        for i, col in enumerate(table.columns):
            cells = [row[i] for row in table.rows]
            if col.kind == "predicted":
                assert "predicted" in col.title or "interval" in col.title
                assert not [cell for cell in cells if not cell.startswith(PREDICTED) and cell != "n/a"], col.title
            elif col.kind == "number":
                assert not [cell for cell in cells if PREDICTED in cell], col.title


# -- the answer


def test_answer_is_measured_where_there_is_a_measurement() -> None:
    found, one = verification(), example().recipes[0]
    kld, rival = found.recipe.kld, found.levels[0].kld
    assert kld is not None
    assert rival is not None
    answer = recipe_tables.answer(example())
    assert answer == (
        f"same-as:Q4_K_M ({mib(one.bytes)} MiB): measured KLD {significant(kld)}, Q4_K_M has {significant(rival)} with "
        f"{mib(found.levels[0].bytes)} MiB: {percent(1 - kld / rival)} less, on text that did not choose it "
        f"({found.text})."
    )
    assert PREDICTED not in answer


def test_answer_of_a_worse_recipe_says_more() -> None:
    rival = verification().levels[0].kld
    assert rival is not None
    answer = recipe_tables.answer(measured(kld=1.25 * rival))
    assert "25.0 % more" in answer
    assert "less" not in answer


def test_answer_takes_the_recipe_that_was_measured() -> None:
    own = dataclasses.replace(verification().recipe, bytes=recipe(2).bytes)
    result = changed(recipes=(recipe(verification=None), recipe(2, verification=verification(recipe=own))))
    assert recipe_tables.answer(result).startswith(f"+0.10bpw ({mib(recipe(2).bytes)} MiB): measured KLD")


@pytest.mark.parametrize("rivals", [(), (Measure("Q4_K_M", 1, None, None, None, None, None, None, None),)])
def test_answer_without_a_measured_level_gives_the_measurement_alone(rivals: tuple[Measure, ...]) -> None:
    found = verification(levels=rivals, pairs=())
    result = changed(recipes=(recipe(verification=found),))
    assert recipe_tables.answer(result) == (
        f"same-as:Q4_K_M ({mib(recipe().bytes)} MiB): measured KLD {significant(found.recipe.kld)} on {found.text}."
    )


def test_answer_compares_with_the_first_level_that_has_a_figure() -> None:
    nothing = dataclasses.replace(verification().levels[0], kld=None)
    found = verification(levels=(nothing, verification().levels[1]))
    assert ", Q5_K_S has " in recipe_tables.answer(changed(recipes=(recipe(verification=found),)))


def test_answer_without_a_measurement_is_predicted_and_says_how_to_measure() -> None:
    one = recipe(verification=None)
    assert one.predicted is not None
    rival = one.stock[0].predicted
    assert rival is not None
    answer = recipe_tables.answer(unverified())
    assert answer.startswith(
        f"same-as:Q4_K_M ({mib(one.bytes)} MiB): predicted KLD ≈{significant(one.predicted.kld)} where Q4_K_M has "
        f"≈{significant(rival.kld)}, ≈{percent(1 - one.predicted.kld / rival.kld)} less. Nothing of this is measured"
    )
    assert "qres build makes the file, qres verify measures it on other text" in answer


def test_measurement_that_is_not_finite_leaves_the_prediction() -> None:
    assert "Nothing of this is measured yet" in recipe_tables.answer(measured(kld=None, kld_se=None))


def test_predicted_answer_of_a_worse_recipe_says_more() -> None:
    stock = dataclasses.replace(recipe().stock[0], predicted=expected(0.05))
    result = changed(recipes=(recipe(verification=None, predicted=expected(0.06), stock=(stock,)),))
    answer = recipe_tables.answer(result)
    assert "≈20.0 % more." in answer
    assert "less" not in answer


def test_recipes_without_predictions_are_said_to_have_none() -> None:
    result = changed(recipes=(recipe(verification=None, predicted=None),))
    assert recipe_tables.answer(result) == (
        "Not all of this has predictions: build and verify the recipes to know what they do."
    )


# -- within a budget


def test_recipes_show_what_their_records_hold() -> None:
    table = recipe_tables.recipes(example())
    assert column(table, "budget") == ["same-as:Q4_K_M", "same-as:Q5_K_M", "+0.10bpw", "+0.25bpw"]
    for place, one in enumerate(example().recipes):
        row, rival = row_of(table, place), one.stock[0]
        assert one.predicted is not None
        assert rival.predicted is not None
        assert row["MiB"] == mib(one.bytes)
        assert row["bits/weight"] == f"{one.bpw:.2f}"
        assert row["predicted KLD"] == f"≈{significant(one.predicted.kld)}"
        assert (
            row["predicted 95 % interval"] == f"≈{significant(one.predicted.low)} to ≈{significant(one.predicted.high)}"
        )
        assert (row["level up to its size"], row["its MiB"]) == (rival.level, mib(rival.bytes))
        assert row["its predicted KLD"] == f"≈{significant(rival.predicted.kld)}"
        assert row["predicted less"] == f"≈{percent(1 - one.predicted.kld / rival.predicted.kld)}"
    assert keys_of(table, "predicted KLD") == [one.predicted and one.predicted.kld for one in example().recipes]
    assert keys_of(table, "MiB") == [one.bytes for one in example().recipes]


def test_recipes_name_the_texts_that_chose_them() -> None:
    found = example().recipes[0].selection
    note = recipe_tables.recipes(example()).note
    assert note.startswith(f"Types chosen on {found.rank_text}; calibrated on {found.report_text}. ")


def test_recipe_names_its_three_most_frequent_types() -> None:
    def planned(counts: dict[str, int], quantizable: bool = True) -> tuple[PlannedTensor, ...]:
        return tuple(
            PlannedTensor(f"{name}.{i}", (256,), name, 1, 0.0, quantizable)
            for name in counts
            for i in range(counts[name])
        )

    few = recipe(tensors=planned({"Q4_K": 2, "Q6_K": 5}) + planned({"F32": 9}, quantizable=False))
    many = recipe(tensors=planned({"Q4_K": 2, "Q6_K": 5, "Q8_0": 3, "F16": 1}))
    table = recipe_tables.recipes(changed(recipes=(few, many)))
    assert column(table, "most tensors") == ["Q6_K 5, Q4_K 2", "Q6_K 5, Q8_0 3, Q4_K 2, …"]


def test_recipe_without_a_prediction_keeps_its_row() -> None:
    alone = Stock("IQ4_XS", 25_165_824, None)
    result = changed(recipes=(recipe(predicted=None), recipe(stock=(alone,))))
    table = recipe_tables.recipes(result)
    own, rival = row_of(table, 0), row_of(table, 1)
    assert [own[title] for title in ("predicted KLD", "predicted 95 % interval", "predicted less")] == ["n/a"] * 3
    assert own["its predicted KLD"].startswith(PREDICTED)
    assert (rival["level up to its size"], rival["its MiB"]) == ("IQ4_XS", "24.0")
    assert [rival[title] for title in ("its predicted KLD", "predicted less")] == ["n/a"] * 2
    assert keys_of(table, "predicted less") == [None, None]


def test_recipe_that_is_predicted_to_be_worse_has_a_minus_sign() -> None:
    stock = dataclasses.replace(recipe().stock[0], predicted=expected(0.05))
    result = changed(recipes=(recipe(predicted=expected(0.06), stock=(stock,)),))
    assert column(recipe_tables.recipes(result), "predicted less") == ["≈−20.0 %"]


# -- built and measured


def test_verified_has_the_recipe_and_its_levels_with_their_own_numbers() -> None:
    found = verification()
    table = recipe_tables.verified(changed(recipes=(recipe(), *unverified().recipes[1:])))
    assert column(table, "file") == ["same-as:Q4_K_M", "Q4_K_M", "Q5_K_S"]
    for place, one in enumerate((found.recipe, *found.levels)):
        row = row_of(table, place)
        assert row["MiB"] == mib(one.bytes)
        assert row["measured KLD ± SE"] == plus_minus(one.kld, one.kld_se)
        assert (row["same top"], row["drift at the end"]) == (percent(one.same_top), percent(one.drift))
        assert one.ln_ppl_ratio is not None
        change = f"{100 * math.expm1(one.ln_ppl_ratio):+.2f}".replace("-", "−")
        assert row["PPL change"].startswith(f"{change} ± ")
    assert found.predicted is not None
    assert column(table, "predicted KLD") == [f"≈{significant(found.predicted.kld)}", "n/a", "n/a"]
    pair = found.pairs[0]
    shown = f"{plus_minus(pair.kld_difference, pair.kld_difference_se)} (Q4_K_M)"
    assert column(table, "KLD against the level ± SE") == [shown, "n/a", "n/a"]
    assert table.note.startswith(f"Text: {found.text}. ")


@pytest.mark.parametrize(("inside", "word"), [(True, "yes"), (False, "no"), (None, "n/a")])
def test_verified_says_whether_the_prediction_held(inside: bool | None, word: str) -> None:
    result = changed(recipes=(recipe(verification=verification(inside=inside)),))
    assert column(recipe_tables.verified(result), "inside the interval") == [word, "n/a", "n/a"]


def test_every_verified_recipe_is_listed_with_its_own_numbers() -> None:
    table = recipe_tables.verified(example())
    files = column(table, "file")
    beside = {"Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K"}
    assert [name for name in files if name not in beside] == [one.budget for one in example().recipes]
    assert sorted(name for name in files if name in beside) == sorted(beside)
    for one in example().recipes:
        found, row = one.verification, row_of(table, files.index(one.budget))
        assert found is not None
        assert one.predicted is not None
        assert row["measured KLD ± SE"] == plus_minus(found.recipe.kld, found.recipe.kld_se)
        assert row["predicted KLD"] == f"≈{significant(one.predicted.kld)}"
        assert row["inside the interval"] == ("yes" if found.inside else "no")
        assert row["KLD against the level ± SE"].endswith(f" ({one.stock[0].level})")


def test_level_beside_two_recipes_is_listed_once() -> None:
    other = verification(text="b, 8 chunks")
    result = changed(recipes=(recipe(verification=verification()), recipe(2, verification=other)))
    table = recipe_tables.verified(result)
    assert column(table, "file") == ["same-as:Q4_K_M", "Q4_K_M", "Q5_K_S", "+0.10bpw"]
    assert table.note.startswith(f"Text: b, 8 chunks; {verification().text}. ")


def test_what_was_not_measured_is_no_number() -> None:
    nothing = Measure("recipe", 1_048_576, None, None, None, None, None, None, None)
    bare = verification(recipe=nothing, levels=(), pairs=(), predicted=None, inside=None)
    row = row_of(recipe_tables.verified(changed(recipes=(recipe(verification=bare),))))
    assert row.pop("file") == "same-as:Q4_K_M"
    assert row.pop("MiB") == "1.0"
    assert set(row.values()) == {"n/a"}


# -- all levels


def test_levels_are_predicted_and_measured_where_they_were() -> None:
    table = recipe_tables.levels(example())
    assert table.folded
    assert column(table, "level") == [stock.level for stock in example().stock]
    weights = sum(math.prod(tensor.shape) for tensor in example().tensors)
    for place, stock in enumerate(example().stock):
        row = row_of(table, place)
        assert row["MiB"] == mib(stock.bytes)
        assert row["bits/weight"] == f"{8 * stock.bytes / weights:.2f}"
        assert row["predicted KLD"] == (f"≈{significant(stock.predicted.kld)}" if stock.predicted else "n/a")
    known = {level.name: significant(level.output.kld_mean) for level in example().levels}
    assert column(table, "measured KLD") == [known.get(stock.level, "n/a") for stock in example().stock]


def test_levels_without_tensors_have_no_bits() -> None:
    assert set(column(recipe_tables.levels(changed(tensors=())), "bits/weight")) == {"n/a"}


# -- what 16 bit is worth


def test_sixteen_is_not_worth_it_with_every_figure() -> None:
    result = changed(recoveries=(recovery(share=0.1), recovery(), recovery(share=0.5)))
    assert recipe_tables.sixteen_answer(result) == (
        "No: to recover 25 % of the damage of Q4_K_M, whole layers at 16 bit take 12.0 MiB (0, 3), larger types where "
        "they count 1.0 MiB, 12 times less; the next levels up take 2.0 MiB. Predicted; the table has every level and "
        "share."
    )


def test_sixteen_without_a_quarter_or_a_larger_level_says_what_there_is() -> None:
    answer = recipe_tables.sixteen_answer(changed(recoveries=(recovery(share=0.1, ladder_bytes=None),)))
    assert answer.startswith("No: to recover 10 % of the damage")
    assert "next levels" not in answer


def test_sixteen_of_the_example_is_its_record() -> None:
    rows = tuple(row for row in example().recoveries if row.level == "Q4_K_M")
    row = next(row for row in rows if row.share == 0.25)
    assert row.layers_bytes is not None
    assert row.raised_bytes is not None
    answer = recipe_tables.sixteen_answer(changed(recoveries=rows))
    layers = ", ".join(name.removeprefix("layer ") for name in row.layers)
    assert f"whole layers at 16 bit take {mib(row.layers_bytes)} MiB ({layers})" in answer
    assert f"larger types where they count {mib(row.raised_bytes)} MiB, " in answer


@pytest.mark.parametrize("raised", [12_582_912, 12_582_913])
def test_sixteen_that_is_as_cheap_as_any_other_is_worth_it(raised: int) -> None:
    result = changed(recoveries=(recovery(), recovery(share=0.5, layers=("layer 3", "output"), raised_bytes=raised)))
    assert recipe_tables.sixteen_answer(result) == (
        "Sometimes: to recover 50 % of the damage of Q4_K_M, nothing is cheaper than 16 bit for 3, output (predicted, "
        "12.0 MiB)."
    )


@pytest.mark.parametrize("rows", [(), ({"layers_bytes": None, "layers": ()},), ({"raised_bytes": None},)])
def test_nothing_that_recovers_is_said(rows: tuple[dict[str, object], ...]) -> None:
    result = changed(recoveries=tuple(recovery(**row) for row in rows))
    assert recipe_tables.sixteen_answer(result) == (
        "No set of layers at 16 bit recovers a tenth of the damage of any level."
    )


def test_level_without_such_a_set_leaves_the_answer_to_the_others() -> None:
    result = changed(recoveries=(recovery(level="Q2_K", layers_bytes=None, layers=()), recovery(level="Q8_0")))
    assert "of the damage of Q8_0" in recipe_tables.sixteen_answer(result)


def test_many_layers_are_counted() -> None:
    layers = tuple(f"layer {i}" for i in range(9))
    result = changed(recoveries=(recovery(layers=layers), recovery(layers=layers[1:])))
    assert column(recipe_tables.recoveries(result), "which") == ["9 layers", "1, 2, 3, 4, 5, 6, 7, 8"]


def test_recoveries_show_what_is_added() -> None:
    rows = (recovery(free_bytes=-1_572_864, raised_bytes=0), recovery(layers=(), layers_bytes=None, ladder_bytes=None))
    table = recipe_tables.recoveries(changed(recoveries=rows))
    first, second = row_of(table, 0), row_of(table, 1)
    assert (first["recover"], first["predicted KLD left"], first["which"]) == ("25 %", "≈0.0400", "0, 3")
    assert (first["layers at 16 bit, MiB"], first["larger types, MiB"]) == ("+12.0", "+0.0")
    assert (first["any types, MiB"], first["larger levels, MiB"]) == ("−1.5", "+2.0")
    assert [second[title] for title in ("layers at 16 bit, MiB", "which", "larger levels, MiB")] == ["n/a"] * 3
    assert keys_of(table, "any types, MiB") == [-1_572_864, 524_288]


def test_recoveries_of_the_example_are_all_listed() -> None:
    table = recipe_tables.recoveries(example())
    assert column(table, "predicted KLD left") == [f"≈{significant(row.kld)}" for row in example().recoveries]
    assert keys_of(table, "larger types, MiB") == [row.raised_bytes for row in example().recoveries]


# -- where it stands


def test_recipes_stand_after_the_levels_and_16_bit_after_what_to_keep() -> None:
    found = names(example())
    assert found[:4] == ["levels", "recipes", "keep", "sixteen"]
    parts = {part.name: part.items for part in rendered.sections(example())}
    assert parts["recipes"][0] == recipe_tables.answer(example())
    assert [item.name for item in parts["recipes"] if isinstance(item, Table)] == ["recipes", "verified", "all-levels"]
    assert parts["sixteen"][0] == recipe_tables.sixteen_answer(example())


def test_result_without_recipes_has_nothing_about_them() -> None:
    assert not {"recipes", "sixteen"} & set(names(without()))
    for make in (recipe_tables.recipes, recipe_tables.verified, recipe_tables.levels, recipe_tables.recoveries):
        assert make(without()).rows == ()
    assert recipe_charts.recipes(without()) is None
    text = rendered.text(without())
    assert "ecipes" not in text
    assert "16 bit worth" not in text


def test_tables_without_rows_are_left_out() -> None:
    parts = {part.name: part.items for part in rendered.sections(dataclasses.replace(unverified(), stock=()))}
    assert [item.name for item in parts["recipes"] if isinstance(item, Table)] == ["recipes"]
    assert "Built and measured" not in rendered.text(unverified())


def test_hostile_names_are_inert() -> None:
    bad = dataclasses.replace(verification().levels[0], name=HOSTILE)
    found = verification(text=HOSTILE, levels=(bad,))
    result = changed(
        recipes=(recipe(budget=HOSTILE, verification=found), recipe(2, stock=(Stock(HOSTILE, 9, None),))),
        stock=(Stock(HOSTILE, 30_000_000, expected(0.1)), *example().stock),
        recoveries=(recovery(level=HOSTILE, layers=(HOSTILE,)),),
    )
    text = rendered.page(result)
    tags = [tag for tag, _ in Page(text).tags]
    assert tags.count("script") == 3
    assert "img" not in tags
    assert HOSTILE in Page(text).words
    assert "<script" not in re.sub("`[^`]*`", "", rendered.text(result))


# -- the chart


def drawn(result: Result) -> dict[str, Any]:
    spec = recipe_charts.recipes(result)
    assert spec is not None
    return spec


def data(result: Result) -> list[dict[str, Any]]:
    """Every row that is drawn, once."""
    found = [row for rows in drawn(result)["datasets"].values() for row in rows]
    return list({(row["kind"], row["label"], row["mib"]): row for row in found}.values())


def points(result: Result, kind: str) -> set[tuple[str, int, float]]:
    return {(row["label"], round(row["mib"] * 2**20), row["value"]) for row in data(result) if row["kind"] == kind}


def offered(spec: dict[str, Any]) -> list[list[str]]:
    """The kinds in each of the chart's legends."""
    encodings = [layer["encoding"] for layer in spec["layer"]]
    return [
        encoding[name]["legend"]["values"] for encoding in encodings for name in ("color", "shape") if name in encoding
    ]


def test_chart_holds_the_values_of_the_records() -> None:
    result = example()
    assert points(result, recipe_charts.MIXES) == {("", mix.bytes, mix.kld) for mix in result.mixes}
    assert points(result, recipe_charts.LEVEL) == {
        (stock.level, stock.bytes, stock.predicted.kld) for stock in result.stock if stock.predicted
    }
    assert points(result, recipe_charts.RECIPE) == {
        (one.budget, one.bytes, one.predicted.kld) for one in result.recipes if one.predicted
    }
    found = [(one.budget, one.verification) for one in result.recipes if one.verification]
    assert len(found) == 4
    assert points(result, recipe_charts.RECIPE_MEASURED) == {
        (name, one.recipe.bytes, one.recipe.kld) for name, one in found
    }
    assert points(result, recipe_charts.LEVEL_MEASURED) == {
        (level.name, level.bytes, level.kld) for _, one in found for level in one.levels
    }


def test_chart_tells_predicted_from_measured() -> None:
    for row in data(example()):
        guessed = row["kind"] in (recipe_charts.MIXES, recipe_charts.LEVEL, recipe_charts.RECIPE)
        assert row["text"].startswith(PREDICTED) == guessed == (PREDICTED in row["kind"]) != row["solid"]
    own = verification().recipe
    assert own.kld is not None
    assert own.kld_se is not None
    row = next(row for row in data(example()) if row["kind"] == recipe_charts.RECIPE_MEASURED)
    assert (row["low"], row["high"]) == pytest.approx((own.kld - own.kld_se, own.kld + own.kld_se))
    assert row["text"] == plus_minus(own.kld, own.kld_se)


def test_whisker_stays_on_a_logarithmic_axis() -> None:
    row = next(r for r in data(measured(kld=0.05, kld_se=0.06)) if r["kind"] == recipe_charts.RECIPE_MEASURED)
    assert (row["low"], row["high"]) == pytest.approx((0.005, 0.11))
    bare = next(r for r in data(measured(kld=0.05, kld_se=None)) if r["kind"] == recipe_charts.RECIPE_MEASURED)
    assert (bare["low"], bare["high"], bare["text"]) == (0.05, 0.05, "0.0500")


def test_levels_of_the_scan_are_drawn_until_a_recipe_is_verified() -> None:
    result = unverified()
    sizes = {stock.level: stock.bytes for stock in result.stock}
    assert points(result, recipe_charts.LEVEL_MEASURED) == {
        (level.name, sizes[level.name], level.output.kld_mean) for level in result.levels
    }
    other = dataclasses.replace(result, levels=(dataclasses.replace(result.levels[0], name="mine"),))
    assert points(other, recipe_charts.LEVEL_MEASURED) == set()


def test_legend_offers_only_kinds_that_are_drawn() -> None:
    guesses = [kind for kind in KINDS if PREDICTED in kind]
    cases = [
        (example(), KINDS),
        (unverified(), [*guesses, recipe_charts.LEVEL_MEASURED]),
        (dataclasses.replace(unverified(), levels=()), guesses),
        (dataclasses.replace(unverified(), levels=(), recipes=()), guesses[:2]),
    ]
    for result, kinds in cases:
        drawn_kinds = {row["kind"] for row in data(result)}
        assert drawn_kinds == set(kinds)
        assert {tuple(values) for values in offered(drawn(result))} == {tuple(kinds)}


def test_what_has_no_logarithm_is_not_drawn() -> None:
    zero = Stock("F16", 99_000_000, expected(0.0))
    result = changed(mixes=(*example().mixes, Mix(99_000_000, 0.0)), stock=(*example().stock, zero))
    assert 0.0 not in {row["value"] for row in data(result)}
    assert "F16" not in {row["label"] for row in data(result)}
    exact = points(measured(kld=0.0, kld_se=0.0), recipe_charts.RECIPE_MEASURED)
    assert exact == set()


def test_chart_without_mixes_or_marks_is_left_out() -> None:
    assert recipe_charts.recipes(changed(mixes=())) is None
    assert recipe_charts.recipes(changed(stock=(), recipes=(), levels=())) is None
    assert "Not drawn" in rendered.text(changed(mixes=()))


def test_chart_becomes_an_image_in_both_themes() -> None:
    for theme in (themes.light(), themes.dark()):
        image = scan_charts.to_svg(drawn(example()), theme)
        assert ElementTree.fromstring(image).tag == f"{SVG}svg"
        assert "NaN" not in image


def dense() -> Result:
    """Every usual level at its nominal bits per weight: some are less than a label apart."""
    rows = []
    for name in levels.LADDER:
        bpw = levels.LEVELS_BY_NAME[name].nominal_bpw
        rows.append(Stock(name, round(bpw * 1e6), expected(20 * math.exp(-1.1 * bpw))))
    mixes = tuple(Mix(row.bytes, row.predicted.kld * 0.8) for row in rows if row.predicted)
    return changed(stock=tuple(rows), mixes=mixes, recipes=())


def boxes(result: Result) -> dict[str, tuple[float, float, float, float]]:
    """Label -> left, top, right, bottom in the image; a character is taken to be two thirds of its height wide."""
    root = ElementTree.fromstring(scan_charts.to_svg(drawn(result), themes.light()))
    found = {}
    for text in root.iter(f"{SVG}text"):
        place = re.fullmatch(r"translate\(([\d.-]+),([\d.-]+)\)", text.get("transform", ""))
        if text.get("aria-roledescription") == "text mark" and text.text and place:
            size, x, y = float(str(text.get("font-size")).removesuffix("px")), float(place[1]), float(place[2])
            assert text.get("text-anchor") == "middle"
            half = len(text.text) * size / 3
            found[text.text] = (x - half, y - size, x + half, y)
    return found


@pytest.mark.parametrize("result", [example(), unverified(), dense()], ids=["example", "unverified", "dense"])
def test_labels_do_not_collide(result: Result) -> None:
    found = boxes(result)
    assert len(found) >= 3
    for (one, a), (other, b) in combinations(found.items(), 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, (one, other)


def test_measured_levels_are_named_first() -> None:
    result = dense()
    assert {"Q4_K_M", "Q8_0"} <= set(boxes(result))
    assert "Q4_K_S" not in boxes(result)  # too near to Q4_K_M, although it comes first
    named = {row["label"] for row in data(result) if row["name"]}
    assert set(boxes(result)) == named
    other = dataclasses.replace(result.levels[0], name="Q4_K_S")
    swapped = boxes(dataclasses.replace(result, levels=(other,)))
    assert "Q4_K_S" in swapped
    assert "Q4_K_M" not in swapped


def test_level_of_one_size_with_another_is_not_named_over_it() -> None:
    twins = (Stock("Q4_K_S", 30_000_000, expected(0.06)), Stock("Q4_K_M", 30_000_000, expected(0.06)))
    alone = dataclasses.replace(changed(stock=twins, recipes=()), levels=())
    assert len(set(boxes(alone)) & {"Q4_K_S", "Q4_K_M"}) == 1


def test_shapes_of_tensors_count_all_their_dimensions() -> None:
    tensors = (FileTensor("experts", (256, 4, 8), "F16", "F16"), FileTensor("norm", (256,), "F32", ""))
    result = changed(tensors=tensors, stock=(Stock("Q4_K_M", 8448, None),))
    assert column(recipe_tables.levels(result), "bits/weight") == [f"{8 * 8448 / (256 * 32 + 256):.2f}"]


# -- one line for the terminal


def test_short_line_of_a_built_recipe_is_measured() -> None:
    found, one = verification(), recipe()
    assert one.built is not None
    assert recipe_tables.short(example()) == (
        f"A mix of the size of Q4_K_M was built: measured KLD {significant(found.recipe.kld)} where Q4_K_M has "
        f"{significant(found.levels[0].kld)} (other text than above): {one.built.file}"
    )


@pytest.mark.parametrize(
    "changes",
    [{"verification": None}, {"built": None}, {"verification": verification(levels=verification().levels[1:])}],
    ids=["not measured", "not built", "not beside its level"],
)
def test_short_line_of_any_other_recipe_is_predicted(changes: dict[str, Any]) -> None:
    one = recipe(**changes)
    rival = one.stock[0].predicted
    assert one.predicted is not None
    assert rival is not None
    assert recipe_tables.short(changed(recipes=(one,))) == (
        f"A mix of the size of Q4_K_M is predicted to have KLD ≈{significant(one.predicted.kld)} where Q4_K_M has "
        f"≈{significant(rival.kld)}: qres recipe makes it."
    )


def test_short_line_is_of_the_first_recipe_that_is_better_at_equal_size() -> None:
    worse = recipe(verification=None, predicted=expected(0.2))
    bare = recipe(verification=None, predicted=None)
    better = recipe(1, verification=None)
    assert better.predicted is not None
    line = recipe_tables.short(changed(recipes=(worse, bare, recipe(2), better)))
    assert line.startswith(
        f"A mix of the size of Q5_K_M is predicted to have KLD ≈{significant(better.predicted.kld)} "
    )
    assert recipe_tables.short(changed(recipes=(worse, bare, recipe(2), recipe(3)))) == ""
    assert recipe_tables.short(without()) == ""
