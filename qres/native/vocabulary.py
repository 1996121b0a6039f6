"""A model's tokenizer, loaded without its weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp

from qres.errors import InputError
from qres.native.session import cannot_load, log


class Vocabulary:
    """Text to token ids, by llama.cpp."""

    def __init__(self, model: Any, name: str) -> None:  # noqa: ANN401 - an opaque ctypes pointer
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self._name = name
        self.n_tokens = int(llama_cpp.llama_vocab_n_tokens(self._vocab))

    def tokenize(self, text: bytes) -> list[int]:
        """Token ids of UTF-8 text, with BOS where the model's rule wants one; special tokens in the text stay text.

        Raises:
            InputError: llama.cpp cannot tokenize it.
        """
        capacity = len(text) + 8
        out = (llama_cpp.llama_token * capacity)()
        n = llama_cpp.llama_tokenize(self._vocab, text, len(text), out, capacity, True, False)
        if n < 0:
            raise InputError(f"the text cannot be tokenized by {self._name} (llama.cpp returned {n})")
        return list(out[:n])

    def bos(self) -> int | None:
        """The token every chunk starts with, or None when the model adds none."""
        if not llama_cpp.llama_vocab_get_add_bos(self._vocab):
            return None
        token = int(llama_cpp.llama_vocab_bos(self._vocab))
        return token if token >= 0 else None


@contextmanager
def vocabulary(path: Path) -> Iterator[Vocabulary]:
    """The tokenizer of a model file; reads no weights.

    Raises:
        NativeError: llama.cpp refused the file.
    """
    log.clear()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise cannot_load(path)
    try:
        yield Vocabulary(model, path.name)
    finally:
        llama_cpp.llama_model_free(model)
