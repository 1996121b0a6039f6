"""Names of publishers' mixes: files whose types a publisher chose tensor by tensor, named like a level of llama.cpp."""

from __future__ import annotations

import re

_BASE = r"(?:Q3[-_]K[-_]L|I?Q\d[-_](?:K[-_][SM]|K|\d|XXS|XS|NL|S|M|L)|TQ\d[-_]\d|MXFP4(?:[-_]MOE)?|NVFP4)"
"""What a level of llama.cpp may be called; of `Q2_K_L` to `Q8_K_L` only `Q3_K_L` is one."""
_MARK = r"(?:UD\d*|DYNAMIC|DYN)"
_MIX = re.compile(
    rf"(?<![^\W_])(?:(?P<before>{_MARK}[-_]))?{_BASE}(?P<size>[-_]X{{1,3}}L|[-_][LP])?(?P<after>[-_]{_MARK})?(?![^\W_])",
    re.IGNORECASE,
)
_OWN_IMATRIX = re.compile(rf"i1[-_](?P<level>{_BASE})", re.IGNORECASE)


def mix_in(name: str) -> str:
    """The publisher's mix that a name contains, as it is spelled there: `UD-Q4_K_XL` of `model-UD-Q4_K_XL.gguf`.

    A mark (`UD-`, `-dynamic`) or a size that llama.cpp does not have (`_XL`, `_P`, `Q6_K_L`) tells it from a level.
    Empty when there is none.
    """
    for match in _MIX.finditer(name):
        if match["before"] or match["size"] or match["after"]:
            return match[0]
    return ""


def refusal(name: str) -> tuple[str, str] | None:
    """Why a name that is no level of llama.cpp cannot be made although publishers use it, and what to do; else None."""
    mix = mix_in(name)
    if mix and mix == name:
        return (
            f"{name} is a publisher's mix: its types were chosen by the publisher, llama.cpp has no such level",
            "measure the publisher's file: qres scan MODEL FILE",
        )
    match = _OWN_IMATRIX.fullmatch(name)
    if match:
        level = match["level"].upper().replace("-", "_")
        return (
            f"{name} is {level} made with a publisher's importance matrix",
            f"measure the publisher's file: qres scan MODEL FILE; or make {level} with --imatrix",
        )
    return None
