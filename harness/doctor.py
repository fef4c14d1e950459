"""Show what each script needs, what is installed, and the command that installs the rest.

    python -m harness.doctor

The exit code is 1 if a script does not start because something is missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness.domains import find, known
from harness.runs.machine import ROOT, requirements
from harness.settings import Domain

LEAST_DISK_GB = 10


@dataclass(frozen=True)
class Check:
    """One requirement of a domain.

    state: "ok", "missing" (the script does not start without it) or "optional" (only some features need it).
    remedy: command that installs what is missing.
    """

    domain: str
    what: str
    state: str
    note: str
    remedy: str = ""


def shared() -> list[Check]:
    """Return the checks of the packages that all scripts need, and of those that run sweeps in parallel."""
    found = [package("core", name, True) for name in requirements()]
    found += [package("experiments and analysis", name, True, "suite") for name in requirements("suite")]
    return found + [
        package("sweeps", name, False, extra) for extra in ("ray", "slurm") for name in requirements(extra)
    ]


def checks_of(domain: Domain) -> list[Check]:
    """Return the checks of the packages and the data of one script."""
    needed = {plain(name) for name in domain.needs}
    found = [
        package(domain.name, name, plain(name) in needed, extra)
        for extra in domain.extras
        for name in requirements(extra)
    ]
    for what, folder, remedy in domain.data:
        here = (ROOT / folder).is_dir() and any((ROOT / folder).iterdir())
        state = "ok" if here else "missing" if remedy.startswith("git checkout") else "optional"
        found.append(Check(domain.name, what, state, folder if here else f"not in {folder}", remedy))
    return found


def package(domain: str, name: str, needed: bool, extra: str = "") -> Check:
    """Return the check of one package, which `extra` of pyproject.toml installs."""
    version = installed(name)
    state = "ok" if version else "missing" if needed else "optional"
    return Check(domain, name, state, version, installs(name, extra))


def installed(name: str) -> str:
    """Return the version of a package, "" if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def plain(name: str) -> str:
    """Return the name of a package or of its module in the form in which both are the same."""
    return name.lower().replace("_", "-")


def installs(name: str, extra: str) -> str:
    """Return the command that installs a package: a target of the Makefile if there is one, else pip."""
    if extra == "suite":
        return "make install"
    if f"\ninstall-{extra}:" in (ROOT / "Makefile").read_text():
        return f"make install-{extra}"
    return ".venv/bin/python -m pip install " + (f"-e '.[{extra}]'" if extra else name)


def machine() -> list[Check]:
    """Return the checks of Python, processor, GPU and disk."""
    python_ok = sys.version_info >= (3, 11)
    free = shutil.disk_usage(ROOT).free / 1e9
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9 if hasattr(os, "sysconf") else 0.0
    gpu = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else "none found; size=paper is meant for a GPU"
    )
    return [
        Check("core", "Python 3.11 or newer", "ok" if python_ok else "missing", platform.python_version()),
        Check("core", "processor", "ok", f"{os.cpu_count()} cores, {memory:.0f} GB memory"),
        Check("core", "GPU", "ok" if torch.cuda.is_available() else "optional", gpu),
        Check("core", "disk", "ok" if free > LEAST_DISK_GB else "optional", f"{free:.0f} GB free"),
    ]


def main(given: Sequence[str] | None = None) -> int:
    """Run the command line: print all checks and return the exit code."""
    argparse.ArgumentParser(
        prog="python -m harness.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(given)
    checks = [*machine(), *shared(), *(check for name in known() for check in checks_of(find(name)))]
    print("MISSING: the script does not start without it. optional: only some of its features need it.")
    for domain in dict.fromkeys(check.domain for check in checks):
        mine = [check for check in checks if check.domain == domain]
        remedies = dict.fromkeys(check.remedy for check in mine if check.state == "missing")
        print(f"\n{domain}: {'cannot start; run ' + ' and '.join(remedies) if remedies else 'ready'}")
        for check in mine:
            mark = {"ok": "ok", "missing": "MISSING", "optional": "optional"}[check.state]
            remedy = f"   ->  {check.remedy}" if check.remedy and check.state != "ok" else ""
            print(f"  {mark:<10}{check.what:<36}{check.note or 'not installed'}{remedy}")
    return int(any(check.state == "missing" for check in checks))


if __name__ == "__main__":
    sys.exit(main())
