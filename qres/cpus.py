"""How many threads are worth starting."""

from __future__ import annotations

import os

CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 4
"""The CPUs that this process may use: in a container fewer than the machine has. llama.cpp's threads spin while they
wait, so that more of them than CPUs is a standstill."""
