"""The report as a list of sections, in the order of a reader's questions. Markdown and HTML both place this list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qres.records.result import Result
from qres.report import paragraphs
from qres.report.charts import prediction as prediction_charts
from qres.report.charts import recipes as recipe_charts
from qres.report.charts import scan as scan_charts
from qres.report.tables import files, layers, levels, prediction, recipes
from qres.report.tables.table import Table
from qres.report.words import FIGURES, Reading


@dataclass(frozen=True)
class Figure:
    """A chart with the text beside it; without a `spec` the text says why it is missing."""

    name: str
    words: Reading
    spec: dict[str, Any] | None


Item = Table | Figure | str
"""What a section holds; a string is a paragraph."""


@dataclass(frozen=True)
class Section:
    """A heading and what is below it."""

    name: str
    title: str
    items: tuple[Item, ...]


_CHARTS: dict[str, Callable[[Result], dict[str, Any] | None]] = {
    "ladder": scan_charts.ladder,
    "distribution": scan_charts.distribution,
    "sensitivity": scan_charts.sensitivity,
    "stream": scan_charts.stream,
    "drift": scan_charts.drift,
    "own_error": scan_charts.own_error,
    "ledger": scan_charts.ledger,
    "recipes": recipe_charts.recipes,
    "trust": prediction_charts.trust,
    "tensors": prediction_charts.tensors,
}


def sections(result: Result) -> tuple[Section, ...]:
    """Every section of the report that has something in it, below the verdict."""
    found = (
        _levels(result),
        Section("numbers", "Numbers to mind", _filled(files.non_finite(result), files.extremes(result))),
        _recipes(result),
        _keep(result),
        _sixteen(result),
        _devices(result),
        _units(result),
        _trust(result),
        _tensors(result),
        Section("residual", "What the residual stream says about this model", paragraphs.paragraphs(result)),
        _stream(result),
        _drift(result),
        _output(result),
        _files(result),
        Section("skipped", "Not measured", _filled(files.skipped(result))),
        Section("settings", "Model and settings", (files.reference(result), files.settings(result))),
    )
    return tuple(section for section in found if section.items)


def figures(parts: tuple[Section, ...]) -> tuple[Figure, ...]:
    """The figures of the sections that are drawn."""
    return tuple(item for part in parts for item in part.items if isinstance(item, Figure) and item.spec is not None)


def _levels(result: Result) -> Section:
    if not result.levels:
        return Section("levels", "Levels", ("No level was measured.",))
    text = f"Text: {result.settings.text}."
    head = (text, levels.levels(result), _figure("ladder", result))
    return Section("levels", "Levels", (*head, *_filled(levels.comparisons(result)), _figure("distribution", result)))


def _keep(result: Result) -> Section:
    intro = (
        f"Best first, ranked on {result.settings.rank_text}. Marked rows are worth their bytes. Recovered KLD and "
        "share of the gap are measured for one unit at a time, on the text that ranks them."
    )
    items = _filled(*(layers.keep(result, level) for level in result.levels))
    stay = "at 16 bit" if result.reference.is_original else "as in the reference"
    return Section("keep", f"What must stay {stay}", (intro, *items) if items else ())


def _recipes(result: Result) -> Section:
    if not result.recipes:
        return Section("recipes", "Recipes", ())
    items = _filled(recipes.recipes(result), recipes.verified(result), recipes.levels(result))
    head = (recipes.answer(result), _figure("recipes", result))
    return Section("recipes", "Recipes: a better file of the same size", (*head, *items))


def _sixteen(result: Result) -> Section:
    items = _filled(recipes.recoveries(result))
    name, title = "sixteen", "Is 16 bit worth its bytes?"
    return Section(name, title, (recipes.sixteen_answer(result), *items) if items else ())


def _devices(result: Result) -> Section:
    return Section("devices", "Devices", _filled(levels.advice(result), levels.deployment(result)))


def _units(result: Result) -> Section:
    if not any(level.sensitivity.units for level in result.levels):
        return Section("units", "Sensitivity", ())
    sentences = " ".join(layers.rank_sentence(level) for level in result.levels if level.sensitivity.units)
    items: list[Item] = [_figure("sensitivity", result)]
    items += _filled(layers.rank_correlations(result))
    items.append(sentences)
    items += _filled(layers.additivity(result), *(layers.units(result, level) for level in result.levels))
    return Section("units", "Sensitivity", tuple(items))


def _trust(result: Result) -> Section:
    name, title = "trust", "How far the predictions can be trusted"
    found = result.prediction
    if not found.used:
        why = found.reason.rstrip(". ") or "no reason was recorded"
        return Section(
            name,
            title,
            (
                f"There is no prediction, because the replay of the reference cannot be used ({why}): measured "
                "patching is used instead.",
            ),
        )
    intro = (
        "Predicted (≈) is what one backward pass through the reference says about each unit; patched is what was "
        "measured. Only units that have both can be compared, so these figures say how far to believe the others."
    )
    made = _filled(
        prediction.trust(result),
        prediction.worst(result),
        prediction.calibration(result),
        prediction.replay(result),
    )
    return Section(name, title, (intro, _figure("trust", result), *made))


def _tensors(result: Result) -> Section:
    name, title = "tensors", "Sensitivity of every tensor"
    if not result.prediction.used:
        return Section(name, title, ())
    intro = (
        "All numbers here are predicted (≈), none is measured: the KLD of giving one tensor one type, with everything "
        "else exact. They are shown as calculated, not calibrated."
    )
    made = _filled(
        prediction.by_role(result),
        *(prediction.most_sensitive(result, level) for level in result.levels),
        prediction.every_tensor(result),
    )
    return Section(name, title, (intro, _figure("tensors", result), *made))


def _stream(result: Result) -> Section:
    if not result.levels:
        return Section("stream", "The stream", _filled(layers.health(result)))
    return Section("stream", "The stream", (_figure("stream", result), *_filled(layers.health(result))))


def _drift(result: Result) -> Section:
    mapped = any(level.points for level in result.levels)
    if not mapped:
        return Section("drift", "Drift", ())
    text = levels.drift_floor(result.noise_floor)
    charts_here = (_figure(name, result) for name in ("drift", "own_error", "ledger"))
    items = _filled(*(layers.points(result, level) for level in result.levels))
    return Section("drift", "Drift", (text, *charts_here, *items))


def _output(result: Result) -> Section:
    items = _filled(levels.output(result), levels.by_position(result), levels.by_confidence(result))
    return Section("output", "Output in detail", items)


def _files(result: Result) -> Section:
    fallbacks = (files.fallbacks(level) for level in result.levels)
    return Section(
        "files",
        "What the files hold",
        _filled(files.types(result), *fallbacks, files.shared(result), files.experts(result)),
    )


def _figure(name: str, result: Result) -> Figure:
    return Figure(name, FIGURES[name], _CHARTS[name](result))


def _filled(*candidates: Table) -> tuple[Table, ...]:
    return tuple(candidate for candidate in candidates if candidate.rows)
