"""What a gradient and a quantized matrix predict, against brute force in float64; and what a scan makes of the sums."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
import torch
from llama_cpp._ctypes_extensions import load_shared_library
from torch import Tensor

from qres.gguf.names import role
from qres.levels import TYPE_TRAITS, TYPES_BY_ID
from qres.measure import checkpoint, predict
from qres.measure.job import ModelFile
from qres.measure.state import State
from qres.metrics.means import clustered_se
from qres.metrics.output import scored_positions
from qres.native.blocks import MAKEABLE, round_trip
from qres.records.units import Unit
from qres.residual.map import ResidualMap
from qres.sensitivity import patching, trust
from qres.sensitivity.collector import Collector, empty
from qres.sensitivity.damage import Use, damage, rounding_block, rounding_error
from qres.sensitivity.prediction import PredictionSums, Sums, TensorSums, added
from qres.sensitivity.replay.products import Mixing, Site
from qres.sensitivity.scored import draws, kld, nmse
from tests.measure import jobs
from tests.residual.test_trace import Builder, sequential
from tests.sensitivity.replay.graphs import normal, weights

T, WIDTH, HEIGHT, VOCAB = 5, 256, 12, 9
TYPES = ("F16", "Q8_0", "Q4_0", "Q4_1", "MXFP4", "Q4_K", "Q6_K", "Q2_K")
SITE = Site("w", 3)

Array = npt.NDArray[np.float64]

W = normal(HEIGHT, WIDTH) / 16
X = normal(T, WIDTH, seed=1) * torch.exp(2 * normal(WIDTH, seed=2))  # some channels are huge


# -- rounding


def rounded_q8_k(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """`quantize_row_q8_K_ref`: the value of the largest magnitude becomes -127, with its sign in the scale."""
    blocks = x.reshape(-1, 256)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scale = np.float32(-127) / largest
    steps = np.minimum(127, np.rint(scale * blocks))
    found: npt.NDArray[np.float32] = (steps * (np.float32(1) / scale)).astype(np.float32).reshape(x.shape)
    return found


def rounded(x: Tensor, type_name: str) -> Array:
    """The input of a matrix of this type, as ggml rounds it."""
    values = x.numpy()
    block = rounding_block(type_name)
    if block is None:
        return values.astype(np.float64)
    return (rounded_q8_k(values) if block == 256 else round_trip(values, "Q8_0", 1)).astype(np.float64)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rounding_to_q8_0_is_ggmls(scale: float) -> None:
    x = normal(200, 512, seed=3) * scale
    found = (x + rounding_error(x, 32)).numpy()
    expected = round_trip(x.numpy(), "Q8_0", 1)
    step = np.abs(x.numpy()).reshape(200, -1, 32).max(axis=2, keepdims=True) / 127
    off = np.abs(found - expected).reshape(200, -1, 32) / step
    assert (off > 1e-3).mean() < 1e-4  # a value halfway between steps may go either way
    assert off.max() < 1.01


def test_rounding_to_q8_k_is_ggmls() -> None:
    x = normal(200, 512, seed=3)
    off = np.abs((x + rounding_error(x, 256)).numpy() - rounded_q8_k(x.numpy()))
    assert (off > 1e-5).mean() < 1e-4
    assert off.max() < 1.01 * float(x.abs().max()) / 127


def test_rounding_of_zeros_is_nothing() -> None:
    assert not rounding_error(torch.zeros(2, 256), 32).any()
    assert not rounding_error(torch.zeros(2, 256), 256).any()


class CpuTraits(ctypes.Structure):
    """`struct ggml_type_traits_cpu` of ggml-cpu.h."""

    _fields_ = (
        ("from_float", ctypes.c_void_p),
        ("vec_dot", ctypes.c_void_p),
        ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    )


def test_rounding_blocks_are_those_of_the_cpu_back_end() -> None:
    library = cast(ctypes.CDLL, load_shared_library("ggml-cpu", Path(llama_cpp.__file__).parent / "lib"))
    traits = library.ggml_get_type_traits_cpu
    traits.restype, traits.argtypes = ctypes.POINTER(CpuTraits), (ctypes.c_int,)
    blocks = {"F32": None, "F16": None, "BF16": None, "Q8_0": 32, "Q8_1": 32, "Q8_K": 256}
    compared = []
    for name, own in TYPE_TRAITS.items():
        found = traits(own.id).contents
        if found.vec_dot and not own.removed:
            compared.append(name)
            assert rounding_block(name) == blocks[TYPES_BY_ID[found.vec_dot_type].name], name
    assert set(compared) >= set(MAKEABLE)


# -- the damage of one matrix


def quantized(name: str) -> Array:
    return round_trip(W.numpy(), name, 1).astype(np.float64)


def use_of(x: Tensor, gradients: Sequence[Tensor] = (), **more: Any) -> Use:  # noqa: ANN401 - fields of Use
    return Use(x, {block: rounding_error(x, block) for block in (32, 256)}, list(gradients), **more)


def sums_of(uses: Sequence[Use], site: Site = SITE, types: Sequence[str] = TYPES) -> Sums:
    known, _ = weights(w=W)
    return damage(known, site, uses, types, None, torch.float32, 1)


class Net:
    """logits_t = c tanh(W x_t) + mixed over positions, small enough for its whole Jacobian in float64."""

    def __init__(self) -> None:
        c = normal(VOCAB, HEIGHT, seed=5).double()
        hidden = torch.tanh(X.double() @ W.double().T / 8)
        logits = 2 * hidden @ c.T
        self.p = logits.softmax(dim=1)
        self.logits = logits
        self.jacobian = 2 * c[None] * (1 - hidden.square())[:, None, :] / 8  # [T, VOCAB, HEIGHT]

    def score(self, t: int, label: int) -> Tensor:
        """Gradient of the label's log probability for W x_t."""
        return self.jacobian[t, label] - self.p[t] @ self.jacobian[t]

    def all_labels(self) -> list[Tensor]:
        """One draw per label, weighted so that their plain mean is the expectation."""
        return [
            torch.stack([self.score(t, y) * (VOCAB * self.p[t, y]).sqrt() for t in range(T)]).float()
            for y in range(VOCAB)
        ]

    def expected(self, name: str) -> float:
        """Sum over positions of dz' (diag(p) - p p') dz: what the second-order KLD is half of."""
        dy = rounded(X, name) @ quantized(name).T - X.numpy().astype(np.float64) @ W.numpy().astype(np.float64).T
        total = 0.0
        for t in range(T):
            p, dz = self.p[t].numpy(), self.jacobian[t].numpy() @ dy[t]
            total += float(p @ dz**2 - (p @ dz) ** 2)
        return total


NET = Net()


def test_product_is_the_fisher_information_over_all_labels() -> None:
    sums = sums_of([use_of(X, NET.all_labels())])
    assert tuple(sums) == TYPES
    for name, (chunk,) in sums.items():
        assert len(chunk) == VOCAB
        assert np.mean(chunk) == pytest.approx(NET.expected(name), rel=1e-3), name


def test_product_rounding_is_a_large_part_where_channels_are_huge() -> None:
    """So that the test above could not pass without it."""
    plain = sums_of([Use(X, {}, NET.all_labels())])
    full = sums_of([use_of(X, NET.all_labels())])
    assert np.mean(full["Q8_0"][0]) > 1.5 * np.mean(plain["Q8_0"][0])
    assert full["F16"] == plain["F16"]


def test_product_of_drawn_labels_converges() -> None:
    count = 4000
    labels = draws(NET.logits.float(), count, 0)
    gradients = [torch.stack([NET.score(t, int(y[t])) for t in range(T)]).float() for y in labels]
    sums = sums_of([use_of(X, gradients)], types=("Q4_0", "Q4_K"))
    for name, (chunk,) in sums.items():
        se = np.std(chunk) / count**0.5
        assert se < 0.1 * NET.expected(name)
        assert np.mean(chunk) == pytest.approx(NET.expected(name), abs=4 * se), name


def test_product_squares_per_position_and_keeps_chunks_apart() -> None:
    whole = [normal(T, HEIGHT, seed=6)]
    (together,) = sums_of([use_of(X, whole)])["Q4_0"]
    parts = sums_of([use_of(X[:2], [whole[0][:2]]), use_of(X[2:], [whole[0][2:]])])["Q4_0"]
    assert parts[0][0] + parts[1][0] == pytest.approx(together[0], rel=1e-5)
    unused = sums_of([empty(use_of(X, whole)), use_of(X, whole)])["Q4_0"]
    assert unused == [[0.0], [pytest.approx(together[0], rel=1e-6)]]


def test_product_in_blocks_of_rows_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sums_of([use_of(X, NET.all_labels())])
    monkeypatch.setattr("qres.sensitivity.replay.weights.BLOCK_WEIGHTS", 5 * WIDTH)
    after = sums_of([use_of(X, NET.all_labels())])
    assert all(after[name][0] == pytest.approx(before[name][0], rel=1e-4) for name in TYPES)


def test_product_of_several_matrices_takes_the_right_one() -> None:
    known, _ = weights(w=torch.stack([W, 4 * W]))
    gradients = [normal(T, HEIGHT, seed=6)]
    first, second = (
        damage(known, Site("w", 3, i), [use_of(X, gradients)], ("Q8_0",), None, torch.float32, 1) for i in (0, 1)
    )
    assert second["Q8_0"][0][0] == pytest.approx(16 * first["Q8_0"][0][0], rel=1e-3)


def test_importance_is_the_quantizers() -> None:
    known, _ = weights(w=W)
    importance = X.square().mean(dim=0).numpy()
    uses = [Use(X, {}, [normal(T, HEIGHT, seed=6 + i) for i in range(20)])]
    with_it, without = (damage(known, SITE, uses, ("Q4_0",), i, torch.float32, 1)["Q4_0"] for i in (importance, None))
    error = round_trip(W.numpy(), "Q4_0", 1, importance) - W.numpy()
    expected = [float(((X.numpy() @ error.T * g.numpy()).sum(axis=1) ** 2).sum()) for g in uses[0].gradients]
    assert with_it[0] == pytest.approx(expected, rel=1e-3)
    assert np.mean(with_it[0]) < np.mean(without[0])


def test_types_that_ggml_cannot_make_are_left_out() -> None:
    """IQ2_XXS needs an importance matrix."""
    assert tuple(sums_of([use_of(X, NET.all_labels())], types=("Q4_0", "IQ2_XXS"))) == ("Q4_0",)


def head_of(x: Tensor) -> tuple[Tensor, Use]:
    logits = x @ W.T / 1
    return logits, use_of(x, lse=logits.logsumexp(dim=1))


def test_head_is_the_variance_of_the_logits_error() -> None:
    """The same as the expectation over labels, exactly, and near the real KLD where errors are small."""
    x = X / X.abs().max() * 8
    logits, use = head_of(x)
    p = logits.double().softmax(dim=1).numpy()
    for name, (entry,) in sums_of([use]).items():
        d = rounded(x, name) @ quantized(name).T - x.numpy().astype(np.float64) @ W.numpy().astype(np.float64).T
        variance = (p * d**2).sum(axis=1) - (p * d).sum(axis=1) ** 2
        assert entry == [pytest.approx(variance.sum(), rel=2e-3)], name
        real = kld(logits, logits + torch.from_numpy(d).float()) * T
        if name in ("Q8_0", "Q6_K", "Q4_K"):
            assert entry[0] / 2 == pytest.approx(real, rel=0.1), name


def test_head_in_blocks_of_rows_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    _, use = head_of(X / X.abs().max() * 8)
    before = sums_of([use])
    monkeypatch.setattr("qres.sensitivity.replay.weights.BLOCK_WEIGHTS", 5 * WIDTH)
    after = sums_of([use])
    assert all(after[name][0] == pytest.approx(before[name][0], rel=1e-3) for name in TYPES)


def test_rows_of_an_embedding() -> None:
    """Only the rows that the text uses, each as often as it does; over chunks with other rows."""
    ids = [torch.tensor([3, 7, 3]), torch.tensor([11, 3])]
    gradients = [[normal(len(i), WIDTH, seed=k + 10 * len(i)) for k in range(2)] for i in ids]
    uses = [Use(i, gradients=g) for i, g in zip(ids, gradients, strict=True)]
    for name, sums in sums_of(uses, Site("w", 3, picks_rows=True)).items():
        error = quantized(name) - W.numpy().astype(np.float64)
        for i, given, found in zip(ids, gradients, sums, strict=True):
            expected = [float(((error[i.numpy()] * g.numpy()).sum(axis=1) ** 2).sum()) for g in given]
            assert found == pytest.approx(expected, rel=1e-4), name


def test_mixing_takes_the_effect_at_the_averages() -> None:
    """Two heads over the same values, which a cache of more places holds; plus what does not pass the attention."""
    attention = (3 * normal(1, 2, T, T + 3, seed=7)).softmax(dim=-1)

    def carry(y: Tensor) -> Tensor:
        padded = torch.cat([y, torch.zeros(3, HEIGHT, dtype=y.dtype)])
        return padded.reshape(1, T + 3, 2, HEIGHT // 2).transpose(1, 2)

    beside, means = normal(T, HEIGHT, seed=8) / 4, normal(1, T, 2, HEIGHT // 2, seed=9)
    use = use_of(X, [beside, 0 * beside], mixing=Mixing(attention, carry), averaged=[means, means])
    for name, (found,) in sums_of([use]).items():
        dy = rounded(X, name) @ quantized(name).T - X.numpy().astype(np.float64) @ W.numpy().astype(np.float64).T
        effect = np.zeros(T)
        for t in range(T):
            for h in range(2):
                part = dy[:, h * HEIGHT // 2 : (h + 1) * HEIGHT // 2]
                effect[t] += means[0, t, h].numpy() @ (attention[0, h, t, :T].numpy().astype(np.float64) @ part)
        both = effect + (beside.numpy() * dy).sum(axis=1)
        assert found == [pytest.approx((both**2).sum(), rel=2e-3), pytest.approx((effect**2).sum(), rel=2e-3)], name


def test_collector_leaves_what_passes_the_attention_out_of_the_gradient() -> None:
    """The gradient of a value matrix is its averages' and the rest; only the rest stays with its output."""
    known, _ = weights(w=W)
    attention = (3 * normal(1, 1, T, T, seed=7)).softmax(dim=-1)
    mixing = Mixing(attention, lambda y: y.reshape(1, 1, T, HEIGHT))
    collector = Collector({"w": ("Q8_0",)}, known, torch.float32, None, torch.zeros(0), None)
    rest, means = normal(T, HEIGHT, seed=8), normal(1, T, 1, HEIGHT, seed=9)
    collector.enters(SITE, X)
    collector.averages(SITE, mixing)
    for factor in (1.0, 2.0):
        collector.averaged(SITE, factor * means)
        collector.product(SITE, X, rest + factor * attention[0, 0].T @ means[0, :, 0])
    use = collector.uses()[SITE]
    assert all(torch.allclose(g, rest, atol=1e-5) for g in use.gradients)
    assert len(use.averaged) == len(use.gradients) == 2


def test_collector_takes_the_scored_positions_of_the_head() -> None:
    known, _ = weights(w=W)
    collector = Collector({"w": ("Q8_0",)}, known, torch.float32, SITE.node, torch.zeros(2), None)
    collector.enters(SITE, X)
    assert torch.equal(collector.uses()[SITE].x, X[2:4])


def test_collector_drops_positions_without_a_gradient_and_unwanted_tensors() -> None:
    known, _ = weights(w=W)
    collector = Collector({"w": ("Q8_0",)}, known, torch.float32, None, torch.zeros(0), None)
    other = Site("v", 4)
    g = normal(T, HEIGHT)
    g[3:] = 0
    for site in (SITE, other):
        collector.enters(site, X)
        collector.product(site, X, g)
    (use,) = collector.uses().values()
    assert torch.equal(use.x, X[:3])
    assert torch.equal(use.rounding[32], rounding_error(X, 32)[:3])
    assert torch.equal(use.gradients[0], g[:3])


def test_collector_passes_over_a_tensor_that_no_type_fits() -> None:
    """A matrix of short rows: predicted types are none, but the matrix is in the table."""
    known, _ = weights(w=W)
    collector = Collector({"w": ()}, known, torch.float32, None, torch.zeros(0), None)
    collector.enters(SITE, X)
    collector.averages(SITE, Mixing(torch.ones(1, 1, T, T), lambda y: y))
    collector.averaged(SITE, normal(1, T, 1, HEIGHT))
    collector.product(SITE, X, normal(T, HEIGHT))
    assert collector.uses() == {}


# -- the scored positions


def test_draws_follow_the_distribution_and_repeat() -> None:
    logits = normal(40, VOCAB, seed=11)
    logits[:, 2] = -torch.inf
    drawn = torch.stack(draws(logits, 2000, 3), dim=1)
    share = torch.stack([(drawn == y).double().mean(dim=1) for y in range(VOCAB)], dim=1)
    assert (share - logits.double().softmax(dim=1)).abs().max() < 0.06
    assert not share[:, 2].any()
    assert torch.equal(drawn, torch.stack(draws(logits, 2000, 3), dim=1))
    assert not torch.equal(drawn, torch.stack(draws(logits, 2000, 4), dim=1))


def test_differences_of_logits() -> None:
    a = normal(40, VOCAB, seed=12).double().numpy()
    b = a + normal(40, VOCAB, seed=13).double().numpy() / 10
    p, q = (np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in (a, b))
    first, second = torch.from_numpy(a).float(), torch.from_numpy(b).float()
    assert kld(first, second) == pytest.approx((p * np.log(p / q)).sum(axis=1).mean(), rel=1e-4)
    assert nmse(first, second) == pytest.approx(((a - b) ** 2).sum() / ((a - a.mean()) ** 2).sum(), rel=1e-4)
    ruled_out = torch.cat([first, torch.full((40, 1), -torch.inf)], dim=1)
    assert kld(ruled_out, torch.cat([second, torch.full((40, 1), -torch.inf)], dim=1)) == pytest.approx(
        kld(first, second)
    )
    assert nmse(ruled_out, ruled_out) == 0.0
    assert (scored_positions(64).start, scored_positions(64).stop) == (32, 63)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1.0])
def test_nmse_of_logits_without_a_spread_is_no_crash(value: float) -> None:
    """All NaN, all infinite, all equal: nothing can be compared, and a division by zero would end the scan."""
    flat = torch.full((3, VOCAB), value)
    assert not nmse(flat, normal(3, VOCAB)) < 1e-3


# -- sums to figures


def test_kld_is_half_the_mean_and_clusters_by_chunk() -> None:
    prediction = PredictionSums(counts=[10, 20])
    found, se = prediction.kld([[1.0, 3.0], [2.0, 4.0]])
    assert found == pytest.approx((2 + 3) / 2 / 30)
    assert se == clustered_se([1.0, 1.5], [10, 20])


def test_kld_of_one_chunk_has_the_error_of_its_draws() -> None:
    prediction = PredictionSums(counts=[10])
    found, se = prediction.kld([[1.0, 3.0, 5.0]])
    assert found == pytest.approx(3 / 2 / 10)
    assert se == pytest.approx(np.std([0.05, 0.15, 0.25], ddof=1) / 3**0.5)
    assert prediction.kld([[2.0]]) == (0.1, None)


def test_added_spreads_an_exact_entry_over_the_draws() -> None:
    exact, drawn = [[5.0], [7.0]], [[1.0, 2.0], [3.0, 4.0]]
    expected = [[6.0, 7.0], [10.0, 11.0]]
    assert added([exact, drawn]) == added([drawn, exact]) == expected
    assert added([exact, exact]) == [[10.0], [14.0]]
    assert drawn == [[1.0, 2.0], [3.0, 4.0]]  # what goes in is left alone
    assert added([]) == []


def tensor(name: str, unit: int | None, **sums: float) -> TensorSums:
    """Sums of two chunks, the same in both."""
    return TensorSums(name, unit, {kind: [[value], [value]] for kind, value in sums.items()})


PREDICTION = PredictionSums(
    replay_kld=1e-9,
    replay_nmse=1e-10,
    limit=1e-5,
    dtype="float32",
    counts=[10, 10],
    tensors=[
        tensor("token_embd.weight", 0, Q4_0=1.0, Q8_0=0.1),
        tensor("blk.0.attn_q.weight", 1, Q4_0=2.0, Q8_0=0.2),
        tensor("blk.0.attn_v.weight", 1, Q4_0=4.0, Q6_K=0.4),
        tensor("blk.0.ffn_up.weight", 2, Q4_0=3.0),
        TensorSums("output.weight", 5, {"Q4_0": [[8.0], [8.0]]}),
        tensor("lost.weight", None, Q4_0=100.0),
    ],
)
Q4 = dict.fromkeys((row.tensor for row in PREDICTION.tensors), "Q4_0")


def test_level_adds_up_the_tensors_of_a_unit() -> None:
    mixed = {**Q4, "blk.0.attn_v.weight": "Q6_K", "blk.0.ffn_up.weight": "F16"}
    assert PREDICTION.level(mixed) == {
        0: [[1.0], [1.0]],
        1: [[2.4], [2.4]],
        5: [[8.0], [8.0]],
        None: [[100.0], [100.0]],
    }
    assert PREDICTION.tensors[1].sums["Q4_0"] == [[2.0], [2.0]]
    assert PREDICTION.level({}) == {}


def test_prediction_survives_the_state_file(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    checkpoint.save(path, State(prediction=PREDICTION, drawn={0: (3, 7)}), {})
    found = checkpoint.load(path, {})
    assert found is not None
    assert found.prediction == PREDICTION
    assert found.drawn == {0: (3, 7)}
    refused = PredictionSums("why", 0.5, None, 1e-5)
    checkpoint.save(path, State(prediction=refused), {})
    found = checkpoint.load(path, {})
    assert found is not None
    assert found.prediction == refused
    assert not refused.used


# -- which units to patch


def many(count: int) -> PredictionSums:
    return PredictionSums(counts=[1], tensors=[TensorSums(f"t{i}", i, {"Q4_0": [[float(i)]]}) for i in range(1, count)])


def test_choose_takes_the_worst_and_some_at_random() -> None:
    types = {f"t{i}": "Q4_0" for i in range(40)}
    chosen = patching.choose_predicted(many(40), types, [0.1] * 40, 20)
    assert len(chosen) == len(set(chosen)) == 20
    top, drawn = chosen[:12], chosen[12:]
    assert top == (0, *range(39, 28, -1))  # unit 0 has an error, but no prediction
    assert set(drawn) <= set(range(1, 29))
    assert list(drawn) != sorted(drawn, reverse=True)[: len(drawn)] or max(drawn) < 28
    assert chosen == patching.choose_predicted(many(40), types, [0.1] * 40, 20)
    assert patching.choose_predicted(many(40), types, [0.1] * 40, 21)[13:] != drawn


def test_choose_leaves_units_without_error_out_and_takes_no_more_than_there_are() -> None:
    types = {f"t{i}": "Q4_0" for i in range(40)}
    injected = [None if i % 2 else (0.0 if i % 4 == 0 else 0.1) for i in range(40)]
    assert sorted(patching.choose_predicted(many(40), types, injected, 99)) == [i for i in range(40) if i % 4 == 2]
    assert len(patching.choose_predicted(many(40), types, [0.1] * 40, 3)) == 3
    assert patching.choose_predicted(many(40), types, [], 9) == ()


# -- records


def test_calibration_is_measured_over_the_sum_of_all() -> None:
    found = trust.calibration(PREDICTION, Q4, 0.59)
    assert found is not None
    assert found.predicted_kld == pytest.approx(118 / 20)
    assert found.factor == pytest.approx(0.59 / 5.9)
    assert found.measured_kld == 0.59
    assert found.predicted_se == pytest.approx(0)


@pytest.mark.parametrize(
    ("types", "measured"), [({}, 0.5), ({"blk.0.ffn_up.weight": "F16"}, 0.5), (Q4, None), (Q4, 0.0)]
)
def test_calibration_of_nothing(types: Mapping[str, str], measured: float | None) -> None:
    assert trust.calibration(PREDICTION, types, measured) is None


def test_calibration_of_a_prediction_of_zero() -> None:
    assert trust.calibration(PredictionSums(counts=[1], tensors=[tensor("a", 0, Q4_0=0.0)]), {"a": "Q4_0"}, 1.0) is None


def mapped() -> ResidualMap:
    g = Builder()
    x, _, _ = sequential(g, g.embedding())
    g.head(x)
    return g.trace()


def unit(name: str, kld_: float | None = None, predicted: float | None = None, method: str = "patched") -> Unit:
    plain: dict[str, Any] = {field.name: None for field in fields(Unit)}
    plain.update(unit=name, kld=kld_, predicted_kld=predicted, method=method)
    return Unit(**plain)


def test_with_predictions_by_name_and_calibrated() -> None:
    units = [unit(name) for name in ("head", "0.attention", "1.ffn", "embedding")]
    found = {row.unit: row for row in trust.with_predictions(units, mapped(), PREDICTION, Q4, 0.5)}
    assert list(found) == ["head", "0.attention", "1.ffn", "embedding"]
    assert found["head"].predicted_kld == pytest.approx(16 / 20 / 2 * 0.5)
    assert found["0.attention"].predicted_kld == pytest.approx(12 / 20 / 2 * 0.5)
    assert found["embedding"].predicted_kld == pytest.approx(2 / 20 / 2 * 0.5)
    assert found["1.ffn"].predicted_kld is None
    uneven = PredictionSums(counts=[10, 10], tensors=[TensorSums("a", 0, {"Q4_0": [[1.0], [3.0]]})])
    (row,) = trust.with_predictions([unit("embedding")], mapped(), uneven, {"a": "Q4_0"}, 0.5)
    assert row.predicted_se == pytest.approx(0.5 * cast(float, clustered_se([0.5, 1.5], [10, 10])))


def test_trust_of_a_power_law() -> None:
    """patched = predicted ** 2: slope 2, the ranks agree, the worst are the furthest from equal on the log scale."""
    guesses = [0.5, 0.1, 0.02, 0.9, 0.3]
    units = [unit(f"u{i}", guess**2, guess, "forced" if i == 0 else "patched") for i, guess in enumerate(guesses)]
    others = [
        unit("skipped", 1.0, 0.001, "not patched"),
        unit("zero", 0.0, 0.5),
        unit("unmeasured", None, 0.5),
        unit("unpredicted", 0.5, None),
    ]
    found = trust.trust([*units, *others], {"u1", "u4", "skipped"})
    assert found is not None
    assert (found.units, found.top, found.random) == (5, 2, 2)  # and the head
    assert found.slope == pytest.approx(2)
    assert found.spearman == pytest.approx(1)
    assert found.worst == ("u2", "u1", "u4")


def test_trust_of_too_few() -> None:
    assert trust.trust([unit("a", 1.0, None), unit("b", 1.0, 0.5, "other")], ()) is None
    found = trust.trust([unit(f"u{i}", 1.0 + i, 2.0 + i) for i in range(3)], ())
    assert found is not None
    assert (found.units, found.spearman, found.slope, len(found.worst)) == (3, None, None, 3)
    same = trust.trust([unit(f"u{i}", 1.0 + i, 2.0) for i in range(5)], ())
    assert same is not None
    assert same.slope is None


def test_sensitivity_is_the_whole_table() -> None:
    job = cast(Any, _Job())
    found = predict.record(job, PREDICTION, mapped())
    assert (found.used, found.chunks, found.tokens, found.draws) == (True, 2, 20, 3)
    assert [row.unit for row in found.tensors] == ["embedding", "0.attention", "0.attention", "0.ffn", "head", ""]
    assert [row.role for row in found.tensors] == [
        *("embedding", "attention q", "attention v", "ffn up", "head", "other"),
    ]
    assert [row.layer for row in found.tensors] == [None, 0, 0, 0, None, None]
    mixed = found.tensors[2]
    assert [(row.type, row.bytes) for row in mixed.types] == [("Q4_0", 256 // 32 * 18), ("Q6_K", 210)]
    assert mixed.types[0].predicted_kld == pytest.approx(8 / 20 / 2)
    none = predict.record(job, PredictionSums("why", 0.5, 0.1, 1e-5), None)
    assert (none.used, none.reason, none.replay_kld, none.replay_kld_limit, none.tensors) == (
        *(False, "why", 0.5, 1e-5),
        (),
    )


class _Job:
    """What `sensitivity` reads of a job."""

    bytes_16bit = dict.fromkeys(Q4, 512)
    reference = ModelFile("reference", "", 0, dict.fromkeys(Q4, 512), dict.fromkeys(Q4, "F16"), ())
    prediction = jobs.prediction(draws=3)


@pytest.mark.parametrize(
    ("name", "of", "expected"),
    [
        ("token_embd.weight", "embedding", "embedding"),
        ("token_embd.weight", "head", "head"),
        ("output.weight", "head", "head"),
        ("blk.3.attn_q.weight", "3.attention", "attention q"),
        ("blk.3.attn_qkv.weight", "3.attention", "attention qkv"),
        ("blk.3.attn_kv_a_mqa.weight", "3.attention", "attention kv_a_mqa"),
        ("blk.3.attn_output.weight", "", "attention output"),
        ("blk.3.ffn_down.weight", "3.ffn", "ffn down"),
        ("blk.3.ffn_down_exps.weight", "3.ffn", "experts down"),
        ("blk.3.ffn_gate_up_exps.weight", "3.ffn", "experts gate and up"),
        ("blk.3.ffn_up_shexp.weight", "3.ffn", "shared expert up"),
        ("blk.3.ffn_gate_inp.weight", "3.ffn", "router"),
        ("blk.3.ssm_in.weight", "3.ssm", "ssm in"),
        ("blk.3.shortconv.in_proj.weight", "3.conv", "conv in_proj"),
        ("blk.3.time_mix_key.weight", "3.time", "time mix key"),
        ("blk.3.channel_mix_key.weight", "3.ffn", "channel mix key"),
        ("enc.blk.3.attn_q.weight", "", "attention q"),
        ("blk.3.what.weight", "3.ffn", "other"),
        ("what.attn_q.weight", "", "other"),
    ],
)
def test_roles(name: str, of: str, expected: str) -> None:
    assert role(name, of) == expected


def test_log_ratio_is_symmetric() -> None:
    """A unit ten times too high is as far off as one ten times too low."""
    found = trust.trust([unit("low", 0.1, 1.0), unit("high", 10.1, 1.0), unit("near", 1.1, 1.0)], ())
    assert found is not None
    assert found.worst == ("high", "low", "near")
