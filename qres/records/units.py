"""Units quantized alone, and what to keep at 16 bit, as records."""

from __future__ import annotations

from dataclasses import dataclass

from qres.records.prediction import Calibration, Trust


@dataclass(frozen=True)
class Unit:
    """A branch, the embedding or the head, quantized alone; on the ranking text."""

    unit: str
    """`embedding`, `head`, or `<layer>.<branch>` such as `3.ffn`, with a running number where that is not unique
    (`3.ffn.2`)."""
    kind: str
    """`branch`, `embedding` or `head`."""
    layer: int | None
    """Block number; None for embedding and head."""
    branch: str
    """Kind of branch as in `Point`; `head` for the head."""
    kld: float | None
    """Mean KLD that this unit's quantization error causes in an otherwise exact model; None when not measured."""
    kld_se: float | None
    """Standard error of `kld`, clustered by chunk."""
    method: str
    """`patched`, `forced` (the head), `no error at this level`, or why there is no figure."""
    injected_error: float | None
    """Median injected error."""
    local_error: float | None
    """Median local error."""
    ratio: float | None
    """Median branch ratio, quantized."""
    drift: float | None
    """Median drift after it."""
    weights: tuple[str, ...]
    """Tensors of the file that it consists of, norms and biases left out."""
    bytes_at_level: int
    """Bytes of its matrices in this file."""
    bytes_at_16bit: int
    """Bytes of the same matrices at 16 bit, or in the reference where that is less."""
    predicted_kld: float | None = None
    """Predicted, never measured: sum over its tensors at the level's types, times `calibration.factor`; None without a
    replay."""
    predicted_se: float | None = None
    """Standard error of `predicted_kld`, calibrated, too; without that of the factor. None without a replay."""

    @property
    def is_measured(self) -> bool:
        """The KLD comes from a decode."""
        return self.method in ("patched", "forced")


@dataclass(frozen=True)
class Keep:
    """One unit of the ordered list of what to keep at 16 bit; on the ranking text."""

    unit: str
    """Name of the unit."""
    type: str
    """`F16`; `BF16` where the reference holds one of its matrices as BF16, or where a weight, an input of a matmul or
    the stream is beyond half of the range of F16; the reference's own type of what it holds below 16 bit, and of what
    costs no bytes."""
    kld_recovered: float
    """The unit's `kld`; for a tied model, the head's and the embedding's together."""
    gap_share: float
    """`kld_recovered` over the level's whole KLD on the ranking text."""
    bytes_added: int
    """What keeping it adds to the file; 0 where the level holds as much as the reference, but not the same."""
    confidence: float | None
    """How often the unit is among the first k of the list when chunks are drawn again, k being the length of the
    worthwhile part (past it: its own rank); None below 3 ranking chunks."""
    worth_it: bool
    """False from the row on where the next larger level buys more KLD per byte."""
    reason: str
    """The two rates, in words."""
    tensors: tuple[str, ...] = ()
    """Its tensors that the level holds below 16 bit, or otherwise than the reference does; the others of the unit are
    the reference's already. Empty in results of before this field."""


@dataclass(frozen=True)
class KeepCheck:
    """The worthwhile part of the list measured together, on text that did not choose it.

    That is on as many reporting chunks as ranked it, fewer when there are fewer. The head cannot be left out of an
    injected run and is not in here.
    """

    units: tuple[str, ...]
    """Names of the units that were checked."""
    kld_all_injected: float
    """KLD with the level's errors of all branches and the embedding injected into the reference."""
    kld_without_units: float
    """The same without the errors of the listed units."""
    recovered_share: float
    """1 - `kld_without_units` / `kld_all_injected`."""
    bytes_added: int
    """What keeping the listed units adds."""
    recovered_se: float | None = None
    """Standard error of `recovered_share`, paired by chunk."""


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman correlation of cheap measures with the measured KLD of the patched branches, without embedding and head.

    None below 4 units.
    """

    units: int
    """Branches that were patched."""
    branch_ratio: float | None
    """Correlation with the branch ratio."""
    drift: float | None
    """Correlation with the drift after the branch."""
    local_error: float | None
    """Correlation with the local error."""
    injected_error: float | None
    """Correlation with the injected error."""
    depth: float | None
    """Correlation with the block number."""


@dataclass(frozen=True)
class Additivity:
    """Do single-unit damages add up? On the ranking text."""

    kld_level: float | None
    """KLD of the level itself."""
    kld_sum_of_units: float | None
    """Sum of `kld` over all units; None unless every unit has one."""
    kld_all_injected: float | None
    """All errors of branches and embedding injected into the reference at once, without the head."""


@dataclass(frozen=True)
class Sensitivity:
    """What the quantization errors of single units do to the output of one level, measured by patching.

    Without a map of the stream there are no units, and only the calibration can be there.
    """

    units: tuple[Unit, ...] = ()
    """Each unit quantized alone; empty when the stream was not mapped."""
    keep_16bit: tuple[Keep, ...] = ()
    """What to keep at 16 bit, best first; empty when the stream was not mapped."""
    keep_check: KeepCheck | None = None
    """The recommended list measured together; None when nothing in it could be checked, or when one text ranks and
    reports."""
    rank_correlation: RankCorrelation | None = None
    """How well cheap measures rank the patched units; None when none was patched."""
    additivity: Additivity | None = None
    """Do single damages add up; None when the stream was not mapped."""
    calibration: Calibration | None = None
    """What the predictions of its units were multiplied with; None where nothing was predicted."""
    trust: Trust | None = None
    """Predicted against patched; None when no unit has both figures."""
