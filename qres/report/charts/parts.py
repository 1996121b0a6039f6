"""What the charts share: axes, colours, legends, guides, tooltips, and the choice beside a chart."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import altair as alt

from qres.records.result import Result
from qres.report.rows import stream
from qres.report.rows.stream import Row
from qres.report.tables import levels

HEIGHT = 270
DOT = 16
BOTH_THEMES = "#7d868f"
"""A grey that reads on light and on dark, for the one legend that Vega gives no colour from the theme."""

Spec = dict[str, Any]
Layer = alt.Chart | alt.LayerChart | alt.FacetChart


class Choice(NamedTuple):
    """A choice offered beside a chart, and the filter that it drives."""

    param: alt.Parameter
    where: str


def spec(*layers: Layer, choice: Choice | None = None, height: int = HEIGHT) -> Spec:
    """The layers as one chart that takes the width of the page."""
    layered = alt.layer(*layers).properties(width="container", height=height)
    found: Spec = (layered.add_params(choice.param) if choice else layered).to_dict()
    for name, rows in found["datasets"].items():
        found["datasets"][name] = json.loads(rows) if isinstance(rows, str) else rows
    found.pop("config", None)
    found.pop("$schema", None)
    return found


def chart(rows: Sequence[Row], choice: Choice | None = None) -> alt.Chart:
    """A chart of these rows, or of those that the choice leaves."""
    drawn = alt.Chart(alt.InlineData(json.dumps(rows)))  # as text: Altair checks each row of a list against its schema
    return drawn.transform_filter(choice.where) if choice else drawn


def level_choice(result: Result, rows: Sequence[Row]) -> Choice | None:
    """A choice of one level at a time, where there are several; the focus first."""
    names, first = values(rows, "level"), levels.focus(result)
    return choice("level", "Level", names, first.name if first and first.name in names else names[-1])


def choice(field: str, label: str, names: list[str], first: str) -> Choice | None:
    """A choice of one value of a field at a time, where there are several."""
    if len(names) < 2:
        return None
    name = f"chosen_{field}"
    param = alt.param(name=name, bind=alt.binding_radio(options=names, name=label), value=first)
    return Choice(param, f"datum.{field} === {name}")


def guide(value: float, words: str) -> Layer:
    """A dashed line across the chart, with words at its right end."""
    base = alt.Chart(alt.InlineData([{"value": value, "words": words}])).encode(y="value:Q")
    label = base.mark_text(style="guide-words", dy=-3, dx=-2).encode(text="words:N", x=alt.value("width"))
    return alt.layer(base.mark_rule(style="guide"), label)


def floor(value: float | None) -> tuple[Layer, ...]:
    """The noise floor as a guide, where there is one."""
    return (guide(value, "noise floor"),) if value else ()


def layer_step(result: Result) -> int:
    """Layers from one label to the next, for about a dozen labels."""
    return max(1, -(-result.reference.n_layer // 12))


def layer_axis(result: Result, rows: Sequence[Row]) -> alt.X:
    """The layers from left to right, the embedding before the first and the head behind the last."""
    last = result.reference.n_layer
    step = layer_step(result)
    ends = [pick(row["place"] for row in rows) for pick in (min, max)]
    ticks = [
        tick for tick in (-1, *range(0, last - (step if step > 1 else 0), step), last) if ends[0] <= tick <= ends[1]
    ]
    words = f"datum.value < 0 ? 'emb' : datum.value === {last} ? 'head' : format(datum.value, 'd')"
    axis = alt.Axis(values=ticks, labelExpr=words, labelOverlap="greedy")
    return alt.X("place:Q", title="layer", scale=alt.Scale(domain=ends, nice=False, padding=10), axis=axis)


def log_y(rows: Sequence[Row], title: str, also: float | None = None) -> alt.Y:
    """A logarithmic vertical axis."""
    scale = alt.Scale(type="log", nice=False, padding=14)
    return alt.Y("value:Q", title=title, scale=scale, axis=log_axis(rows, "value", also))


def log_axis(rows: Sequence[Row], field: str, also: float | None = None) -> alt.Axis:
    """Ticks at powers of ten, and at 3, or 2 and 5, between them where there are few."""
    shown = [float(value) for row in rows if (value := row[field]) is not None] + ([also] if also else [])
    low, high = math.log10(min(shown)), math.log10(max(shown))
    between = (1,) if high - low > 4 else (1, 3) if high - low > 1.5 else (1, 2, 5)
    decades = range(math.floor(low) - 1, math.ceil(high) + 1)
    ticks = [float(f"{digit}e{decade}") for decade in decades for digit in between]
    words = "datum.value < 0.001 ? format(datum.value, '~e') : format(datum.value, '~g')"
    return alt.Axis(values=ticks, labelExpr=words, labelOverlap="greedy")


def by_level(result: Result, with_legend: bool = True) -> alt.Color:
    """One colour per level."""
    names = [level.name for level in result.levels]
    scale = alt.Scale(domain=names, range="category")
    return alt.Color("level:N", scale=scale, legend=legend() if with_legend and len(names) > 1 else None)


def by_branch(result: Result, rows: Sequence[Row]) -> alt.Color:
    """One colour per kind of branch."""
    scale = alt.Scale(domain=stream.branches(result), range="ordinal")
    return alt.Color("branch:N", scale=scale, legend=branch_legend(result, rows))


def branch_legend(result: Result, rows: Sequence[Row]) -> alt.Legend:
    """The kinds of branches that are drawn."""
    present = values(rows, "branch")
    return legend(values=[name for name in stream.branches(result) if name in present])


def dashed(base: alt.Chart, field: str, names: list[str]) -> tuple[alt.Chart, alt.Chart]:
    """Lines told apart by their dashes, and dots; the dots' fill would hide the dashes in a common legend."""
    patterns = [[1, 0], [5, 3], [1, 3], [8, 3, 1, 3]]
    scale = alt.Scale(domain=names, range=[patterns[index % len(patterns)] for index in range(len(names))])
    strokes = legend(symbolType="stroke", symbolSize=160, symbolStrokeColor=BOTH_THEMES)
    dash = alt.StrokeDash(f"{field}:N", scale=scale, legend=strokes)
    return base.mark_line().encode(strokeDash=dash), base.mark_point(filled=True, size=DOT, opacity=1)


def legend(**more: object) -> alt.Legend:
    """A legend above the chart, in as many columns as fit."""
    columns = alt.ExprRef("max(1, floor(width / 110))")
    return alt.Legend(orient="top", title=None, columns=columns, labelLimit=160, **more)  # type: ignore[arg-type]


def tip(field: str, title: str | None = None, style: str | None = None) -> alt.Tooltip:
    """One line of a tooltip."""
    if style is None:
        return alt.Tooltip(f"{field}:N", title=title or field)
    return alt.Tooltip(f"{field}:Q", title=title or field, format=style)


def values(rows: Sequence[Row], field: str) -> list[str]:
    """The values of a field, in order of appearance."""
    return list(dict.fromkeys(str(row[field]) for row in rows))
