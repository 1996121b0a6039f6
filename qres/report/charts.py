"""One Altair definition for every chart: the page draws it, and Markdown gets it as SVG.

A chart is None when there is nothing to draw. Colours come from the theme (`themes`), widths from the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import altair as alt
import vl_convert

from qres.records import Result
from qres.report import series, tables
from qres.report.series import Row

HEIGHT = 270
IMAGE_WIDTH = 720
VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])

Spec = dict[str, Any]


def stream(result: Result) -> Spec | None:
    """Branch ratio by layer, reference and one level."""
    rows = series.ratios(result)
    if not rows:
        return None
    shown, chosen = _choice("level", "Level", rows, tables.focus(result))
    base = _chart(rows, chosen).encode(
        x=_layer_axis(result, rows),
        y=_log(rows, "branch ratio", 1.0),
        color=_branch(result, rows),
        strokeDash=_dash("model", ["reference", "quantized"]),
        tooltip=[_tip("label", "point"), _tip("model"), _tip("value", "ratio", ".3g"), _tip("p95", "p95")],
    )
    return _spec(_guide(1, "the branch is as large as the stream"), base.mark_line(point=_point()), params=shown)


def drift(result: Result) -> Spec | None:
    """Free-run drift of every level along the stream."""
    rows = series.drifts(result)
    if not rows:
        return None
    lines = _chart(rows).encode(
        x=_layer_axis(result, rows),
        y=_log(rows, "drift", result.noise_floor.drift_median),
        color=_level(result),
        tooltip=[_tip("level"), _tip("label", "point"), _tip("value", "drift", ".3g"), _tip("p95"), _tip("sqnr", "dB")],
    )
    return _spec(*_floor(result.noise_floor.drift_median), lines.mark_line(point=_point()))


def own_error(result: Result) -> Spec | None:
    """Forced-run error of every branch, by level."""
    rows = series.own_errors(result)
    if not rows:
        return None
    shown, chosen = _options("measure", "Error", [series.INJECTED, series.LOCAL], series.INJECTED)
    lines = _chart(rows, chosen).encode(
        x=_layer_axis(result, rows),
        y=_log(rows, "error of the branch"),
        color=_level(result),
        strokeDash=_dash("branch", [name for name in series.branches(result) if name in _values(rows, "branch")]),
        tooltip=[_tip("level"), _tip("label", "point"), _tip("measure"), _tip("value", "error", ".3g")],
    )
    return _spec(lines.mark_line(point=_point()), params=shown)


def ledger(result: Result) -> Spec | None:
    """Which layers the final drift comes from."""
    rows = series.ledger(result)
    if not rows:
        return None
    shown, chosen = _choice("level", "Level", rows, tables.focus(result))
    parts = [series.MADE, series.INHERITED]
    bars = _chart(rows, chosen).encode(
        x=alt.X("layer:N", sort=None, title="layer", axis=alt.Axis(labelAngle=0, labelOverlap="greedy")),
        y=alt.Y("value:Q", title="share of the final drift", axis=alt.Axis(format="~%", tickCount=6)),
        opacity=alt.Opacity("part:N", sort=None, scale=alt.Scale(domain=parts, range=[1, 0.35]), legend=_legend()),
        tooltip=[_tip("layer"), _tip("part"), _tip("value", "share", ".1%")],
    )
    return _spec(bars.mark_bar(), params=shown)


def sensitivity(result: Result) -> Spec | None:
    """Measured KLD of every unit quantized alone."""
    rows = series.sensitivities(result)
    if not rows:
        return None
    shown, chosen = _choice("level", "Level", rows, tables.focus(result))
    colour = _branch(result, rows)
    base = _chart(rows, chosen).encode(
        x=_layer_axis(result, rows),
        color=colour,
        tooltip=[_tip("label", "unit"), _tip("branch"), _tip("text", "KLD ± SE")],
    )
    dots = base.mark_point(filled=True, size=60, opacity=1).encode(
        y=_log(rows, "KLD of the unit alone", result.noise_floor.kld_mean),
        shape=alt.Shape("branch:N", scale=alt.Scale(domain=series.branches(result)), legend=colour.legend),
    )
    bars = base.mark_rule(strokeWidth=1.5).encode(y=alt.Y("low:Q"), y2="high:Q")
    return _spec(*_floor(result.noise_floor.kld_mean), bars, dots, params=shown)


def distribution(result: Result) -> Spec | None:
    """Per-token KLD of every level, with its mean."""
    rows = series.histograms(result)
    if not rows:
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
    if not rows:
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
    return str(vl_convert.javascript_bundle(vl_version=VEGA_LITE))


def _spec(*layers: alt.Chart | alt.LayerChart, params: Sequence[alt.Parameter] = ()) -> Spec:
    chart = alt.layer(*layers).properties(width="container", height=HEIGHT)
    spec: Spec = chart.add_params(*params).to_dict() if params else chart.to_dict()
    spec.pop("config", None)
    spec.pop("$schema", None)
    return spec


def _chart(rows: Sequence[Row], chosen: Callable[[alt.Chart], alt.Chart] | None = None) -> alt.Chart:
    chart = alt.Chart(alt.InlineData(list(rows)))
    return chosen(chart) if chosen else chart


def _choice(field: str, label: str, rows: Sequence[Row], first: Any) -> Any:
    names = _values(rows, field)
    return _options(field, label, names, first.name if first is not None and first.name in names else names[-1])


def _options(field: str, label: str, names: list[str], first: str) -> Any:
    if len(names) < 2:
        return (), None
    param = alt.param(name=f"chosen_{field}", bind=alt.binding_radio(options=names, name=label), value=first)
    return (param,), lambda chart: chart.transform_filter(f"datum.{field} === chosen_{field}")


def _guide(value: float, words: str) -> alt.LayerChart:
    base = alt.Chart(alt.InlineData([{"value": value, "words": words}])).encode(y="value:Q")
    label = base.mark_text(style="guide-words", dy=-3, dx=-2).encode(text="words:N", x=alt.value("width"))
    return base.mark_rule(style="guide") + label


def _floor(value: float | None) -> tuple[alt.LayerChart, ...]:
    return (_guide(value, "noise floor"),) if value else ()


def _layer_axis(result: Result, rows: Sequence[Row]) -> alt.X:
    last = result.reference.n_layer
    step = max(1, -(-last // 12))
    ends = [pick(float(row["place"]) for row in rows) for pick in (min, max)]
    ticks = [tick for tick in (-1, *range(0, last, step), last) if ends[0] <= tick <= ends[1]]
    words = f"datum.value < 0 ? 'emb' : datum.value === {last} ? 'head' : format(datum.value, 'd')"
    axis = alt.Axis(values=ticks, labelExpr=words, labelOverlap="greedy")
    return alt.X("place:Q", title="layer", scale=alt.Scale(domain=ends, nice=False, padding=10), axis=axis)


def _log(rows: Sequence[Row], title: str, guide: float | None = None) -> alt.Y:
    scale = alt.Scale(type="log", nice=False, padding=14)
    return alt.Y("value:Q", title=title, scale=scale, axis=_log_axis(rows, "value", guide))


def _log_axis(rows: Sequence[Row], field: str, guide: float | None = None) -> alt.Axis:
    """Ticks at powers of ten, and at 3, or 2 and 5, between them where there are few."""
    values = [float(row[field]) for row in rows] + ([guide] if guide else [])
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
    present = [name for name in series.branches(result) if name in _values(rows, "branch")]
    return alt.Color("branch:N", scale=scale, legend=_legend(values=present))


def _dash(field: str, names: list[str]) -> alt.StrokeDash:
    patterns = [[1, 0], [5, 3], [1, 3], [8, 3, 1, 3]]
    scale = alt.Scale(domain=names, range=[patterns[index % len(patterns)] for index in range(len(names))])
    return alt.StrokeDash(f"{field}:N", scale=scale, legend=_legend(symbolType="stroke"))


def _legend(**more: Any) -> alt.Legend:
    columns = alt.ExprRef("max(1, floor(width / 110))")
    return alt.Legend(orient="top", title=None, columns=columns, labelLimit=160, **more)


def _point() -> alt.OverlayMarkDef:
    return alt.OverlayMarkDef(filled=True, size=22, opacity=1)


def _tip(field: str, title: str | None = None, style: str | None = None) -> alt.Tooltip:
    kind = "Q" if style else "N"
    more = {"format": style} if style else {}
    return alt.Tooltip(f"{field}:{kind}", title=title or field, **more)


def _values(rows: Sequence[Row], field: str) -> list[str]:
    return list(dict.fromkeys(str(row[field]) for row in rows))
