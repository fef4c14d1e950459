"""The error type for mistakes that the caller can fix, and helpers that write its messages."""

import difflib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Bad input. The message quotes the value and says what to do; scripts print it in one line, with exit code 2."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown `word`: the nearest known word, or the first 30 if none is near."""
    names = list(known)
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names[:30])}"


def check_settings(owner: object, **rules: str) -> None:
    """Raise UserError for the first setting of `owner` outside its rule: an interval, as "[0, 1)", or words to choose."""
    for name, rule in rules.items():
        value = getattr(owner, name)
        if rule[0] not in "[(":
            if value not in rule.split():
                raise UserError(f"{name}={value!r} is unknown: choose one of {', '.join(rule.split())}")
            continue
        low, high = map(float, rule[1:-1].split(","))
        inside = isinstance(value, int | float) and low <= value <= high
        if not inside or (value == low and rule[0] == "(") or (value == high and rule[-1] == ")"):
            raise UserError(f"{name}={value!r} must be a number in {rule}")


def shown(path: str | os.PathLike[str]) -> str:
    """Return a path as text for a message, with bytes that are not UTF-8 escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def printable(text: object) -> str:
    """Return `text` as one line with unprintable characters escaped: names in a file may control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def print_error(error: object) -> None:
    """Print a message to stderr the way all scripts do, with unprintable characters escaped in each of its lines."""
    print("error: " + "\n".join(map(printable, str(error).split("\n"))), file=sys.stderr, flush=True)


@contextmanager
def clean_exit() -> Iterator[None]:
    """Run a command: print bad input in one line and exit with 2; end quietly if nobody reads on, as in `command | head`."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (UserError, OSError) as error:
        print_error(error)
        sys.exit(2)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 160 characters, or the error's type if it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__
