"""Tables of named things: a new row is one registration, a misspelt name gets the nearest one."""

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from rankscope._errors import RankscopeError, did_you_mean

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """A read-only mapping whose look-up of an unknown name is a :class:`RankscopeError` with a hint.

    Args:
        argument: What the user calls the choice, as in "``argument`` must be …".
        entries: The rows known from the start.

    Example:
        >>> kinds = Registry("projection", {"mean": 1, "max": 2})
        >>> kinds["maen"]
        Traceback (most recent call last):
            ...
        rankscope._errors.RankscopeError: `projection` has no 'maen': did you mean 'mean'? (one of: max, mean)
    """

    def __init__(self, argument: str, entries: Mapping[str, T] | None = None) -> None:
        self._argument = argument
        self._entries: dict[str, T] = dict(entries or {})

    def register(self, name: str, entry: T) -> T:
        """Add one row and return it; a name that is taken is a programming error."""
        if name in self._entries:
            raise ValueError(f"`{self._argument}` {name!r} is registered already")
        self._entries[name] = entry
        return entry

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name]
        except KeyError:
            raise RankscopeError(
                f"`{self._argument}` has no {name!r}: {did_you_mean(str(name), self._entries)}"
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
