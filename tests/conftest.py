"""What all tests share: options, and one thread for each process."""

from __future__ import annotations

import os

import pytest

ALONE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Threads of torch and numpy wait for each other in a spin, which on CPUs that do other work costs three times the work
itself. Set before either is imported; faults.py takes them away again."""
os.environ.update({name: value for name, value in ALONE.items() if name not in os.environ})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files instead of comparing")
