"""Arrows between packages point down only, and no module imports itself in a circle."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLOORS = {
    "fire_core": set(),
    "harness": {"fire_core"},
    "vision": {"fire_core", "harness"},
    "language": {"fire_core", "harness"},
    "rl": {"fire_core", "harness"},
    "analysis": {"fire_core", "harness", "vision", "language", "rl"},
    "benchmarks": {"fire_core", "harness", "vision", "language", "rl", "analysis"},
}
RINGS = (  # of fire_core, the inner ones first; all else is the outer one
    {
        "columns",
        "errors",
        "files",
        "passes",
        "seeding",
        "solvers",
        "targets",
        "measure",
        "units",
        "wrapped_models",
    },
    {"engine", "distributed", "report", "optim_state", "triggers", "state"},
)


def modules():
    """{dotted name: path} of the project's files."""
    found = {}
    for package in FLOORS:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name, path, known, *, at_import_only):
    """Modules of the project that a file imports; `at_import_only` leaves out imports inside functions and for types."""
    found = set()

    def visit(node):
        for child in ast.iter_child_nodes(node):
            lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if at_import_only and (lazy or typing):
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            if isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
                    for _ in range(child.level - 1):
                        package = package.rpartition(".")[0]
                    base = f"{package}.{base}".rstrip(".")
                for alias in child.names:
                    whole = f"{base}.{alias.name}"
                    found.add(whole if whole in known else base)
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return {module for module in found if module in known and module != name}


def test_arrows_point_down():
    known = modules()
    for name, path in known.items():
        below = FLOORS[name.split(".")[0]] | {name.split(".")[0]}
        for target in imports(name, path, known, at_import_only=False):
            assert target.split(".")[0] in below, f"{name} imports {target}"


def ring(module):
    part = module.split(".")[1] if "." in module else ""
    return next((i for i, members in enumerate(RINGS) if part in members), len(RINGS))


def test_the_rings_of_the_library_point_inwards():
    known = {name: path for name, path in modules().items() if name.startswith("fire_core")}
    for name, path in known.items():
        for target in imports(name, path, known, at_import_only=False):
            assert ring(target) <= ring(name), f"{name} imports {target}"


def test_files_are_replaced_by_one_writer_only():
    files = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in modules().values()}
    assert [name for name, text in files.items() if re.search(r"os\.(replace|rename)\b", text)] == [
        "fire_core/files.py"
    ]


def test_no_circles():
    known = modules()
    arrows = {name: imports(name, path, known, at_import_only=True) for name, path in known.items()}
    TopologicalSorter(arrows).prepare()  # raises CycleError, with the circle
