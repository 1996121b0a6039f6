"""What a tensor's name says: its block, and its role in its layer. Unlike nodes', names of weights are a standard."""

from __future__ import annotations

import re

BLOCK = re.compile(r"^(?:\w+\.)?blk\.(\d{1,9})\.(.+)$")
"""Block number, and what follows it; an encoder's and a decoder's names begin with `enc.` and `dec.`."""

_PARTS: tuple[tuple[str, str], ...] = (
    (r"attn_(q|k|v|qkv|output|gate)\.", "attention {0}"),
    (r"attn_(q_a|q_b|kv_a_mqa|kv_b|k_b|v_b|kv_a)\.", "attention {0}"),
    (r"ffn_(gate|up|down)_exps\.", "experts {0}"),
    (r"ffn_gate_up_exps\.", "experts gate and up"),
    (r"ffn_(gate|up|down)_(?:shexp|chexps)\.", "shared expert {0}"),
    (r"ffn_(gate|up|down)\.", "ffn {0}"),
    (r"ffn_gate_inp", "router"),
    (r"ssm_(\w+)\.", "ssm {0}"),
    (r"shortconv\.(\w+)\.", "conv {0}"),
    (r"time_mix_(\w+)\.", "time mix {0}"),
    (r"channel_mix_(\w+)\.", "channel mix {0}"),
)
_RULES = tuple((re.compile(pattern), text) for pattern, text in _PARTS)


def block_number(name: str) -> int | None:
    """The block that a weight belongs to, by its GGUF name; None for one outside the blocks."""
    match = BLOCK.match(name)
    return int(match[1]) if match else None


def role(tensor: str, unit: str) -> str:
    """The role of a matrix.

    Args:
        tensor: Its name in the file.
        unit: The unit that it is used in: a tied matrix is `embedding` in one and `head` in the other.
    """
    if unit in ("embedding", "head"):
        return unit
    block = BLOCK.match(tensor)
    matches = ((pattern.match(block[2]), text) for pattern, text in _RULES) if block else ()
    return next((text.format(*found.groups()) for found, text in matches if found), "other")
