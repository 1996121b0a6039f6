"""Measuring where numbers come out that cannot be: what rests on them, and what does not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from qres.events import Listener, Logged
from qres.measure import passes, predict
from qres.measure.job import Measured
from qres.measure.lockstep import Lockstep
from qres.measure.state import LevelStats, State
from qres.metrics.output import OutputStats, score, score_reference
from qres.native import worker
from qres.records.stream import NoiseFloor
from qres.sensitivity import trust
from qres.sensitivity.prediction import PredictionSums, TensorSums
from tests import archs
from tests.measure import jobs

TYPES = {"blk.0.ffn_up.weight": "Q4_K"}


def predicted(kld: float = 0.01) -> PredictionSums:
    """Of one tensor on one chunk of ten positions."""
    sums = {"Q4_K": [[2 * kld * 10]]}
    return PredictionSums("", 1e-4, 1e-6, 2e-4, "float32", [10], 1.0, [TensorSums("blk.0.ffn_up.weight", 1, sums)])


def ranked(damage: float) -> LevelStats:
    """A level with a KLD that grows with `damage`; exactly 0 for 0."""
    logits = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    tokens = list(range(32)) * 2
    stats = LevelStats(OutputStats(), None)
    stats.output.update(score(score_reference(logits, tokens), logits * np.float32(1 + damage)))
    return stats


def settled(floor: float, damage: float) -> State:
    state = State(rank=[ranked(damage)], noise=NoiseFloor(floor, None, measured_kld=floor), prediction=predicted())
    passes._settle_floor(state, cast("Lockstep", SimpleNamespace(alive=[0])))
    return state


def test_prediction_that_rests_on_a_floor_that_is_none_is_taken_back() -> None:
    level = ranked(0.01).output.kld.mean
    assert level is not None
    state = settled(2 * level, 0.01)
    assert state.noise is not None
    assert (state.noise.kld_mean, state.noise.measured_kld) == (None, 2 * level)
    found = state.prediction
    assert found is not None
    assert not found.used
    assert (found.limit, found.tensors) == (predict.KLD_LIMIT, [])
    assert "KLD 0.0001, at most 1e-05" in found.reason
    assert trust.calibration(found, TYPES, level) is None


@pytest.mark.parametrize(("factor", "damage"), [(0.5, 0.01), (2.0, 0.0)])  # below the level; beside an exact copy
def test_prediction_stays_where_the_floor_does(factor: float, damage: float) -> None:
    floor = factor * (ranked(0.01).output.kld.mean or 0)
    state = settled(floor, damage)
    assert state.noise is not None
    assert state.noise.kld_mean == floor
    assert state.prediction == predicted()


@pytest.mark.parametrize("kld", [0.0, 1e-320])
def test_calibration_is_none_where_there_is_no_ratio(kld: float) -> None:
    assert trust.calibration(predicted(kld), TYPES, 0.1) is None
    assert trust.calibration(predicted(0.05), TYPES, 0.0) is None
    assert trust.calibration(predicted(0.05), TYPES, None) is None
    found = trust.calibration(predicted(0.05), TYPES, 0.1)
    assert found is not None
    assert found.factor == pytest.approx(2)


@dataclass(frozen=True)
class _QuantizeAndMeasure:
    """Work on one of the architectures, in a process of its own."""

    model: Path
    level: Path

    def work(self, listener: Listener) -> Measured:
        from qres.measure.passes import measure
        from qres.native.quantizer import quantize

        quantize(self.model, self.level, 15, 1)
        ids = tuple((7 * i * i + 3 * i + 1) % 128 for i in range(64))
        texts = jobs.one_chunk(ids)
        return measure(jobs.job(self.model, {"Q4_K_M": self.level}, texts, with_noise_floor=True), listener)


@pytest.mark.model
def test_c16_floor_of_a_model_that_masks_the_first_row_is_none(tmp_path: Path) -> None:
    """Chameleon rules its image tokens out in the first row of each decode only: halves differ from the whole there."""
    model = archs.make("chameleon-dense", tmp_path)
    found = worker.run(_QuantizeAndMeasure(model, tmp_path / "q.gguf"), Logged())
    assert found.noise_floor.kld_mean is None
    assert found.noise_floor.measured_kld is not None
    assert found.noise_floor.measured_kld > 1e30
    assert "differs from itself" in found.noise_floor.reason
    assert found.noise_floor.drift_median is not None  # the stream is not masked
    assert found.prediction.used
    assert found.prediction.replay_kld_limit == predict.KLD_LIMIT
    assert found.levels[0].sensitivity.keep_16bit  # a floor of 1e36 would have let none pass
