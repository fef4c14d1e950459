"""Execute the notebooks of this folder and save their outputs: python -m analysis.notebooks [NAME ...] [--out
FOLDER]."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fire_core.errors import UserError, print_error

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def names() -> list[str]:
    """Return the names of all notebooks, without the ending."""
    return sorted(path.stem for path in HERE.glob("*.ipynb"))


def execute(name: str, out: Path = HERE) -> Path:
    """Run one notebook from the repository root, write it with its outputs into `out`, and return the path. Nothing is
    written if a cell raises an error or takes longer than 20 minutes; nbclient's error is raised then."""
    try:
        import nbformat
        from nbclient import NotebookClient
    except ImportError as error:
        raise UserError(
            "notebooks need two packages: run make install-all, or pip install -e '.[notebooks]'"
        ) from error
    notebook = nbformat.read(HERE / f"{name}.ipynb", as_version=4)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    resources = {"metadata": {"path": str(ROOT)}}
    options = {"timeout": 1200, "startup_timeout": 300, "resources": resources, "record_timing": False}
    NotebookClient(notebook, **options).execute()
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.notebooks", description=__doc__)
    parser.add_argument("name", nargs="*", help=f"default all: {', '.join(names())}")
    parser.add_argument("--out", default=HERE, type=Path, help="folder of the results; default: in place")
    options = parser.parse_args(given)
    unknown = sorted(set(options.name) - set(names()))
    try:
        if unknown:
            raise UserError(f"there is no notebook {unknown[0]!r}; choose from {', '.join(names())}")
        for name in options.name or names():
            print(f"executing {name} ...", flush=True)
            print(execute(name, options.out), flush=True)
    except UserError as error:
        print_error(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
