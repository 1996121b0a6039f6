"""One Altair definition for every chart: the page draws it, and Markdown gets it as SVG.

A chart is None when there is nothing to draw. Colours come from the theme (`themes`), widths from the page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import altair as alt
import vl_convert

from qres.records import Result
from qres.report import series, tables
from qres.report.series import Row

HEIGHT = 270
IMAGE_WIDTH = 720
DOT = 16
_EXPORTS = "window.vegaEmbed = vegaEmbed;"
BOTH_THEMES = "#7d868f"
"""A grey that reads on light and on dark, for the one legend that Vega gives no colour from the theme."""
VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])

Spec = dict[str, Any]
Layer = alt.Chart | alt.LayerChart | alt.FacetChart


class Choice(NamedTuple):
    """A choice offered beside a chart, and the filter that it drives."""

    param: alt.Parameter
    where: str


def stream(result: Result) -> Spec | None:
    """Branch ratio by layer, reference and one level."""
    rows = series.ratios(result)
    if not series.drawable(rows):
        return None
    chosen = _one_level(result, rows)
    base = _chart(rows, chosen).encode(
        x=_layer_axis(result, rows),
        y=_log(rows, "branch ratio", 1.0),
        color=_branch(result, rows),
        tooltip=[_tip("label", "point"), _tip("model"), _tip("value", "ratio", ".3g"), _tip("p95", "p95")],
    )
    guide = _guide(1, "the branch is as large as the stream")
    return _spec(guide, *_dashed(base, "model", ["reference", "quantized"]), choice=chosen)


def drift(result: Result) -> Spec | None:
    """Free-run drift of every level along the stream."""
    rows = series.drifts(result)
    if not series.drawable(rows):
        return None
    lines = _chart(rows).encode(
        x=_layer_axis(result, rows),
        y=_log(rows, "drift", result.noise_floor.drift_median),
        color=_level(result),
        tooltip=[_tip("level"), _tip("label", "point"), _tip("value", "drift", ".3g"), _tip("p95"), _tip("sqnr", "dB")],
    )
    return _spec(
        *_floor(result.noise_floor.drift_median),
        lines.mark_line(point=alt.OverlayMarkDef(filled=True, size=DOT, opacity=1)),
    )


def own_error(result: Result) -> Spec | None:
    """Forced-run error of every branch, by level."""
    rows = series.own_errors(result)
    if not series.drawable(rows):
        return None
    chosen = _one("measure", "Error", [series.INJECTED, series.LOCAL], series.INJECTED)
    lines = _chart(rows, chosen).encode(
        x=_layer_axis(result, rows),
        y=_log(rows, "error of the branch"),
        color=_level(result),
        tooltip=[_tip("level"), _tip("label", "point"), _tip("measure"), _tip("value", "error", ".3g")],
    )
    names = [name for name in series.branches(result) if name in _values(rows, "branch")]
    return _spec(*_dashed(lines, "branch", names), choice=chosen)


def ledger(result: Result) -> Spec | None:
    """Which layers the final drift comes from."""
    rows = series.ledger(result)
    if not series.drawable(rows):
        return None
    chosen = _one_level(result, rows)
    parts = [series.MADE, series.INHERITED]
    labels = ["emb", *(str(layer) for layer in range(0, result.reference.n_layer, _layer_step(result)))]
    axis = alt.Axis(labelAngle=0, labelOverlap="greedy", values=labels)
    bars = _chart(rows, chosen).encode(
        x=alt.X("layer:N", sort=None, title="layer", axis=axis),
        y=alt.Y("value:Q", title="share of the final drift", axis=alt.Axis(format="~%", tickCount=6)),
        opacity=alt.Opacity("part:O", sort=None, scale=alt.Scale(domain=parts, range=[1, 0.35]), legend=_legend()),
        tooltip=[_tip("layer"), _tip("part"), _tip("value", "share", ".1%")],
    )
    return _spec(bars.mark_bar(), choice=chosen)


def sensitivity(result: Result) -> Spec | None:
    """Measured KLD of every unit quantized alone."""
    rows = series.sensitivities(result)
    if not series.drawable(rows):
        return None
    chosen = _one_level(result, rows)
    colour = _branch(result, rows)
    base = _chart(rows, chosen).encode(
        x=_layer_axis(result, rows),
        color=colour,
        tooltip=[_tip("label", "unit"), _tip("branch"), _tip("text", "KLD ± SE")],
    )
    dots = base.mark_point(filled=True, size=60, opacity=1).encode(
        y=_log(rows, "KLD of the unit alone", result.noise_floor.kld_mean),
        shape=alt.Shape(
            "branch:N", scale=alt.Scale(domain=series.branches(result)), legend=_branch_legend(result, rows)
        ),
    )
    bars = base.mark_rule(strokeWidth=1.5).encode(y=alt.Y("low:Q"), y2="high:Q")
    return _spec(*_floor(result.noise_floor.kld_mean), bars, dots, choice=chosen)


def distribution(result: Result) -> Spec | None:
    """Per-token KLD of every level, with its mean."""
    rows = series.histograms(result)
    if not series.drawable(rows):
        return None
    area = _chart(rows).encode(
        x=alt.X("kld:Q", title="KLD of a token", scale=alt.Scale(type="log", nice=False), axis=_log_axis(rows, "kld")),
        y=alt.Y("value:Q", stack=None, title="share of positions", axis=alt.Axis(format="~%", tickCount=5)),
        color=_level(result),
        tooltip=[_tip("level"), _tip("kld", "KLD from", ".2g"), _tip("text", "positions")],
    )
    means = _chart(series.means(result)).mark_rule(strokeDash=[5, 3], strokeWidth=1.5)
    means = means.encode(x="value:Q", color=_level(result), tooltip=[_tip("level"), _tip("value", "mean KLD", ".3g")])
    return _spec(area.mark_area(interpolate="step-after", fillOpacity=0.12, line={"strokeWidth": 1.5}), means)


def ladder(result: Result) -> Spec | None:
    """Size against mean KLD."""
    rows = series.sizes(result)
    if not series.drawable(rows):
        return None
    base = _chart(rows).encode(
        x=alt.X("mib:Q", title="size, MiB", scale=alt.Scale(zero=False, padding=48), axis=alt.Axis(tickCount=6)),
        tooltip=[_tip("level"), _tip("mib", "MiB", ",.1f"), _tip("text", "KLD ± SE")],
    )
    mean = _log(rows, "mean KLD", result.noise_floor.kld_mean)
    hue = _level(result, legend=False)
    return _spec(
        *_floor(result.noise_floor.kld_mean),
        base.mark_line(style="guide", strokeDash=[1, 0]).encode(y=mean),
        base.mark_rule(strokeWidth=1.5).encode(y=alt.Y("low:Q"), y2="high:Q", color=hue),
        base.mark_point(filled=True, size=80, opacity=1).encode(y=mean, color=hue),
        base.mark_text(align="left", dx=9, dy=-9, limit=140).encode(y=mean, text="level:N"),
    )


def to_svg(spec: Spec, config: dict[str, Any]) -> str:
    """A chart as an SVG image, made without a network."""
    sized = {**spec, "width": IMAGE_WIDTH}
    sized.pop("params", None)
    sized["params"] = [
        {key: value for key, value in param.items() if key != "bind"} for param in spec.get("params", ())
    ]
    return str(vl_convert.vegalite_to_svg(sized, vl_version=VEGA_LITE, config=config))


@lru_cache(maxsize=1)
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script (BSD-3-Clause), for a page without a network."""
    return str(vl_convert.javascript_bundle(_EXPORTS, vl_version=VEGA_LITE))


def _spec(*layers: Layer, choice: Choice | None = None) -> Spec:
    chart = alt.layer(*layers).properties(width="container", height=HEIGHT)
    spec: Spec = (chart.add_params(choice.param) if choice else chart).to_dict()
    spec.pop("config", None)
    spec.pop("$schema", None)
    return spec


def _chart(rows: Sequence[Row], choice: Choice | None = None) -> alt.Chart:
    chart = alt.Chart(alt.InlineData(list(rows)))
    return chart.transform_filter(choice.where) if choice else chart


def _one_level(result: Result, rows: Sequence[Row]) -> Choice | None:
    names, first = _values(rows, "level"), tables.focus(result)
    return _one("level", "Level", names, first.name if first and first.name in names else names[-1])


def _one(field: str, label: str, names: list[str], first: str) -> Choice | None:
    if len(names) < 2:
        return None
    name = f"chosen_{field}"
    param = alt.param(name=name, bind=alt.binding_radio(options=names, name=label), value=first)
    return Choice(param, f"datum.{field} === {name}")


def _guide(value: float, words: str) -> Layer:
    base = alt.Chart(alt.InlineData([{"value": value, "words": words}])).encode(y="value:Q")
    label = base.mark_text(style="guide-words", dy=-3, dx=-2).encode(text="words:N", x=alt.value("width"))
    return alt.layer(base.mark_rule(style="guide"), label)


def _floor(value: float | None) -> tuple[Layer, ...]:
    return (_guide(value, "noise floor"),) if value else ()


def _layer_step(result: Result) -> int:
    """Layers from one label to the next, for about a dozen labels."""
    return max(1, -(-result.reference.n_layer // 12))


def _layer_axis(result: Result, rows: Sequence[Row]) -> alt.X:
    last = result.reference.n_layer
    step = _layer_step(result)
    ends = [pick(row["place"] for row in rows) for pick in (min, max)]
    ticks = [
        tick for tick in (-1, *range(0, last - (step if step > 1 else 0), step), last) if ends[0] <= tick <= ends[1]
    ]
    words = f"datum.value < 0 ? 'emb' : datum.value === {last} ? 'head' : format(datum.value, 'd')"
    axis = alt.Axis(values=ticks, labelExpr=words, labelOverlap="greedy")
    return alt.X("place:Q", title="layer", scale=alt.Scale(domain=ends, nice=False, padding=10), axis=axis)


def _log(rows: Sequence[Row], title: str, guide: float | None = None) -> alt.Y:
    scale = alt.Scale(type="log", nice=False, padding=14)
    return alt.Y("value:Q", title=title, scale=scale, axis=_log_axis(rows, "value", guide))


def _log_axis(rows: Sequence[Row], field: str, guide: float | None = None) -> alt.Axis:
    """Ticks at powers of ten, and at 3, or 2 and 5, between them where there are few."""
    values = [float(value) for row in rows if (value := row[field]) is not None] + ([guide] if guide else [])
    low, high = math.log10(min(values)), math.log10(max(values))
    between = (1,) if high - low > 4 else (1, 3) if high - low > 1.5 else (1, 2, 5)
    decades = range(math.floor(low) - 1, math.ceil(high) + 1)
    ticks = [float(f"{digit}e{decade}") for decade in decades for digit in between]
    words = "datum.value < 0.001 ? format(datum.value, '~e') : format(datum.value, '~g')"
    return alt.Axis(values=ticks, labelExpr=words, labelOverlap="greedy")


def _level(result: Result, legend: bool = True) -> alt.Color:
    names = [level.name for level in result.levels]
    scale = alt.Scale(domain=names, range="category")
    return alt.Color("level:N", scale=scale, legend=_legend() if legend and len(names) > 1 else None)


def _branch(result: Result, rows: Sequence[Row]) -> alt.Color:
    scale = alt.Scale(domain=series.branches(result), range="ordinal")
    return alt.Color("branch:N", scale=scale, legend=_branch_legend(result, rows))


def _branch_legend(result: Result, rows: Sequence[Row]) -> alt.Legend:
    present = _values(rows, "branch")
    return _legend(values=[name for name in series.branches(result) if name in present])


def _dashed(base: alt.Chart, field: str, names: list[str]) -> tuple[alt.Chart, alt.Chart]:
    """Lines told apart by their dashes, and dots; the dots' fill would hide the dashes in a common legend."""
    patterns = [[1, 0], [5, 3], [1, 3], [8, 3, 1, 3]]
    scale = alt.Scale(domain=names, range=[patterns[index % len(patterns)] for index in range(len(names))])
    legend = _legend(symbolType="stroke", symbolSize=160, symbolStrokeColor=BOTH_THEMES)
    dash = alt.StrokeDash(f"{field}:N", scale=scale, legend=legend)
    return base.mark_line().encode(strokeDash=dash), base.mark_point(filled=True, size=DOT, opacity=1)


def _legend(**more: object) -> alt.Legend:
    columns = alt.ExprRef("max(1, floor(width / 110))")
    return alt.Legend(orient="top", title=None, columns=columns, labelLimit=160, **more)  # type: ignore[arg-type]


def _tip(field: str, title: str | None = None, style: str | None = None) -> alt.Tooltip:
    if style is None:
        return alt.Tooltip(f"{field}:N", title=title or field)
    return alt.Tooltip(f"{field}:Q", title=title or field, format=style)


def _values(rows: Sequence[Row], field: str) -> list[str]:
    return list(dict.fromkeys(str(row[field]) for row in rows))
