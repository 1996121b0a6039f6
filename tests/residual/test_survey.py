"""What a survey says of a decode, against the same model computed in NumPy and against damage planted on purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from qres.gguf import model_file
from qres.native.session import Session, SessionOptions
from qres.residual.map import ResidualMap
from qres.residual.survey import Survey, survey
from qres.residual.trace import trace
from tests import archs, tiny

pytestmark = pytest.mark.model

N_TOKENS = 48
"""Unlike the heads' width and their number: a dimension of this length is the tokens'."""
TOKENS = [(7 * i * i + 3 * i + 1) % 128 for i in range(N_TOKENS)]
SPECIAL = 200
"""A token that is not among them."""
OPTIONS = SessionOptions(n_ctx=64, n_threads=1)
STEPWISE = replace(OPTIONS, flash_attention=False)
N_LAYER = 2
Doubles = npt.NDArray[np.float64]


def weights_of(path: Path) -> frozenset[str]:
    return frozenset(tensor.name for tensor in model_file.read(path).tensors)


def mapped(session: Session, tokens: Sequence[int]) -> ResidualMap:
    return trace(session.record(tokens), weights_of(session.path), session.n_embd, session.n_vocab, len(tokens))


def look(
    path: Path, tokens: Sequence[int] = TOKENS, options: SessionOptions = OPTIONS, *, mapping: bool = True
) -> Survey:
    with Session(path, options) as session:
        rmap = mapped(session, tokens) if mapping else None
        return survey(session, rmap, tuple(tokens), weights_of(path), "Q8_0", "chunk 3 of it")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_llama(tmp_path_factory.mktemp("activations") / "tiny.gguf", n_layer=N_LAYER)


def planted(
    path: Path, name: str, value: float = np.nan, rows: slice | int = 5, change: tiny.Change = tiny.keep
) -> Path:
    """The model with a value in one tensor, F16 or F32 as it is there."""

    def plant(tensor: str, values: tiny.Floats) -> tuple[npt.NDArray[np.generic], gguf.GGMLQuantizationType | None]:
        data, kind = change(tensor, values)
        if tensor == name:
            data = data.copy()
            data[rows] = value  # of a matrix a whole row
        return data, kind

    return tiny.write_llama(path, n_layer=N_LAYER, change=plant)


# ---------------------------------------------------------------- how large the inputs are


def inputs_in_numpy(tokens: Sequence[int]) -> dict[str, float]:
    """Largest magnitude that each matrix of the tiny llama is multiplied with, in double precision."""
    stored: dict[str, Doubles] = {}
    for name, shape, scale in tiny._tensors(N_LAYER, 258):
        values = (
            np.ones(shape) if len(shape) == 1 else np.random.default_rng([0, *name.encode()]).normal(0, scale, shape)
        )
        stored[name.removesuffix(".weight")] = values.astype(np.float32).astype(np.float16).astype(np.float64)
    found: dict[str, float] = {}

    def times(name: str, x: Doubles) -> Doubles:
        found[f"{name}.weight"] = float(np.abs(x).max())
        product: Doubles = x @ stored[name].T
        return product

    x = stored["token_embd"][list(tokens)]
    for i in range(N_LAYER):
        normed = rms_norm(x)
        q, k, v = (split(times(f"blk.{i}.attn_{part}", normed)) for part in "qkv")
        x = x + times(f"blk.{i}.attn_output", attention(rope(q), rope(k), v))
        normed = rms_norm(x)
        gate, up = times(f"blk.{i}.ffn_gate", normed), times(f"blk.{i}.ffn_up", normed)
        x = x + times(f"blk.{i}.ffn_down", gate / (1 + np.exp(-gate)) * up)
    times("output", rms_norm(x))
    return found


def rms_norm(x: Doubles) -> Doubles:
    """All norm weights are 1."""
    return np.asarray(x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5), dtype=np.float64)


def split(x: Doubles) -> Doubles:
    """[head, token, width of a head]."""
    return np.asarray(x.reshape(len(x), tiny.N_HEAD, -1).transpose(1, 0, 2), dtype=np.float64)


def rope(x: Doubles) -> Doubles:
    """Neighbours turned by an angle that grows with the position, as llama's GGUFs are laid out for."""
    width = x.shape[2]
    angle = np.arange(x.shape[1])[:, None] * 10_000.0 ** (-np.arange(0, width, 2) / width)
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
    return np.asarray(np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape), dtype=np.float64)


def attention(q: Doubles, k: Doubles, v: Doubles) -> Doubles:
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[2])
    scores[:, np.triu(np.ones(scores.shape[1:], dtype=bool), 1)] = -np.inf
    share = np.exp(scores - scores.max(axis=2, keepdims=True))
    mixed: Doubles = (share / share.sum(axis=2, keepdims=True)) @ v
    return np.asarray(mixed.transpose(1, 0, 2).reshape(mixed.shape[1], -1), dtype=np.float64)


@pytest.mark.parametrize("options", [OPTIONS, STEPWISE], ids=["flash attention", "step by step"])
def test_survey_inputs_are_those_of_the_model_in_numpy(model: Path, options: SessionOptions) -> None:
    """Every matrix that is multiplied with, and no other tensor; llama.cpp's F16 inputs cost the last digits."""
    found, expected = look(model, options=options).inputs, inputs_in_numpy(TOKENS)
    assert set(found) == set(expected)
    assert len(found) == 7 * N_LAYER + 1
    for name, top in expected.items():
        assert found[name] == pytest.approx(top, rel=3e-3), name


def test_survey_inputs_are_of_the_tokens_given(model: Path) -> None:
    """The agreement above is no accident of figures that are alike anyway."""
    others = [(5 * i + 2) % 128 for i in range(N_TOKENS)]
    name = "blk.1.ffn_down.weight"
    assert inputs_in_numpy(others)[name] != pytest.approx(inputs_in_numpy(TOKENS)[name], rel=0.02)
    assert look(model, others).inputs[name] == pytest.approx(inputs_in_numpy(others)[name], rel=3e-3)


def test_survey_input_beyond_f16_is_told_in_full(tmp_path: Path) -> None:
    """With F32 weights nothing overflows: the figure is the true one, whatever 16 bit could hold."""

    def huge(name: str, values: tiny.Floats) -> tuple[npt.NDArray[np.generic], None]:
        return values * np.float32(300 if name in ("blk.1.ffn_gate.weight", "blk.1.ffn_up.weight") else 1), None

    plain = look(tiny.write_llama(tmp_path / "f32.gguf", change=lambda _name, values: (values, None)))
    found = look(tiny.write_llama(tmp_path / "huge.gguf", change=huge))
    assert found.non_finite is None
    name = "blk.1.ffn_down.weight"
    assert found.inputs[name] > 65_504
    # gate and up are each 300 times as large, and silu is nearly linear there.
    assert found.inputs[name] > 300 * 300 * plain.inputs[name] / 2
    assert found.inputs["blk.1.ffn_up.weight"] == pytest.approx(plain.inputs["blk.1.ffn_up.weight"], rel=1e-6)


# ---------------------------------------------------------------- where it breaks

KINDS = [
    ("attn_norm", "attention", "MUL"),
    ("attn_q", "attention", "MUL_MAT"),
    ("attn_k", "attention", "MUL_MAT"),
    ("attn_v", "attention", "MUL_MAT"),
    ("attn_output", "attention", "MUL_MAT"),
    ("ffn_norm", "ffn", "MUL"),
    ("ffn_gate", "ffn", "MUL_MAT"),
    ("ffn_up", "ffn", "MUL_MAT"),
    ("ffn_down", "ffn", "MUL_MAT"),
]


@pytest.mark.parametrize("layer", range(N_LAYER))
@pytest.mark.parametrize(("kind", "branch", "operation"), KINDS)
def test_survey_names_the_tensor_that_is_broken(
    model: Path, tmp_path: Path, layer: int, kind: str, branch: str, operation: str
) -> None:
    name = f"blk.{layer}.{kind}.weight"
    found = look(planted(tmp_path / "bad.gguf", name)).non_finite
    assert found is not None
    assert (found.model, found.where) == ("Q8_0", "chunk 3 of it")
    assert (found.unit, found.layer) == (f"{layer}.{branch}", layer)
    assert (found.operation, found.tensor, found.token) == (operation, name, 0)
    if operation == "MUL_MAT":  # its input was sound: that of the sound model
        assert found.input_absmax == pytest.approx(look(model).inputs[name], rel=1e-6)
    else:
        assert found.input_absmax is None
    assert found.place.startswith(f"in {layer}.{branch} ({operation} with {name}, from token 0")


@pytest.mark.parametrize(("name", "operation"), [("output_norm.weight", "MUL"), ("output.weight", "MUL_MAT")])
def test_survey_names_the_head(tmp_path: Path, name: str, operation: str) -> None:
    found = look(planted(tmp_path / "bad.gguf", name)).non_finite
    assert found is not None
    assert (found.unit, found.operation, found.tensor) == ("head", operation, name)


def test_survey_gives_the_head_no_layer(tmp_path: Path) -> None:
    found = look(planted(tmp_path / "bad.gguf", "output.weight")).non_finite
    assert found is not None
    assert found.layer is None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_survey_takes_every_value_that_is_not_finite(tmp_path: Path, value: float) -> None:
    name = "blk.1.ffn_down.weight"
    found = look(planted(tmp_path / "bad.gguf", name, value)).non_finite
    assert found is not None
    assert (found.unit, found.tensor) == ("1.ffn", name)


@pytest.mark.parametrize("options", [OPTIONS, STEPWISE], ids=["flash attention", "step by step"])
@pytest.mark.parametrize("at", [(0,), (5, 17, 40), (46, 47), (N_TOKENS - 1,), (1, 2, 3)])
def test_survey_finds_the_first_token(tmp_path: Path, at: tuple[int, ...], options: SessionOptions) -> None:
    """A token whose embedding is NaN breaks nothing before it is used."""
    tokens = [SPECIAL if i in at else token for i, token in enumerate(TOKENS)]
    path = planted(tmp_path / "bad.gguf", "token_embd.weight", rows=SPECIAL)
    found = look(path, tokens, options).non_finite
    assert found is not None
    assert found.token == at[0]
    assert (found.unit, found.layer, found.operation) == ("embedding", None, "GET_ROWS")
    assert found.tensor == "token_embd.weight"
    assert found.input_absmax is None
    assert look(path, TOKENS, options).non_finite is None  # a row that is not used


def only_for(token: int, factor: float) -> Callable[[str, tiny.Floats], tuple[npt.NDArray[np.generic], None]]:
    """Embeddings of one channel per token, and a last FFN that is `factor` times as large for one of them."""

    def change(name: str, values: tiny.Floats) -> tuple[npt.NDArray[np.generic], None]:
        if name == "token_embd.weight":
            values = np.eye(len(values), tiny.N_EMBD, dtype=np.float32) * 16
        if name.endswith(("attn_output.weight", "ffn_down.weight")):
            values = values * np.float32(0.1)
        if name in ("blk.1.ffn_gate.weight", "blk.1.ffn_up.weight"):
            values = values.copy()
            values[:, token] *= factor
        return tiny.keep(name, values)[0], None

    return change


@pytest.mark.parametrize("position", [0, 20, N_TOKENS - 1])
def test_survey_finds_the_token_that_overflows(tmp_path: Path, position: int) -> None:
    """All weights are finite; the matmul turns its input into F16, and there it ends."""
    tokens = [SPECIAL if i == position else token for i, token in enumerate(TOKENS)]
    path = tiny.write_llama(tmp_path / "over.gguf", change=only_for(SPECIAL, 400))
    found = look(path, tokens).non_finite
    assert found is not None
    assert (found.unit, found.layer, found.tensor) == ("1.ffn", 1, "blk.1.ffn_down.weight")
    assert found.token == position
    assert found.input_absmax is not None
    assert found.input_absmax > 65_504
    with Session(path, OPTIONS) as session:
        rows = ~np.isfinite(session.decode(tokens)).all(axis=1)
    assert np.flatnonzero(rows).tolist() == [position]  # the record agrees with the logits


def test_survey_takes_minus_infinity_from_a_matmul_for_broken(tmp_path: Path) -> None:
    """A mask is minus infinity on purpose, a product never: one logit of every token, and nothing else."""

    def change(name: str, values: tiny.Floats) -> tuple[npt.NDArray[np.generic], None]:
        data, kind = only_for(SPECIAL, 1)(name, values)
        if name == "output.weight":
            data = data.copy()
            data[3, SPECIAL] = -np.inf  # what meets the token's own channel, which is positive
        return data, kind

    path = tiny.write_llama(tmp_path / "bad.gguf", n_layer=N_LAYER, change=change)
    tokens = [SPECIAL] * 8
    with Session(path, OPTIONS) as session:
        logits = session.decode(tokens)
        assert np.isneginf(logits[:, 3]).all()
        assert np.isfinite(np.delete(logits, 3, axis=1)).all()
    found = look(path, tokens).non_finite
    assert found is not None
    assert (found.unit, found.operation, found.tensor) == ("head", "MUL_MAT", "output.weight")


def full_cache(path: Path) -> Path:
    """Keys of one token too large for the 16-bit cache, all weights as F32: nothing else overflows."""

    def change(name: str, values: tiny.Floats) -> tuple[npt.NDArray[np.generic], None]:
        if name == "token_embd.weight":
            values = np.eye(len(values), tiny.N_EMBD, dtype=np.float32) * 16
        if name == "blk.1.attn_k.weight":
            values = values.copy()
            values[:, SPECIAL] *= 1e5
        return values, None

    return tiny.write_llama(path, n_layer=N_LAYER, change=change)


def test_survey_finds_keys_that_the_cache_cannot_hold(tmp_path: Path) -> None:
    """No weight enters where it shows: attention reads the cache, not the matmul that filled it."""
    path = full_cache(tmp_path / "keys.gguf")
    found = look(path, [1, 2, 3, SPECIAL, 5, 6, 7, 8]).non_finite
    assert found is not None
    assert (found.unit, found.layer, found.operation) == ("1.attention", 1, "FLASH_ATTN_EXT")
    assert (found.tensor, found.token, found.input_absmax) == ("", 3, None)
    assert look(path, [1, 2, 3, 4, 5, 6, 7, 8]).non_finite is None


def test_survey_finds_the_token_among_as_many_heads(tmp_path: Path) -> None:
    """Attention gives [width, head, token]: of 4 tokens and 4 heads, the head is taken for the token."""
    found = look(full_cache(tmp_path / "keys.gguf"), [1, 2, SPECIAL, 4]).non_finite
    assert found is not None
    assert found.operation == "FLASH_ATTN_EXT"
    assert found.token == 2


def test_survey_without_a_map_names_the_layer(tmp_path: Path) -> None:
    found = look(planted(tmp_path / "bad.gguf", "blk.1.attn_v.weight"), mapping=False).non_finite
    assert found is not None
    assert (found.unit, found.layer) == ("", 1)
    assert found.place.startswith("in layer 1 (MUL_MAT with blk.1.attn_v.weight")
    path = planted(tmp_path / "embedding.gguf", "token_embd.weight", rows=TOKENS[0])
    found = look(path, mapping=False).non_finite
    assert found is not None
    assert (found.unit, found.layer) == ("", None)
    assert "before the first layer" in found.place


def test_survey_looks_at_finite_values_beside_broken_ones(model: Path, tmp_path: Path) -> None:
    """One channel of the FFN's inner values is lost; the others still tell how large its input is."""
    path = planted(tmp_path / "bad.gguf", "blk.1.ffn_up.weight")
    found, sound = look(path).inputs, look(model).inputs
    name = "blk.1.ffn_down.weight"
    assert 0 < found[name] <= sound[name] * (1 + 1e-6)
    assert found[name] > sound[name] / 2
    before = {name for name in sound if name.startswith("blk.0.")}
    assert {name: found[name] for name in before} == {name: sound[name] for name in before}


# ---------------------------------------------------------------- what is not broken


def test_survey_takes_no_mask_for_broken(model: Path) -> None:
    """Step by step, the scores of later tokens are minus infinity on purpose."""
    assert look(model, options=STEPWISE).non_finite is None
    assert look(model, TOKENS[:7], STEPWISE).non_finite is None


@pytest.mark.parametrize("options", [OPTIONS, STEPWISE], ids=["flash attention", "step by step"])
def test_survey_of_a_sound_model_finds_nothing(model: Path, options: SessionOptions) -> None:
    assert look(model, options=options).non_finite is None


WITH_INFINITIES = [
    "deepseek2-moe", "falcon-h1-dense", "gemma2-dense", "gpt-oss-moe", "jamba-dense", "kimi-linear-moe", "llama4-moe",
    "mamba-dense", "minimax-01-moe", "qwen3next-moe", "rwkv7-dense",
]  # fmt: skip
"""Routers that rule experts out, recurrent states, soft caps, attention sinks, windows."""


@pytest.mark.parametrize("options", [OPTIONS, STEPWISE], ids=["flash attention", "step by step"])
@pytest.mark.parametrize("name", WITH_INFINITIES)
def test_survey_of_other_architectures_finds_nothing(tmp_path: Path, name: str, options: SessionOptions) -> None:
    path = archs.make(name, tmp_path)
    tokens = TOKENS[:32]
    with Session(path, options) as session:
        before = session.decode(tokens).copy()
        assert np.isfinite(before).all()
        found = survey(session, None, tuple(tokens), weights_of(path), "reference", "chunk 1")
        assert np.array_equal(session.decode(tokens), before)
    assert found.non_finite is None
    assert found.inputs
    assert all(0 < top < 65_504 for top in found.inputs.values())


# ---------------------------------------------------------------- what it leaves behind


def test_survey_changes_no_logits(model: Path) -> None:
    with Session(model, OPTIONS) as session:
        before = session.decode(TOKENS).copy()
        rmap = mapped(session, TOKENS)
        first = survey(session, rmap, tuple(TOKENS), weights_of(model), "a", "b")
        assert np.array_equal(session.decode(TOKENS), before)
        assert survey(session, rmap, tuple(TOKENS), weights_of(model), "a", "b") == first
        assert np.array_equal(session.decode(TOKENS[:20]), before[:20])


def test_survey_of_a_broken_chunk_leaves_the_next_one_alone(tmp_path: Path) -> None:
    """NaN in the cache of one chunk does not reach another."""
    path = planted(tmp_path / "bad.gguf", "token_embd.weight", rows=SPECIAL)
    tokens = [SPECIAL if i == 30 else token for i, token in enumerate(TOKENS)]
    with Session(path, OPTIONS) as session:
        before = session.decode(TOKENS).copy()
        rmap = mapped(session, TOKENS)
        assert survey(session, rmap, tuple(tokens), weights_of(path), "a", "b").non_finite is not None
        assert np.array_equal(session.decode(TOKENS), before)
        assert survey(session, rmap, tuple(TOKENS), weights_of(path), "a", "b").non_finite is None
