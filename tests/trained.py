"""A small llama that was trained: weights that are no noise, in rows of whole K-quant blocks.

What recipes do can only be measured on a model that has something to lose: random weights have no sensitive layers, and
predict nothing. The text is one that every Python installation has, the documentation behind `help()`.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data import topics

import filelock
import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qres.files import whole_file
from qres.gguf import model_file
from qres.gguf.inventory import Inventory
from qres.quantize.original import Original, original
from qres.recipes.choices import Choices
from qres.records import as_json
from qres.records.result import Result
from qres.text import source
from qres.text.chunks import Chunk
from tests import tiny
from tests.pipeline.test_run import qres

N_EMBD, N_FF, N_HEAD, N_LAYER, N_CTX = 256, 768, 4, 4, 512
N_VOCAB = 258
"""Every byte under its own number, a merge of two bytes that UTF-8 has not, and `<s>`."""
SCAN_CTX, SCAN_CHUNKS = 128, 128
"""Of the scan that all tests share; the model was trained on so many tokens at a time."""
_EPS, _BASE = 1e-5, 10_000.0
_HEAD_SIZE = N_EMBD // N_HEAD
_STEPS, _BATCH, _LENGTH, _RATE = 200, 8, 128, 3e-3
"""A minute on one CPU, 1.70 nats of the text that it never saw; batches of 16 and half the steps learn less."""

Weights = Mapping[str, Tensor]
"""By the names of the GGUF."""


def text() -> tuple[bytes, bytes]:
    """What the model is trained on, and what it never saw."""
    known = topics.topics
    whole = "\n".join(known[name] for name in sorted(known)).encode()
    cut = whole.index(b"\n", len(whole) * 9 // 10) + 1
    return whole[:cut], whole[cut:]


def model() -> Path:
    """The trained model's file; about a minute where it has not been made before."""
    seen, _ = text()
    parts = (text, _train, _shapes, _initial, logits, _normed, _rotations, _turned, write)
    settings = (N_EMBD, N_FF, N_HEAD, N_LAYER, N_CTX, N_VOCAB, _EPS, _BASE, _STEPS, _BATCH, _LENGTH, _RATE)
    recipe = "".join(inspect.getsource(part) for part in parts).encode() + repr(settings).encode() + seen
    folder = Path(os.environ.get("QRES_TEST_CACHE") or Path(__file__).resolve().parents[1] / "build")
    path = folder / f"trained-{hashlib.sha256(recipe).hexdigest()[:16]}.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_suffix(".lock")):
        if not path.exists():
            with whole_file(path) as partial:
                write(partial, train(seen))
    return path


# -- training


def train(data: bytes) -> dict[str, Tensor]:
    """Weights that predict the next byte.

    On one thread: two are a little faster on idle CPUs, and wait for each other for minutes on busy ones.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _train(torch.frombuffer(bytearray(data), dtype=torch.uint8).long())
    finally:
        torch.set_num_threads(threads)


def _train(ids: Tensor) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    weights = {name: _initial(name, shape, random) for name, shape in _shapes().items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=_STEPS, pct_start=0.15)
    for _ in range(_STEPS):
        starts = torch.randint(0, len(ids) - _LENGTH - 1, (_BATCH, 1), generator=random)
        batch = ids[starts + torch.arange(_LENGTH + 1)]
        loss = functional.cross_entropy(logits(weights, batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        schedule.step()
    return {name: weight.detach() for name, weight in weights.items()}


def _shapes() -> dict[str, tuple[int, ...]]:
    square, wide, tall = (N_EMBD, N_EMBD), (N_FF, N_EMBD), (N_EMBD, N_FF)
    rows: dict[str, tuple[int, ...]] = {"token_embd.weight": (N_VOCAB, N_EMBD)}
    for i in range(N_LAYER):
        rows |= {f"blk.{i}.{part}.weight": (N_EMBD,) for part in ("attn_norm", "ffn_norm")}
        rows |= {f"blk.{i}.attn_{part}.weight": square for part in ("q", "k", "v", "output")}
        rows |= {f"blk.{i}.ffn_gate.weight": wide, f"blk.{i}.ffn_up.weight": wide, f"blk.{i}.ffn_down.weight": tall}
    return {**rows, "output_norm.weight": (N_EMBD,), "output.weight": (N_VOCAB, N_EMBD)}


def _initial(name: str, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Embeddings of size 1, branches that are small beside them, and a head that knows nothing."""
    if len(shape) == 1:
        return torch.ones(shape, requires_grad=True)
    scale = 1.0 if name == "token_embd.weight" else shape[1] ** -0.5
    if name.endswith(("attn_output.weight", "ffn_down.weight")):
        scale *= (2 * N_LAYER) ** -0.5
    elif name == "output.weight":
        scale = 0.02
    return (torch.randn(shape, generator=random) * scale).requires_grad_()


def logits(weights: Weights, ids: Tensor) -> Tensor:
    """The model as llama.cpp computes it: [sequences, tokens] to [sequences, tokens, N_VOCAB].

    Without `output.weight` the head is the embedding.
    """
    x = weights["token_embd.weight"][ids]
    turn = _rotations(ids.shape[1])
    for i in range(N_LAYER):
        own = {part: weights[f"blk.{i}.{part}.weight"] for part in _PARTS}
        h = _normed(x, own["attn_norm"])
        q, k, v = ((h @ own[part].T).reshape(*ids.shape, N_HEAD, -1).transpose(1, 2) for part in _PARTS[1:4])
        mixed = functional.scaled_dot_product_attention(_turned(q, turn), _turned(k, turn), v, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2) @ own["attn_output"].T
        h = _normed(x, own["ffn_norm"])
        x = x + (functional.silu(h @ own["ffn_gate"].T) * (h @ own["ffn_up"].T)) @ own["ffn_down"].T
    return _normed(x, weights["output_norm.weight"]) @ weights.get("output.weight", weights["token_embd.weight"]).T


_PARTS = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPS) * weight


def _rotations(n_tokens: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(n_tokens)[:, None] * _BASE ** (-torch.arange(0, _HEAD_SIZE, 2) / _HEAD_SIZE)
    return angles.cos(), angles.sin()


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions: neighbours are a pair."""
    a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = turn
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


# -- as a file


def write(path: Path, weights: Weights) -> Path:
    """Matrices as F16, vectors as F32; without `output.weight` the head is tied to the embedding."""
    tokens = [*tiny.byte_tokens(), "ÀÁ", "<s>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("trained llama")
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_F16))
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_block_count(N_LAYER)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD)
    writer.add_layer_norm_rms_eps(_EPS)
    writer.add_rope_dimension_count(_HEAD_SIZE)
    writer.add_rope_freq_base(_BASE)
    writer.add_vocab_size(N_VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * (N_VOCAB - 1) + [int(gguf.TokenType.CONTROL)])
    writer.add_token_merges(["À Á"])
    writer.add_bos_token_id(N_VOCAB - 1)
    writer.add_eos_token_id(N_VOCAB - 1)
    writer.add_add_bos_token(False)
    for name, weight in weights.items():
        values: npt.NDArray[np.float32] = weight.numpy()
        writer.add_tensor(name, values.astype(np.float16) if values.ndim > 1 else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path) -> dict[str, Tensor]:
    """The weights of a file that `write` wrote."""
    return {t.name: torch.from_numpy(np.array(t.data, np.float32)) for t in gguf.GGUFReader(path).tensors}


# -- scanned


@dataclass(frozen=True)
class Scanned:
    """A folder with the model, the text that it never saw, and a scan of both."""

    folder: Path
    inventory: Inventory
    result: Result
    choices: Choices

    @property
    def out(self) -> Path:
        """Where the scan wrote to."""
        return self.folder / "reports" / "trained"

    @property
    def original(self) -> Original:
        """What files are made from, on one thread and without an importance matrix."""
        return original(self.inventory, None, 1)

    @property
    def held(self) -> source.Source:
        """The text."""
        return source.read_text(self.folder / "held.txt")

    def chunks(self) -> list[Chunk]:
        """The whole text: a token is a byte."""
        whole = self.held.text or b""
        starts = range(0, len(whole) - SCAN_CTX + 1, SCAN_CTX)
        return [tuple(whole[start : start + SCAN_CTX]) for start in starts]


def scanned(factory: pytest.TempPathFactory) -> Scanned:
    """One scan for a whole run of the tests, by the command: two levels, and recipes that are built and verified.

    Of several processes the first one scans; each has a copy to work in.
    """
    own = factory.getbasetemp()
    return _scanned(own / "scanned", (own.parent if os.environ.get("PYTEST_XDIST_WORKER") else own) / "scanned-once")


@cache
def _scanned(folder: Path, once: Path) -> Scanned:
    with filelock.FileLock(once.with_suffix(".lock")):
        if not (once / "stdout.txt").exists():
            _scan(once)
    shutil.copytree(once, folder)
    result = as_json.load(folder / "reports" / "trained" / "result.json")
    return Scanned(folder, model_file.read(folder / "trained.gguf"), result, Choices(result))


def _scan(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # what another process left that failed
    folder.mkdir()
    shutil.copyfile(model(), folder / "trained.gguf")
    (folder / "held.txt").write_bytes(_mixed(text()[1]))
    done = qres(
        *("scan", "trained.gguf", "--text", "held.txt", "--n-ctx", SCAN_CTX, "--chunks", SCAN_CHUNKS),
        *("--rank-chunks", 4, "--threads", 1, "--recipe"),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    (folder / "stdout.txt").write_text(done.stdout)


def _mixed(whole: bytes) -> bytes:
    """The paragraphs in another order, so that one part of the text is like the other.

    As they come, a level's KLD differs by up to a half between the first 4,000 bytes and the rest: 3 standard errors.
    """
    parts = whole.split(b"\n\n")
    return b"\n\n".join(parts[i] for i in np.random.default_rng(0).permutation(len(parts)))
