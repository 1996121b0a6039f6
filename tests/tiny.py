"""A small random llama written as GGUF: enough for everything that must run in a stranger's clone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from qres.text import source

Floats = npt.NDArray[np.float32]
Change = Callable[[str, Floats], tuple[npt.NDArray[np.generic], gguf.GGMLQuantizationType | None]]
"""Tensor name and values -> data to write and its type, None for the type of the data."""

N_EMBD, N_FF, N_HEAD, N_CTX = 256, 512, 4, 512


def byte_tokens() -> list[str]:
    """GPT-2's printable name of each byte: a vocabulary that needs no merges."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names, spare = {byte: chr(byte) for byte in plain}, 256
    for byte in range(256):
        if byte not in names:
            names[byte], spare = chr(spare), spare + 1
    return [names[byte] for byte in range(256)]


def keep(_name: str, values: Floats) -> tuple[npt.NDArray[np.generic], gguf.GGMLQuantizationType | None]:
    """Matrices as F16, vectors as F32."""
    return (values.astype(np.float16) if values.ndim > 1 else values), None


def predictive(name: str, values: Floats) -> tuple[npt.NDArray[np.generic], gguf.GGMLQuantizationType | None]:
    """A model that knows which byte follows which: perplexity about 15 instead of the vocabulary's 258.

    Embeddings are one-hot, so that the normed last stream point is sqrt(N_EMBD) times the byte's own unit vector, and
    the head holds the logarithms of how often each token follows it in the built-in text.
    """
    if name == "token_embd.weight":
        values = np.eye(len(values), N_EMBD, dtype=np.float32)
        values *= np.float32(N_EMBD**0.5)
    elif name.endswith(("attn_output.weight", "ffn_down.weight")):
        values = values / np.float32(8)  # branches that disturb the prediction a little
    elif name == "output.weight":
        values = (_follow(len(values))[:, :N_EMBD] / N_EMBD**0.5).astype(np.float32)
    return keep(name, values)


def _follow(n_vocab: int) -> Floats:
    """[next token, token]: logarithm of the share; token 256 is " t", the only merge."""
    text = (source.built_in("report").text or b"") + (source.built_in("rank").text or b"")
    ids = np.frombuffer(text.replace(b" t", b"\xff"), dtype=np.uint8).astype(np.int64)  # 0xff is in no UTF-8 text
    ids[ids == 255] = 256
    counts = np.full((n_vocab, n_vocab), 0.02)
    np.add.at(counts, (ids[1:], ids[:-1]), 1)
    shares: Floats = np.log(counts / counts.sum(axis=0)).astype(np.float32)
    return shares


def write_llama(
    path: Path,
    n_layer: int = 2,
    change: Change = keep,
    bos: bool = False,
    tokens: list[str] | None = None,
    seed: int = 0,
    file_type: gguf.LlamaFileType = gguf.LlamaFileType.MOSTLY_F16,
) -> Path:
    """Write a model whose weights depend on the seed only, so that two files differ in nothing but `change`."""
    tokens = [*(tokens or byte_tokens()), "\u0120t", "<s>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny llama")
    writer.add_file_type(int(file_type))
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_block_count(n_layer)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(N_EMBD // N_HEAD)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * (len(tokens) - 1) + [int(gguf.TokenType.CONTROL)])
    writer.add_token_merges(["\u0120 t"])
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_add_bos_token(bos)
    for name, shape, scale in _tensors(n_layer, len(tokens)):
        random = np.random.default_rng([seed, *name.encode()])
        values = np.ones(shape) if len(shape) == 1 else random.normal(0, scale, shape)
        data, kind = change(name, values.astype(np.float32))
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(n_layer: int, n_vocab: int) -> list[tuple[str, tuple[int, ...], float]]:
    """Name, shape (numpy order) and standard deviation; the scales keep branches at a fraction of the stream."""
    wide = N_EMBD**-0.5
    rows: list[tuple[str, tuple[int, ...], float]] = [("token_embd.weight", (n_vocab, N_EMBD), 1.0)]
    for i in range(n_layer):
        rows += [(f"blk.{i}.attn_norm.weight", (N_EMBD,), 1.0), (f"blk.{i}.ffn_norm.weight", (N_EMBD,), 1.0)]
        rows += [(f"blk.{i}.attn_{part}.weight", (N_EMBD, N_EMBD), wide) for part in ("q", "k", "v", "output")]
        rows += [(f"blk.{i}.ffn_{part}.weight", (N_FF, N_EMBD), wide) for part in ("gate", "up")]
        rows.append((f"blk.{i}.ffn_down.weight", (N_EMBD, N_FF), N_FF**-0.5))
    return [*rows, ("output_norm.weight", (N_EMBD,), 1.0), ("output.weight", (n_vocab, N_EMBD), wide)]
