"""`python -m fire_core.methods`: name, what it does, where it comes from. `--names DOMAIN`: names for a sweep."""

import sys

from fire_core.methods import available


def main(arguments: list[str]) -> None:
    """Print the registry; with `--names DOMAIN`, those that run there, joined by commas."""
    methods = available()
    if arguments[:1] == ["--names"] and len(arguments) == 2:
        print(",".join(name for name, cls in methods.items() if arguments[1] in cls.domains))
        return
    width = max(map(len, methods))
    for name, cls in methods.items():
        print(f"{name:<{width}}  {cls.summary}\n{'':<{width}}  [{cls.source}]")


if __name__ == "__main__":
    main(sys.argv[1:])
