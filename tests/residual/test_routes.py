"""Which experts tokens are sent to, against the router's own logits in plain numpy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from qres.events import Listener, Logged
from qres.gguf import model_file
from qres.native import worker
from qres.residual.routes import Counts
from tests import archs

pytestmark = pytest.mark.model

ARCHITECTURES = ("qwen3moe-moe", "olmoe-moe", "llama-moe", "granitemoe-moe", "qwen2moe-moe", "arctic-moe")
"""Those that choose by the largest of the router's logits, without groups or biases."""
N = 64


class _Logits:
    """A tap that reads the output of every multiplication with a router."""

    def __init__(self) -> None:
        self.found: dict[str, np.ndarray] = {}

    def ask(self, address: int) -> bool:
        from qres.native import ggml

        tensor = ggml.at(address)
        name = ggml.at(tensor.src[0]).name.decode() if tensor.src[0] else ""
        self._name = name
        return ggml.op_name(tensor.op) == "MUL_MAT" and name.endswith("ffn_gate_inp.weight")

    def see(self, address: int) -> None:
        from qres.native import ggml

        self.found[self._name] = ggml.read(address)


@dataclass(frozen=True)
class Count:
    """Count the choices of one chunk by the routes, and by the logits."""

    model: Path

    def work(self, _listener: Listener) -> tuple[dict[int, Counts], dict[int, Counts]]:
        from qres.native.session import Session, SessionOptions
        from qres.residual.capture import capture
        from qres.residual.routes import counters, routes
        from qres.residual.trace import trace

        inventory = model_file.read(self.model)
        ids = tuple((7 * i * i + 3 * i + 1) % min(inventory.n_vocab or 128, 128) for i in range(N))
        names = frozenset(tensor.name for tensor in inventory.tensors)
        used = inventory.metadata[f"{inventory.architecture}.expert_used_count"]
        assert isinstance(used, int)
        with Session(self.model, SessionOptions(N, 1)) as session:
            graph = session.record(ids)
            found = routes(graph, names)
            counts = {route.layer: np.zeros(route.experts, np.int64) for route in found}
            rmap = trace(graph, names, session.n_embd, session.n_vocab, N)
            _, logits = capture(session, rmap, ids, beside=counters(found, counts))
            plain = logits.copy()
            tap = _Logits()
            assert np.array_equal(session.decode(ids, tap), plain)  # looking changes nothing
        expected = {}
        for name, rows in tap.found.items():
            chosen = np.argsort(-rows, axis=1, kind="stable")[:, :used]
            expected[int(name.split(".")[1])] = np.bincount(chosen.ravel(), minlength=rows.shape[1])
        return counts, expected


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_counts_are_those_of_the_routers_logits(name: str, tmp_path: Path) -> None:
    counts, expected = worker.run(Count(archs.make(name, tmp_path)), Logged())
    assert counts
    assert counts.keys() == expected.keys()
    for layer, found in counts.items():
        assert found.tolist() == expected[layer].tolist()
