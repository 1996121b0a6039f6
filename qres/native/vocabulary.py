"""A model's tokenizer, which needs none of its weights."""

from __future__ import annotations

from typing import Any

import llama_cpp

from qres.errors import InputError

_SPECIAL = 1 | 8  # LLAMA_TOKEN_ATTR_UNKNOWN and _CONTROL: those that llama_tokenize parses only where it is asked to


class Vocabulary:
    """Text to token ids, by llama.cpp."""

    def __init__(self, model: Any, name: str) -> None:  # noqa: ANN401 - an opaque ctypes pointer
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self._name = name
        self.n_tokens = int(llama_cpp.llama_vocab_n_tokens(self._vocab))

    def tokenize(self, text: bytes, *, special: bool = False) -> list[int]:
        """Token ids of UTF-8 text, with BOS where the model's rule wants one.

        Args:
            text: The text.
            special: Parse special tokens in it; else they are read as characters.

        Raises:
            InputError: llama.cpp cannot tokenize it.
        """
        capacity = len(text) + 8
        out = (llama_cpp.llama_token * capacity)()
        n = llama_cpp.llama_tokenize(self._vocab, text, len(text), out, capacity, True, special)
        if n < 0:
            raise InputError(f"the text cannot be tokenized by {self._name} (llama.cpp returned {n})")
        ids = list(out[:n])
        bos = self.bos()
        if special and bos is not None and ids[:2] == [bos, bos]:  # the text begins with it, and the rule adds it
            del ids[0]
        return ids

    def hidden(self, text: bytes) -> tuple[int, tuple[str, ...]]:
        """Special tokens that `tokenize` reads as characters in this text: how many, and their names in order."""
        found, begins = {}, dict[bytes, bool]()  # thousands of names begin alike, and mostly none of them is there
        for token in range(self.n_tokens):
            if llama_cpp.llama_vocab_get_attr(self._vocab, token) & _SPECIAL:
                name = bytes(llama_cpp.llama_vocab_get_text(self._vocab, token))
                begin = name[:3]
                if begin not in begins:
                    begins[begin] = begin in text
                if name and begins[begin] and name in text:
                    found[token] = name.decode(errors="replace")
        if not found:
            return 0, ()
        ids = self.tokenize(text, special=True)
        added = 1 if ids[:1] == [self.bos()] and not text.startswith(found.get(ids[0], "\0").encode()) else 0
        there = [token for token in ids[added:] if token in found]
        return len(there), tuple(found[token] for token in dict.fromkeys(there))

    def bos(self) -> int | None:
        """The token every chunk starts with, or None when the model adds none."""
        if not llama_cpp.llama_vocab_get_add_bos(self._vocab):
            return None
        token = int(llama_cpp.llama_vocab_bos(self._vocab))
        return token if token >= 0 else None
