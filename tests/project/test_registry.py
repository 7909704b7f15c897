"""Names and what an unknown one is told."""

from __future__ import annotations

import pytest

from gradsieve.errors import UnknownNameError
from gradsieve.registry import SHOWN_NAMES, Registry


def test_an_unknown_name_is_told_all_names_if_they_are_few() -> None:
    with pytest.raises(UnknownNameError) as caught:
        Registry("fruit", {"apple": 1, "pear": 2})["aple"]
    assert str(caught.value) == "unknown fruit 'aple'; did you mean 'apple'? allowed: apple, pear"


def test_many_names_do_not_bury_the_sentence() -> None:
    """The laboratory has more than a hundred exchanges, most of them of a few patterns."""
    many = Registry("number", {f"n{number}": number for number in range(SHOWN_NAMES + 70)})
    with pytest.raises(UnknownNameError, match=r"did you mean 'n\d+'\? allowed: n0, n1, .* and 70 more$") as caught:
        many["n"]
    assert f"n{SHOWN_NAMES}," not in str(caught.value)
