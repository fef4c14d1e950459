"""Execute the notebooks of this folder in place, or those that are named: python -m analysis.notebooks [NAME ...]"""

import base64
import os
import sys
from pathlib import Path

from analysis.plot import small_png

HERE = Path(__file__).resolve().parent


def execute(name: str, out: Path = HERE) -> Path:
    """Run one notebook, write it with its outputs into `out`, and return the path. Raises nbclient's error, and writes
    nothing, if a cell fails or takes longer than 20 minutes."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(HERE / f"{name}.ipynb", as_version=4)
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    options = {"timeout": 1200, "startup_timeout": 300, "record_timing": False}
    NotebookClient(notebook, resources={"metadata": {"path": str(HERE)}}, **options).execute()
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        if picture := output.get("data", {}).get("image/png"):
            output["data"]["image/png"] = base64.b64encode(small_png(base64.b64decode(picture))).decode()
        if "text/html" in output.get("data", {}):
            output["data"]["text/plain"] = "table"  # GitHub and Jupyter show the HTML
    nbformat.write(notebook, out / f"{name}.ipynb")
    return out / f"{name}.ipynb"


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in HERE.glob("*.ipynb")):
        print(execute(name), flush=True)
