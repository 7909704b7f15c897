"""`python -m gradsieve`, for when the command is not on the path."""

import sys

from gradsieve.cli import main

if __name__ == "__main__":  # spawned rank processes import this file by another name
    sys.exit(main())
