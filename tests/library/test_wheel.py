"""A wheel installed in an empty environment works alone: torch, numpy and safetensors are all it imports, and fast."""

import subprocess
import sys
import sysconfig
import tomllib
import venv
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
# torch and what torch itself requires, numpy, safetensors
ALONE = """torch torchgen functorch numpy numpy.libs safetensors sympy mpmath networkx jinja2 markupsafe filelock
    fsspec typing_extensions.py nvidia triton"""
CHECK = """
import importlib, importlib.metadata, pkgutil, sys, time
import torch
start = time.process_time()
import fire_core
seconds = time.process_time() - start
assert fire_core.__file__.startswith(sys.prefix), fire_core.__file__
assert fire_core.__version__ == importlib.metadata.version("fire-core") == sys.argv[1]
needs_more = "fire_core.integrations."
for module in pkgutil.walk_packages(fire_core.__path__, "fire_core."):
    if not module.name.startswith(needs_more) and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
assert len(fire_core.fire(model).treated()) == 2
print(seconds)
"""


def output(*command: str | Path, folder: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def environment(folder: Path) -> Path:
    """A new environment in a folder: the wheel of the library is installed, and what it requires."""
    (source := folder / "source").mkdir()  # of links, so that the build leaves nothing behind
    for name in ("pyproject.toml", "LICENSE", "fire_core"):
        (source / name).symlink_to(ROOT / name)
    pip = (sys.executable, "-m", "pip", "-q")
    output(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source)
    venv.create(folder / "empty", with_pip=False, symlinks=True)
    (site,) = folder.glob("empty/lib/python*/site-packages")
    installed = Path(sysconfig.get_paths()["purelib"])
    for name in ALONE.split():
        if (installed / name).exists():
            (site / name).symlink_to(installed / name)
    # pip sees its own environment too, where the same version may be installed as a link to this folder
    alone = ("install", "--ignore-installed", "--no-deps", "--no-index")
    output(*pip, "--python", folder / "empty/bin/python", *alone, *folder.glob("fire_core-*.whl"))
    return folder / "empty"


def test_the_wheel_imports_alone_and_fast_and_so_does_its_command_line(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version} (" in (ROOT / "CHANGELOG.md").read_text()
    run = partial(output, environment(tmp_path) / "bin/python", "-I", folder=tmp_path)
    assert float(run("-c", CHECK, version)) < 2.0, "processor seconds beyond the import of torch"
    save_file({"fc.weight": torch.randn(4, 4)}, tmp_path / "a.safetensors")
    for arguments in (["inspect", "a.safetensors"], ["apply", "a.safetensors", "b.safetensors"]):
        run("-m", "fire_core", *arguments)
    assert (tmp_path / "b.safetensors").exists()
