"""The charts of predicted sensitivity: can it be trusted, and where it sits."""

from __future__ import annotations

import altair as alt

from qres.records.result import Result
from qres.report.charts import parts
from qres.report.charts.parts import Choice, Layer, Spec, tip
from qres.report.rows import prediction, stream
from qres.report.rows.stream import Row
from qres.report.tables import levels

_HEIGHT = 340
_CELL = 24
"""Height of a role in the map of layers and roles."""


def trust(result: Result) -> Spec | None:
    """Predicted against patched KLD of the units that have both."""
    rows = prediction.pairs(result)
    if not rows:
        return None
    chosen = parts.level_choice(result, rows)
    x = _log_x(rows, "≈ predicted KLD, calibrated")
    y = parts.log_y(rows, "patched KLD (measured)")
    dots = _dots(result, rows, chosen).encode(x=x, y=y)
    spread = parts.chart(rows, chosen).mark_rule(strokeWidth=1).encode(color=parts.by_branch(result, rows))
    return parts.spec(
        *_guides(result, rows, chosen, x, y),
        spread.encode(x=x, y=alt.Y("low:Q"), y2="high:Q"),
        spread.encode(x=alt.X("left:Q"), x2="right:Q", y=y),
        dots,
        *_names(rows, chosen, x, y),
        choice=chosen,
        height=_HEIGHT,
    )


def tensors(result: Result) -> Spec | None:
    """Predicted KLD of every layer and role, with one type asked for."""
    rows = prediction.heat(result)
    if not rows:
        return None
    names = parts.values(rows, "base")
    first = levels.focus(result)
    wanted = prediction.base_types(result).get(first.name) if first else None
    chosen = parts.choice("base", "Asked for", names, wanted if wanted in names else names[0])
    order = ["emb", *(str(layer) for layer in range(result.reference.n_layer)), prediction.OTHER, "head"]
    shown = [name for name in order if name in set(parts.values(rows, "layer"))]
    step = parts.layer_step(result)
    labels = [name for name in shown if not name.isdigit() or int(name) % step == 0]
    roles = [role.name for role in prediction.roles(result) if role.name in set(parts.values(rows, "role"))]
    axis = alt.Axis(labelAngle=0, labelOverlap="greedy", values=labels)
    colour = alt.Legend(
        orient="top",
        title="≈ predicted KLD, not calibrated",
        titleLimit=260,
        format=".0e",
        tickCount=4,
        gradientLength=220,
    )
    cells = parts.chart(rows, chosen).encode(
        x=alt.X("layer:N", sort=None, title="layer", axis=axis, scale=alt.Scale(domain=shown, paddingInner=0.06)),
        y=alt.Y(
            "role:N",
            sort=None,
            title=None,
            axis=alt.Axis(labelLimit=130, domain=False, ticks=False),
            scale=alt.Scale(domain=roles, paddingInner=0.08),
        ),
        color=alt.Color("value:Q", scale=alt.Scale(type="log", range="heatmap"), legend=colour),
        tooltip=[tip("label", "tensor"), tip("role"), tip("layer"), tip("type"), tip("text", "predicted KLD ± SE")],
    )
    return parts.spec(cells.mark_rect(), choice=chosen, height=max(120, _CELL * len(roles)))


def _dots(result: Result, rows: list[Row], chosen: Choice | None) -> alt.Chart:
    legend = parts.branch_legend(result, rows)
    dots = parts.chart(rows, chosen).mark_point(filled=True, size=60, opacity=1)
    found: alt.Chart = dots.encode(
        color=parts.by_branch(result, rows),
        shape=alt.Shape("branch:N", scale=alt.Scale(domain=stream.branches(result)), legend=legend),
        tooltip=[tip("label", "unit"), tip("branch"), tip("text", "patched ± SE"), tip("guess", "predicted ± SE")],
    )
    return found


def _guides(result: Result, rows: list[Row], chosen: Choice | None, x: alt.X, y: alt.Y) -> list[Layer]:
    """The diagonal, which also gives both axes the same range, and the noise floor where it is within."""
    ranges = prediction.ranges(rows)
    ends = [{"level": level, "x": end, "value": end} for level, both in ranges.items() for end in both]
    found: list[Layer] = [parts.chart(ends, chosen).mark_line(style="guide").encode(x=x, y=y)]
    floor = result.noise_floor.kld_mean
    if floor:
        floors = [_floor(level, floor, *both) for level, both in ranges.items()]
        base = parts.chart(floors, chosen).encode(y=y, opacity=alt.Opacity("shown:Q", scale=None))
        words = base.mark_text(style="guide-words", dy=-3, dx=-2)
        found += [base.mark_rule(style="guide"), words.encode(text="words:N", x=alt.value("width"))]
    return found


def _floor(level: str, floor: float, low: float, high: float) -> Row:
    """The noise floor of one level's axis; unseen at its end where it is outside, as Vega warns of empty layers."""
    inside = low <= floor <= high
    return {"level": level, "value": floor if inside else low, "shown": int(inside), "words": "noise floor"}


def _names(rows: list[Row], chosen: Choice | None, x: alt.X, y: alt.Y) -> list[Layer]:
    """The worst units by name: towards the middle of the chart, neighbours above and below their points."""
    middle = {level: low**0.5 * high**0.5 for level, (low, high) in prediction.ranges(rows).items()}
    places: dict[tuple[str, str], tuple[bool, bool]] = {}
    named = [row for row in sorted(rows, key=lambda row: (row["level"], row["x"])) if row["name"]]
    for index, row in enumerate(named):
        places[row["level"], row["label"]] = row["x"] > middle[row["level"]], index % 2 == 1
    found: list[Layer] = []
    for place in dict.fromkeys(places.values()):
        right, below = place
        texts = [{**row, "name": row["name"] * (places.get((row["level"], row["label"])) == place)} for row in rows]
        marks = parts.chart(texts, chosen).mark_text(
            align="right" if right else "left", dx=-9 if right else 9, dy=11 if below else -9, limit=140
        )
        found.append(marks.encode(x=x, y=y, text="name:N"))
    return found


def _log_x(rows: list[Row], title: str) -> alt.X:
    scale = alt.Scale(type="log", nice=False, padding=14)
    return alt.X("x:Q", title=title, scale=scale, axis=parts.log_axis(rows, "x"))
