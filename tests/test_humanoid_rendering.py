"""Pictures of the H1 tasks, which nothing else needs, and a simulator that does not load."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest

mujoco = pytest.importorskip("mujoco")

import rl.sac.humanoid  # noqa: E402, F401
from fire_core.errors import UserError  # noqa: E402
from rl.sac.humanoid import rendering  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]


def test_without_opengl_rendering_names_the_remedy(monkeypatch):
    def broken(name: str):
        raise ImportError(f"no {name}")

    env = gymnasium.make("h1-walk-primitive-v0", render_mode="rgb_array")
    env.reset(seed=0)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    with monkeypatch.context() as patched:
        patched.setattr(rendering.importlib, "import_module", broken)
        with pytest.raises(UserError, match=r"apt-get install libegl1.*egl: no mujoco\.egl"):
            env.render()

    def late(*_):
        raise mujoco.FatalError("an OpenGL platform library has not been loaded")

    monkeypatch.setattr(rendering.mujoco, "MjrContext", late)
    with pytest.raises(UserError, match="apt-get install libegl1"):
        env.render()
    env.close()


def test_a_picture_shows_the_robot():
    env = gymnasium.make("h1-walk-primitive-v0", render_mode="rgb_array", width=96, height=72)
    env.reset(seed=0)
    try:
        picture = env.render()
    except UserError as error:
        pytest.skip(str(error))
    assert picture.shape == (72, 96, 3) and picture.dtype == np.uint8
    assert picture.std() > 10
    env.close()


@pytest.mark.parametrize("size", [(1920, 1080), (0, 480), (640, -5)])
def test_a_picture_that_does_not_fit_the_buffer_is_refused(size):
    with pytest.raises(
        UserError, match=rf"width={size[0]}, height={size[1]}: pictures have 1 to 1280 by 1 to 960"
    ):
        gymnasium.make("h1-walk-primitive-v0", render_mode="rgb_array", width=size[0], height=size[1])


def test_cameras_do_not_touch_one_another_and_end_with_python():
    """In a process of its own, which ends without `close` and without a word."""
    code = (
        "import gymnasium, rl.sac.humanoid\n"
        "one, other = (gymnasium.make('h1-walk-primitive-v0', render_mode='rgb_array') for _ in range(2))\n"
        "one.reset(seed=0); other.reset(seed=0)\n"
        "before = (one.render(), other.render())[1]\n"
        "one.close()\n"
        "assert (other.render() == before).all()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    if "off-screen OpenGL" in done.stderr:
        pytest.skip("no OpenGL here")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "raise AttributeError('no glGetError')",
            "MuJoCo does not load with MUJOCO_GL='osmesa': unset it.*no glGetError",
        ),
        ("raise ImportError('no mujoco')", "MuJoCo is missing .*pip install"),
    ],
)
def test_a_simulator_that_does_not_load_is_one_line(tmp_path, fault, message):
    (tmp_path / "mujoco.py").write_text(fault)
    done = subprocess.run(
        [sys.executable, "-c", "import gymnasium, rl.sac.humanoid; gymnasium.make('h1-walk-primitive-v0')"],
        capture_output=True,
        text=True,
        env={**os.environ, "MUJOCO_GL": "osmesa", "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        timeout=120,
    )
    assert re.search(f"UserError: {message}", done.stderr.splitlines()[-1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_simulator_loads_is_not_a_missing_package(tmp_path, number):
    """Compiled modules report any exception of their own start as an ImportError."""
    (tmp_path / "mujoco.py").write_text(
        f"import os\ntry:\n    os.kill(os.getpid(), {number:d})\n    sum(range(10**6))\n"
        "except KeyboardInterrupt:\n    raise ImportError('initialization failed') from None\n"
    )
    code = "from harness import stop; stop.raise_interrupt(); import rl.sac.humanoid.simulator"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        timeout=120,
    )
    assert done.stderr.splitlines()[-1] == f"KeyboardInterrupt: {number:d}", done.stderr


def test_training_needs_no_opengl_and_ids_of_others_are_left_alone():
    code = (
        "import sys, gymnasium\n"
        "gymnasium.register('h1-walk-v0', entry_point='theirs:Env')\n"
        "import rl.sac.humanoid\n"
        "env = gymnasium.make('h1-walk-primitive-v0'); env.reset(seed=0); env.step(env.action_space.sample())\n"
        "assert gymnasium.spec('h1-walk-v0').entry_point == 'theirs:Env'\n"
        "assert 'OpenGL' not in sys.modules and 'mujoco.egl' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)
