"""The one error type for mistakes that the caller can mend, and the hint that goes with a misspelt name."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: the message quotes the value and says what to do. Scripts print it as one line, exit code 2."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """End of a message about `word`, which is none of `known`: the nearest of them, or where none is near, a list."""
    names = list(known)
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names[:30])}"
