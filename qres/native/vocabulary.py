"""A model's tokenizer, which needs none of its weights."""

from __future__ import annotations

from typing import Any

import llama_cpp

from qres.errors import InputError


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
