"""A branch of the residual stream, and what can be said of it from the weights behind it.

GGUF's weight names are a standard, unlike llama.cpp's node names: block number and kind come from them.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

from qres.gguf.names import BLOCK

_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("moe", re.compile(r"ffn_\w+_exps|ffn_gate_inp")),
    ("ffn", re.compile(r"ffn_(?!norm)|channel_mix")),
    ("rwkv", re.compile(r"time_mix")),
    ("ssm", re.compile(r"ssm_")),
    ("conv", re.compile(r"shortconv")),
    ("attention", re.compile(r"attn_(?!norm|post_norm|sub_norm)|cross_attn")),
)
"""Kind of a branch by the block weights behind it, first match wins (an MoE layer also has ffn weights, linear
attention has both `ssm_` and `attn_` ones)."""


@dataclass(frozen=True)
class Branch:
    """What one residual add adds to the stream, after post-norm and residual scale."""

    index: int
    """Stream point after it, 1..M."""
    unit: str
    """Name as a unit of sensitivity: `<layer>.<kind>`, with a running number where that is not unique."""
    layer: int | None
    kind: str
    """`attention`, `ffn`, `moe`, `ssm`, `conv`, `rwkv` or `other`."""
    label: str
    """llama.cpp's name of the tensor, for people; not unique."""
    weights: tuple[str, ...]
    reads: int
    """Stream point that the branch reads: its input for ratios. Parallel branches read the same one."""
    node: int
    """Ordinal of the branch tensor."""
    add: int
    """Ordinal of the residual add that puts it into the stream."""
    stream_in: int | None
    """Ordinal of the add's stream operand where that is not the point before (the stream was scaled or normed on the
    way)."""
    closes: bool
    """True when the add's result is stream point `index`; False for all but the last of branches that one add adds
    together."""
    norm_before: bool
    norm_after: bool


def kind_of(weights: tuple[str, ...]) -> str:
    """Kind of a branch from the block weights behind it."""
    blocks = " ".join(match[2] for match in map(BLOCK.match, weights) if match)
    return next((kind for kind, pattern in _KINDS if pattern.search(blocks)), "other")


def family(kind: str) -> str:
    """`ffn` for dense and MoE feed-forward alike: experts and a shared expert are one branch."""
    return "ffn" if kind == "moe" else kind


def name_units(branches: list[Branch]) -> tuple[Branch, ...]:
    """Give each branch its unit name; a block that runs twice, or has two branches of a kind, gets running numbers."""
    seen: Counter[str] = Counter()
    out = []
    for branch in branches:
        unit = f"{'none' if branch.layer is None else branch.layer}.{branch.kind}"
        seen[unit] += 1
        out.append(replace(branch, unit=unit if seen[unit] == 1 else f"{unit}.{seen[unit]}"))
    return tuple(out)


def norm_placement(branches: tuple[Branch, ...], through_norms: bool) -> str:
    """Where norms sit, by majority.

    `pre`, `post` (on the branch), `sandwich` (both), `post-add` (on the stream) or `none`; `, parallel` where branches
    share their input.
    """
    before = sum(b.norm_before for b in branches) * 2 > len(branches)
    after = sum(b.norm_after for b in branches) * 2 > len(branches)
    if through_norms:
        placement = "post-add"
    else:
        placement = {(True, True): "sandwich", (True, False): "pre", (False, True): "post"}.get((before, after), "none")
    reads = Counter(b.reads for b in branches)
    shared = sum(n for n in reads.values() if n > 1)
    return f"{placement}, parallel" if shared * 2 > len(branches) else placement
