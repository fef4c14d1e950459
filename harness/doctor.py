"""Show what each script needs, what is installed, and the command that installs the rest.

    python -m harness.doctor

The exit code is 1 if a script does not start because something is missing.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence

import torch

from fire_core.columns import columns
from harness.domains import find, known
from harness.runs.machine import ROOT, hardware, installed, requirements
from harness.settings import Domain

OK, MISSING, OPTIONAL = "ok", "MISSING", "optional"
Check = dict[str, str]  # state, what, note, remedy: the command that brings what is not there


def machine() -> Iterator[Check]:
    """Yield the checks of processor, GPU and disk."""
    free = shutil.disk_usage(ROOT).free / 1e9
    yield check(OK, "processor", hardware())
    if not torch.cuda.is_available():
        yield check(OPTIONAL, "GPU", "none found; size=paper is meant for a GPU")
    yield check(OK if free > 10 else OPTIONAL, "disk", f"{free:.0f} GB free")


def needs_of(domain: Domain) -> Iterator[Check]:
    """Yield the checks of the packages and the data of one script."""
    yield from packages(*domain.extras, needed={plain(name) for name in domain.needs})
    for what, folder, remedy in domain.data:
        here = (ROOT / folder).is_dir() and any((ROOT / folder).iterdir())
        absent = MISSING if remedy.startswith("git checkout") else OPTIONAL
        yield check(OK if here else absent, what, folder if here else f"not in {folder}", remedy)


def packages(*extras: str, needed: set[str] | None = None) -> Iterator[Check]:
    """Yield a check of each package that extras install. `needed`: those that must be there; None: all."""
    for extra in extras:
        for name in requirements(extra):
            version = installed(name)
            absent = MISSING if needed is None or plain(name) in needed else OPTIONAL
            yield check(OK if version else absent, name, version or "not installed", installs(extra))


def check(state: str, what: str, note: str, remedy: str = "") -> Check:
    return {"state": state, "what": what, "note": note, "remedy": remedy if state != OK else ""}


def plain(name: str) -> str:
    """Return the name of a package or of its module in the form in which both are the same."""
    return name.lower().replace("_", "-")


def installs(extra: str) -> str:
    """Return the command that installs an extra: a target of the Makefile if there is one, else pip."""
    if extra == "suite":
        return "make install"
    is_target = f"\ninstall-{extra}:" in (ROOT / "Makefile").read_text()
    return f"make install-{extra}" if is_target else f".venv/bin/python -m pip install -e '.[{extra}]'"


def main(given: Sequence[str] | None = None) -> int:
    """Run the command line: print all checks and return the exit code."""
    argparse.ArgumentParser(
        prog="python -m harness.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(given)
    parts = {"this machine": machine(), "all scripts and the analysis": packages("suite")}
    parts |= {name: needs_of(find(name)) for name in known()}
    parts |= {"sweeps in parallel": packages("ray", "slurm", needed=set())}
    print("MISSING: the script does not start without it. optional: only some of its features need it.")
    missing = False
    for name, checks in parts.items():
        rows = list(checks)
        remedies = dict.fromkeys(row["remedy"] for row in rows if row["state"] == MISSING)
        missing |= bool(remedies)
        print(f"\n{name}: {'cannot start; run ' + ' and '.join(remedies) if remedies else 'ready'}")
        print("\n".join(f"  {line}" for line in columns(rows).splitlines()[1:]))
    return int(missing)


if __name__ == "__main__":
    sys.exit(main())
