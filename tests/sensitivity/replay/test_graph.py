"""The replay of recorded graphs: cutting, memory, products with weights, each against torch's own autograd."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from qres.errors import UnsupportedError
from qres.native.graph import VIEWS, Graph, Node
from qres.sensitivity.replay import products
from qres.sensitivity.replay.graph import Replay, State, unknown_operations
from qres.sensitivity.replay.products import Context, Mixing, Site
from qres.sensitivity.replay.schedule import root_of, schedule
from qres.sensitivity.replay.value_paths import value_paths
from qres.sensitivity.replay.weights import Weights, blocks
from tests.sensitivity.replay.graphs import F16, I64, Builder, FakeWeights, normal, weights, words

TOKENS, WIDTH, WIDE, VOCAB = 6, 8, 12, 10


class Listener:
    """A tap that keeps what it hears."""

    def __init__(self) -> None:
        self.entered: dict[Site, Tensor] = {}
        self.gradients: dict[Site, list[Tensor]] = {}
        self.order: list[Site] = []
        self.mixings: dict[Site, Mixing] = {}
        self.means: dict[Site, list[Tensor]] = {}

    def enters(self, site: Site, x: Tensor) -> None:
        self.entered[site] = x.detach().clone()

    def product(self, site: Site, x: Tensor, g: Tensor) -> None:
        if not site.picks_rows:
            assert torch.equal(x, self.entered[site])
        self.gradients.setdefault(site, []).append(g.clone())
        self.order.append(site)

    def averages(self, site: Site, mixing: Mixing) -> None:
        self.mixings[site] = mixing

    def averaged(self, site: Site, g: Tensor) -> None:
        self.means.setdefault(site, []).append(g.clone())


def replay_of(g: Builder, known: Weights, tokens: int = TOKENS, vocab: int = VOCAB, pieces: int = 1) -> Replay:
    return Replay(g.graph(), known, vocab, tokens, pieces)


def logits(g: Builder, known: Weights, tokens: int = TOKENS, vocab: int = VOCAB, pieces: int = 1) -> Tensor:
    return replay_of(g, known, tokens, vocab, pieces).forward(g.inputs).logits


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    return found.shape == expected.shape and bool(torch.allclose(found, expected, rtol=tolerance, atol=tolerance))


def head(g: Builder, x: int) -> int:
    return g.matmul(g.leaf("output.weight", WIDTH, VOCAB), x)


# -- schedule


def layered(layers: int = 4) -> Builder:
    """Narrow between layers, wide within; each layer also writes a cache that is a leaf."""
    g = Builder()
    x = g.matmul(g.leaf("in", WIDTH, WIDTH), g.given("x", normal(TOKENS, WIDTH)))
    for layer in range(layers):
        cache = g.given(f"cache{layer}", torch.zeros(32, WIDE))
        wide = g.matmul(g.leaf(f"up{layer}", WIDTH, WIDE), x)
        into = g.into("CPY", wide, g.view(cache, WIDE, TOKENS), target=g.view(cache, WIDE, TOKENS))
        squared = g.op("SQR", g.view(into, WIDE, TOKENS))
        x = g.op("ADD", g.matmul(g.leaf(f"down{layer}", WIDE, WIDTH), g.op("MUL", squared, wide)), x)
    head(g, x)
    return g


def readers(graph: Graph, steps: Sequence[int]) -> set[int]:
    return {root_of(graph.nodes[source]) for index in steps for source in graph.nodes[index].sources}


@pytest.mark.parametrize("count", [1, 2, 4, 50])
def test_pieces_hold_every_computed_node_once(count: int) -> None:
    graph = layered().graph()
    plan = schedule(graph, graph.executed[-1], count)
    steps = [index for piece in plan.pieces for index in piece.nodes]
    assert steps == [index for index in graph.executed if graph.nodes[index].op not in VIEWS]
    assert all(piece.nodes for piece in plan.pieces)
    assert len(plan.pieces) <= count + 1
    assert (len(plan.pieces) > 1) == (count > 1)


@pytest.mark.parametrize("count", [2, 4, 50])
def test_alive_is_what_was_made_before_and_is_read_later(count: int) -> None:
    graph = layered().graph()
    pieces = schedule(graph, graph.executed[-1], count).pieces
    for i, piece in enumerate(pieces):
        before = {root_of(graph.nodes[index]) for earlier in pieces[:i] for index in earlier.nodes}
        later = readers(graph, [index for one in pieces[i:] for index in one.nodes])
        assert set(piece.alive) == before & later


def test_cuts_are_where_little_is_alive() -> None:
    """Between layers only the stream is alive: never a cut inside of one."""
    graph = layered().graph()
    pieces = schedule(graph, graph.executed[-1], 4).pieces
    assert len(pieces) >= 3
    for piece in pieces[1:]:
        assert [graph.nodes[root].ne[:2] for root in piece.alive] == [(WIDTH, TOKENS)]


def test_nothing_behind_the_result_is_computed() -> None:
    g = layered(1)
    result = g.executed[-1]
    g.op("SQR", result)
    plan = schedule(g.graph(), result, 1)
    assert plan.pieces[-1].nodes[-1] == result
    assert plan.last_read[result] == len(g.nodes)


def test_a_cache_that_later_pieces_read_is_alive_until_then() -> None:
    """Written in the first layer, read in the last."""
    g = layered(3)
    cache = next(node.index for node in g.nodes if node.name == "cache0")
    head(g, g.op("ADD", g.nodes[g.executed[-1]].slots[1], g.view(cache, WIDTH, TOKENS)))
    graph = g.graph()
    pieces = schedule(graph, graph.executed[-1], 4).pieces
    assert len(pieces) > 1
    assert all(cache in piece.alive for piece in pieces[1:])


def test_a_node_that_nobody_reads_is_never_alive() -> None:
    g = layered(2)
    unread = g.op("SQR", g.executed[0])
    head(g, g.nodes[g.executed[-2]].slots[1] or 0)
    graph = g.graph()
    assert all(unread not in p.alive for p in schedule(graph, graph.executed[-1], 50).pieces)


# -- which matrices make values


class Attention(Builder):
    """Queries and keys from the input; values as each test wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.x = self.given("x", normal(TOKENS, WIDTH))

    def product(self, name: str = "v.weight", rows: int = WIDTH) -> int:
        return self.matmul(self.leaf(name, WIDTH, rows), self.x)

    def attend(self, value: int, key: int | None = None, mask: int | None = None) -> int:
        """One head; the result [WIDTH, 1, TOKENS]."""
        query = self.product("q.weight")
        key = self.product("k.weight") if key is None else key
        n = self.nodes[query].ne[1]
        return self.op("FLASH_ATTN_EXT", query, key, value, mask, ne=(WIDTH, 1, n), params=words(WIDTH**-0.5, 0.0, 0.0))

    def cached(self, new: int, name: str = "cache", rows: int = TOKENS) -> int:
        cache = self.given(name, torch.zeros(16, WIDTH), F16)
        ids = self.given("rows", torch.arange(TOKENS), I64)
        self.into("SET_ROWS", new, ids, cache, target=cache)
        return self.view(cache, WIDTH, rows)

    def paths(self) -> dict[int, tuple[int, tuple[int, ...]]]:
        graph = self.graph()

        def is_weight(node: Node) -> bool:
            return node.is_leaf and (node.name.endswith(".weight") or node.name.endswith(".bias"))

        found = value_paths(graph, is_weight)
        assert all(path.attention == index for index, path in found.items())
        return {index: (path.site, path.steps) for index, path in found.items()}


def test_values_straight_from_a_product() -> None:
    g = Attention()
    site = g.product()
    at = g.attend(g.view(site, WIDTH, TOKENS, op="RESHAPE"))
    assert g.paths() == {at: (site, ())}


def test_values_through_a_cache_and_a_bias() -> None:
    g = Attention()
    site = g.product()
    biased = g.op("ADD", site, g.leaf("v.bias", WIDTH))
    value = g.cached(biased)
    write = g.executed[-2]
    assert g.nodes[write].op == "SET_ROWS"
    at = g.attend(value)
    g.cached(g.product("later.weight"), "other")
    assert g.paths() == {at: (site, (biased, write))}


def test_values_from_the_last_write_in_front_of_the_attention() -> None:
    """A cache written again behind the attention still holds what was there before."""
    g = Attention()
    site = g.product()
    cache = g.given("cache", torch.zeros(TOKENS, WIDTH))
    first = g.into("CPY", site, cache, target=cache)
    at = g.attend(cache)
    g.into("CPY", g.product("later.weight"), cache, target=cache)
    assert g.paths() == {at: (site, (first,))}


def test_values_from_the_later_of_two_writes() -> None:
    g = Attention()
    cache = g.given("cache", torch.zeros(TOKENS, WIDTH))
    g.into("CPY", g.product("early.weight"), cache, target=cache)
    site = g.product()
    write = g.into("CPY", site, cache, target=cache)
    at = g.attend(cache)
    assert g.paths() == {at: (site, (write,))}


def test_values_that_are_part_of_a_fused_product() -> None:
    g = Attention()
    site = g.product("qkv.weight", 3 * WIDTH)
    part = g.view(site, WIDTH, TOKENS, nb=(4, 12 * WIDTH), offset=8 * WIDTH)
    cont = g.op("CONT", part)
    at = g.attend(cont)
    assert g.paths() == {at: (site, (cont,))}


@pytest.mark.parametrize("op", ["RMS_NORM", "SCALE", "SQR"])
def test_values_that_more_is_done_to_have_no_path(op: str) -> None:
    g = Attention()
    g.attend(g.cached(g.op(op, g.product())))
    assert g.paths() == {}


def test_values_that_two_products_make_have_no_path() -> None:
    g = Attention()
    g.attend(g.op("ADD", g.product("a.weight"), g.product("b.weight")))
    assert g.paths() == {}


def test_values_that_were_there_before_have_no_path() -> None:
    g = Attention()
    g.attend(g.given("old", normal(TOKENS, WIDTH)))
    assert g.paths() == {}


# -- memory


def test_views_read_by_strides() -> None:
    """The second half of each row, transposed back and forth, over memory that another node owns."""
    known, _ = weights(output_weight=normal(VOCAB, WIDTH, seed=1))
    x = normal(TOKENS, 2 * WIDTH)
    g = Builder()
    root = g.op("CONT", g.given("x", x))
    half = g.view(root, WIDTH, TOKENS, nb=(4, 8 * WIDTH), offset=4 * WIDTH)
    turned = g.view(half, TOKENS, WIDTH, nb=(8 * WIDTH, 4), op="TRANSPOSE")
    plain = g.op("CONT", turned)  # [TOKENS, WIDTH] -> its own memory
    back = g.view(plain, WIDTH, TOKENS, nb=(4 * TOKENS, 4))
    head(g, back)
    assert close(logits(g, known), x[:, WIDTH:] @ normal(VOCAB, WIDTH, seed=1).T)


def test_rows_go_into_a_cache_that_rounds_them() -> None:
    known, w = weights(output_weight=normal(VOCAB, WIDTH, seed=1), v_weight=normal(WIDTH, WIDTH, seed=2))
    g = Builder()
    x, before = normal(TOKENS, WIDTH), normal(16, WIDTH, seed=3).half().float()
    ids = torch.tensor([3, 2, 9, 0, 15, 4])
    new = g.matmul(g.leaf("v.weight", WIDTH, WIDTH), g.given("x", x))
    cache = g.given("cache", before, F16)
    g.into("SET_ROWS", new, g.given("ids", ids, I64), cache, target=cache)
    head(g, g.op("CONT", g.view(cache, WIDTH, TOKENS, offset=2 * 2 * WIDTH)))
    expected = before.clone()
    exact = x @ w["v.weight"].T
    expected[ids] = exact.half().float()
    found = logits(g, known)
    assert close(found, expected[2 : 2 + TOKENS] @ w["output.weight"].T, 1e-6)
    expected[ids] = exact
    assert not close(found, expected[2 : 2 + TOKENS] @ w["output.weight"].T, 1e-6)


@pytest.mark.parametrize("part", [False, True])
def test_writes_in_place(part: bool) -> None:
    """CPY and SCALE into memory that was computed before; what is outside of a view stays."""
    known, w = weights(output_weight=normal(VOCAB, WIDTH, seed=1))
    x = normal(TOKENS, WIDTH)
    g = Builder()
    root = g.op("SQR", g.given("x", x))
    target = g.view(root, WIDTH // 2, TOKENS, nb=(4, 4 * WIDTH), offset=8) if part else root
    scaled = g.into("SCALE", target, target=target, params=words(3.0, 0.5))
    again = g.into("CPY", g.op("UNARY", scaled, params=(2,)), scaled, target=scaled)
    assert root_of(g.nodes[again]) == root
    head(g, g.view(again, WIDTH, TOKENS, op="RESHAPE") if not part else g.op("CONT", g.view(root, WIDTH, TOKENS)))
    expected = x.square()
    where = slice(2, 2 + WIDTH // 2) if part else slice(None)
    expected[:, where] = -(expected[:, where] * 3 + 0.5)
    assert close(logits(g, known), expected @ w["output.weight"].T)


def test_an_input_of_zeros_needs_no_bytes() -> None:
    known, w = weights(output_weight=normal(VOCAB, WIDTH, seed=1))
    g = Builder()
    x = normal(TOKENS, WIDTH)
    head(g, g.op("ADD", g.given("x", x), g.given("empty", torch.zeros(TOKENS, WIDTH), F16)))
    assert close(logits(g, known), x @ w["output.weight"].T)


def test_a_leaf_that_is_neither_input_nor_weight_is_named() -> None:
    known, _ = weights(output_weight=normal(VOCAB, WIDTH, seed=1))
    g = Builder()
    head(g, g.op("ADD", g.given("x", normal(TOKENS, WIDTH)), g.leaf("who.is.this", WIDTH)))
    with pytest.raises(UnsupportedError, match=r"reads who\.is\.this"):
        logits(g, known)


def test_an_unknown_operation_is_named() -> None:
    known, _ = weights(output_weight=normal(VOCAB, WIDTH, seed=1))
    g = Builder()
    head(g, g.op("FROBNICATE", g.op("AARDVARK", g.given("x", normal(TOKENS, WIDTH)))))
    assert unknown_operations(g.graph()) == ("AARDVARK", "FROBNICATE")
    with pytest.raises(UnsupportedError, match="AARDVARK, FROBNICATE"):
        replay_of(g, known)


def test_a_graph_without_logits_for_every_token_is_refused() -> None:
    known, _ = weights(output_weight=normal(VOCAB, WIDTH, seed=1))
    g = Builder()
    head(g, g.given("x", normal(1, WIDTH)))
    with pytest.raises(UnsupportedError, match="no logits"):
        replay_of(g, known)


# -- products


def context(known: Weights, tap: Listener) -> Context:
    return Context(known, torch.float32, torch.zeros((), requires_grad=True), tap)


def test_blocks_of_rows_cover_a_matrix() -> None:
    assert blocks(5, 1 << 21) == [(0, 2), (2, 4), (4, 5)]
    assert blocks(3, 1 << 30) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_product_and_its_gradients(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """In several blocks of rows; x is rounded as llama.cpp does to a 16-bit weight's type, gradients are not."""
    monkeypatch.setattr("qres.sensitivity.replay.weights.BLOCK_WEIGHTS", 3 * WIDTH)
    known, w = weights({"w": kind}, w=normal(VOCAB, WIDTH))
    tap, site = Listener(), Site("w", 7)
    x = normal(TOKENS, WIDTH, seed=1).requires_grad_()
    upstream = normal(TOKENS, VOCAB, seed=2)
    upstream[2] = 0  # rows without a gradient are left out of the product
    y = products.product(context(known, tap), site, x)
    low = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    assert close(y, x.detach().to(low).float() @ w["w"].T, 1e-6)
    (found,) = torch.autograd.grad(y, x, upstream)
    assert close(found, upstream @ w["w"])
    assert torch.equal(tap.gradients[site][0], upstream)
    assert torch.equal(tap.entered[site], x.detach())


def test_product_of_an_input_without_gradient_is_heard_of() -> None:
    known, _ = weights(w=normal(VOCAB, WIDTH))
    tap = Listener()
    shared = context(known, tap)
    y = products.product(shared, Site("w", 7), normal(TOKENS, WIDTH))
    torch.autograd.grad(y.sum(), shared.anchor, allow_unused=True)
    assert torch.equal(tap.gradients[Site("w", 7)][0], torch.ones(TOKENS, VOCAB))


def test_picked_rows() -> None:
    known, w = weights(w=normal(VOCAB, WIDTH))
    tap = Listener()
    shared, ids = context(known, tap), torch.tensor([3, 0, 3])
    y = products.picked(shared, Site("w", 7, picks_rows=True), ids)
    assert torch.equal(y, w["w"][ids])
    upstream = normal(3, WIDTH, seed=2)
    torch.autograd.grad(y, shared.anchor, upstream, allow_unused=True)
    assert torch.equal(tap.gradients[Site("w", 7, picks_rows=True)][0], upstream)


@pytest.mark.parametrize("matrices", [1, 2, 4])
def test_mul_mat_of_grouped_matrices(matrices: int) -> None:
    """ggml: neighbours among the inputs share a matrix, i2 // (n2 / matrices)."""
    known, w = weights(w=normal(matrices, VOCAB, WIDTH))
    tap = Listener()
    x = normal(3, 4, TOKENS, WIDTH, seed=1).requires_grad_()
    y = products.mul_mat(context(known, tap), Site("w", 7), x)
    stack = w["w"].reshape(matrices, VOCAB, WIDTH).repeat_interleave(4 // matrices, dim=0)
    plain = torch.einsum("sgtk,gvk->sgtv", x, stack)
    assert close(y, plain)
    upstream = normal(3, 4, TOKENS, VOCAB, seed=2)
    (found,), (expected,) = torch.autograd.grad(y, x, upstream), torch.autograd.grad(plain, x, upstream)
    assert close(found, expected)
    for matrix in range(matrices):
        part = upstream[:, matrix * 4 // matrices : (matrix + 1) * 4 // matrices].reshape(-1, VOCAB)
        assert torch.equal(tap.gradients[Site("w", 7, matrix)][0], part)


def test_mul_mat_with_matrices_that_do_not_divide_the_inputs() -> None:
    known, _ = weights(w=normal(3, VOCAB, WIDTH))
    with pytest.raises(UnsupportedError, match="3 matrices for 4 x 1"):
        products.mul_mat(context(known, Listener()), Site("w", 7), normal(1, 4, TOKENS, WIDTH))


@pytest.mark.parametrize("shared_input", [True, False])
def test_mul_mat_id(shared_input: bool) -> None:
    """Each token with its own experts; one that none uses is not heard of."""
    known, w = weights(w=normal(4, VOCAB, WIDTH))
    tap = Listener()
    ids = torch.tensor([[0, 3], [3, 0], [2, 3], [0, 2], [2, 0], [3, 2]])
    x = normal(1, TOKENS, 1 if shared_input else 2, WIDTH, seed=1).requires_grad_()
    y = products.mul_mat_id(context(known, tap), Site("w", 7), x, ids.reshape(1, 1, TOKENS, 2))
    plain = torch.einsum("btuk,tuvk->btuv", x.expand(1, TOKENS, 2, WIDTH), w["w"][ids])
    assert close(y, plain)
    upstream = normal(1, TOKENS, 2, VOCAB, seed=2)
    (found,), (expected,) = torch.autograd.grad(y, x, upstream), torch.autograd.grad(plain, x, upstream)
    assert close(found, expected)
    assert {site.matrix for site in tap.entered} == {0, 2, 3}
    rows = (ids == 3).nonzero()
    assert torch.equal(tap.gradients[Site("w", 7, 3)][0], upstream[0, rows[:, 0], rows[:, 1]])


# -- a whole network, in pieces


NET = {
    "embd_weight": normal(VOCAB, WIDTH),
    "q_weight": normal(WIDTH, WIDTH, seed=1) / 3,
    "k_weight": normal(WIDTH, WIDTH, seed=2) / 3,
    "v_weight": normal(WIDTH, WIDTH, seed=3) / 3,
    "v_bias": normal(WIDTH, seed=4),
    "up_weight": normal(WIDE, WIDTH, seed=5) / 3,
    "down_weight": normal(WIDTH, WIDE, seed=6) / 3,
    "output_weight": normal(VOCAB, WIDTH, seed=7),
}
IDS = torch.tensor([3, 1, 4, 1, 5, 9])
MASK = torch.triu(torch.full((TOKENS, TOKENS), -torch.inf), 1)


def network() -> tuple[Builder, dict[str, int]]:
    """Embedding, attention through caches, a squared feed-forward, head."""
    g = Attention()
    at = {}
    at["embd"] = g.op("GET_ROWS", g.leaf("embd.weight", WIDTH, VOCAB), g.given("ids", IDS, I64), ne=(WIDTH, TOKENS))
    g.x = at["embd"]
    at["v"] = g.product()
    value = g.cached(g.op("ADD", at["v"], g.leaf("v.bias", WIDTH)), "cache_v")
    key = g.cached(g.product("k.weight"), "cache_k")
    mixed = g.attend(value, key, g.given("mask", MASK, F16))
    at["stream"] = g.op("ADD", g.view(mixed, WIDTH, TOKENS, op="RESHAPE"), at["embd"])
    at["up"] = g.matmul(g.leaf("up.weight", WIDTH, WIDE), at["stream"])
    at["down"] = g.matmul(g.leaf("down.weight", WIDE, WIDTH), g.op("SQR", at["up"]))
    at["last"] = g.op("ADD", at["down"], at["stream"])
    at["head"] = head(g, at["last"])
    return g, at


def plain_network(w: FakeWeights, values: dict[str, Tensor]) -> Tensor:
    """The same in plain torch; what the gradients are compared at is put into `values`."""
    embd = w["embd.weight"][IDS].requires_grad_()
    q, k, v = (embd @ w[f"{name}.weight"].T for name in ("q", "k", "v"))
    v.retain_grad()
    weights_ = (q @ k.half().float().T * WIDTH**-0.5 + MASK).softmax(-1)
    mean = weights_ @ (v + w["v.bias"]).half().float()
    mean.retain_grad()
    stream = mean + embd
    stream.retain_grad()
    up = stream @ w["up.weight"].T
    up.retain_grad()
    down = up.square() @ w["down.weight"].T
    out: Tensor = (down + stream) @ w["output.weight"].T
    down.retain_grad()
    values.update(embd=embd, v=v, mean=mean, stream=stream, up=up, down=down, weights=weights_)
    return out


@pytest.mark.parametrize("pieces", [1, 3, 50])
def test_network_backward_in_pieces_is_autograd(pieces: int) -> None:
    """Logits, gradients of the roots alive between pieces, and what the tap hears, for two draws."""
    known, w = weights(None, **NET)
    g, at = network()
    replay = replay_of(g, known, pieces=pieces)
    assert (len(replay.pieces) > 1) == (pieces > 1)
    run = replay.forward(g.inputs)
    values: dict[str, Tensor] = {}
    expected = plain_network(w, values)
    assert close(run.logits, expected.detach())
    seeds = [normal(TOKENS, VOCAB, seed=20), normal(TOKENS, VOCAB, seed=21)]
    tap = Listener()
    behind: list[State] = [{replay.result: seed.reshape(-1)} for seed in seeds]
    for piece in reversed(range(len(replay.pieces))):
        behind = replay.backward(run, piece, lambda _: behind, tap)  # noqa: B023 - called at once
        assert all(set(one) <= set(replay.pieces[piece].alive) for one in behind)
    assert replay.head == at["head"]
    for draw, seed in enumerate(seeds):
        for value in values.values():
            value.grad = None
        torch.autograd.backward(expected, seed, retain_graph=True)
        for name, place in (("v", "v"), ("up", "up"), ("down", "down")):
            gradient = values[place].grad
            assert gradient is not None
            assert close(tap.gradients[Site(f"{name}.weight", at[name])][draw], gradient, 1e-4)
        gradient = values["embd"].grad
        assert gradient is not None
        assert close(tap.gradients[Site("embd.weight", at["embd"], picks_rows=True)][draw], gradient, 1e-4)
        assert torch.equal(tap.gradients[Site("output.weight", at["head"])][draw], seed)
        mean = values["mean"].grad
        assert mean is not None
        assert close(tap.means[Site("v.weight", at["v"])][draw].reshape(TOKENS, WIDTH), mean, 1e-4)
    assert close(tap.entered[Site("up.weight", at["up"])], values["stream"].detach())


def test_network_gradient_of_the_stream() -> None:
    """Of a root alive in front of a piece: what an error of the stream there does."""
    known, w = weights(None, **NET)
    g, at = network()
    replay = replay_of(g, known, pieces=50)
    run = replay.forward(g.inputs)
    values: dict[str, Tensor] = {}
    seed = normal(TOKENS, VOCAB, seed=20)
    torch.autograd.backward(plain_network(w, values), seed)
    behind: list[State] = [{replay.result: seed.reshape(-1)}]
    compared = 0
    for piece in reversed(range(len(replay.pieces))):
        behind = replay.backward(run, piece, lambda _: behind, Listener())  # noqa: B023 - called at once
        if at["stream"] in behind[0] and at["up"] not in behind[0] and at["down"] not in behind[0]:
            gradient = values["stream"].grad
            assert gradient is not None
            assert close(behind[0][at["stream"]].reshape(TOKENS, WIDTH), gradient, 1e-4)
            compared += 1
    assert compared


def test_network_mixing_carries_errors_of_values_to_the_attention() -> None:
    """Linear, without the bias and without rounding: weights times the error of each value."""
    known, w = weights(None, **NET)
    g, at = network()
    replay = replay_of(g, known)
    run = replay.forward(g.inputs)
    tap = Listener()
    replay.backward(run, 0, lambda _: [{replay.result: torch.ones(TOKENS * VOCAB)}], tap)
    mixing = tap.mixings[Site("v.weight", at["v"])]
    error = normal(TOKENS, WIDTH, seed=9) * 1e-5
    carried = mixing.carry(error)
    assert torch.equal(carried.reshape(-1, WIDTH)[:TOKENS], error)
    assert not carried.reshape(-1, WIDTH)[TOKENS:].any()
    values: dict[str, Tensor] = {}
    plain_network(w, values)
    assert close(mixing.weights.reshape(TOKENS, -1)[:, :TOKENS], values["weights"].detach())


@pytest.mark.parametrize("part", [False, True])
def test_gradients_pass_writes_in_place(part: bool) -> None:
    """What is written over gets none; what lies beside a view, and what is written, gets its own."""
    x, out = normal(TOKENS, WIDTH), normal(VOCAB, WIDTH, seed=3)
    rows = WIDTH // 2 if part else WIDTH
    known, w = weights(w=normal(WIDTH, WIDTH, seed=1), v=normal(rows, WIDTH, seed=2), output_weight=out)
    g = Builder()
    given = g.given("x", x)
    root = g.matmul(g.leaf("w", WIDTH, WIDTH), given)
    written = g.matmul(g.leaf("v", WIDTH, rows), given)
    target = g.view(root, WIDTH // 2, TOKENS, nb=(4, 4 * WIDTH), offset=8) if part else root
    g.into("CPY", written, target, target=target)
    head(g, g.op("SQR", g.view(root, WIDTH, TOKENS)))
    replay = replay_of(g, known)
    run, tap, seed = replay.forward(g.inputs), Listener(), normal(TOKENS, VOCAB, seed=4)
    replay.backward(run, 0, lambda _: [{replay.result: seed.reshape(-1)}], tap)
    first, second = (x @ w[name].T for name in ("w", "v"))
    where = slice(2, 2 + WIDTH // 2) if part else slice(None)
    memory = first.clone()
    memory[:, where] = second
    assert close(run.logits, memory.square() @ out.T, 1e-4)
    gradient = 2 * memory * (seed @ out)
    assert close(tap.gradients[Site("v", written)][0], gradient[:, where], 1e-4)
    beside = gradient.clone()
    beside[:, where] = 0
    if part:
        assert close(tap.gradients[Site("w", root)][0], beside, 1e-4)
    else:
        assert Site("w", root) not in tap.gradients


def test_network_keeps_no_gradients_between_draws() -> None:
    """The second of two equal draws is the first again."""
    known, _ = weights(None, **NET)
    g, at = network()
    replay = replay_of(g, known)
    seed = {replay.result: normal(TOKENS, VOCAB, seed=20).reshape(-1)}
    tap = Listener()
    replay.backward(replay.forward(g.inputs), 0, lambda _: [seed, dict(seed)], tap)
    first, second = tap.gradients[Site("up.weight", at["up"])]
    assert torch.equal(first, second)
    assert first.any()
