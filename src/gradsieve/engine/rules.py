"""Which parameters are sent sparsely, and how sparsely: by shape and by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gradsieve.errors import InputError

SHOWN_NAMES = 3


@dataclass(frozen=True)
class Rules:
    """By default matrices go sparse; biases, norms and small tensors go dense, all in one all_reduce.

    Patterns are shell patterns over the names of `named_parameters()`: `*.bias`, `encoder.layer.*`. A name that
    `exclude` matches goes dense; else one that `include` or `density` matches goes sparse; else its shape decides.
    """

    min_numel: int = 2048  # parameters with fewer entries go dense; higher sends more, in fewer and simpler messages
    min_dimensions: int = 2  # parameters with fewer dimensions go dense; 1 lets biases and norms go sparse
    include: tuple[str, ...] = ()  # patterns of names that go sparse whatever their shape
    exclude: tuple[str, ...] = ()  # patterns of names that go dense whatever their shape
    density: tuple[tuple[str, float], ...] = ()  # (pattern, density): first match wins over the schedule's density

    def __post_init__(self) -> None:
        for name in ("include", "exclude"):
            patterns = getattr(self, name)
            if isinstance(patterns, str):
                raise InputError(f"{name} must be a list of patterns, got the single text {patterns!r}")
            object.__setattr__(self, name, tuple(patterns))
        object.__setattr__(self, "density", tuple((pattern, float(value)) for pattern, value in self.density))
        for pattern, density in self.density:
            if not 0 < density <= 1:
                raise InputError(f"density of {pattern!r} must be in (0, 1], got {density}")
        if self.min_numel < 0 or self.min_dimensions < 0:
            raise InputError(
                f"min_numel and min_dimensions must not be negative, got {self.min_numel} and {self.min_dimensions}"
            )

    def keeps_dense(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a parameter is sent whole."""
        if _matches(name, self.exclude):
            return True
        if _matches(name, self.include) or self.density_of(name) is not None:
            return False
        numel = 1
        for extent in shape:
            numel *= extent
        return len(shape) < self.min_dimensions or numel < self.min_numel

    def density_of(self, name: str) -> float | None:
        """A density of its own, or None to follow the schedule."""
        return next((density for pattern, density in self.density if fnmatchcase(name, pattern)), None)

    def check_names(self, names: Iterable[str]) -> None:
        """A pattern that matches nothing is a slip of the pen: say so."""
        known = list(names)
        for pattern in (*self.include, *self.exclude, *(pattern for pattern, _ in self.density)):
            if not any(fnmatchcase(name, pattern) for name in known):
                shown = ", ".join(known[:SHOWN_NAMES]) + (", ..." if len(known) > SHOWN_NAMES else "")
                raise InputError(f"pattern {pattern!r} matches no parameter; their names are {shown}")


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
