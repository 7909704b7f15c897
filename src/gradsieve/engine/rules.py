"""Which parameters are sent sparsely, and how sparsely: by shape and by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gradsieve.errors import InputError

SHOWN_NAMES = 3


@dataclass(frozen=True)
class Rules:
    """Which parameters are sent sparsely, by name and shape.

    By default matrices are sparse. Biases, norms and small tensors are dense, all in one all_reduce. Patterns are shell
    patterns over the names of `named_parameters()`, such as `*.bias` and `encoder.layer.*`. A name that `exclude`
    matches is dense. Any other name that `include` or `density` matches is sparse. For all others the shape decides.

    Args:
        min_numel: Parameters with fewer entries are dense. Higher sends more, in fewer and simpler messages.
        min_dimensions: Parameters with fewer dimensions are dense. 1 makes biases and norms sparse.
        include: Patterns of names that are sparse, whatever their shape.
        exclude: Patterns of names that are dense, whatever their shape.
        density: Pairs of a pattern and a density. The first match overrides the schedule's density.

    Raises:
        InputError: A value is outside its range, or a single text is given as patterns.

    Example:
        >>> from gradsieve import Rules
        >>> rules = Rules(exclude=["head.*"], density=[("embedding.*", 0.001)])
        >>> rules.keeps_dense("head.weight", (512, 512))
        True
        >>> rules.density_of("embedding.weight")
        0.001
    """

    min_numel: int = 2048
    min_dimensions: int = 2
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    density: tuple[tuple[str, float], ...] = ()

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
        """Return whether a parameter is sent whole.

        Args:
            name: The name of the parameter.
            shape: Its shape.
        """
        if _matches(name, self.exclude):
            return True
        if _matches(name, self.include) or self.density_of(name) is not None:
            return False
        numel = 1
        for extent in shape:
            numel *= extent
        return len(shape) < self.min_dimensions or numel < self.min_numel

    def density_of(self, name: str) -> float | None:
        """Return the density of a parameter, or None for the schedule's.

        Args:
            name: The name of the parameter.
        """
        return next((density for pattern, density in self.density if fnmatchcase(name, pattern)), None)

    def check_names(self, names: Iterable[str]) -> None:
        """Check that every pattern matches a parameter: one that matches nothing is a typing error.

        Args:
            names: The names of all parameters.

        Raises:
            InputError: A pattern matches no name.
        """
        known = list(names)
        for pattern in (*self.include, *self.exclude, *(pattern for pattern, _ in self.density)):
            if not any(fnmatchcase(name, pattern) for name in known):
                shown = ", ".join(known[:SHOWN_NAMES]) + (", ..." if len(known) > SHOWN_NAMES else "")
                raise InputError(f"pattern {pattern!r} matches no parameter; their names are {shown}")


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
