"""A built wheel works alone: torch, numpy and safetensors are all it imports, and it imports fast."""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HUMANOID = ROOT / "rl/sac/humanoid"
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


def build(folder: Path, name: str, links: dict[str, Path]) -> Path:
    """The content of a wheel that is built from a copy of these files, so that the build leaves nothing behind."""
    pytest.importorskip("setuptools", minversion="77")
    source = folder / name
    source.mkdir()
    for target, path in links.items():
        (source / target).symlink_to(path)
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
    (wheel,) = folder.glob(f"{name}-*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "unpacked" / name)
    return folder / "unpacked" / name


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the library, and beside it a folder that holds nothing but the packages it may use."""
    folder = tmp_path_factory.mktemp("wheel")
    site = folder / "unpacked" / "site"
    site.mkdir(parents=True)
    installed = Path(sysconfig.get_paths()["purelib"])
    for name in ALONE.split():
        if (installed / name).exists():
            (site / name).symlink_to(installed / name)
    return build(
        folder, "fire_core", {name: ROOT / name for name in ("pyproject.toml", "LICENSE", "fire_core")}
    )


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the H1 tasks."""
    folder = tmp_path_factory.mktemp("robot")
    return build(folder, "h1_humanoid", {path.name: path for path in HUMANOID.iterdir() if path.is_file()})


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in (".py", ".csv")}


def content(unpacked: Path) -> list[str]:
    return sorted(path.name for path in unpacked.iterdir() if "dist-info" not in path.name)


def test_the_wheel_holds_the_library_and_nothing_else(unpacked: Path) -> None:
    assert content(unpacked) == ["fire_core"]
    assert (unpacked / "fire_core" / "py.typed").exists()
    assert files(unpacked / "fire_core") == files(ROOT / "fire_core")


def test_the_h1_tasks_are_a_distribution_of_their_own(robot: Path) -> None:
    assert content(robot) == ["h1_humanoid"]
    assert files(robot / "h1_humanoid") == files(HUMANOID)
    assert (robot / "h1_humanoid" / "LICENSE.unitree").exists()


def test_the_h1_tasks_of_the_wheel_run_anywhere(robot: Path, tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.modules['fire_core'] = None\n"
        "import gymnasium, h1_humanoid, numpy\n"
        "assert h1_humanoid.__file__.startswith(sys.argv[1]) and not {'rl', 'torch'} & set(sys.modules)\n"
        "env = gymnasium.make('h1-balance_simple-primitive-v0'); env.reset(seed=0)\n"
        "print(env.step(numpy.zeros(19))[0].shape)\n"
        "envs = gymnasium.make_vec('h1-walk-primitive-v0', num_envs=2); print(envs.reset(seed=0)[0].shape)\n"
    )
    command = [sys.executable, "-I", "-c", code, str(robot)]
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
        "save_file({'fc.weight': torch.randn(4, 4)}, 'a.safetensors'); from fire_core.checkpoints.command_line import main;"
        "assert main(['inspect', 'a.safetensors']) == 0; assert main(['apply', 'a.safetensors', 'b.safetensors']) == 0;"
        "sys.exit(main(['inspect', 'a.safetensors', '--plot', 'a.png']))"
    )
    command = [sys.executable, "-S", "-I", "-c", code, str(unpacked), str(unpacked.parent / "site")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "--plot needs matplotlib" in done.stderr, done.stderr
