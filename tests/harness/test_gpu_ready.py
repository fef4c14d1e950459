"""Ready for a GPU, without one: what would make a GPU wait, or launch many small kernels, is counted on the CPU.

In the steady inner loop of every script, the host reads values of tensors at the documented places alone. A copy from
or to a GPU that waits, and tensors on two devices, are not seen here.
"""

import ast
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from training_scripts import ROOT, SCRIPTS, SMALLEST

from fire_core import find_targets, fire
from harness.config import compose, resolve
from harness.domains import find
from vision.models import build

READS = {"item", "tolist", "cpu", "numpy", "equal", "allclose"}
READS |= {"__bool__", "__float__", "__int__", "__index__"}
READS |= {"nonzero", "masked_select", "unique", "argwhere"}  # their sizes depend on values
# Where the host may read in every step.
DOCUMENTED = {
    "language": {"language/data.py batch"},  # where the windows start, drawn on the CPU
    "dqn": {"rl/dqn/play.py act"},  # the emulators need the actions
    # the simulator needs the actions, and Adam counts its steps on the CPU
    "sac": {"rl/sac/policy.py explore", "rl/sac/update.py step"},
}


class Reads(TorchFunctionMode):
    """Notes where values are read: (optimizer steps done by then, stack of the project's code, innermost first)."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.found: list[tuple[int, list[tuple[str, int, str]]]] = []

    def __torch_function__(self, function, kinds, arguments=(), keywords=None):
        if getattr(function, "__name__", "") in READS:
            frame, stack = sys._getframe(1), []
            while frame is not None:
                path = Path(frame.f_code.co_filename)
                if path.is_relative_to(ROOT) and path.parts[len(ROOT.parts)] not in ("tests", ".venv"):
                    stack.append((str(path.relative_to(ROOT)), frame.f_lineno, frame.f_code.co_name))
                frame = frame.f_back
            self.found.append((self.steps, stack))
        return function(*arguments, **(keywords or {}))


def loop_lines(source: str) -> set[int]:
    """Line numbers of the inner loop, the smallest `while`, else the smallest `for`, in which the method is called after a
    step; without the parts of it that run when something is recorded, saved or treated."""
    loops = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.For | ast.While) and "method.after_step(state)" in ast.unparse(node)
    ]
    loop = min(loops, key=lambda node: (isinstance(node, ast.For), len(ast.unparse(node))))
    found = {line for part in loop.body for line in range(part.lineno, part.end_lineno + 1)}
    for part in ast.walk(loop):
        if isinstance(part, ast.If) and "run." in ast.unparse(part):
            found -= set(range(part.lineno, part.end_lineno + 1))
    return found


def reads_in_the_loop(script: str, folder: Path, *overrides: str, line: str = "") -> set[str]:
    """{"file function"} of the reads that came in three steps or more; `line` is put before the call after a step."""
    before, call, after = (ROOT / SCRIPTS[script]).read_text().partition("method.after_step(state)")
    indent = before[before.rindex("\n") + 1 :]
    source = f"{before}{line}\n{indent}{call}{after}" if line else before + call + after
    fixed = ["size=smoke", "device=cpu", f"run.root={folder}", "run.trunk=false", "run.progress=false"]
    composed = compose(find(script), [*fixed, "run.checkpoint_seconds=1e9", *SMALLEST[script], *overrides])
    HydraConfig.instance().set_config(composed)
    module = types.ModuleType(f"rehearsed_{script}")
    module.__file__ = str(ROOT / SCRIPTS[script])
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    reads = Reads()

    def step(*arguments: object) -> None:
        reads.steps += 1

    hook = register_optimizer_step_post_hook(step)
    try:
        with reads:
            module.train.__wrapped__(resolve(find(script), composed))
    finally:
        hook.remove()
    lines, when = loop_lines(source), {}
    for step_number, stack in reads.found:
        if any(path == SCRIPTS[script] and number in lines for path, number, _ in stack):
            when.setdefault(f"{stack[0][0]} {stack[0][2]}", set()).add(step_number)
    return {place for place, steps in when.items() if len(steps) > 2}


@pytest.mark.parametrize(
    "script, change",
    [
        *(("vision", f"method={method}") for method in ("fire", "l2_init", "parseval", "spectral")),
        *((script, "method=fire") for script in ("language", "dqn", "sac")),
    ],
)
def test_loops_read_values_at_documented_places_only(script, change, tmp_path):
    assert reads_in_the_loop(script, tmp_path, change) == DOCUMENTED.get(script, set())


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_number_read_in_the_loop_is_found(script, tmp_path):
    line = "next(next(iter(state.nets.values())).parameters()).detach().sum().item()"
    found = reads_in_the_loop(script, tmp_path, "method=none", line=line) - DOCUMENTED.get(script, set())
    assert found == {f"{SCRIPTS[script]} {'train_in' if script == 'language' else 'train'}"}


class Products(TorchDispatchMode):
    """Counts the operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, kinds, arguments=(), keywords=None):
        self.calls[operation.overloadpacket.__name__] += 1
        return operation(*arguments, **(keywords or {}))


def test_fire_multiplies_matrices_of_one_shape_together(monkeypatch):
    """With the stacks of a GPU: two products for each step and shape, however many matrices there are."""
    monkeypatch.setitem(sys.modules["fire_core.solvers.polar"].STACK_BYTES, "cpu", 2**40)
    net = build("resnet18", classes=5, channels=3, image_size=16, width=4)
    shapes = {target.shape for target in find_targets(net).included}
    with Products() as products:
        report = fire(net, iterations=5)
    assert len(report.treated()) > 10 * len(shapes)
    assert sum(products.calls[name] for name in ("bmm", "baddbmm")) <= 2 * 5 * len(shapes) + 20
