"""Training scripts in forks of one process that has imported them, and configs of command lines composed once."""

import json
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from fire_core.methods import available
from harness.config import compose, resolve, settings_of
from harness.domains import find
from harness.overrides import check_overrides

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {name.split("/")[-1]: f"{name}/train.py" for name in ("vision", "language", "rl/dqn", "rl/sac")}
SMALLEST = {
    "vision": ["experiment=label_noise", "protocol.epochs=[1,2]", "batch_size=20", "metrics_samples=32"],
    "language": ["experiment=fig3_best", "boundary.fork=last", "eval_windows=2"],
    "dqn": ["experiment=fig4a_catch", "total_steps=320", "midpoint=160", "random_episodes=4"],
    "sac": ["experiment=fig4b_hopper", "steps=120", "midpoint=60", "random_episodes=1", "eval_limit=20"],
}
SERVER = """
import importlib, json, os, runpy, sys, traceback
script, *modules = sys.argv[1:]
for module in modules:
    importlib.import_module(module)
for line in sys.stdin:
    arguments, before, log = json.loads(line)
    child = os.fork()
    if child == 0:
        for stream in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        code, sys.argv = 0, [script, *arguments]
        try:
            exec(before, {})
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def compose_config(name: str, overrides: list[str]) -> DictConfig:
    """The checked config of a command line of the script of a domain."""
    check_overrides(find(name), overrides)
    return resolve(find(name), compose(find(name), overrides))


def with_method(composed: DictConfig, name: str) -> DictConfig:
    """What Hydra composes with method=NAME, from what it composed with another method."""
    method = {"method": settings_of(available()[name])}
    return OmegaConf.create(dict(composed.items_ex(resolve=False)) | method)


def train_here(script: str, root: Path, *overrides: str) -> None:
    """Train a smoke run of a script in this process, on the CPU or inside `pretended_gpu()`."""
    given = ["size=smoke", "device=cpu", f"run.root={root}", "run.progress=false", *SMALLEST[script]]
    composed = compose(find(script), [*given, *overrides])
    HydraConfig.instance().set_config(composed)
    runpy.run_path(str(ROOT / SCRIPTS[script]))["train"].__wrapped__(resolve(find(script), composed))


class Script:
    """One training script. `modules` are imported first. The process ends with that of the tests, whose pipe it reads."""

    def __init__(self, path: str, *modules: str):
        self.path = str(ROOT / path)
        own = () if Path(path).is_absolute() else (path.removesuffix(".py").replace("/", "."),)
        self.modules = (*own, *modules)
        self.server: subprocess.Popen | None = None

    def run(self, arguments: list[str], before: str = "", expect: tuple[int, ...] = (0,)) -> str:
        """All that a command line printed, ending with an expected exit code (or -signal), after the Python `before`."""
        if self.server is None or self.server.poll() is not None:
            command, pipe = [sys.executable, "-c", SERVER, self.path, *self.modules], subprocess.PIPE
            self.server = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
        with tempfile.NamedTemporaryFile("r") as log:
            print(json.dumps([arguments, before, log.name]), file=self.server.stdin, flush=True)
            code, output = self.server.stdout.readline(), log.read()
        assert code and int(code) in expect, output[-3000:]
        return output

    def train(self, root: Path, *overrides: str, before: str = "", expect: int = 0) -> str:
        """All that a smoke run below `root` printed."""
        fixed = ["size=smoke", "device=cpu", "threads=1", "run.progress=false", f"run.root={root}"]
        return self.run([*fixed, *overrides], before, (expect,))


def metrics_of(root: Path, label: str = "*") -> list[dict]:
    """The lines of the only run below `root`, or of the one with this label."""
    [path] = root.glob(f"*/smoke/{label}/seed_1/metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def killed(condition: str, act: str = "os._exit(9)") -> str:
    """Python that ends a run as SIGKILL would, or acts, after the first checkpoint whose `step` fulfils the condition."""
    return f"""
import os, signal
from harness.runs import Run
save = Run.save
def dying(self, step, parts, name=None):
    save(self, step, parts, name)
    if name is None and {condition}:
        {act}
Run.save = dying
"""
