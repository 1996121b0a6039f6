"""Units quantized alone, and what to keep at 16 bit, as records."""

from __future__ import annotations

from dataclasses import dataclass

from qres.records.prediction import Calibration, Trust


@dataclass(frozen=True)
class Unit:
    """A branch, the embedding or the head, quantized alone."""

    unit: str
    """`embedding`, `head`, or `<layer>.<branch>` such as `3.ffn`."""
    kind: str
    """`branch`, `embedding` or `head`."""
    layer: int | None
    branch: str
    kld: float | None
    """Mean KLD that this unit's quantization error causes in an otherwise exact model; None when not measured."""
    kld_se: float | None
    method: str
    """`patched`, `forced` (the head), or why there is no figure."""
    injected_error: float | None
    local_error: float | None
    ratio: float | None
    drift: float | None
    weights: tuple[str, ...]
    """Tensors of the file that the unit consists of, norms and biases left out."""
    bytes_at_level: int
    bytes_at_16bit: int
    predicted_kld: float | None = None
    """Calibrated prediction for the unit's tensors at the level's types; None without a replay."""
    predicted_se: float | None = None

    @property
    def is_measured(self) -> bool:
        """The KLD comes from a decode."""
        return self.method in ("patched", "forced")


@dataclass(frozen=True)
class Keep:
    """One unit of the ordered list of what to keep at 16 bit."""

    unit: str
    type: str
    """`F16`, or `BF16` where the reference holds one of its matrices as BF16 or with values beyond F16."""
    kld_recovered: float
    gap_share: float
    """kld_recovered over the level's whole KLD on the ranking text."""
    bytes_added: int
    confidence: float | None
    """How often the unit stays in the list's first k when chunks are resampled."""
    worth_it: bool
    """False from the row on where the next larger level buys more KLD per byte."""
    reason: str


@dataclass(frozen=True)
class KeepCheck:
    """The recommended list measured together, on the reporting text that did not choose it."""

    units: tuple[str, ...]
    kld_all_injected: float
    """All the level's local errors injected into the reference."""
    kld_without_units: float
    """The same without the listed units' errors."""
    recovered_share: float
    bytes_added: int
    recovered_se: float | None = None
    """Standard error of `recovered_share`, paired by chunk."""


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman correlation of cheap measures with the measured KLD of the same units; None below 4 units."""

    units: int
    branch_ratio: float | None
    drift: float | None
    local_error: float | None
    injected_error: float | None
    depth: float | None


@dataclass(frozen=True)
class Additivity:
    """Do single-unit damages add up? All on the ranking text."""

    kld_level: float | None
    kld_sum_of_units: float | None
    """Only when every unit was patched."""
    kld_all_injected: float | None
    """All local errors of branches and embedding added to the reference run at once (no head error)."""


@dataclass(frozen=True)
class Sensitivity:
    """What the quantization errors of single units do to the output of one level, measured by patching.

    Without a map of the stream there are no units, and only the calibration can be there.
    """

    units: tuple[Unit, ...] = ()
    keep_16bit: tuple[Keep, ...] = ()
    """What to keep at 16 bit, most KLD recovered per byte first."""
    keep_check: KeepCheck | None = None
    rank_correlation: RankCorrelation | None = None
    additivity: Additivity | None = None
    calibration: Calibration | None = None
    """Of the level's predictions; None where nothing was predicted."""
    trust: Trust | None = None
    """Predicted against patched; None where there is no pair of the two."""
