"""The border to llama.cpp: what the callback may do, what happens when native code fails."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from qres.errors import CrashError, NativeError, UnsupportedError
from qres.events import Event, Listener, Logged
from qres.gguf import model_file
from qres.native import ggml, worker
from qres.native.quantizer import planned_types, quantize
from qres.native.session import Session, SessionOptions
from qres.quantize.ladder import planned_bytes
from qres.residual.capture import capture, force, identity_error, inject
from qres.residual.map import ResidualMap
from qres.residual.trace import trace
from tests import tiny
from tests.listening import Heard

pytestmark = pytest.mark.model

TOKENS = [(7 * i * i + 3 * i + 1) % 128 for i in range(64)]
OPTIONS = SessionOptions(n_ctx=64, n_threads=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_llama(tmp_path_factory.mktemp("native") / "tiny.gguf")


@pytest.fixture(scope="module")
def level(model: Path) -> Path:
    target = model.with_name("level.gguf")
    quantize(model, target, 15, 1)
    return target


def mapped(session: Session) -> ResidualMap:
    names = frozenset(tensor.name for tensor in model_file.read(session.path).tensors)
    return trace(session.record(TOKENS), names, session.n_embd, session.n_vocab, len(TOKENS))


class RaisingTap:
    """Fails in one of the two callback phases, at the 20th node."""

    def __init__(self, phase: str) -> None:
        self.phase, self.asked = phase, 0

    def ask(self, _address: int) -> bool:
        self.asked += 1
        if self.phase == "ask" and self.asked == 20:
            raise ValueError("inside the callback")
        return self.asked == 20

    def see(self, _address: int) -> None:
        raise ValueError("inside the callback")


@pytest.mark.parametrize("phase", ["ask", "see"])
def test_session_raises_what_a_tap_raised(model: Path, phase: str) -> None:
    """llama.cpp itself would return 0 and logits that are all zero."""
    with Session(model, OPTIONS) as session:
        with pytest.raises(ValueError, match="inside the callback"):
            session.decode(TOKENS, RaisingTap(phase))
        assert np.ptp(session.decode(TOKENS)[-1]) > 0  # and works again afterwards


def test_session_capture_does_not_change_the_logits(model: Path) -> None:
    with Session(model, OPTIONS) as session:
        plain = session.decode(TOKENS).copy()
        _, captured = capture(session, mapped(session), TOKENS)
        assert np.array_equal(plain, captured)


def test_session_record_leaves_no_trace(model: Path) -> None:
    with Session(model, OPTIONS) as session:
        plain = session.decode(TOKENS).copy()
        graph = session.record(TOKENS)
        assert [graph.nodes[i].ordinal for i in graph.executed] == list(range(len(graph.executed)))
        assert all(source < node.index for node in graph.nodes for source in node.sources)
        assert np.array_equal(plain, session.decode(TOKENS))


def test_session_refuses_more_tokens_than_its_batch(model: Path) -> None:
    """llama.cpp would abort the process."""
    with Session(model, OPTIONS) as session, pytest.raises(NativeError, match="65 tokens do not fit"):
        session.decode([1] * 65)


def test_session_refuses_a_token_the_model_lacks(model: Path) -> None:
    with Session(model, OPTIONS) as session, pytest.raises(NativeError, match="invalid token"):
        session.decode([1, 2, 999_999])


def test_capture_stream_identity_holds(model: Path) -> None:
    with Session(model, OPTIONS) as session:
        rmap = mapped(session)
        snapshot, _ = capture(session, rmap, TOKENS)
    assert identity_error(rmap, snapshot) <= 1
    total = snapshot.stream[0].astype(np.float64) + sum(b.astype(np.float64) for b in snapshot.branches)
    assert np.allclose(total, snapshot.stream[-1], rtol=0, atol=1e-5)


def test_force_of_the_reference_is_exact(model: Path) -> None:
    with Session(model, OPTIONS) as session:
        rmap = mapped(session)
        snapshot, logits = capture(session, rmap, TOKENS)
        plain = logits.copy()
        forced = force(session, rmap, TOKENS, snapshot)
        assert all(not error.any() for error in forced.errors)
        assert np.array_equal(forced.logits, plain)


def test_inject_nothing_and_everything(model: Path, level: Path) -> None:
    """No error changes nothing; the error of one branch changes what lies behind it and nothing before."""
    with Session(model, OPTIONS) as session, Session(level, OPTIONS) as quantized:
        rmap = mapped(session)
        snapshot, logits = capture(session, rmap, TOKENS)
        plain = logits.copy()
        forced = force(quantized, mapped(quantized), TOKENS, snapshot)
        zero = {i: np.zeros_like(error) for i, error in enumerate(forced.errors)}
        assert np.array_equal(inject(session, rmap, TOKENS, zero), plain)
        last = len(rmap.branches)
        one = inject(session, rmap, TOKENS, {last: forced.errors[last]}).copy()
        assert not np.array_equal(one, plain)


def test_inject_equals_the_change_it_stands_for(model: Path, tmp_path: Path) -> None:
    """A model with one changed tensor, and the reference with that branch's error injected, give the same logits."""

    def change(name: str, values: tiny.Floats) -> tuple[np.ndarray, None]:
        return tiny.keep(name, values * 1.25 if name == "blk.1.ffn_down.weight" else values)[0], None

    changed = tiny.write_llama(tmp_path / "changed.gguf", change=change)
    with Session(model, OPTIONS) as session, Session(changed, OPTIONS) as other:
        rmap = mapped(session)
        snapshot, _ = capture(session, rmap, TOKENS)
        forced = force(other, mapped(other), TOKENS, snapshot)
        assert [i for i, error in enumerate(forced.errors) if error.any()] == [len(rmap.branches)]
        injected = inject(session, rmap, TOKENS, dict(enumerate(forced.errors))).copy()
        assert np.abs(injected - other.decode(TOKENS)).max() < 1e-4


def test_quantizer_dry_run_tells_the_size(model: Path, level: Path) -> None:
    told = planned_bytes(model_file.read(model), planned_types(model, 15, 1))
    assert told == model_file.read(level).tensor_bytes


def test_quantizer_refuses_its_own_source(model: Path, tmp_path: Path) -> None:
    """llama.cpp would destroy the source and die with SIGBUS."""
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    before = model.read_bytes()
    for target in (model, link):
        with pytest.raises(NativeError, match="onto itself"):
            quantize(model, target, 15, 1)
    assert model.read_bytes() == before


def test_quantizer_removes_a_partial_file(model: Path, tmp_path: Path) -> None:
    def poisoned(name: str, values: tiny.Floats) -> tuple[np.ndarray, None]:
        if name == "blk.1.ffn_down.weight":
            values = np.full_like(values, np.nan)
        return tiny.keep(name, values)[0], None

    source = tiny.write_llama(tmp_path / "nan.gguf", change=poisoned)
    with pytest.raises(NativeError, match="invalid data"):
        quantize(source, tmp_path / "out.gguf", 15, 1)
    assert not (tmp_path / "out.gguf").exists()


# -- the worker process


@dataclass(frozen=True)
class Crash:
    number: int

    def work(self, listener: Listener) -> None:
        listener.working("the model")
        os.write(2, b"ggml.c:1234: GGML_ASSERT(something) failed\n")
        os.kill(os.getpid(), self.number)


class Segfault:
    def work(self, _listener: Listener) -> None:
        ctypes.string_at(0)


class Fails:
    def work(self, _listener: Listener) -> None:
        raise NativeError("told", "hint")


class Bug:
    def work(self, _listener: Listener) -> None:
        raise KeyError("a bug")


@dataclass(frozen=True)
class Counts:
    n: int

    def work(self, listener: Listener) -> int:
        for i in range(self.n):
            listener.step(i, self.n)
        return self.n * self.n


class SaysAll:
    def work(self, listener: Listener) -> None:
        listener.stage("a stage")
        listener.step(1, 2, "doing")
        listener.working("a model")
        listener.note("a note")
        listener.warn("a warning")


def test_worker_brings_what_is_told_and_the_result() -> None:
    heard = Heard()
    assert worker.run(Counts(5), heard) == 25
    assert heard.calls == [Event("step", (i, 5, "")) for i in range(5)]


def test_worker_brings_every_call_of_a_listener() -> None:
    inside, heard = Heard(), Heard()
    SaysAll().work(inside)
    worker.run(SaysAll(), heard)
    assert heard.calls == inside.calls
    assert {event.call for event in heard.calls} == {name for name in vars(Listener) if not name.startswith("_")}


def test_worker_turns_an_abort_into_its_last_words_and_knows_who_worked() -> None:
    words = r"died with SIGABRT: ggml.c:1234: GGML_ASSERT\(something\) failed"
    with pytest.raises(CrashError, match=words) as caught:
        worker.run(Crash(6), Logged())
    assert (caught.value.working, caught.value.killed) == ("the model", False)


def test_worker_turns_a_segfault_into_an_error() -> None:
    with pytest.raises(CrashError, match="died with SIGSEGV") as caught:
        worker.run(Segfault(), Logged())
    assert caught.value.working == ""


def test_worker_killed_from_outside_hints_at_memory() -> None:
    with pytest.raises(CrashError, match="out of memory") as caught:
        worker.run(Crash(9), Logged())
    assert caught.value.killed


def test_worker_passes_errors_on() -> None:
    with pytest.raises(NativeError) as caught:
        worker.run(Fails(), Logged())
    assert (caught.value.message, caught.value.hint, caught.value.exit_code) == ("told", "hint", 5)


def test_worker_names_a_bug() -> None:
    with pytest.raises(NativeError, match="internal error: KeyError: 'a bug'"):
        worker.run(Bug(), Logged())


def test_worker_dies_when_a_listener_fails() -> None:
    def fail(_event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        worker.run(Counts(10**9), Heard(fail))


def test_layout_is_checked(model: Path) -> None:
    """The struct that import checked also reads a real graph: weights keep their names and shapes."""
    with Session(model, OPTIONS) as session:
        graph = session.record(TOKENS)
    leaves = {node.name: node for node in graph.nodes if node.is_leaf}
    down = leaves["blk.0.ffn_down.weight"]
    assert down.ne == (tiny.N_FF, tiny.N_EMBD, 1, 1)
    assert ctypes.sizeof(ggml.CTensor) >= 300


def test_decode_refuses_equal_logits_only_where_all_rows_are(tmp_path: Path) -> None:
    """A model of embeddings alone, one of which is zeros: nothing follows from that token, and much from the others."""
    silent = 7

    def change(name: str, values: tiny.Floats) -> tuple[tiny.Floats, None]:
        data = values * np.float32(not name.endswith(("attn_output.weight", "ffn_down.weight")))
        if name == "token_embd.weight":
            data[silent] = 0
        return data, None

    path = tiny.write_llama(tmp_path / "silent.gguf", change=change)
    with Session(path, OPTIONS) as session:
        logits = session.decode([9, 9, silent])
        assert np.ptp(logits[1]) > 0
        assert np.ptp(logits[2]) == 0
        with pytest.raises(UnsupportedError, match="all logits are equal"):
            session.decode([silent] * 3)
