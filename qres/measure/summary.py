"""Running statistics to records: what the worker sends back instead of arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from qres.levels import F16_MAX
from qres.measure.state import LevelStats
from qres.metrics.means import ChunkMean, clustered_se, paired_se, spearman
from qres.records.result import Comparison
from qres.records.stream import Health, Point
from qres.records.units import Additivity, Keep, KeepCheck, RankCorrelation, Unit
from qres.residual.drift import DriftStats, HealthStats
from qres.residual.map import ResidualMap


def finite(value: float | None) -> float | None:
    """None for what JSON cannot hold."""
    return float(value) if value is not None and math.isfinite(value) else None


def health(rmap: ResidualMap, stats: HealthStats) -> tuple[Health, ...]:
    """The reference's stream at every point."""
    rows = []
    for unit in rmap.in_stream:
        i = unit.index
        mean, variance = stats.sums[i] / max(stats.tokens, 1)
        absmax = finite(stats.absmax[i])
        rows.append(
            Health(
                index=i,
                layer=unit.layer,
                branch=unit.branch,
                label=unit.label,
                norm_median=stats.norm.quantile(0.5, i),
                mean=finite(mean),
                variance=finite(variance),
                absmax=absmax,
                kurtosis=stats.kurtosis.quantile(0.5, i),
                participation=stats.participation.quantile(0.5, i),
                f16_headroom=F16_MAX / absmax if absmax else None,
            )
        )
    return tuple(rows)


def points(rmap: ResidualMap, stats: DriftStats, reference: HealthStats) -> tuple[Point, ...]:
    """One level's stream at every point."""
    rows = []
    before: float | None = None
    tokens = stats.ledger_tokens
    for unit in rmap.in_stream:
        i = unit.index
        drift = stats.drift.quantile(0.5, i)
        distance = stats.one_minus_cosine.quantile(0.5, i)
        rows.append(
            Point(
                index=i,
                layer=unit.layer,
                branch=unit.branch,
                label=unit.label,
                weights=unit.weights,
                ratio_median=stats.ratio.quantile(0.5, i),
                ratio_p95=stats.ratio.quantile(0.95, i),
                reference_ratio_median=reference.ratio.quantile(0.5, i),
                drift_median=drift,
                drift_p95=stats.drift.quantile(0.95, i),
                drift_growth=drift / before if drift is not None and before else None,
                cosine_median=None if distance is None else 1 - distance,
                sqnr_db=-20 * math.log10(drift) if drift else None,
                local_error_median=stats.local.quantile(0.5, i),
                injected_error_median=stats.injected.quantile(0.5, i),
                ledger_share=finite(stats.share[i] / tokens) if tokens else None,
                generated_share=finite(stats.generated[i] / tokens) if tokens else None,
                absmax=finite(stats.absmax[i]),
                scaling_share=finite(stats.scaling[i] / tokens) if tokens else None,
            )
        )
        before = drift
    return tuple(rows)


def units(
    rmap: ResidualMap, stats: LevelStats, level_bytes: Mapping[str, int], bytes_16bit: Mapping[str, int]
) -> tuple[Unit, ...]:
    """Every unit, measured or not, with the cheap measures of the same text beside it."""
    drift = stats.drift
    assert drift is not None
    rows = []
    for unit in rmap.units:
        i, head = unit.index, unit.is_head
        damage = stats.units.get(i)
        injected = None if head else drift.injected.quantile(0.5, i)
        names = [name for name in unit.weights if name in bytes_16bit and name in level_bytes]
        exact = not head and drift.injected.max[i] == 0
        rows.append(
            Unit(
                unit=unit.name,
                kind=unit.kind,
                layer=unit.layer,
                branch=unit.branch,
                kld=damage.mean if damage else (0.0 if exact else None),
                kld_se=damage.se if damage else None,
                method=_method(damage, exact, head),
                injected_error=injected,
                local_error=None if head else drift.local.quantile(0.5, i),
                ratio=drift.ratio.quantile(0.5, i) if unit.kind == "branch" else None,
                drift=None if head else drift.drift.quantile(0.5, i),
                weights=tuple(names),
                bytes_at_level=sum(level_bytes[name] for name in names),
                bytes_at_16bit=sum(max(bytes_16bit[name], level_bytes[name]) for name in names),
            )
        )
    return tuple(rows)


def _method(damage: ChunkMean | None, exact: bool, head: bool) -> str:
    if damage is not None and damage.mean is None:
        return "no finite position"
    if head:
        return "forced"
    if damage is not None:
        return "patched"
    return "no error at this level" if exact else "not patched: it ranked below the patched ones"


def rank_correlation(rows: Sequence[Unit]) -> RankCorrelation | None:
    """How well cheap measures rank the patched branches."""
    patched = [row for row in rows if row.kind == "branch" and row.method == "patched" and row.kld is not None]
    if not patched:
        return None
    damage = [row.kld or 0.0 for row in patched]

    def against(values: Sequence[float | None]) -> float | None:
        return None if any(v is None for v in values) else spearman([v or 0.0 for v in values], damage)

    return RankCorrelation(
        units=len(patched),
        branch_ratio=against([row.ratio for row in patched]),
        drift=against([row.drift for row in patched]),
        local_error=against([row.local_error for row in patched]),
        injected_error=against([row.injected_error for row in patched]),
        depth=against([row.layer for row in patched]),
    )


def additivity(rows: Sequence[Unit], stats: LevelStats) -> Additivity:
    """Single-unit damages against the whole, on the ranking text."""
    known = [row.kld for row in rows if row.kld is not None]
    return Additivity(
        kld_level=stats.output.kld.mean,
        kld_sum_of_units=math.fsum(known) if len(known) == len(rows) else None,
        kld_all_injected=stats.all_injected.mean,
    )


def keep_check(rmap: ResidualMap, stats: LevelStats, kept: Sequence[int], keep: Sequence[Keep]) -> KeepCheck | None:
    """The chosen units' joint effect on the reporting text."""
    whole, rest = stats.all_injected.mean, stats.without_kept.mean
    if not kept or whole is None or rest is None:
        return None
    names = tuple(rmap.units[i].name for i in kept)
    return KeepCheck(
        units=names,
        kld_all_injected=whole,
        kld_without_units=rest,
        recovered_share=1 - rest / whole if whole > 0 else 0.0,
        bytes_added=sum(row.bytes_added for row in keep if row.unit in names),
        recovered_se=clustered_se(stats.without_kept.sums, stats.all_injected.sums),  # of the ratio rest / whole
    )


def comparisons(names: Sequence[str], stats: Sequence[LevelStats]) -> tuple[Comparison, ...]:
    """Each level against the next larger one, paired by chunk."""
    rows = []
    for a in range(len(names) - 1):
        one, other = stats[a].output.kld, stats[a + 1].output.kld
        broken = any(s.output.nonfinite > s.output.reference_nonfinite for s in (stats[a], stats[a + 1]))
        if broken or one.mean is None or other.mean is None:
            continue  # not the same positions
        rows.append(Comparison(names[a], names[a + 1], one.mean - other.mean, paired_se(one, other)))
    return tuple(rows)
