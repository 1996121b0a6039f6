"""Launcher, so that `python cli.py scan ...` works in a checkout."""

from __future__ import annotations

from qres.__main__ import main

if __name__ == "__main__":
    main()
