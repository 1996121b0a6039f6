"""Every architecture there is a tiny model of, measured to the end: the table is part of the tests' output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qres.errors import NativeError, QresError
from qres.events import Logged
from qres.gguf import model_file
from qres.measure.job import Job, Measured
from tests import archs
from tests.measure import jobs

pytestmark = pytest.mark.model

LANGUAGE_MODELS = 131
"""Of the 141 headers; the others are encoders, embedding models, a codec, or cannot be loaded as they are."""
MUST_BE_MAPPED = 124

MULTI_STREAM = {"deepseek4-moe", "glm5-next-moe", "hy_v4-moe", "kimi-k3-moe"}
"""Several parallel streams: measured for output, with a row that says why the layers are missing."""


def job_for(model: Path, level: Path, all_units: bool = False) -> Job:
    """One chunk of 64 ids that ranks and reports."""
    n_vocab = model_file.read(model).n_vocab or 128
    ids = tuple((7 * i * i + 3 * i + 1) % min(n_vocab, 128) for i in range(64))
    return jobs.job(model, {"Q4_K_M": level}, jobs.one_chunk(ids), all_units=all_units)


def measure_all(emit: Callable[[object], None], names: list[str], folder: Path) -> None:
    """Make, quantize and measure one model after the other; one event each."""
    from qres.measure.passes import measure
    from qres.native.quantizer import quantize

    for name in names:
        emit((name, "died"))
        model = archs.make(name, folder)
        level = folder / f"{name}-q.gguf"
        try:
            model_file.require_language_model(model_file.read(model), "reference")
            quantize(model, level, 15, 1)
            emit((name, measure(job_for(model, level), Logged())))
        except QresError as error:
            emit((name, error))
        finally:
            model.unlink()
            level.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measured | QresError | str]:
    return archs.in_worker(measure_all, tmp_path_factory.mktemp("archs"))


def _row(name: str, outcome: Measured | QresError | str) -> str:
    if not isinstance(outcome, Measured):
        return f"{name:28} refused   {outcome}"
    if outcome.unmapped:
        return f"{name:28} unmapped  {outcome.unmapped}"
    level = outcome.levels[0]
    return (
        f"{name:28} mapped    {outcome.norm_placement:18} {len(level.points) - 1:3} branches  "
        f"KLD {level.output.kld_mean:.2e}  patched {sum(u.method == 'patched' for u in level.sensitivity.units)}"
    )


def test_archs_are_measured(
    outcomes: dict[str, Measured | QresError | str], capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print()  # noqa: T201
        for name, outcome in outcomes.items():
            print(_row(name, outcome))  # noqa: T201 - the table is part of the output
    mapped = [name for name, out in outcomes.items() if isinstance(out, Measured) and not out.unmapped]
    measured = [name for name, out in outcomes.items() if isinstance(out, Measured)]
    assert "died" not in outcomes.values()
    assert len(mapped) >= MUST_BE_MAPPED
    assert set(measured) - set(mapped) <= MULTI_STREAM


def test_archs_compute_the_same_function_as_their_levels(outcomes: dict[str, Measured | QresError | str]) -> None:
    measured = [(name, one) for name, one in outcomes.items() if isinstance(one, Measured)]
    assert {name: one.levels[0].differs for name, one in measured if one.levels[0].differs} == {}
    assert {name: one.levels[0].unmatched for name, one in measured if one.levels[0].unmatched} == {}


def test_archs_without_a_plain_stream_say_why(outcomes: dict[str, Measured | QresError | str]) -> None:
    for name in MULTI_STREAM:
        outcome = outcomes[name]
        assert isinstance(outcome, Measured)
        assert "several streams" in outcome.unmapped
        assert outcome.levels[0].output.kld_mean is not None
        assert outcome.levels[0].points == ()


def test_archs_crash_becomes_a_message(outcomes: dict[str, Measured | QresError | str]) -> None:
    """llama.cpp 0.3.36 aborts on a Q4_K operand of an ADD in this architecture; the scan of the others goes on."""
    outcome = outcomes["qwen4exp-moe"]
    assert isinstance(outcome, NativeError)
    assert "SIGABRT: binary-ops.cpp" in outcome.message


@pytest.mark.parametrize("name", ["gemma-embedding-dense", "llama-embed-dense", "t5encoder-dense", "bert-dense"])
def test_archs_without_logits_are_refused(outcomes: dict[str, Measured | QresError | str], name: str) -> None:
    assert isinstance(outcomes[name], QresError)


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("llama-dense", "pre"),
        ("gemma2-dense", "sandwich"),
        ("gemma3-dense", "sandwich"),
        ("olmo2-dense", "post"),
        ("phi2-dense", "pre, parallel"),
        ("falcon-dense", "pre, parallel"),
        ("command-r-dense", "pre, parallel"),
        ("granite-dense", "pre"),
        ("minicpm-dense", "pre"),
        ("mamba-dense", "pre"),
        ("nemotron_h-dense", "pre"),
    ],
)
def test_archs_norm_placement(outcomes: dict[str, Measured | QresError | str], name: str, placement: str) -> None:
    outcome = outcomes[name]
    assert isinstance(outcome, Measured)
    assert outcome.norm_placement == placement


def test_archs_ledger_adds_up(outcomes: dict[str, Measured | QresError | str]) -> None:
    for name, outcome in outcomes.items():
        if isinstance(outcome, Measured) and not outcome.unmapped:
            shares = [point.ledger_share for point in outcome.levels[0].points if point.ledger_share is not None]
            assert sum(shares) == pytest.approx(1, abs=1e-6), name
