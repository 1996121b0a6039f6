"""What sort of file it is, and what refuses it as a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from qres.errors import InputError, QresError, UnsupportedError
from qres.gguf import model_file
from tests.gguf.building import LLAMA, ROWS, Row, inventory


@pytest.mark.parametrize(
    ("metadata", "rows", "kind", "error", "message"),
    [
        ({"general.type": "adapter", "adapter.type": "lora"}, ROWS, "lora", InputError, "LoRA adapter.*base model"),
        ({}, [("blk.0.attn_q.weight.lora_a", (64, 4), 1, 0)], "lora", InputError, "LoRA"),
        ({"general.architecture": "clip"}, ROWS, "mmproj", InputError, "projector"),
        ({"general.architecture": "x", "clip.has_vision_encoder": True}, ROWS, "mmproj", InputError, "projector"),
        ({"general.type": "imatrix"}, ROWS, "imatrix", InputError, "importance matrix"),
        ({"general.architecture": "controlvector"}, ROWS, "control_vector", InputError, "control vector"),
        ({}, [], "vocab_only", InputError, "vocabulary without weights"),
        ({"general.architecture": "bert"}, ROWS, "embedding_only", UnsupportedError, "embedding"),
        ({"general.architecture": "nomic-bert-moe"}, ROWS, "embedding_only", UnsupportedError, "embedding"),
        ({"general.architecture": "gemma-embedding"}, ROWS, "embedding_only", UnsupportedError, "embedding"),
        ({"llama.pooling_type": 3}, ROWS, "embedding_only", UnsupportedError, "embedding"),
        ({"llama.pooling_type": 2**32 - 1}, ROWS, "model", None, ""),  # unspecified
        ({"llama.attention.causal": False}, ROWS, "embedding_only", UnsupportedError, "embedding"),
        ({"general.architecture": "t5"}, ROWS, "encoder_decoder", UnsupportedError, "encoder-decoder"),
        ({"general.architecture": "wavtokenizer-dec"}, ROWS, "audio", UnsupportedError, "speech"),
        ({"general.architecture": "eagle3"}, ROWS, "draft", UnsupportedError, "target model"),
        ({"general.architecture": "dflash"}, ROWS, "draft", UnsupportedError, "target model"),
        ({"general.architecture": "gemma4-assistant"}, ROWS, "draft", UnsupportedError, "target model"),
        ({}, [ROWS[0], ("blk.2.nextn.eh_proj.weight", (64, 2), 1, 512)], "draft", UnsupportedError, "target model"),
        ({}, [("blk.2.attn_q.weight", (64, 2), 1, 512)], "draft", UnsupportedError, "target model"),
        ({}, [*ROWS, ("blk.2.nextn.eh_proj.weight", (64, 2), 1, 864)], "model", None, ""),  # the model with its head
        ({"llama.nextn_predict_layers": 0}, [ROWS[0], ("blk.2.attn_q.weight", (64, 2), 1, 512)], "model", None, ""),
        ({}, ROWS[:1], "model", None, ""),  # no block at all says nothing
        ({"general.architecture": "flux"}, ROWS[1:], "other", UnsupportedError, "token_embd"),
        ({"general.architecture": "llada", "llada.attention.causal": False}, ROWS, "diffusion", None, ""),
        ({"general.architecture": ""}, ROWS, "model", InputError, "does not name its architecture"),
        ({}, ROWS, "model", None, ""),
    ],
)
def test_kinds(
    tmp_path: Path,
    metadata: dict[str, object],
    rows: Sequence[Row],
    kind: str,
    error: type[QresError] | None,
    *,
    message: str,
) -> None:
    found = inventory(tmp_path, LLAMA | metadata, rows)
    assert found.kind == kind
    if error is None:
        model_file.require_language_model(found, "reference")
        return
    with pytest.raises(error, match=f"the reference model .*{message}"):
        model_file.require_language_model(found, "reference")


def test_file_without_tensors_or_vocabulary(tmp_path: Path) -> None:
    assert inventory(tmp_path, {"general.architecture": "llama"}, []).kind == "empty"
