"""A cache for what kernels are given addresses of: all threads get the same object, for good."""

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class kept(Generic[P, T]):  # noqa: N801 - a decorator
    """A function's values, one for each arguments, that stay.

    Where two threads come first together, ``functools.cache`` gives each a value of its own and
    keeps one; the other is freed as soon as its caller lets go of it, with the memory whose address
    a kernel may have been given.
    """

    def __init__(self, function: Callable[P, T]) -> None:
        """Keep nothing yet."""
        self._function = function
        self._values: dict[object, T] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the value that is kept, or make it."""
        key = (args, tuple(sorted(kwargs.items())))
        if key not in self._values:
            self._values.setdefault(key, self._function(*args, **kwargs))  # the first one stays
        return self._values[key]

    def cache_clear(self) -> None:
        """Forget all values; no kernel may be running."""
        self._values.clear()
