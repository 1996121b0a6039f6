"""Predictions against llama.cpp itself: gradients, damage of real quantized files, every architecture, whole scans."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from qres import levels
from qres.errors import NativeError, QresError
from qres.events import Event, Logged
from qres.gguf import imatrix, model_file
from qres.gguf.inventory import Inventory
from qres.measure.job import Job
from qres.measure.passes import measure
from qres.metrics.output import scored_positions
from qres.native import blocks, ggml
from qres.native.session import Session, SessionOptions
from qres.pipeline import sizes
from qres.residual.capture import inject
from qres.residual.map import ResidualMap
from qres.residual.trace import trace
from qres.sensitivity import adjoint
from qres.sensitivity.adjoint import Request, predict
from qres.sensitivity.replay.graph import Replay, State
from qres.sensitivity.replay.products import Mixing, Site
from qres.sensitivity.replay.weights import Weights
from qres.sensitivity.scored import kld
from qres.text.chunks import Texts
from tests import archs, tiny
from tests.listening import Heard
from tests.measure import jobs
from tests.measure.test_archs import LANGUAGE_MODELS
from tests.pipeline.test_run import load, qres, small

pytestmark = pytest.mark.model

N = 64
CHUNKS = tuple(tuple((7 * i * i + k * i + 1) % 128 for i in range(N)) for k in (3, 5, 11))
OPTIONS = SessionOptions(n_ctx=N, n_threads=1)
MUST_REPLAY = 124
EPS = 0.03
"""Size of an injected error: smaller ones drown in llama.cpp's 16-bit averages of values."""
TYPE = "Q4_0"


def exact(name: str, values: tiny.Floats) -> tuple[npt.NDArray[np.generic], gguf.GGMLQuantizationType | None]:
    """The predictive model in float32: no rounding of activations to the weights' type.

    Embeddings are a little more than one-hot, which any type would hold exactly.
    """
    found = tiny.predictive(name, values)[0].astype(np.float32)
    return (found + values / 4 if name == "token_embd.weight" else found), None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Inventory:
    return model_file.read(tiny.write_llama(tmp_path_factory.mktemp("sensitivity") / "exact.gguf", change=exact))


@pytest.fixture(scope="module")
def session(model: Inventory) -> Iterator[Session]:
    with Session(model.path, OPTIONS) as opened:
        yield opened


def names(inventory: Inventory) -> frozenset[str]:
    return frozenset(tensor.name for tensor in inventory.tensors)


def mapped(session: Session, inventory: Inventory) -> ResidualMap:
    return trace(session.record(CHUNKS[0]), names(inventory), session.n_embd, session.n_vocab, N)


class Silent:
    """Hears nothing of products."""

    def enters(self, site: Site, x: Tensor) -> None:
        pass

    def product(self, site: Site, x: Tensor, g: Tensor) -> None:
        pass

    def averages(self, site: Site, mixing: Mixing) -> None:
        pass

    def averaged(self, site: Site, g: Tensor) -> None:
        pass


# -- gradients


def test_gradients_are_llama_cpps_finite_differences(session: Session, model: Inventory) -> None:
    """A direction injected into the stream by llama.cpp changes its log probabilities as the replay's gradient says."""
    rmap = mapped(session, model)
    graph, native = session.record_inputs(CHUNKS[0], names(model))
    logits = torch.from_numpy(native.copy())
    replay = Replay(graph, Weights(model, torch.device("cpu"), 1), session.n_vocab, N, pieces=500)
    run = replay.forward(graph.inputs)
    labels = np.random.default_rng(0).integers(0, session.n_vocab, N)
    seed = -logits.softmax(dim=1)
    seed[torch.arange(N), torch.from_numpy(labels)] += 1
    behind: list[State] = [{replay.result: seed.reshape(-1)}]
    gradients: State = {}
    for piece in reversed(range(len(replay.pieces))):
        behind = replay.backward(run, piece, lambda _: behind, Silent())  # noqa: B023 - called at once
        gradients = {**behind[0], **gradients}

    def log_probability(found: npt.NDArray[np.float32]) -> float:
        z = torch.from_numpy(found.copy()).double().log_softmax(dim=1)
        return float(z[torch.arange(N), torch.from_numpy(labels)].sum())

    off = {}
    for point in range(len(rmap.branches) + 1):
        root = graph.executed[rmap.embedding if point == 0 else rmap.branches[point - 1].add]
        gradient = gradients[root].reshape(N, -1).double().numpy()
        random = np.random.default_rng(point).normal(size=gradient.shape)
        direction = (np.sign(gradient) * np.abs(random)).astype(np.float32)  # the changes do not cancel
        told = float((gradient * direction).sum())
        up, down = (
            log_probability(inject(session, rmap, CHUNKS[0], {point: sign * np.float32(EPS) * direction}))
            for sign in (np.float32(1), np.float32(-1))
        )
        off[point] = abs((up - down) / (2 * EPS) / told - 1)
    assert len(off) == 5
    assert max(off.values()) < 0.02, off


# -- second order


def only(tensor: str) -> tiny.Change:
    """The exact model with one tensor quantized."""

    def change(name: str, values: tiny.Floats) -> tuple[npt.NDArray[np.generic], gguf.GGMLQuantizationType | None]:
        data, _ = exact(name, values)
        if name != tensor:
            return data, None
        return blocks.quantize(data.astype(np.float32), TYPE, 1), gguf.GGMLQuantizationType[TYPE]

    return change


def request(types: Mapping[str, tuple[str, ...]], **changes: Any) -> Request:  # noqa: ANN401 - fields of Request
    plain = Request(types=types, importance={}, draws=1, device="cpu", dtype="float32", threads=1, limit=1e-5)
    return dataclasses.replace(plain, **changes)


def matrices(inventory: Inventory) -> list[str]:
    return [tensor.name for tensor in inventory.tensors if tensor.n_dims > 1]


def test_predictions_are_the_kld_of_files_with_one_quantized_tensor(
    session: Session, model: Inventory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    types = dict.fromkeys(matrices(model), (TYPE,))
    found = predict(session, model, CHUNKS, mapped(session, model), request(types, draws=4), Heard())
    assert found.used, found.reason
    told = {row.tensor: found.kld(row.sums[TYPE])[0] for row in found.tensors}
    assert set(told) == set(types)
    references = [torch.from_numpy(session.decode(chunk)[scored_positions(N)].copy()) for chunk in CHUNKS]
    measured = {}
    for name in types:
        with Session(tiny.write_llama(tmp_path / "one.gguf", change=only(name)), OPTIONS) as one:
            others = [torch.from_numpy(one.decode(chunk)[scored_positions(N)].copy()) for chunk in CHUNKS]
        measured[name] = float(np.mean([kld(a, b) for a, b in zip(references, others, strict=True)]))
    with capsys.disabled():
        print()  # noqa: T201
        for name in types:
            ratio = told[name] / measured[name]
            print(f"{name:26} {measured[name]:.3e} {told[name]:.3e} {ratio:.2f}")  # noqa: T201 - part of the output
        print(f"sum {sum(measured.values()):.3e} {sum(told.values()):.3e}")  # noqa: T201
    assert all(2 / 3 < told[name] / measured[name] < 3 / 2 for name in types)
    assert 0.85 < sum(told.values()) / sum(measured.values()) < 1.15


def test_prediction_knows_units_and_counts(session: Session, model: Inventory) -> None:
    types = dict.fromkeys(matrices(model), ("Q8_0", TYPE))
    found = predict(session, model, CHUNKS[:2], mapped(session, model), request(types), Heard())
    units = {row.tensor: row.unit for row in found.tensors}
    assert units["token_embd.weight"] == 0
    assert (units["blk.0.attn_v.weight"], units["blk.0.ffn_up.weight"], units["blk.1.ffn_down.weight"]) == (1, 2, 4)
    assert units["output.weight"] == 5
    assert found.counts == [N - N // 2 - 1] * 2
    assert found.replay_nmse is not None
    assert found.replay_nmse < 1e-8
    for row in found.tensors:
        assert found.kld(row.sums["Q8_0"])[0] < found.kld(row.sums[TYPE])[0], row.tensor
    without = predict(session, model, CHUNKS[:2], None, request(types), Heard())
    assert {row.unit for row in without.tensors} == {None}
    assert {row.tensor: row.sums for row in without.tensors} == {row.tensor: row.sums for row in found.tensors}


def test_prediction_of_a_replay_that_is_off_says_by_how_much(session: Session, model: Inventory) -> None:
    found = predict(session, model, CHUNKS[:1], None, request({}, limit=0.0), Heard())
    assert not found.used
    assert found.reason.startswith("its logits are not llama.cpp's: KLD ")
    assert found.replay_kld is not None
    assert found.replay_kld > 0
    assert found.tensors == []


# -- every architecture


def predict_all(emit: Callable[[object], None], left: list[str], folder: Path) -> None:
    """Predict one model after the other, whatever its replay's check says; one event each."""
    for name in left:
        emit((name, "died"))
        path = archs.make(name, folder)
        try:
            emit((name, _predicted(path)))
        except QresError as error:
            emit((name, f"refused: {error.message}"))
        except Exception as error:  # torch's own ones are to be seen in the table
            emit((name, f"{type(error).__name__}: {str(error)[:150]}"))
        finally:
            path.unlink()


def _predicted(path: Path) -> tuple[float, float, str] | str:
    """NMSE and KLD of the replay, and what is wrong with the prediction; or why the model is none of a language."""
    inventory = model_file.read(path)
    try:
        model_file.require_language_model(inventory, "reference")
    except QresError as error:
        return f"refused: {error.message}"
    chunk = tuple((7 * i * i + 3 * i + 3) % min(inventory.n_vocab or 128, 1000) for i in range(24))
    types = sizes.predicted_types(inventory, [])  # none at all for some small matrices
    with Session(path, SessionOptions(n_ctx=256, n_threads=1)) as opened:
        try:
            rmap = trace(opened.record(chunk), names(inventory), opened.n_embd, opened.n_vocab, len(chunk))
        except QresError:
            rmap = None
        try:
            opened.decode(chunk)
        except QresError as error:
            return f"refused: {error.message}"
        found = predict(opened, inventory, [chunk], rmap, request(types, limit=math.inf), Heard())
    if not found.used:
        return found.reason
    sums = [x for row in found.tensors for one in row.sums.values() for draws in one for x in draws]
    wrong = "" if sums and all(math.isfinite(x) and x >= 0 for x in sums) else "sums that are not finite, or negative"
    return found.replay_nmse or 0.0, found.replay_kld or 0.0, wrong


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, float, str] | str]:
    found = archs.in_worker(predict_all, tmp_path_factory.mktemp("replays"))
    return {name: out.message if isinstance(out, NativeError) else out for name, out in found.items()}


def test_archs_are_replayed(
    outcomes: dict[str, tuple[float, float, str] | str], capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print()  # noqa: T201
        for name, out in outcomes.items():
            text = out if isinstance(out, str) else f"NMSE {out[0]:.1e}  KLD {out[1]:.1e}  {out[2]}"
            print(f"{name:28} {text}")  # noqa: T201 - the table is part of the output
    replayed = [name for name, out in outcomes.items() if not isinstance(out, str) and out[0] < 1e-6]
    assert MUST_REPLAY <= len(replayed) <= LANGUAGE_MODELS + 1


def test_archs_predictions_are_finite(outcomes: dict[str, tuple[float, float, str] | str]) -> None:
    wrong = {name: out[2] for name, out in outcomes.items() if not isinstance(out, str) and out[2]}
    failed = {name: out for name, out in outcomes.items() if isinstance(out, str) and not out.startswith("refused")}
    assert wrong == {}
    assert {name for name, out in failed.items() if "SIGABRT" not in out} == set(), failed


# -- scans


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one finished scan that also made an importance matrix."""
    folder = tmp_path_factory.mktemp("predicted")
    tiny.write_llama(folder / "tiny.gguf", change=tiny.predictive)
    done = qres(*small("scan", "tiny.gguf", "--levels", "Q4_K_M", "--make-imatrix", "i.gguf"), cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_scan_predicts_every_unit_and_says_how_far_to_trust_it(scanned: Path) -> None:
    result = load(scanned)
    sensitivity, (level,) = result["prediction"], result["levels"]
    assert sensitivity["used"]
    assert sensitivity["replay_kld"] < sensitivity["replay_kld_limit"]
    assert len(sensitivity["tensors"]) == 2 * 7 + 2
    assert {len(row["types"]) for row in sensitivity["tensors"]} == {len(levels.PREDICTED)}
    assert all(unit["predicted_kld"] > 0 for unit in level["sensitivity"]["units"])
    calibration = level["sensitivity"]["calibration"]
    assert calibration["factor"] == pytest.approx(calibration["measured_kld"] / calibration["predicted_kld"])
    assert 0.5 < calibration["factor"] < 2
    assert sum(unit["predicted_kld"] for unit in level["sensitivity"]["units"]) == pytest.approx(
        calibration["measured_kld"]
    )
    trust = level["sensitivity"]["trust"]
    assert trust["units"] == len(level["sensitivity"]["units"]) == 6
    assert trust["random"] == 0  # all were patched
    assert trust["spearman"] > 0.5
    assert len(trust["worst"]) == 3


def test_scan_of_all_units_is_the_same_here(scanned: Path) -> None:
    """Six units are fewer than the least that is patched."""
    options = ("--levels", "Q4_K_M", "--units", "all", "--out", "reports/all")
    assert qres(*small("scan", "tiny.gguf", *options), cwd=scanned).returncode == 0
    assert (
        load(scanned, "all")["levels"][0]["sensitivity"]["units"] == load(scanned)["levels"][0]["sensitivity"]["units"]
    )


def test_scan_with_its_own_imatrix_predicts_other_damage(scanned: Path) -> None:
    options = ("--levels", "Q4_K_M", "--imatrix", "i.gguf", "--out", "reports/with")
    done = qres(*small("scan", "tiny.gguf", *options), cwd=scanned)
    assert done.returncode == 0, done.stderr
    found = [load(scanned, name)["prediction"] for name in ("with", "tiny")]
    assert (found[0]["imatrix"], found[1]["imatrix"]) == ("i.gguf", "")
    damages = [
        {(row["tensor"], one["type"]): one["predicted_kld"] for row in each["tensors"] for one in row["types"]}
        for each in found
    ]
    changed = {name for (name, kind), value in damages[0].items() if value != damages[1][name, kind]}
    assert changed == {row["tensor"] for row in found[0]["tensors"] if row["layer"] is not None}
    assert {name for (name, kind), v in damages[0].items() if kind == "Q8_0" and v != damages[1][name, kind]} == set()


def test_scan_whose_replay_is_off_ranks_by_patching(scanned: Path, tmp_path: Path) -> None:
    patch = "from qres.sensitivity import adjoint\nadjoint.kld = lambda *_: 0.5\n"
    (tmp_path / "sitecustomize.py").write_text(patch)
    options = ("--levels", "Q4_K_M", "--out", "reports/off", "--make-imatrix", "none.gguf")
    done = qres(*small("scan", "tiny.gguf", *options), cwd=scanned, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "No predictions, units are ranked by patching: its logits are not llama.cpp's: KLD 0.5" in done.stderr
    assert not (scanned / "none.gguf").exists()
    result = load(scanned, "off")
    assert result["prediction"]["reason"].startswith("its logits are not llama.cpp's: KLD 0.5")
    assert result["prediction"]["tensors"] == []
    (level,) = result["levels"]
    assert (level["sensitivity"]["calibration"], level["sensitivity"]["trust"]) == (None, None)
    assert {unit["method"] for unit in level["sensitivity"]["units"]} == {"patched", "forced"}
    assert all(unit["kld"] > 0 and unit["predicted_kld"] is None for unit in level["sensitivity"]["units"])


def test_scan_on_a_device_that_is_not_there(scanned: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("the device is there")
    done = qres(*small("scan", "tiny.gguf", "--device", "cuda", "--out", "reports/cuda"), cwd=scanned)
    assert done.returncode == 2
    assert "--device cuda" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (scanned / "reports" / "cuda").exists()


def job_of(folder: Path, **changes: Any) -> Job:  # noqa: ANN401 - fields of Job
    reference, level = folder / "tiny.gguf", next((folder / "cache").rglob("tiny-Q4_K_M.gguf"))
    types = sizes.predicted_types(model_file.read(reference), [model_file.read(level)])
    texts = Texts(CHUNKS[:2], CHUNKS[2:], "rank", "report", 0)
    plain = jobs.job(reference, {"Q4_K_M": level}, texts, prediction=jobs.prediction(types=types))
    return dataclasses.replace(plain, **changes)


def test_resume_behind_the_prediction_ends_the_same(
    scanned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_time(job: Job) -> Any:  # noqa: ANN401 - Measured
        found = measure(job, Logged())
        return dataclasses.replace(found, prediction=dataclasses.replace(found.prediction, elapsed_s=0.0))

    stages: list[str | int] = []

    def stop(event: Event) -> None:
        if event.call == "stage":
            stages.append(event.arguments[0])
            if len(stages) == 2:
                raise KeyboardInterrupt

    job = job_of(scanned, state=tmp_path / "state.npz", about={"a": "b"})
    with pytest.raises(KeyboardInterrupt):
        measure(job, Heard(stop))
    assert "predicting" in str(stages[0])

    def again(*_: object) -> None:
        raise AssertionError("predicted a second time")

    with monkeypatch.context() as patched:
        patched.setattr(adjoint, "predict", again)
        resumed = without_time(dataclasses.replace(job, resume=True))
    assert resumed.prediction.used
    assert resumed == without_time(job_of(scanned))


class SquaresTap:
    """Sums the squares of what llama.cpp multiplies each weight with."""

    def __init__(self, known: frozenset[str]) -> None:
        self._known = known
        self.sums: dict[str, npt.NDArray[np.float64]] = {}
        self.counts: dict[str, int] = {}

    def ask(self, address: int) -> bool:
        return ggml.op_name(ggml.at(address).op) == "MUL_MAT" and self._weight(address) in self._known

    def see(self, address: int) -> None:
        source = ggml.at(address).src[1]
        assert source
        values = ggml.read(source).astype(np.float64)
        name = self._weight(address)
        self.sums[name] = self.sums.get(name, 0.0) + np.square(values.reshape(-1, values.shape[-1])).sum(axis=0)
        self.counts[name] = self.counts.get(name, 0) + values.size // values.shape[-1]

    @staticmethod
    def _weight(address: int) -> str:
        source = ggml.at(address).src[0]
        return str(ggml.at(source).name.decode()) if source else ""


def test_made_imatrix_is_of_llama_cpps_own_activations(scanned: Path, tmp_path: Path) -> None:
    target = tmp_path / "made.gguf"
    job = job_of(scanned)
    measure(dataclasses.replace(job, prediction=jobs.prediction(make_imatrix=target)), Logged())
    made = imatrix.read(target)
    inventory = model_file.read(scanned / "tiny.gguf")
    tap = SquaresTap(names(inventory))
    with Session(inventory.path, OPTIONS) as opened:
        for chunk in job.texts.rank:
            opened.decode(chunk, tap)
    assert set(made.sums) == {name for name in matrices(inventory) if name.startswith("blk.")}
    for name, sums in made.sums.items():
        off = np.abs(sums[0] - tap.sums[name]) / np.maximum(tap.sums[name], 1e-30)
        assert off.max() < 1e-3, name  # single columns: llama.cpp averages values in 16-bit float
        assert off.mean() < 1e-4, name
        assert made.counts[name].tolist() == [tap.counts[name]] == [2 * N]
    assert (made.chunks, made.chunk_size, made.datasets) == (2, N, ("rank",))


def test_made_imatrix_of_the_command_can_be_read(scanned: Path) -> None:
    made = imatrix.read(scanned / "i.gguf")
    assert len(made.entries) == 2 * 7
    assert made.chunks == 2
    assert json.loads((scanned / "reports" / "tiny" / "result.json").read_text())["prediction"]["imatrix"] == ""
