"""Adjusts a framework's clipping limit to a rank's own gradient if updates are exchanged.

A user's limit is meant for the mean over all ranks. If updates are exchanged, the framework clips one rank's own
gradient, which is longer (see `Sieve.clip_factor`). So the framework's clipping methods are replaced on their object.
The user's settings keep their values, which the framework's errors and logs show.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from gradsieve.sieve import Sieve


def multiply_limits(owner: Any, methods: Mapping[str, str], sieve: Sieve) -> None:
    """Let clipping methods of `owner` multiply their limits for the parameters of `sieve`.

    `methods` maps each method to the name of its argument that is the limit. The first argument of a method must be an
    optimizer or parameters. A second call for the same sieve changes nothing.
    """
    for method, limit in methods.items():
        clip = getattr(owner, method)
        if not isinstance(clip, _OwnClipping):
            clip = _OwnClipping(clip, limit)
            setattr(owner, method, clip)
        if not any(each is sieve for each in clip.sieves):
            clip.sieves.append(sieve)


def restore_limits(owner: Any, methods: Mapping[str, str], sieve: Sieve | None) -> None:
    """Undo `multiply_limits` for this sieve."""
    for method in methods:
        clip = getattr(owner, method)
        if isinstance(clip, _OwnClipping):
            clip.sieves = [each for each in clip.sieves if each is not sieve]
            if not clip.sieves:
                delattr(owner, method)
                if getattr(owner, method) != clip.framework:  # it was set on the object, not on its class
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
        if not hasattr(clipped, "param_groups"):  # an iterator can be read only once
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
