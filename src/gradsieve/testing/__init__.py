"""Ranks as threads of one process, and the laws as checks for algorithms of your own.

`check_reducer(MyReducer)` raises a `LawError` that says which law is broken, and for which input.
"""

from gradsieve.testing.laws import LawError, check_feedback, check_reducer, check_selector
from gradsieve.testing.ranks import run_ranks

__all__ = ["LawError", "check_feedback", "check_reducer", "check_selector", "run_ranks"]
