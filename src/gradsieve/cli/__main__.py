"""`python -m gradsieve.cli` is the `gradsieve` command."""

import sys

from gradsieve.cli import main

if __name__ == "__main__":
    sys.exit(main())
