"""Recipes in the words of quantizers: llama-quantize's --tensor-type-file, ik_llama.cpp's --custom-q; and back.

Both search each rule's regular expression anywhere in a tensor's name, first match wins, so that `blk.1` is also in
`blk.10` and `output.weight` in `attn_output.weight` (docs/facts.md, 22). Hence one rule for every tensor, anchored at
both ends and escaped. llama-quantize makes the pattern lower case, splits the file at white space and each rule at its
first `=`: letters in upper case, white space, `=` and commas become `.`, which stands for any character.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qres.errors import InputError
from qres.levels import MAKEABLE
from qres.native import patterns
from qres.printable import show

_UNSAFE = re.compile(r"[A-Z\s=,]")
_RULE = re.compile(r"([^\s=]+)=([A-Za-z0-9_]+)(?=[,\s]|$)")
_OUTPUT, _EMBEDDING = "output.weight", "token_embd.weight"


@dataclass(frozen=True)
class Rule:
    """All tensors in whose name the pattern is found, unless an earlier rule matched."""

    pattern: str
    type: str
    """ggml type name, upper case."""


def type_word(name: str) -> str:
    """The type as ggml spells it: ik_llama.cpp compares letter by letter."""
    return re.sub(r"_k$", "_K", name.lower())


def rules(types: Sequence[tuple[str, str]]) -> list[Rule]:
    """A rule for each (tensor, type) that matches this tensor alone.

    Raises:
        InputError: two names differ only in what a rule cannot say.
    """
    plain = [(name, Rule(_pattern(name), kind)) for name, kind in types if not _UNSAFE.search(name)]
    loose = [(name, Rule(_pattern(name), kind)) for name, kind in types if _UNSAFE.search(name)]
    for name, rule in loose:
        for other, kind in types:
            if kind != rule.type and _UNSAFE.search(other) and re.search(rule.pattern, other):
                message = f"a rule for {show(name)} would match {show(other)}, too"
                raise InputError(message, "build with qres build instead")
    return [rule for _, rule in (*plain, *loose)]  # `.` only gets what no exact rule has matched before


def _pattern(name: str) -> str:
    return patterns.exact(_UNSAFE.sub("\0", name)).replace("\0", ".")


def tensor_type_file(types: Sequence[tuple[str, str]]) -> str:
    """Contents of a file for llama-quantize --tensor-type-file: a rule a line."""
    return "".join(f"{rule.pattern}={type_word(rule.type)}\n" for rule in rules(types))


def custom_q(types: Sequence[tuple[str, str]]) -> str:
    """The argument of ik_llama.cpp's llama-quantize --custom-q."""
    return ",".join(f"{rule.pattern}={type_word(rule.type)}" for rule in rules(types))


def flags(types: Sequence[tuple[str, str]]) -> list[str]:
    """The options for head and embedding, which count before any rule."""
    known = dict(types)
    words = []
    if _OUTPUT in known:
        words += ["--output-tensor-type", type_word(known[_OUTPUT])]
    if _EMBEDDING in known:
        words += ["--token-embedding-type", type_word(known[_EMBEDDING])]
    return words


def parse(text: str) -> list[Rule]:
    """Rules of either dialect; lines that begin with # are left out.

    Raises:
        InputError: something in it is no rule, or names no type.
    """
    plain = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    found, end = [], 0
    for match in _RULE.finditer(plain):
        between = plain[end : match.start()]
        if between.strip(", \t\r\n"):
            break
        pattern, name = match[1].lstrip(","), match[2].upper()
        if name not in MAKEABLE:
            raise InputError(f"{show(match[0])!r}: {match[2]} is no type that this qres knows", "use llama.cpp's types")
        if not pattern:
            raise InputError(f"{show(match[0])!r} has no pattern", "give PATTERN=TYPE")
        try:
            re.compile(pattern)
        except re.error as error:
            raise InputError(
                f"{show(pattern)!r} is no regular expression: {error}", "correct the rule, or take it out"
            ) from error
        found.append(Rule(pattern, name))
        end = match.end()
    rest = plain[end:].strip(", \t\r\n")
    if rest or not found:
        raise InputError(
            f"{show(rest[:40])!r} is not PATTERN=TYPE" if rest else "there are no rules in it",
            "give a file for --tensor-type-file or --custom-q",
        )
    return found


def apply(found: Sequence[Rule], names: Iterable[str]) -> dict[str, str]:
    """Tensor -> type of those that a rule matches."""
    compiled = [(re.compile(rule.pattern), rule.type) for rule in found]
    types = {}
    for name in names:
        kind = next((kind for pattern, kind in compiled if pattern.search(name)), None)
        if kind is not None:
            types[name] = kind
    return types
