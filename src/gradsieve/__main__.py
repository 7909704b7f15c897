"""`python -m gradsieve`, for where the command is not on the path."""

import sys

from gradsieve.cli import main

if __name__ == "__main__":  # workers that are spawned import it by another name
    sys.exit(main())
