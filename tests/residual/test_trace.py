"""The residual map on graphs built by hand, one for each way in which architectures arrange their branches."""

from __future__ import annotations

import pytest

from qres.errors import UnsupportedError
from qres.native.graph import LEAF, Graph, Node
from qres.residual.map import ResidualMap
from qres.residual.trace import trace

N_EMBD, N_FF, N_VOCAB, N_TOKENS = 8, 12, 20, 4

Shape = tuple[int, int, int, int]


class Builder:
    """Writes a graph as llama.cpp would compute it: leaves where they are first read, everything else in order."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.executed: list[int] = []
        self.weights: dict[str, int] = {}

    # -- nodes

    def _append(self, op: str, name: str, ne: tuple[int, ...], sources: tuple[int, ...], ordinal: int) -> int:
        shape: Shape = (*ne, *(1,) * (4 - len(ne)))  # type: ignore[assignment]
        self.nodes.append(Node(len(self.nodes), ordinal, op, name, shape, 0, sources))
        return len(self.nodes) - 1

    def leaf(self, name: str, *ne: int) -> int:
        """An input or a cache."""
        return self._append("NONE", name, ne, (), LEAF)

    def weight(self, name: str, *ne: int) -> int:
        """A tensor of the file; the same one again for the same name."""
        if name not in self.weights:
            self.weights[name] = self.leaf(name, *ne)
        return self.weights[name]

    def op(self, op: str, *sources: int, ne: tuple[int, ...] | None = None, name: str = "") -> int:
        """A computed node, of its first source's shape unless said otherwise."""
        index = self._append(op, name, ne or self.nodes[sources[0]].ne, sources, len(self.executed))
        self.executed.append(index)
        return index

    def ordinal(self, index: int) -> int:
        return self.nodes[index].ordinal

    # -- the usual pieces

    def matmul(self, weight: str, x: int, rows: int = N_EMBD) -> int:
        w = self.weight(weight, self.nodes[x].ne[0], rows)
        return self.op("MUL_MAT", w, x, ne=(rows, N_TOKENS))

    def norm(self, x: int, weight: str) -> int:
        return self.op("MUL", self.op("RMS_NORM", x), self.weight(weight, N_EMBD))

    def add(self, a: int, b: int) -> int:
        return self.op("ADD", a, b)

    def embedding(self) -> int:
        table = self.weight("token_embd.weight", N_EMBD, N_VOCAB)
        return self.op("GET_ROWS", table, self.leaf("inp_tokens", N_TOKENS), ne=(N_EMBD, N_TOKENS), name="inp_embd")

    def attention(self, layer: int, x: int) -> int:
        """Keys and values reach the output through a cache alone, as in llama.cpp."""
        cached = []
        q = self.matmul(f"blk.{layer}.attn_q.weight", x)
        for which in ("k", "v"):
            new = self.matmul(f"blk.{layer}.attn_{which}.weight", x)
            cache = self.leaf(f"cache_{which}_l{layer}", N_EMBD, 64)
            self.op("SET_ROWS", new, self.leaf("rows", N_TOKENS), cache, ne=(N_EMBD, 64))
            cached.append(self.op("VIEW", cache, ne=(N_EMBD, 32)))
        mixed = self.op("FLASH_ATTN_EXT", q, *cached)
        return self.matmul(f"blk.{layer}.attn_output.weight", mixed)

    def ffn(self, layer: int, x: int) -> int:
        gate = self.matmul(f"blk.{layer}.ffn_gate.weight", x, N_FF)
        up = self.matmul(f"blk.{layer}.ffn_up.weight", x, N_FF)
        return self.matmul(f"blk.{layer}.ffn_down.weight", self.op("GLU", gate, up))

    def moe(self, layer: int, x: int, used: int = 2) -> int:
        """Expert outputs are added up by ADDs of the stream's shape."""
        router = self.matmul(f"blk.{layer}.ffn_gate_inp.weight", x, 4)
        ids = self.op("ARGSORT", self.op("SOFT_MAX", router))
        w_up = self.weight(f"blk.{layer}.ffn_up_exps.weight", N_EMBD, N_FF, 4)
        w_down = self.weight(f"blk.{layer}.ffn_down_exps.weight", N_FF, N_EMBD, 4)
        hidden = self.op("MUL_MAT_ID", w_up, x, ids, ne=(N_FF, used, N_TOKENS))
        out = self.op("MUL_MAT_ID", w_down, hidden, ids, ne=(N_EMBD, used, N_TOKENS))
        out = self.op("MUL", out, router)
        first, *rest = (self.op("VIEW", out, ne=(N_EMBD, N_TOKENS)) for _ in range(used))
        for one in rest:
            first = self.add(first, one)
        return first

    def head(self, x: int, weight: str = "output.weight") -> int:
        return self.matmul(weight, self.norm(x, "output_norm.weight"), N_VOCAB)

    def trace(self) -> ResidualMap:
        graph = Graph(tuple(self.nodes), tuple(self.executed))
        return trace(graph, frozenset(self.weights), N_EMBD, N_VOCAB, N_TOKENS)


def shape(found: ResidualMap) -> list[tuple[str, int, bool]]:
    return [(b.unit, b.reads, b.closes) for b in found.branches]


def attention_weights(layer: int, *more: str) -> tuple[str, ...]:
    return tuple(sorted(f"blk.{layer}.{name}.weight" for name in ("attn_k", "attn_output", "attn_q", "attn_v", *more)))


SEQUENTIAL = [("0.attention", 0, True), ("0.ffn", 1, True), ("1.attention", 2, True), ("1.ffn", 3, True)]


# ---------------------------------------------------------------- sequential


def sequential(g: Builder, x: int, layers: int = 2) -> tuple[int, list[int], list[int]]:
    """Pre-norm layers; the last stream tensor, the branches and the adds."""
    branches, adds = [], []
    for layer in range(layers):
        for kind in ("attn", "ffn"):
            normed = g.norm(x, f"blk.{layer}.{kind}_norm.weight")
            branches.append(g.attention(layer, normed) if kind == "attn" else g.ffn(layer, normed))
            x = g.add(branches[-1], x) if layer else g.add(x, branches[-1])  # either order
            adds.append(x)
    return x, branches, adds


def test_sequential_pre_norm() -> None:
    g = Builder()
    x, branches, adds = sequential(g, embedding := g.embedding())
    g.head(x)
    found = g.trace()
    assert shape(found) == SEQUENTIAL
    assert [b.index for b in found.branches] == [1, 2, 3, 4]
    assert [(b.layer, b.kind) for b in found.branches] == [(0, "attention"), (0, "ffn"), (1, "attention"), (1, "ffn")]
    assert [b.node for b in found.branches] == [g.ordinal(i) for i in branches]
    assert [b.add for b in found.branches] == [g.ordinal(i) for i in adds]
    assert [b.stream_in for b in found.branches] == [None] * 4
    assert found.embedding == g.ordinal(embedding)
    assert found.embedding_weights == ("token_embd.weight",)
    assert found.head_weights == ("output.weight", "output_norm.weight")
    assert found.norm_placement == "pre"


def test_weights_behind_a_branch_are_its_own() -> None:
    g = Builder()
    x, *_ = sequential(g, g.embedding())
    g.head(x)
    attention, ffn, second, _ = g.trace().branches
    assert attention.weights == attention_weights(0, "attn_norm")  # k and v through the cache
    assert second.weights == attention_weights(1, "attn_norm")
    assert ffn.weights == tuple(
        sorted(f"blk.0.{name}.weight" for name in ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"))
    )


def test_checks_hold_operation_and_name_of_every_node_used() -> None:
    g = Builder()
    x, branches, adds = sequential(g, embedding := g.embedding(), layers=1)
    g.head(x)
    found = g.trace()
    assert list(found.checks) == sorted(g.ordinal(i) for i in (embedding, *branches, *adds))
    assert found.checks[g.ordinal(embedding)] == ("GET_ROWS", "inp_embd")
    assert found.checks[g.ordinal(adds[0])] == ("ADD", "")


def test_names_of_nodes_do_not_matter() -> None:
    g = Builder()
    x, *_ = sequential(g, g.embedding())
    g.head(x)
    expected = shape(g.trace())
    g.nodes = [
        node if node.is_leaf else Node(node.index, node.ordinal, node.op, "l_out-0", node.ne, 0, node.sources)
        for node in g.nodes
    ]
    assert shape(g.trace()) == expected


def test_tied_head() -> None:
    g = Builder()
    x, *_ = sequential(g, g.embedding())
    g.head(x, "token_embd.weight")
    assert g.trace().head_weights == ("output_norm.weight", "token_embd.weight")


def test_block_that_runs_twice_gets_running_numbers() -> None:
    g = Builder()
    x, *_ = sequential(g, g.embedding(), layers=1)
    x, *_ = sequential(g, x, layers=1)
    g.head(x)
    assert [b.unit for b in g.trace().branches] == ["0.attention", "0.ffn", "0.attention.2", "0.ffn.2"]


# ---------------------------------------------------------------- where norms sit


def test_sandwich_norms() -> None:
    g = Builder()
    x = g.embedding()
    normed = []
    for layer in range(2):
        out = g.attention(layer, g.norm(x, f"blk.{layer}.attn_norm.weight"))
        normed.append(g.norm(out, f"blk.{layer}.post_attention_norm.weight"))
        x = g.add(normed[-1], x)
        out = g.ffn(layer, g.norm(x, f"blk.{layer}.ffn_norm.weight"))
        normed.append(g.norm(out, f"blk.{layer}.post_ffw_norm.weight"))
        x = g.add(normed[-1], x)
    g.head(x)
    found = g.trace()
    assert shape(found) == SEQUENTIAL
    assert found.norm_placement == "sandwich"
    assert [b.node for b in found.branches] == [g.ordinal(i) for i in normed]  # after the post-norm, as it is added
    assert found.branches[0].weights == attention_weights(0, "attn_norm", "post_attention_norm")


def test_post_branch_norms() -> None:
    g = Builder()
    x = g.embedding()
    for layer in range(2):
        x = g.add(x, g.norm(g.attention(layer, x), f"blk.{layer}.post_attention_norm.weight"))
        x = g.add(x, g.norm(g.ffn(layer, x), f"blk.{layer}.post_ffw_norm.weight"))
    g.head(x)
    found = g.trace()
    assert shape(found) == SEQUENTIAL
    assert found.norm_placement == "post"
    assert [(b.norm_before, b.norm_after) for b in found.branches] == [(False, True)] * 4


def test_norm_before_the_residual_scale_is_a_post_norm() -> None:
    g = Builder()
    x = g.embedding()
    for layer in range(2):
        x = g.add(x, g.op("SCALE", g.norm(g.attention(layer, x), f"blk.{layer}.post_attention_norm.weight")))
        x = g.add(x, g.op("SCALE", g.norm(g.ffn(layer, x), f"blk.{layer}.post_ffw_norm.weight")))
    g.head(x)
    found = g.trace()
    assert shape(found) == SEQUENTIAL
    assert found.norm_placement == "post"


def test_norms_on_the_stream_itself() -> None:
    g = Builder()
    x = g.embedding()
    entered = []
    for layer in range(2):
        x = g.norm(g.add(g.attention(layer, x), x), f"blk.{layer}.attn_output_norm.weight")
        entered.append(x)
        x = g.norm(g.add(g.ffn(layer, x), x), f"blk.{layer}.layer_output_norm.weight")
        entered.append(x)
    g.head(x)
    found = g.trace()
    assert shape(found) == SEQUENTIAL
    assert found.norm_placement == "post-add"
    # What an add adds to is the normed stream, not the point before.
    assert [b.stream_in for b in found.branches] == [None, *(g.ordinal(i) for i in entered[:-1])]


# ---------------------------------------------------------------- parallel branches


@pytest.mark.parametrize("ffn_first", [True, False])
def test_parallel_with_inner_sum(ffn_first: bool) -> None:
    g = Builder()
    x = g.embedding()
    parts, adds = [], []
    for layer in range(2):
        normed = g.norm(x, f"blk.{layer}.attn_norm.weight")
        attention, ffn = g.attention(layer, normed), g.ffn(layer, normed)
        inner = g.add(ffn, attention) if ffn_first else g.add(attention, ffn)
        x = g.add(inner, x)
        parts += [attention, ffn]
        adds += [x, x]
    g.head(x)
    found = g.trace()
    assert shape(found) == [
        ("0.attention", 0, False),
        ("0.ffn", 0, True),
        ("1.attention", 2, False),
        ("1.ffn", 2, True),
    ]
    assert [b.node for b in found.branches] == [g.ordinal(i) for i in parts]  # the summands, not their sum
    assert [b.add for b in found.branches] == [g.ordinal(i) for i in adds]
    assert found.norm_placement == "pre, parallel"
    assert found.branches[0].weights == attention_weights(0, "attn_norm")


def test_parallel_with_two_adds() -> None:
    g = Builder()
    x = g.embedding()
    adds = []
    for layer in range(2):
        normed = g.norm(x, f"blk.{layer}.attn_norm.weight")
        attention, ffn = g.attention(layer, normed), g.ffn(layer, normed)
        for branch in (ffn, attention):
            x = g.add(branch, x)
            adds.append(x)
    g.head(x)
    found = g.trace()
    assert shape(found) == [("0.ffn", 0, True), ("0.attention", 0, True), ("1.ffn", 2, True), ("1.attention", 2, True)]
    assert [b.add for b in found.branches] == [g.ordinal(i) for i in adds]
    assert found.norm_placement == "pre, parallel"


def test_attention_and_state_space_summed_before_the_add() -> None:
    g = Builder()
    x = g.embedding()
    normed = g.norm(x, "blk.0.attn_norm.weight")
    state = g.matmul("blk.0.ssm_out.weight", g.op("SSM_SCAN", g.matmul("blk.0.ssm_in.weight", normed)))
    x = g.add(g.add(state, g.attention(0, normed)), x)
    x = g.add(g.ffn(0, g.norm(x, "blk.0.ffn_norm.weight")), x)
    g.head(x)
    found = g.trace()
    assert shape(found) == [("0.ssm", 0, False), ("0.attention", 0, True), ("0.ffn", 2, True)]


def test_three_branches_summed_before_the_add() -> None:
    g = Builder()
    x = g.embedding()
    normed = g.norm(x, "blk.0.attn_norm.weight")
    state = g.matmul("blk.0.ssm_out.weight", g.op("SSM_SCAN", g.matmul("blk.0.ssm_in.weight", normed)))
    attention, ffn = g.attention(0, normed), g.ffn(0, normed)
    x = g.add(g.add(ffn, g.add(attention, state)), x)
    g.head(x)
    found = g.trace()
    assert shape(found) == [("0.attention", 0, False), ("0.ssm", 0, False), ("0.ffn", 0, True)]
    assert [b.node for b in found.branches] == [g.ordinal(i) for i in (attention, state, ffn)]


# ---------------------------------------------------------------- what lies between


def test_scaled_residual_is_measured_after_its_scale() -> None:
    g = Builder()
    x = g.embedding()
    scaled = []
    for layer in range(2):
        scaled.append(g.op("SCALE", g.attention(layer, g.norm(x, f"blk.{layer}.attn_norm.weight"))))
        x = g.add(scaled[-1], x)
        scaled.append(g.op("SCALE", g.ffn(layer, g.norm(x, f"blk.{layer}.ffn_norm.weight"))))
        x = g.add(scaled[-1], x)
    g.head(x)
    found = g.trace()
    assert shape(found) == SEQUENTIAL
    assert [b.node for b in found.branches] == [g.ordinal(i) for i in scaled]
    assert [b.stream_in for b in found.branches] == [None] * 4
    assert found.norm_placement == "pre"


def test_scaled_stream_is_what_the_next_add_adds_to() -> None:
    g = Builder()
    x = g.embedding()
    x, *_ = sequential(g, x, layers=1)
    x = scaled = g.op("MUL", x, g.weight("blk.0.layer_output_scale.weight", 1))
    x = g.add(x, g.attention(1, g.norm(x, "blk.1.attn_norm.weight")))
    x = g.add(x, g.ffn(1, g.norm(x, "blk.1.ffn_norm.weight")))
    g.head(x)
    found = g.trace()
    assert shape(found) == SEQUENTIAL
    assert [b.stream_in for b in found.branches] == [None, None, g.ordinal(scaled), None]
    assert found.norm_placement == "pre"  # a scalar for the layer, not a norm on the stream


def test_scaled_embedding_is_stream_point_0() -> None:
    g = Builder()
    x = scaled = g.op("SCALE", g.embedding())
    x, *_ = sequential(g, x)
    g.head(x)
    found = g.trace()
    assert shape(found) == SEQUENTIAL
    assert found.embedding == g.ordinal(scaled)
    assert found.branches[0].stream_in is None


def test_normed_embedding_is_stream_point_0() -> None:
    g = Builder()
    x = g.norm(g.embedding(), "token_embd_norm.weight")
    x = start = g.op("ADD", x, g.weight("token_embd_norm.bias", N_EMBD))
    x, *_ = sequential(g, x)
    g.head(x)
    found = g.trace()
    assert shape(found) == SEQUENTIAL
    assert found.embedding == g.ordinal(start)
    assert found.embedding_weights == ("token_embd.weight", "token_embd_norm.bias", "token_embd_norm.weight")


def test_rows_selected_in_the_last_layer() -> None:
    g = Builder()
    x, *_ = sequential(g, g.embedding(), layers=1)
    out = g.attention(1, g.norm(x, "blk.1.attn_norm.weight"))
    ids = g.leaf("inp_out_ids", N_TOKENS)
    selected = g.op("GET_ROWS", out, ids)
    x = g.add(selected, g.op("GET_ROWS", x, ids))
    x = g.add(g.ffn(1, g.norm(x, "blk.1.ffn_norm.weight")), x)
    g.head(x)
    found = g.trace()
    assert shape(found) == SEQUENTIAL
    assert found.branches[2].node == g.ordinal(selected)
    assert [b.stream_in for b in found.branches] == [None] * 4  # all rows are selected: the same values


def test_biased_branch_is_measured_with_its_bias() -> None:
    g = Builder()
    x = g.embedding()
    out = g.attention(0, g.norm(x, "blk.0.attn_norm.weight"))
    biased = g.op("ADD", out, g.weight("blk.0.attn_output.bias", N_EMBD))
    x = g.add(biased, x)
    x = g.add(g.ffn(0, g.norm(x, "blk.0.ffn_norm.weight")), x)
    g.head(x)
    found = g.trace()
    assert shape(found) == SEQUENTIAL[:2]
    assert found.branches[0].node == g.ordinal(biased)
    assert "blk.0.attn_output.bias" in found.branches[0].weights


# ---------------------------------------------------------------- false friends


def test_position_embeddings_are_no_branch() -> None:
    g = Builder()
    table = g.weight("position_embd.weight", N_EMBD, 64)
    positions = g.op("GET_ROWS", table, g.leaf("inp_pos", N_TOKENS), ne=(N_EMBD, N_TOKENS))
    x = summed = g.add(g.embedding(), positions)
    x, *_ = sequential(g, x)
    g.head(x)
    found = g.trace()
    assert shape(found) == SEQUENTIAL
    assert found.embedding == g.ordinal(summed)
    assert found.embedding_weights == ("position_embd.weight", "token_embd.weight")


def test_embedding_added_again_is_no_branch() -> None:
    g = Builder()
    start = g.embedding()
    x, *_ = sequential(g, start, layers=1)
    x = again = g.add(x, g.op("SCALE", start))
    x = g.add(x, g.attention(1, g.norm(x, "blk.1.attn_norm.weight")))
    x = g.add(x, g.ffn(1, g.norm(x, "blk.1.ffn_norm.weight")))
    g.head(x)
    found = g.trace()
    assert shape(found) == SEQUENTIAL
    assert [b.stream_in for b in found.branches] == [None, None, g.ordinal(again), None]


@pytest.mark.parametrize("used", [1, 2, 4])
def test_expert_sums_are_no_residual_adds(used: int) -> None:
    g = Builder()
    x = g.embedding()
    outs = []
    for layer in range(2):
        x = g.add(g.attention(layer, g.norm(x, f"blk.{layer}.attn_norm.weight")), x)
        outs.append(g.moe(layer, g.norm(x, f"blk.{layer}.ffn_norm.weight"), used))
        x = g.add(outs[-1], x)
    g.head(x)
    found = g.trace()
    assert shape(found) == [("0.attention", 0, True), ("0.moe", 1, True), ("1.attention", 2, True), ("1.moe", 3, True)]
    assert [b.node for b in found.branches[1::2]] == [g.ordinal(i) for i in outs]
    assert found.branches[1].weights == tuple(
        sorted(f"blk.0.{name}.weight" for name in ("ffn_norm", "ffn_gate_inp", "ffn_up_exps", "ffn_down_exps"))
    )


def test_experts_and_shared_expert_are_one_branch() -> None:
    g = Builder()
    x = g.embedding()
    x = g.add(g.attention(0, g.norm(x, "blk.0.attn_norm.weight")), x)
    normed = g.norm(x, "blk.0.ffn_norm.weight")
    shared = g.matmul("blk.0.ffn_down_shexp.weight", g.matmul("blk.0.ffn_up_shexp.weight", normed, N_FF))
    summed = g.add(g.moe(0, normed), shared)
    g.head(g.add(summed, x))
    found = g.trace()
    assert shape(found) == [("0.attention", 0, True), ("0.moe", 1, True)]
    assert found.branches[1].node == g.ordinal(summed)
    assert "blk.0.ffn_down_shexp.weight" in found.branches[1].weights


def test_graph_after_the_logits_is_ignored() -> None:
    g = Builder()
    x, *_ = sequential(g, g.embedding())
    g.head(x)
    g.add(g.ffn(2, x), x)  # a residual add that no logits read
    assert shape(g.trace()) == SEQUENTIAL


# ---------------------------------------------------------------- no stream


def test_model_without_residual_adds_is_unsupported() -> None:
    g = Builder()
    x = g.embedding()
    for layer in range(2):
        x = g.ffn(layer, g.norm(x, f"blk.{layer}.ffn_norm.weight"))
    g.head(x)
    with pytest.raises(UnsupportedError, match="no plain residual stream"):
        g.trace()


def test_model_without_layers_is_unsupported() -> None:
    g = Builder()
    g.head(g.embedding())
    with pytest.raises(UnsupportedError, match="no plain residual stream"):
        g.trace()


def test_model_without_logits_is_unsupported() -> None:
    g = Builder()
    sequential(g, g.embedding())
    with pytest.raises(UnsupportedError, match="no plain residual stream"):
        g.trace()


def test_model_with_several_streams_is_unsupported() -> None:
    g = Builder()
    x = g.op("REPEAT", g.embedding(), ne=(N_EMBD, 2, N_TOKENS))  # hyper-connections: two streams side by side
    for layer in range(2):
        mixed = g.matmul(f"blk.{layer}.hc_in.weight", g.op("RMS_NORM", g.op("SUM_ROWS", x, ne=(N_EMBD, N_TOKENS))))
        x = g.op("ADD", x, g.op("REPEAT", g.ffn(layer, mixed), ne=(N_EMBD, 2, N_TOKENS)))
    g.head(g.op("SUM_ROWS", x, ne=(N_EMBD, N_TOKENS)))
    with pytest.raises(UnsupportedError, match="no plain residual stream"):
        g.trace()
