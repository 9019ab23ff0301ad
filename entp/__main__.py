"""`python -m entp` and `torchrun -m entp`: the command line."""

import sys

from entp.cli import main

if __name__ == "__main__":
    sys.exit(main())
