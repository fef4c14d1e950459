"""Turn the percent-format sources into executed notebooks.

python -m analysis.notebooks [NAME ...] [--out runs/notebooks]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fire_core.errors import UserError

SOURCES = Path(__file__).resolve().parent
ROOT = SOURCES.parents[1]


def names() -> list[str]:
    return sorted(path.stem for path in SOURCES.glob("*.py") if not path.stem.startswith("_"))


def execute(name: str, out: Path, seconds: int = 1200) -> Path:
    """Run one source from the repository root and write it with its outputs as .ipynb; errors stop it."""
    try:
        import jupytext
        from nbclient import NotebookClient
    except ImportError as error:
        raise UserError(
            "notebooks need two packages: .venv/bin/python -m pip install -e '.[notebooks]'"
        ) from error
    notebook = jupytext.read(SOURCES / f"{name}.py")
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    NotebookClient(
        notebook, timeout=seconds, startup_timeout=300, resources={"metadata": {"path": str(ROOT)}}
    ).execute()
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.ipynb"
    jupytext.write(notebook, path)
    return path


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.notebooks", description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", help=f"default all: {', '.join(names())}")
    parser.add_argument("--out", default="runs/notebooks")
    options = parser.parse_args(given)
    unknown = sorted(set(options.name) - set(names()))
    if unknown:
        print(f"error: no notebook '{unknown[0]}'; there are {', '.join(names())}", file=sys.stderr)
        return 2
    try:
        for name in options.name or names():
            print(f"executing {name} ...", flush=True)
            print(execute(name, Path(options.out)), flush=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
