"""The one error a user's mistake raises, and the checks that raise it."""

from collections.abc import Iterable
from difflib import get_close_matches


class RankscopeError(ValueError):
    """A mistake the user can mend: the message names the argument, what was wanted, what came and the cure.

    The command line prints it as one line and leaves with exit code 2; in Python it is a ``ValueError``.
    """


class MissingExtraError(RankscopeError):
    """An optional dependency is not installed; the message gives the command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r}: pip install 'rankscope[{extra}]'")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint for a misspelt name: the nearest known one, or all of them.

    Example:
        >>> did_you_mean("gausian", ["gaussian", "mean"])
        "did you mean 'gaussian'? (one of: gaussian, mean)"
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.6)
    listing = ", ".join(names)
    return f"did you mean {near[0]!r}? (one of: {listing})" if near else f"choose one of: {listing}"
