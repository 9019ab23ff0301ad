"""`python -m entp` and `torchrun -m entp`: the command line."""

import os
import sys

from entp.cli.main import main

if __name__ == "__main__":
    code = main()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # All is on disk and the group is left, but gloo's threads may still be ending and would
        # abort the interpreter's exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
