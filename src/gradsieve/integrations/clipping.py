"""A framework's clipping, at the limit for a rank's own gradient where updates are exchanged.

A user's limit is meant for the mean over all ranks. Where updates are exchanged, the framework clips one rank's own
gradient, which is longer (see `Sieve.clip_factor`). So the framework's clipping methods are replaced on the object that
they are called on. The user's settings keep their values, and the framework's errors and logs show these.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from gradsieve.sieve import Sieve


def multiply_limits(owner: Any, methods: Mapping[str, str], sieve: Sieve) -> None:
    """Have clipping methods of `owner` multiply their limits for the parameters of `sieve`.

    `methods` has the name of each method's argument that is the limit. The first argument is what is clipped: an
    optimizer, or parameters. Doing it again for the same sieve changes nothing.
    """
    for method, limit in methods.items():
        clip = getattr(owner, method)
        if not isinstance(clip, _OwnClipping):
            clip = _OwnClipping(clip, limit)
            setattr(owner, method, clip)
        if not any(each is sieve for each in clip.sieves):
            clip.sieves.append(sieve)


def restore_limits(owner: Any, methods: Mapping[str, str], sieve: Sieve | None) -> None:
    """Take back what `multiply_limits` did for this sieve."""
    for method in methods:
        clip = getattr(owner, method)
        if isinstance(clip, _OwnClipping):
            clip.sieves = [each for each in clip.sieves if each is not sieve]
            if not clip.sieves:
                delattr(owner, method)
                if getattr(owner, method) != clip.framework:  # it was the object's own, not its class's
                    setattr(owner, method, clip.framework)


class _OwnClipping:
    """A framework's clipping method whose limit is multiplied for the parameters of some sieves."""

    def __init__(self, framework: Callable[..., Any], limit: str) -> None:
        self.framework = framework
        self.sieves: list[Sieve] = []
        self._limit = limit
        self._signature = inspect.signature(framework)
        functools.update_wrapper(self, framework)

    def __call__(self, clipped: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(clipped, "param_groups"):  # an iterator can be read once only
            clipped = [clipped] if isinstance(clipped, Tensor) else list(clipped)
        call = self._signature.bind(clipped, *args, **kwargs)
        if self._limit in call.arguments:
            call.arguments[self._limit] *= self._factor(clipped)
        return self.framework(*call.args, **call.kwargs)

    def _factor(self, clipped: Any) -> float:
        groups = getattr(clipped, "param_groups", [{"params": clipped}])
        ids = {id(parameter) for group in groups for parameter in group["params"]}
        factors = [
            sieve.clip_factor for sieve in self.sieves if any(id(parameter) in ids for parameter in sieve.parameters)
        ]
        return max(factors, default=1.0)
