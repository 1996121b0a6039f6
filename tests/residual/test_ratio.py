"""Branch ratios of every architecture against plain float64 numpy, over operands that are read in another way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from qres.arrays import Floats
from qres.errors import QresError
from qres.gguf import model_file
from qres.native import ggml
from qres.native.graph import Graph, Recorder
from qres.native.session import Session, SessionOptions
from qres.residual.capture import Snapshot, capture
from qres.residual.drift import DriftStats, HealthStats, norms, reference_norms
from qres.residual.map import ResidualMap
from qres.residual.trace import trace
from tests import archs

pytestmark = pytest.mark.model

N = 64
IDS = tuple((7 * i * i + 3 * i + 1) % 128 for i in range(N))
MUST_BE_MAPPED = 124
SCALES = (0.5, 0.25, 2.0, 0.8, 0.7)
SCALED = {"hrm_text-dense", "minimax-01-moe", "gemma4-scaled"}
"""Their stream is scaled or normed between one add and the next."""
GEMMA4 = "gemma4-scaled"


@dataclass(frozen=True)
class Ratios:
    """Of one model, by branch: what the statistics say, and what numpy does."""

    reference: list[float | None]
    level: list[float | None]
    expected: list[float]
    over_points: list[float]
    """Over the stream point before, without what happens to it on its way into the add."""
    parallel: bool


class _EveryNode:
    """Reads the output of every node right after it was computed."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.values: dict[int, Floats] = {}
        self._ordinal = -1

    def ask(self, address: int) -> bool:
        self.recorder.add(address)
        self._ordinal += 1
        return True

    def see(self, address: int) -> None:
        if ggml.is_plain(address):
            self.values[self._ordinal] = ggml.read(address).copy()


def operands(graph: Graph, values: dict[int, Floats], rmap: ResidualMap, found: Snapshot) -> dict[int, Floats]:
    """Ordinal of a residual add -> that of its two sources which is the stream: the sum less the branches."""
    streams = {}
    for add in {branch.add for branch in rmap.branches}:
        rest = values[add].astype(np.float64)
        for branch in rmap.branches:
            if branch.add == add:
                rest = rest - found.branches[branch.index - 1]
        sources = [graph.nodes[index] for index in graph.nodes[graph.executed[add]].sources]
        read = [values[node.ordinal] for node in sources]
        streams[add] = min(read, key=lambda x: np.abs(x.reshape(rest.shape) - rest).max()).reshape(rest.shape)
    return streams


def ratios(model: Path) -> Ratios:
    """Everything about one model.

    Raises:
        QresError: it cannot be loaded or mapped.
    """
    inventory = model_file.read(model)
    model_file.require_language_model(inventory, "reference")
    weights = frozenset(tensor.name for tensor in inventory.tensors)
    with Session(model, SessionOptions(n_ctx=N, n_threads=1)) as session:
        rmap = trace(session.record(IDS), weights, session.n_embd, session.n_vocab, N)
        found, _ = capture(session, rmap, IDS)
        tap = _EveryNode()
        session.run(IDS, tap)
    streams = operands(tap.recorder.graph(), tap.values, rmap, found)
    known, reads = reference_norms(found, 1), tuple(branch.reads for branch in rmap.branches)
    health, drift = HealthStats(rmap.n_points), DriftStats(rmap.n_points)
    health.update(found, known, reads, 1)
    nothing = tuple(np.zeros_like(x) for x in found.stream)
    drift.update(found, known, found, nothing, reads, 1)
    expected: list[float] = []
    over_points: list[float] = []
    for branch in rmap.branches:
        size = norms(found.branches[branch.index - 1])
        stream = streams[rmap.branches[branch.reads].add]  # of the first add behind the point that it reads
        for over, x in ((expected, stream), (over_points, found.stream[branch.reads])):
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = (size / np.linalg.norm(x.astype(np.float64), axis=1))[known.plain]
            over.append(float(np.median(ratio[np.isfinite(ratio)])))
    return Ratios(
        [health.ratio.quantile(0.5, branch.index) for branch in rmap.branches],
        [drift.ratio.quantile(0.5, branch.index) for branch in rmap.branches],
        expected,
        over_points,
        parallel=len(set(reads)) < len(reads),
    )


def ratios_of_all(emit: Callable[[object], None], names: list[str], folder: Path) -> None:
    """One model after the other; one event each."""
    for name in names:
        emit((name, "died"))
        model = archs.make_gemma4(folder, SCALES) if name == "gemma4-dense" else archs.make(name, folder)
        try:
            emit((name, ratios(model)))
        except QresError as error:
            emit((name, error))
        finally:
            model.unlink()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ratios]:
    found = archs.in_worker(ratios_of_all, tmp_path_factory.mktemp("ratios"))
    found[GEMMA4] = found.pop("gemma4-dense")
    return {name: one for name, one in found.items() if isinstance(one, Ratios)}


def test_archs_have_the_ratio_of_each_add_to_its_own_operand(measured: dict[str, Ratios]) -> None:
    assert len(measured) > MUST_BE_MAPPED
    for name, found in measured.items():
        assert found.reference == pytest.approx(found.expected, rel=0.01), name
        assert found.level == pytest.approx(found.expected, rel=0.01), name
    assert any(found.parallel for found in measured.values())


@pytest.mark.parametrize("name", sorted(SCALED))
def test_stream_that_is_scaled_on_the_way_has_another_ratio(measured: dict[str, Ratios], name: str) -> None:
    found = measured[name]
    assert found.reference == pytest.approx(found.expected, rel=0.01)
    assert found.over_points != pytest.approx(found.expected, rel=0.1)  # what is checked makes a difference here


def test_stream_that_is_not_scaled_has_the_ratio_over_the_point(measured: dict[str, Ratios]) -> None:
    plain = {name: found for name, found in measured.items() if found.over_points == found.expected}
    assert len(plain) > MUST_BE_MAPPED - 10
    assert not SCALED & set(plain)


def test_ratio_after_a_layer_output_scale_is_off_by_exactly_the_scale(measured: dict[str, Ratios]) -> None:
    """Three branches a layer; the first add of a layer takes the stream that the layer before has scaled."""
    found = measured[GEMMA4]
    for layer, scale in enumerate(SCALES[:-1], 1):
        first = 3 * layer
        assert found.over_points[first] / found.expected[first] == pytest.approx(scale, rel=0.01)
        assert found.over_points[first + 1 : first + 3] == found.expected[first + 1 : first + 3]
