"""One Altair definition for every chart: the page draws it, and Markdown gets it as SVG.

A chart is None when there is nothing to draw. Colours come from the theme (`themes`), widths from the page.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import altair as alt
import vl_convert

from qres.records.result import Result
from qres.report.charts import parts
from qres.report.charts.parts import DOT, Spec, tip
from qres.report.rows.stream import (
    INHERITED,
    INJECTED,
    LOCAL,
    MADE,
    SCALED,
    branches,
    drawable,
    drifts,
    histograms,
    ledgers,
    means,
    own_errors,
    ratios,
    sensitivities,
    sizes,
)

IMAGE_WIDTH = 720
_GRADIENT = re.compile(r"\bgradient_\d+\b")
"""Vega numbers them through all charts of a process; a chart here has one, and the same result gives the same bytes."""
_EXPORTS = "window.vegaEmbed = vegaEmbed;"
VEGA_LITE = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])


def stream(result: Result) -> Spec | None:
    """Branch ratio by layer, reference and one level."""
    rows = ratios(result)
    if not drawable(rows):
        return None
    chosen = parts.level_choice(result, rows)
    base = parts.chart(rows, chosen).encode(
        x=parts.layer_axis(result, rows),
        y=parts.log_y(rows, "branch ratio", 1.0),
        color=parts.by_branch(result, rows),
        tooltip=[tip("label", "point"), tip("model"), tip("value", "ratio", ".3g"), tip("p95", "p95")],
    )
    guide = parts.guide(1, "the branch is as large as the stream")
    return parts.spec(guide, *parts.dashed(base, "model", ["reference", "quantized"]), choice=chosen)


def drift(result: Result) -> Spec | None:
    """Free-run drift of every level along the stream."""
    rows = drifts(result)
    if not drawable(rows):
        return None
    lines = parts.chart(rows).encode(
        x=parts.layer_axis(result, rows),
        y=parts.log_y(rows, "drift", result.noise_floor.drift_median),
        color=parts.by_level(result),
        tooltip=[tip("level"), tip("label", "point"), tip("value", "drift", ".3g"), tip("p95"), tip("sqnr", "dB")],
    )
    return parts.spec(
        *parts.floor(result.noise_floor.drift_median),
        lines.mark_line(point=alt.OverlayMarkDef(filled=True, size=DOT, opacity=1)),
    )


def own_error(result: Result) -> Spec | None:
    """Forced-run error of every branch, by level."""
    rows = own_errors(result)
    if not drawable(rows):
        return None
    chosen = parts.choice("measure", "Error", [INJECTED, LOCAL], INJECTED)
    lines = parts.chart(rows, chosen).encode(
        x=parts.layer_axis(result, rows),
        y=parts.log_y(rows, "error of the branch"),
        color=parts.by_level(result),
        tooltip=[tip("level"), tip("label", "point"), tip("measure"), tip("value", "error", ".3g")],
    )
    names = [name for name in branches(result) if name in parts.values(rows, "branch")]
    return parts.spec(*parts.dashed(lines, "branch", names), choice=chosen)


def ledger(result: Result) -> Spec | None:
    """Which layers the final drift comes from."""
    rows = ledgers(result)
    if not drawable(rows):
        return None
    chosen = parts.level_choice(result, rows)
    has_scaled = SCALED in parts.values(rows, "part")
    shades = {MADE: 1.0, **({SCALED: 0.6} if has_scaled else {}), INHERITED: 0.35}
    labels = ["emb", *(str(layer) for layer in range(0, result.reference.n_layer, parts.layer_step(result)))]
    axis = alt.Axis(labelAngle=0, labelOverlap="greedy", values=labels)
    bars = parts.chart(rows, chosen).encode(
        x=alt.X("layer:N", sort=None, title="layer", axis=axis),
        y=alt.Y("value:Q", title="share of the final drift", axis=alt.Axis(format="~%", tickCount=6)),
        opacity=alt.Opacity(
            "part:O",
            sort=None,
            scale=alt.Scale(domain=list(shades), range=list(shades.values())),
            legend=parts.legend(),
        ),
        tooltip=[tip("layer"), tip("part"), tip("value", "share", ".1%")],
    )
    return parts.spec(bars.mark_bar(), choice=chosen)


def sensitivity(result: Result) -> Spec | None:
    """Measured KLD of every unit quantized alone."""
    rows = sensitivities(result)
    if not drawable(rows):
        return None
    chosen = parts.level_choice(result, rows)
    colour = parts.by_branch(result, rows)
    base = parts.chart(rows, chosen).encode(
        x=parts.layer_axis(result, rows),
        color=colour,
        tooltip=[tip("label", "unit"), tip("branch"), tip("text", "KLD ± SE")],
    )
    dots = base.mark_point(filled=True, size=60, opacity=1).encode(
        y=parts.log_y(rows, "KLD of the unit alone", result.noise_floor.kld_mean),
        shape=alt.Shape("branch:N", scale=alt.Scale(domain=branches(result)), legend=parts.branch_legend(result, rows)),
    )
    bars = base.mark_rule(strokeWidth=1.5).encode(y=alt.Y("low:Q"), y2="high:Q")
    return parts.spec(*parts.floor(result.noise_floor.kld_mean), bars, dots, choice=chosen)


def distribution(result: Result) -> Spec | None:
    """Per-token KLD of every level, with its mean."""
    rows = histograms(result)
    if not drawable(rows):
        return None
    area = parts.chart(rows).encode(
        x=alt.X(
            "kld:Q", title="KLD of a token", scale=alt.Scale(type="log", nice=False), axis=parts.log_axis(rows, "kld")
        ),
        y=alt.Y("value:Q", stack=None, title="share of positions", axis=alt.Axis(format="~%", tickCount=5)),
        color=parts.by_level(result),
        tooltip=[tip("level"), tip("kld", "KLD from", ".2g"), tip("text", "positions")],
    )
    rules = parts.chart(means(result)).mark_rule(strokeDash=[5, 3], strokeWidth=1.5)
    rules = rules.encode(
        x="value:Q", color=parts.by_level(result), tooltip=[tip("level"), tip("value", "mean KLD", ".3g")]
    )
    return parts.spec(area.mark_area(interpolate="step-after", fillOpacity=0.12, line={"strokeWidth": 1.5}), rules)


def ladder(result: Result) -> Spec | None:
    """Size against mean KLD."""
    rows = sizes(result)
    if not drawable(rows):
        return None
    base = parts.chart(rows).encode(
        x=alt.X("mib:Q", title="size, MiB", scale=alt.Scale(zero=False, padding=48), axis=alt.Axis(tickCount=6)),
        tooltip=[tip("level"), tip("mib", "MiB", ",.1f"), tip("text", "KLD ± SE")],
    )
    mean = parts.log_y(rows, "mean KLD", result.noise_floor.kld_mean)
    hue = parts.by_level(result, with_legend=False)
    return parts.spec(
        *parts.floor(result.noise_floor.kld_mean),
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
    image = str(vl_convert.vegalite_to_svg(sized, vl_version=VEGA_LITE, config=config))
    return _GRADIENT.sub("gradient_0", image)


@lru_cache(maxsize=1)
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script (BSD-3-Clause), for a page without a network."""
    return str(vl_convert.javascript_bundle(_EXPORTS, vl_version=VEGA_LITE))
