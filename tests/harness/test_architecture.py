"""Arrows between packages point down only, and no module imports itself in a circle."""

import ast
import re
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("fire_core", "harness", "vision language rl", "analysis", "benchmarks")
RINGS = (  # of fire_core, the inner ones first; all else is the outer one
    "columns errors files passes seeding solvers targets measure units wrapped_models",
    "engine distributed report optim_state triggers state",
)
KNOWN = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in " ".join(FLOORS).split()
    for path in sorted((ROOT / package).rglob("*.py"))
}


def imports(name, *, at_import_only=False):
    """Modules of the project that one imports; `at_import_only` leaves out imports inside functions and for types."""
    found, package = set(), name if KNOWN[name].name == "__init__.py" else name.rpartition(".")[0]

    def visit(node):
        for child in ast.iter_child_nodes(node):
            lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if at_import_only and (lazy or typing):
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            if isinstance(child, ast.ImportFrom):
                base = resolve_name("." * child.level + (child.module or ""), package)
                wholes = [f"{base}.{alias.name}" for alias in child.names]
                found.update(whole if whole in KNOWN else base for whole in wholes)
            visit(child)

    visit(ast.parse(KNOWN[name].read_text(encoding="utf-8")))
    return (found & KNOWN.keys()) - {name}


def level(name, groups):
    return next((i for i, group in enumerate(groups) if name in group.split()), len(groups))


def place(module):
    """Numbers of its floor and, in the library, of its ring."""
    package, part, *_ = f"{module}.".split(".")
    return level(package, FLOORS), level(part, RINGS) if package == "fire_core" else 0


def test_arrows_point_down_and_in_the_library_inwards():
    for name in KNOWN:
        for target in imports(name):
            same_package = name.split(".")[0] == target.split(".")[0]
            down = place(target) <= place(name) if same_package else place(target)[0] < place(name)[0]
            assert down, f"{name} imports {target}"


def test_files_are_replaced_by_one_writer_only():
    texts = {name: path.read_text(encoding="utf-8") for name, path in KNOWN.items()}
    writers = [name for name, text in texts.items() if re.search(r"os\.(replace|rename)\b", text)]
    assert writers == ["fire_core.files"]


def test_no_circles():
    arrows = {name: imports(name, at_import_only=True) for name in KNOWN}
    TopologicalSorter(arrows).prepare()  # raises CycleError, with the circle
