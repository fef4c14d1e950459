"""`python -m fire_core.methods`: name, what it does, where it comes from."""

from fire_core.methods import available


def main() -> None:
    methods = available()
    width = max(map(len, methods))
    for name, cls in methods.items():
        print(f"{name:<{width}}  {cls.summary}\n{'':<{width}}  [{cls.source}]")


if __name__ == "__main__":
    main()
