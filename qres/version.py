"""The version of qres, as results and recipes name it."""

from __future__ import annotations

__version__ = "0.1.0"
