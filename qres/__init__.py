"""Quantization-robustness analysis for GGUF models, seen from the residual stream.

    from qres import ScanOptions, scan

    result = scan(ScanOptions(Path("model-f16.gguf")))
    print(result.verdict.headline)

The names below are the public interface (docs/api.md). They are imported when they are first used: `import qres` alone
loads nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qres.version import __version__

if TYPE_CHECKING:
    from qres.api import (
        InputError,
        Inspection,
        Listener,
        NativeError,
        QresError,
        Recipe,
        RecipeOptions,
        RefineOptions,
        Result,
        ScanOptions,
        UnsupportedError,
        UsageError,
        VerifyOptions,
        build,
        inspect,
        load,
        recipe,
        render_html,
        render_markdown,
        scan,
        to_json,
        verify,
    )

__all__ = [
    "InputError",
    "Inspection",
    "Listener",
    "NativeError",
    "QresError",
    "Recipe",
    "RecipeOptions",
    "RefineOptions",
    "Result",
    "ScanOptions",
    "UnsupportedError",
    "UsageError",
    "VerifyOptions",
    "__version__",
    "build",
    "inspect",
    "load",
    "recipe",
    "render_html",
    "render_markdown",
    "scan",
    "to_json",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'qres' has no attribute {name!r}")
    from qres import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return list(__all__)
