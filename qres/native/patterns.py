"""Names of tensors as patterns for llama.cpp's quantizers, which search regular expressions (docs/facts.md, 22)."""

from __future__ import annotations

import re

_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}]")


def exact(name: str) -> str:
    r"""The pattern that this name matches, and no other one: anchored at both ends and escaped.

    >>> print(exact("blk.1.attn_q.weight"))
    ^blk\.1\.attn_q\.weight$
    """
    return f"^{_SPECIAL.sub(lambda match: chr(92) + match[0], name)}$"
