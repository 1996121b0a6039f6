"""The rows that the charts draw, taken from a Result. A value that does not exist is None or has no row.

The horizontal place of a point is its layer plus a fraction for each further branch of the layer: with two branches,
attention of layer 3 is at 3 and its ffn at 3.5. The embedding is at -1, the head one past the last layer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from qres.records.output import Histogram
from qres.records.result import Level, Result
from qres.records.stream import Point
from qres.records.units import Unit
from qres.report.formatting import percent, plus_minus, significant

Row = dict[str, Any]
"""Field to value; a value of None breaks the line that would pass there."""

EMBEDDING_PLACE = -1.0
INJECTED = "injected into the stream"
LOCAL = "relative to the branch"
MADE = "made by the layer"
SCALED = "made by scaling the stream"
INHERITED = "inherited"


def places(layers: Sequence[int | None]) -> list[float]:
    """Where on the layer axis the items of these layers go, in their order."""
    sizes = Counter(layers)
    seen: Counter[int | None] = Counter()
    result: list[float] = []
    for layer in layers:
        if layer is None:
            result.append(result[-1] if result else EMBEDDING_PLACE)
        else:
            result.append(layer + seen[layer] / sizes[layer])
            seen[layer] += 1
    return result


def branches(result: Result) -> list[str]:
    """Every kind of branch in the result, in order of appearance, so that each keeps one colour."""
    found: dict[str, None] = {}
    for level in result.levels:
        found.update(dict.fromkeys(point.branch for point in level.points if point.branch != "embedding"))
    for level in result.levels:
        found.update(dict.fromkeys(unit.branch for unit in level.sensitivity.units))
    return list(found)


def _branch_rows(result: Result, values: Callable[[Point], tuple[Row, ...]]) -> list[Row]:
    """One row for each of a point's values, for every branch of every level; the embedding is no branch."""
    return [
        {"level": level.name, "place": place, "branch": point.branch, "label": point.label, **value}
        for level in result.levels
        for place, point in zip(places([point.layer for point in level.points]), level.points, strict=True)
        if point.branch != "embedding"
        for value in values(point)
    ]


def ratios(result: Result) -> list[Row]:
    """Branch ratio of the reference and of each level."""
    return _branch_rows(
        result,
        lambda point: (
            {"model": "reference", "value": _positive(point.reference_ratio_median), "p95": ""},
            {"model": "quantized", "value": _positive(point.ratio_median), "p95": significant(point.ratio_p95)},
        ),
    )


def drifts(result: Result) -> list[Row]:
    """Free-run drift of each level along the stream."""
    return [
        {
            "level": level.name,
            "place": place,
            "label": point.label,
            "value": _positive(point.drift_median),
            "p95": significant(point.drift_p95),
            "sqnr": significant(point.sqnr_db),
        }
        for level in result.levels
        for place, point in zip(places([point.layer for point in level.points]), level.points, strict=True)
    ]


def own_errors(result: Result) -> list[Row]:
    """What each layer's own weights do, by both measures of the forced run."""
    return _branch_rows(
        result,
        lambda point: (
            {"measure": INJECTED, "value": _positive(point.injected_error_median)},
            {"measure": LOCAL, "value": _positive(point.local_error_median)},
        ),
    )


def ledgers(result: Result) -> list[Row]:
    """Drift ledger summed by layer: what its own weights made, what it inherited, and what scaling the stream did.

    The last only where the model scales or norms the stream itself.
    """
    rows: list[Row] = []
    for level in result.levels:
        shares: dict[str, dict[str, float]] = {part: defaultdict(float) for part in (MADE, SCALED, INHERITED)}
        for point in level.points:
            if point.ledger_share is not None and point.generated_share is not None:
                name, scaled = "emb" if point.branch == "embedding" else str(point.layer), point.scaling_share or 0.0
                shares[MADE][name] += point.generated_share
                shares[SCALED][name] += scaled
                shares[INHERITED][name] += point.ledger_share - point.generated_share - scaled
        parts = (MADE, SCALED, INHERITED) if is_scaled(level) else (MADE, INHERITED)
        rows += [
            {"level": level.name, "layer": name, "part": part, "value": shares[part][name]}
            for name in shares[MADE]
            for part in parts
        ]
    return rows


def is_scaled(level: Level) -> bool:
    """Whether scales or norms of the stream itself have a part in the level's drift."""
    return any(point.scaling_share for point in level.points)


def sensitivities(result: Result) -> list[Row]:
    """Measured KLD of single units with one standard error to each side; unmeasured units are absent."""
    rows: list[Row] = []
    for level in result.levels:
        for place, unit in zip(_unit_places(level, result.reference.n_layer), level.sensitivity.units, strict=True):
            if unit.kld is not None and unit.kld > 0:
                error = unit.kld_se or 0.0
                rows.append(
                    {
                        "level": level.name,
                        "place": place,
                        "branch": unit.branch,
                        "label": unit.unit,
                        "value": unit.kld,
                        "low": max(unit.kld - error, unit.kld / 10),
                        "high": unit.kld + error,
                        "text": plus_minus(unit.kld, unit.kld_se),
                    }
                )
    return rows


def histograms(result: Result) -> list[Row]:
    """Share of the scored positions in each bin of per-token KLD."""
    rows: list[Row] = []
    for level in result.levels:
        histogram = level.output.kld_histogram
        total = sum(histogram.counts)
        edges = _positive_edges(histogram)
        if total and edges:
            counts = [*histogram.counts, 0]
            filled = [index for index, size in enumerate(counts) if size]
            rows += [
                {
                    "level": level.name,
                    "kld": edges[index],
                    "value": counts[index] / total,
                    "text": percent(counts[index] / total),
                }
                for index in range(filled[0], filled[-1] + 2)
            ]
    return rows


def sizes(result: Result) -> list[Row]:
    """Size and mean KLD of each level."""
    rows: list[Row] = []
    for level in result.levels:
        mean, error = level.output.kld_mean, level.output.kld_se or 0.0
        if mean is not None and mean > 0:
            rows.append(
                {
                    "level": level.name,
                    "mib": level.file.bytes / 2**20,
                    "value": mean,
                    "low": max(mean - error, mean / 10),
                    "high": mean + error,
                    "text": plus_minus(mean, level.output.kld_se),
                }
            )
    return rows


def means(result: Result) -> list[Row]:
    """Mean KLD of each level."""
    return [
        {"level": level.name, "value": level.output.kld_mean}
        for level in result.levels
        if level.output.kld_mean is not None and level.output.kld_mean > 0
    ]


def drawable(rows: Sequence[Row]) -> bool:
    """Whether any row has a value."""
    return any(row["value"] is not None for row in rows)


def _positive(value: float | None) -> float | None:
    """The value where a logarithmic axis can show it."""
    return value if value is not None and value > 0 else None


def _unit_places(level: Level, n_layer: int) -> list[float]:
    """As `places`, with the embedding and the head at the two ends."""
    inner = iter(places([unit.layer for unit in level.sensitivity.units if unit.kind == "branch"]))
    return [_end(unit, n_layer) if unit.kind != "branch" else next(inner) for unit in level.sensitivity.units]


def _end(unit: Unit, n_layer: int) -> float:
    return float(n_layer) if unit.kind == "head" else EMBEDDING_PLACE


def _positive_edges(histogram: Histogram) -> list[float]:
    """The edges, with a first edge at zero moved to where the logarithmic steps would put it."""
    edges = list(histogram.edges)
    if len(edges) > 2 and edges[0] <= 0 < edges[1]:
        edges[0] = edges[1] ** 2 / edges[2]
    return edges if edges and edges[0] > 0 else []
