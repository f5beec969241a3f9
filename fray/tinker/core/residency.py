"""Choice of the adapters in memory: those in use, and of the others those that were used last."""

from __future__ import annotations


class Residency:
    """Names of adapters in memory.

    Args:
        limit: most of them.

    Raises:
        ValueError: the limit is below 1.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"resident={limit}: expected at least 1")
        self._limit = limit
        self._uses: dict[str, int] = {}
        """Users of each, the one that was used first in front."""

    @property
    def names(self) -> frozenset[str]:
        """Return the adapters that stay or come into memory; all others leave it."""
        return frozenset(self._uses)

    def take(self, name: str) -> bool:
        """Begin to use an adapter; False: all places are in use, and it has to wait."""
        if name not in self._uses and len(self._uses) >= self._limit:
            idle = next((each for each, uses in self._uses.items() if not uses), None)
            if idle is None:
                return False
            del self._uses[idle]
        self._uses[name] = self._uses.pop(name, 0) + 1
        return True

    def release(self, name: str) -> None:
        """End one use of an adapter; it keeps its place until another needs it."""
        self._uses[name] -= 1

    def drop(self, name: str) -> None:
        """Give up the place of an adapter that is not in use."""
        if not self._uses.get(name, 1):
            del self._uses[name]
