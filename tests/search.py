"""How properties are searched: derandomized, so that a run finds the same everywhere."""

from __future__ import annotations

from hypothesis import settings

searched = settings(deadline=None, max_examples=100, derandomize=True)
