"""The domains, found through conf/: `declared_in` in `conf/<name>.yaml` is the module with its DOMAIN.
`python -m harness.domains NAME` prints the methods that run in one of them."""

import importlib
import sys

from fire_core.errors import UserError, clean_exit, did_you_mean
from fire_core.methods import available, create
from harness.config import FOLDERS, read_yaml
from harness.settings import Domain


def modules() -> dict[str, str]:
    """Return {name of a domain: the module that the key `declared_in` of its script's config names}."""
    files = [path for folder in reversed(FOLDERS) for path in folder.glob("*.yaml")]
    return {path.stem: module for path in files if (module := read_yaml(path).get("declared_in"))}


def find(name: str) -> Domain:
    """Return the domain of this name. Raises UserError if there is none."""
    if name not in (known := modules()):
        raise UserError(f"domain {name!r} does not exist{did_you_mean(name, sorted(known))}")
    return importlib.import_module(known[name]).DOMAIN


def methods_of(domain: Domain) -> list[str]:
    """Return the names of the methods that run in a domain."""
    return [name for name in available() if not domain.why_not(create(name))]


if __name__ == "__main__":
    with clean_exit():
        print(",".join(methods_of(find(" ".join(sys.argv[1:])))))
