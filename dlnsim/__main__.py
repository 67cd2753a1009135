"""`python -m dlnsim` is the command `dlnsim`."""

import sys

from dlnsim.cli import main

if __name__ == "__main__":
    sys.exit(main())
