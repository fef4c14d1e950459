"""A built wheel works alone: torch, numpy and safetensors are all it imports, and it imports fast."""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# torch and what torch itself requires, numpy, safetensors
ALONE = (
    "torch torchgen functorch numpy numpy.libs safetensors sympy mpmath networkx jinja2 markupsafe filelock fsspec "
    "typing_extensions.py nvidia triton"
)
CHECK = """
import importlib, pkgutil, sys, time
sys.path[:0] = sys.argv[1:]
import torch
start = time.process_time()
import fire_core
seconds = time.process_time() - start
assert fire_core.__file__.startswith(sys.argv[1]), fire_core.__file__
needs_more = "fire_core.integrations."
for module in pkgutil.walk_packages(fire_core.__path__, "fire_core."):
    if not module.name.startswith(needs_more) and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
assert len(fire_core.fire(model).treated()) == 2
print(seconds)
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel's content, and beside it a folder that holds nothing but the packages it may use."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    source, site = folder / "source", folder / "site"
    source.mkdir()
    site.mkdir()
    for name in ("pyproject.toml", "LICENSE", "fire_core", "rl"):
        (source / name).symlink_to(ROOT / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        folder,
        source,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "unpacked")
    installed = Path(sysconfig.get_paths()["purelib"])
    for name in ALONE.split():
        if (installed / name).exists():
            (site / name).symlink_to(installed / name)
    return folder / "unpacked"


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in (".py", ".csv")}


def test_the_wheel_holds_the_library_the_robot_and_nothing_else(unpacked: Path) -> None:
    found = sorted(path.name for path in unpacked.iterdir() if "dist-info" not in path.name)
    assert found == ["fire_core", "h1_humanoid"]
    assert (unpacked / "fire_core" / "py.typed").exists()
    assert files(unpacked / "fire_core") == files(ROOT / "fire_core")
    assert files(unpacked / "h1_humanoid") == files(ROOT / "rl/sac/humanoid")
    assert (unpacked / "h1_humanoid" / "LICENSE.unitree").exists()


def test_the_h1_tasks_of_the_wheel_run_anywhere(unpacked: Path, tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import gymnasium, h1_humanoid, numpy\n"
        "assert h1_humanoid.__file__.startswith(sys.argv[1]) and 'rl' not in sys.modules\n"
        "env = gymnasium.make('h1-balance_simple-primitive-v0'); env.reset(seed=0)\n"
        "print(env.step(numpy.zeros(19))[0].shape)\n"
        "envs = gymnasium.make_vec('h1-walk-primitive-v0', num_envs=2); print(envs.reset(seed=0)[0].shape)\n"
    )
    command = [sys.executable, "-I", "-c", code, str(unpacked)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.split("\n")[:2] == ["(64,)", "(2, 51)"], done.stderr


def test_the_wheel_imports_alone_and_fast(unpacked: Path) -> None:
    command = [sys.executable, "-S", "-I", "-c", CHECK, str(unpacked), str(unpacked.parent / "site")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=unpacked.parent)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2.0, "processor seconds beyond the import of torch"


def test_without_other_packages_the_command_line_works(unpacked: Path, tmp_path: Path) -> None:
    """No tqdm, no matplotlib: no progress bar, and --plot says what is missing."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:3]; from safetensors.torch import save_file; import torch;"
        "save_file({'fc.weight': torch.randn(4, 4)}, 'a.safetensors'); from fire_core.__main__ import main;"
        "assert main(['inspect', 'a.safetensors']) == 0; assert main(['apply', 'a.safetensors', 'b.safetensors']) == 0;"
        "sys.exit(main(['inspect', 'a.safetensors', '--plot', 'a.png']))"
    )
    command = [sys.executable, "-S", "-I", "-c", code, str(unpacked), str(unpacked.parent / "site")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "--plot needs matplotlib" in done.stderr, done.stderr
