"""The domains, found through conf/: `declared_in` in `conf/<name>.yaml` is the module with its DOMAIN.

`python -m harness.domains NAME` prints the methods that run in one of them.
"""

import functools
import importlib
import sys
from pathlib import Path

import yaml

from fire_core.errors import UserError, did_you_mean
from fire_core.methods import available
from harness.config import folders
from harness.settings import Domain


def known() -> list[str]:
    """Return the names of all domains."""
    return sorted(path.stem for path in _files() if _declared_in(path))


def find(name: str) -> Domain:
    """Return the domain of this name. Raises UserError if there is none."""
    for path in _files():
        if path.stem == name and (module := _declared_in(path)):
            return importlib.import_module(module).DOMAIN
    raise UserError(f"domain {name!r} does not exist{did_you_mean(name, known())}")


def methods_of(domain: Domain) -> list[str]:
    """Return the names of the methods that run in a domain."""
    return [name for name in available() if name not in domain.refuses]


def _files() -> list[Path]:
    return [path for folder in folders() for path in sorted(folder.glob("*.yaml"))]


@functools.cache
def _declared_in(path: Path) -> str:
    """Return the module that the key `declared_in` of a script's config names, "" if it is not one."""
    return (yaml.safe_load(path.read_text()) or {}).get("declared_in", "")


if __name__ == "__main__":
    print(",".join(methods_of(find(*sys.argv[1:]))))
