"""`python -m qres`."""

from qres.cli import main

if __name__ == "__main__":
    main()
