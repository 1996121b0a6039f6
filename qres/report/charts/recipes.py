"""The chart of recipes: the best mix of every size beside the levels, predicted and measured."""

from __future__ import annotations

import altair as alt

from qres.records.recipe import Measure
from qres.records.result import Result
from qres.report.charts import parts
from qres.report.charts.parts import Spec, tip
from qres.report.formatting import plus_minus, predicted
from qres.report.rows.stream import Row

_HEIGHT = 340
_ROOM = 0.08
"""Share of the width that a name needs."""
MIXES, LEVEL, RECIPE = "best mixes (≈)", "level (≈)", "recipe (≈)"
LEVEL_MEASURED, RECIPE_MEASURED = "level, measured", "recipe, measured"
_KINDS = (MIXES, LEVEL, RECIPE, LEVEL_MEASURED, RECIPE_MEASURED)


def recipes(result: Result) -> Spec | None:
    """Size against KLD of recipes, levels and mixes."""
    line = [_row(MIXES, "", mix.bytes, mix.kld, predicted(mix.kld)) for mix in result.mixes if mix.kld > 0]
    marks = _marks(result)
    if not line or not marks:
        return None
    every = [*line, *marks]
    x = alt.X("mib:Q", title="MiB", scale=alt.Scale(zero=False, nice=False, padding=14))
    y = parts.log_y(every, "KLD")
    present = [kind for kind in _KINDS if any(row["kind"] == kind for row in every)]
    colour = _colour(present)
    path = parts.chart(line).mark_line(strokeDash=[5, 3]).encode(x=x, y=y, color=colour)
    dots = parts.chart(marks).mark_point(size=64, opacity=1, strokeWidth=1.6)
    shapes = ["stroke", "circle", "diamond", "circle", "diamond"]
    scale = alt.Scale(domain=list(_KINDS), range=shapes)
    shape = alt.Shape("kind:N", scale=scale, legend=parts.legend(values=present))
    tips = [tip("label", "file"), tip("kind"), tip("mib", "MiB", ",.1f"), tip("text", "KLD")]
    hollow = dots.transform_filter("!datum.solid").encode(x=x, y=y, color=colour, shape=shape, tooltip=tips)
    solid = parts.chart([row for row in marks if row["solid"]] or line[:0])
    layers = [path, hollow]
    if any(row["solid"] for row in marks):
        bars = solid.mark_rule(strokeWidth=1).encode(x=x, y=alt.Y("low:Q"), y2="high:Q", color=colour)
        filled = solid.mark_point(size=64, filled=True, opacity=1)
        layers += [bars, filled.encode(x=x, y=y, color=colour, shape=shape, tooltip=tips)]
    names = parts.chart([row for row in marks if row["name"]]).mark_text(style="guide-words", dy=-10, align="center")
    return parts.spec(*layers, names.encode(x=x, y=y, text="name:N"), height=_HEIGHT)


def _colour(present: list[str]) -> alt.Color:
    scale = alt.Scale(domain=list(_KINDS), range="category")
    return alt.Color("kind:N", scale=scale, legend=parts.legend(values=present))


def _marks(result: Result) -> list[Row]:
    """Levels and recipes: predictions, and measurements where there are some."""
    rows = [
        _row(LEVEL, stock.level, stock.bytes, stock.predicted.kld, predicted(stock.predicted.kld))
        for stock in result.stock
        if stock.predicted is not None and stock.predicted.kld > 0
    ]
    measured: dict[str, Row] = {}
    for recipe in result.recipes:
        found = recipe.verification
        if recipe.predicted is not None and recipe.predicted.kld > 0:
            shown = predicted(recipe.predicted.kld)
            rows.append(_row(RECIPE, recipe.budget, recipe.bytes, recipe.predicted.kld, shown))
        if found is not None:
            measured |= _measured(RECIPE_MEASURED, recipe.budget, found.recipe)
            for other in found.levels:
                measured |= _measured(LEVEL_MEASURED, other.name, other)
    if not measured:
        sizes = {stock.level: stock.bytes for stock in result.stock}
        for level in result.levels:
            kld, se = level.output.kld_mean, level.output.kld_se
            if kld and level.name in sizes:
                measured[level.name] = _row(
                    LEVEL_MEASURED, level.name, sizes[level.name], kld, plus_minus(kld, se), se=se, solid=True
                )
    marks = [*rows, *measured.values()]
    _name(marks, [mix.bytes / 2**20 for mix in result.mixes])
    return marks


def _name(marks: list[Row], line: list[float]) -> None:
    """Name levels where there is room beside those that have a name: the measured ones first."""
    sizes = [*line, *(row["mib"] for row in marks)]
    reach = max(sizes, default=0.0) - min(sizes, default=0.0)
    named: dict[str, float] = {}
    levels = [row for row in marks if row["kind"] in (LEVEL, LEVEL_MEASURED)]
    for row in sorted(levels, key=lambda row: not row["solid"]):
        if row["label"] not in named and all(abs(row["mib"] - other) > _ROOM * reach for other in named.values()):
            row["name"] = row["label"]
            named[row["label"]] = row["mib"]


def _measured(kind: str, name: str, found: Measure) -> dict[str, Row]:
    if not found.kld:
        return {}
    shown = plus_minus(found.kld, found.kld_se)
    return {name: _row(kind, name, found.bytes, found.kld, shown, se=found.kld_se, solid=True)}


def _row(
    kind: str,
    label: str,
    n_bytes: int,
    kld: float,
    shown: str,
    *,
    name: str = "",
    se: float | None = None,
    solid: bool = False,
) -> Row:
    return {
        "kind": kind,
        "label": label,
        "name": name,
        "mib": n_bytes / 2**20,
        "value": kld,
        "low": max(kld - (se or 0.0), kld / 10),
        "high": kld + (se or 0.0),
        "text": shown,
        "solid": solid,
    }
