"""The result of a real scan: the trained model (tests/trained.py) at two levels, with recipes built and measured."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from qres.records import as_json
from qres.records.result import Result

GOLDEN = Path(__file__).parents[1] / "golden" / "result.json"
"""Written by `pytest --update-golden tests/examples/test_scan.py`, which needs none to be there."""


@cache
def example() -> Result:
    """Every unit was patched, every recipe verified, every tensor has the type that its level asks for.

    What such a scan does not have (gaps, fallbacks, warnings, missing numbers, names that want to be code) tests make
    from it, beside what they say about it.
    """
    return as_json.load(GOLDEN)
