"""Where the program starts: `qres`, `python -m qres` and `python cli.py`."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Run the command line. While its libraries load there is nothing to tidy up: a signal just ends the process."""
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        signal.signal(number, lambda *_, code=code: os._exit(code))
    from qres.cli import program

    program.main()


if __name__ == "__main__":
    main()
