"""Arrows between packages point down only, and no module imports itself in a circle."""

import ast
import re
from graphlib import TopologicalSorter
from importlib.util import resolve_name
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


def modules(*packages):
    """{dotted name: path} of the files of packages."""
    paths = [
        path.relative_to(ROOT) for package in packages for path in sorted((ROOT / package).rglob("*.py"))
    ]
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): ROOT / path for path in paths}


def imports(name, known, *, at_import_only=False):
    """Modules among `known` that one imports; `at_import_only` leaves out imports inside functions and for types."""
    found, package = set(), name if known[name].name == "__init__.py" else name.rpartition(".")[0]

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
                found.update(whole if whole in known else base for whole in wholes)
            visit(child)

    visit(ast.parse(known[name].read_text(encoding="utf-8")))
    return (found & known.keys()) - {name}


def test_arrows_point_down():
    for name in (known := modules(*FLOORS)):
        own = name.split(".")[0]
        for target in imports(name, known):
            assert target.split(".")[0] in FLOORS[own] | {own}, f"{name} imports {target}"


def ring(module):
    part = module.split(".")[1] if "." in module else ""
    return next((i for i, members in enumerate(RINGS) if part in members), len(RINGS))


def test_the_rings_of_the_library_point_inwards():
    for name in (known := modules("fire_core")):
        for target in imports(name, known):
            assert ring(target) <= ring(name), f"{name} imports {target}"


def test_files_are_replaced_by_one_writer_only():
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules(*FLOORS).items()}
    writers = [name for name, text in texts.items() if re.search(r"os\.(replace|rename)\b", text)]
    assert writers == ["fire_core.files"]


def test_no_circles():
    known = modules(*FLOORS)
    arrows = {name: imports(name, known, at_import_only=True) for name in known}
    TopologicalSorter(arrows).prepare()  # raises CycleError, with the circle
