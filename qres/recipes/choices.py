"""What can be chosen for each tensor of a scanned model, and what a choice costs: bytes, and predicted KLD.

Predictions are sums over tensors (docs/sensitivity.md). They are calibrated on the levels that the scan measured on its
reporting text, which took no part in the predictions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from qres.errors import InputError, UnsupportedError
from qres.gguf.inventory import SIXTEEN_BIT
from qres.levels import LADDER, TYPE_TRAITS
from qres.recipes import correction
from qres.records.recipe import Expected, FileTensor, Stock
from qres.records.result import Level, Result

INTERVAL_CHUNKS = 8
"""Chunks of 512 tokens that the interval of a prediction is for."""
MODEL_ERROR = 0.10
"""Standard error of ln(measured / predicted) of a recipe that is no level, beside what texts differ by; measured over
the recipes in docs/recipes.md."""
_ONE_CHUNK = 0.5
"""Relative standard error of a level's KLD where one chunk gives none: texts differ that much."""
_Z = 1.96
_PADDING = 32
"""Tensors begin at multiples of it: GGUF's default alignment, which llama.cpp's quantizer writes."""


@dataclass(frozen=True)
class TensorOptions:
    """The options of one tensor."""

    tensor: FileTensor
    quantizable: bool
    types: tuple[str, ...]
    """Those with a prediction, smallest first, and 16 bit; empty where there is nothing to choose by: the tensor has no
    prediction, as it takes no part in the output, or is not quantized."""
    bytes: tuple[int, ...]
    losses: tuple[float, ...]
    """Predicted KLD, not calibrated; 0 at 16 bit."""
    silent: tuple[float, ...] = ()
    """What experts that no token reached would add, were they like the others; empty where there are none."""

    @property
    def costs(self) -> tuple[float, ...]:
        """What a choice of types goes by: nothing is had for free from experts that are silent."""
        return tuple(map(sum, zip(self.losses, self.silent, strict=True))) if self.silent else self.losses

    @property
    def weights(self) -> int:
        """Number of weights in the tensor."""
        return math.prod(self.tensor.shape)


class Choices:
    """The options of every tensor of a result's reference."""

    def __init__(self, result: Result) -> None:
        """Read a result.

        Raises:
            InputError: a result of before recipes.
            UnsupportedError: nothing was predicted, or llama.cpp cannot quantize the model.
        """
        _require(result)
        self.result = result
        self.rows = _rows(result)
        self.by_name = {row.tensor.name: row for row in self.rows}
        self.n_weights = sum(row.weights for row in self.rows)
        self._calibration = self._calibrate()

    # -- sizes

    def bytes_of(self, types: Mapping[str, str]) -> int:
        """Bytes of tensor data, without padding, where each tensor has its type in `types`."""
        return sum(size_of(row, types[row.tensor.name]) for row in self.rows)

    def file_bytes(self, types: Mapping[str, str]) -> int:
        """Bytes of the whole file: what the scan's levels have beside their data, and every tensor padded."""
        return self.header_bytes + sum(padded(size_of(row, types[row.tensor.name])) for row in self.rows)

    @property
    def header_bytes(self) -> int:
        """Bytes of metadata and tensor table in a made file, which do not depend on the types."""
        level = self.levels[0]
        return level.file.bytes - sum(
            padded(size_of(row, held)) for row, held in zip(self.rows, level.file.tensor_types, strict=True)
        )

    # -- predictions

    def loss(self, types: Mapping[str, str]) -> float | None:
        """Predicted KLD, not calibrated; None where a type is not among the predicted ones."""
        total = 0.0
        for row in self.rows:
            loss = loss_of(row, types[row.tensor.name])
            if loss is None:
                return None
            total += loss
        return total

    def expected(self, raw: float | None) -> Expected | None:
        """The calibrated prediction with its interval; None where there is none, or no level to calibrate on."""
        if raw is None or not self._calibration:
            return None
        factor = self.factor(raw)
        known = [level.output for level in self.levels if level.output.kld_mean]
        out = min(known, key=lambda out: abs(math.log((out.kld_mean or 1) / max(raw, 1e-12))))
        relative = _ONE_CHUNK if out.kld_se is None else out.kld_se / (out.kld_mean or 1.0)
        spread = MODEL_ERROR**2 + relative**2 + relative**2 * out.chunks / INTERVAL_CHUNKS
        reach = math.exp(_Z * math.sqrt(spread))
        kld = raw * factor
        return Expected(kld, kld / reach, kld * reach, raw, factor)

    def factor(self, raw: float) -> float:
        """What predictions of this size are multiplied with: between levels a straight line over ln raw."""
        points = self._calibration
        if not points:
            return 1.0
        x = math.log(max(raw, 1e-12))
        if x <= points[0][0]:
            return points[0][1]
        for (x0, y0), (x1, y1) in pairwise(points):
            if x <= x1:
                return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        return points[-1][1]

    def raw_for(self, kld: float) -> float:
        """The raw prediction whose calibrated one is `kld`."""
        low, high = 1e-12, 1e3
        for _ in range(200):  # calibrated grows with raw as long as the factors of the levels are alike
            middle = math.sqrt(low * high)
            low, high = (middle, high) if middle * self.factor(middle) < kld else (low, middle)
        return low

    def _calibrate(self) -> list[tuple[float, float]]:
        points = {}
        for level in self.levels:
            raw = self.loss(self.level_types(level))
            if raw and level.output.kld_mean:
                points[math.log(raw)] = level.output.kld_mean / raw
        return sorted(points.items())

    # -- levels

    @property
    def levels(self) -> list[Level]:
        """The measured levels whose types are known, smallest first."""
        found = [level for level in self.result.levels if _calibrates(level)]
        return sorted(found, key=lambda level: level.file.bytes)

    @property
    def quantized_levels(self) -> list[Level]:
        """Those that hold less than half of the matrices as large as the reference: recipes and 16 bit are for them.

        Copies, conversions, and files that are at 16 bit but for a few tensors are none of them.
        """
        return [level for level in self.levels if not self._is_mostly_whole(level)]

    def _is_mostly_whole(self, level: Level) -> bool:
        types = self.level_types(level)
        rows = [row for row in self.rows if row.quantizable]
        return 2 * sum(types[row.tensor.name] in SIXTEEN_BIT for row in rows) > len(rows)

    def level_types(self, level: Level) -> dict[str, str]:
        """Tensor -> type in the level's file."""
        return dict(zip(self.by_name, level.file.tensor_types, strict=True))

    @cached_property
    def types_by_level(self) -> dict[str, dict[str, str]]:
        """Level -> tensor -> type, of the usual levels and the measured ones, which count where both are known."""
        found = {rung.level: dict(zip(self.by_name, rung.types, strict=True)) for rung in self.result.ladder}
        found |= {level.name: self.level_types(level) for level in self.levels}
        return dict(sorted(found.items(), key=lambda pair: self.bytes_of(pair[1])))

    @cached_property
    def stock(self) -> tuple[Stock, ...]:
        """The usual levels with their predictions, smallest first."""
        return tuple(
            Stock(name, self.bytes_of(types), self.expected(self.loss(types)))
            for name, types in self.types_by_level.items()
            if name in LADDER
        )


def size_of(row: TensorOptions, type_name: str) -> int:
    """Bytes of the tensor as that type."""
    return TYPE_TRAITS[type_name].bytes_of(row.weights)


def padded(n_bytes: int) -> int:
    """Bytes that so many take in a file."""
    return -(-n_bytes // _PADDING) * _PADDING


def loss_of(row: TensorOptions, type_name: str) -> float | None:
    """Raw predicted KLD of the tensor as that type; None where it is not known."""
    if type_name in row.types:
        return row.losses[row.types.index(type_name)]
    return 0.0 if not row.types or type_name in ("F32", "F16", "BF16") else None


def _require(result: Result) -> None:
    found = result.prediction
    if not result.reference.is_original:
        raise UnsupportedError(
            f"{result.reference.name} was no 16-bit model: llama.cpp quantizes no weights a second time, so that no "
            "recipe can be built from it",
            "scan the 16-bit model",
        )
    if not found.used:
        raise UnsupportedError(
            f"no recipe without predictions, and there are none: {found.reason}",
            "the report still says which units were measured to be sensitive",
        )
    if not result.ladder:
        raise UnsupportedError(
            f"no recipe: llama.cpp cannot quantize {result.reference.name}", "the report says why, under Not measured"
        )
    lengths = {len(result.tensors), *(len(rung.types) for rung in result.ladder)}
    lengths |= {len(level.file.tensor_types) for level in result.levels if level.file.tensor_types}
    if len(lengths) > 1:
        raise InputError("the result's lists of tensor types differ in length", "scan again")
    if not any(map(_calibrates, result.levels)):
        raise UnsupportedError("no recipe: no level was measured that it could be calibrated on", "scan again")


def _calibrates(level: Level) -> bool:
    """Its types are known tensor by tensor, and its damage was measured and comes from them."""
    types = level.file.tensor_types
    return bool(types) and all(types) and level.output.kld_mean is not None and not level.differs


def _rows(result: Result) -> list[TensorOptions]:
    """Options from the predictions, made steadier and corrected by what was patched."""
    corrected = correction.factors(result)
    predicted: dict[str, dict[str, list[float | None]]] = defaultdict(lambda: defaultdict(list))
    silent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    uses: dict[str, int] = defaultdict(int)
    for damage in result.prediction.tensors:
        uses[damage.tensor] += 1  # a tied head is used twice, and stored once
        times = corrected[damage.tensor, damage.unit]
        for one in damage.types:
            loss = None if one.predicted_kld is None else one.predicted_kld * times
            predicted[damage.tensor][one.type].append(loss)
            if damage.silent_experts:
                silent[damage.tensor][one.type] += one.silent_kld * times
    widest = result.ladder[-1].types  # what llama.cpp does not quantize even there, it never does
    rows = []
    for tensor, held in zip(result.tensors, widest, strict=True):
        losses = {
            name: math.fsum(value for value in values if value is not None)
            for name, values in predicted[tensor.name].items()
            if len(values) == uses[tensor.name] and None not in values
        }
        quantizable = held != tensor.type
        if losses and quantizable:
            rows.append(_row(tensor, losses, silent.get(tensor.name)))
        else:
            rows.append(TensorOptions(tensor, quantizable, (), (), ()))
    return rows


def _row(tensor: FileTensor, losses: Mapping[str, float], silent: Mapping[str, float] | None) -> TensorOptions:
    weights = math.prod(tensor.shape)
    known = {**losses, tensor.type_16bit: 0.0}
    sizes = {name: TYPE_TRAITS[name].bytes_of(weights) for name in known}
    names = sorted(known, key=lambda name: (sizes[name], -known[name]))
    return TensorOptions(
        tensor,
        True,
        tuple(names),
        tuple(sizes[name] for name in names),
        tuple(known[name] for name in names),
        () if silent is None else tuple(silent.get(name, 0.0) for name in names),
    )
