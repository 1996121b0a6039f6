"""Launcher, so that `python cli.py scan ...` works in a checkout."""

from qres.cli import main

if __name__ == "__main__":
    main()
