"""Ready for a GPU, without one: every script is run on the stand-in of tests/stand_in.py, or on a GPU where there is one.

Nothing mixes devices, no CPU generator is asked for numbers of the device, and in the steady inner loops the host waits
for the device at the documented places alone. Each check is also shown to fail with the mistake put into the script.
"""

import ast
import types
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from stand_in import DEVICE, ROOT, DevicesMixed, watched
from torch import Tensor
from torch.utils._pytree import tree_leaves

import vision.official  # noqa: F401 (registers the variants)
from fire_core.methods import variants
from harness.config import compose, resolve
from harness.domains import find, methods_of
from vision.models import build

SCRIPTS = {
    "vision": "vision/train.py",
    "language": "language/train.py",
    "dqn": "rl/dqn/train.py",
    "sac": "rl/sac/train.py",
}
SMALLEST = {
    "vision": ["experiment=label_noise", "protocol.epochs=1", "batch_size=20", "metrics_samples=32"],
    "language": ["experiment=fig3_best", "boundary.fork=last", "eval_windows=2"],
    "dqn": ["experiment=fig4a_catch", "total_steps=320", "midpoint=160", "random_episodes=4"],
    "sac": ["experiment=fig4b_hopper", "steps=80", "midpoint=40", "random_episodes=1", "eval_limit=20"],
}
# Where the host may wait in every step.
DOCUMENTED = {
    "dqn": {"rl/dqn/play.py act"},  # the emulators need the actions
    "sac": {"rl/sac/policy.py explore"},  # so does the simulator
}
# These methods decide on the CPU, after every step, which units are replaced, and replace them.
UNITS = {f"fire_core/methods/{name}.py choose" for name in ("cbp", "snr")}
UNITS |= {
    "vision/official/snr.py choose",
    "fire_core/units/recycling.py recycle",
    "vision/official/outputs.py reset_rows",
}


def source_of(script: str) -> str:
    return (ROOT / SCRIPTS[script]).read_text()


def loop_lines(source: str) -> set[int]:
    """Line numbers of the inner loop, the smallest `while`, else the smallest `for`, in which the method is called after a
    step; without the parts of it that run when something is recorded, saved or treated."""
    tree = ast.parse(source)
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For | ast.While) and "method.after_step(state)" in ast.unparse(node)
    ]
    loop = min(loops, key=lambda node: (isinstance(node, ast.For), len(ast.unparse(node))))
    found = {line for part in loop.body for line in range(part.lineno, part.end_lineno + 1)}
    for part in ast.walk(loop):
        called = [ast.unparse(node.func) for node in ast.walk(part) if isinstance(node, ast.Call)]
        if isinstance(part, ast.If) and any(name.startswith("run.") for name in called):
            found -= set(range(part.lineno, part.end_lineno + 1))
    return found


def rehearse(
    script: str, folder: Path, *overrides: str, source: str | None = None
) -> tuple[dict[str, str], list]:
    """Run a script of the smallest size on DEVICE: the waits in its steady loop, and the shapes that graphs were given."""
    source = source or source_of(script)
    fixed = ["size=smoke", f"device={DEVICE}", f"run.root={folder}", "run.trunk=false", "run.progress=false"]
    typed = [*fixed, "run.checkpoint_seconds=1e9", *SMALLEST[script], *overrides]
    composed = compose(find(script), typed)
    HydraConfig.instance().set_config(composed)
    module = types.ModuleType(f"rehearsed_{script}")
    module.__file__ = str(ROOT / SCRIPTS[script])
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    shapes: list[list] = []

    def captured(function, device, backend=None):
        def run(*arguments):
            tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
            shapes.append([(t.shape, t.stride(), t.dtype, t.device) for t in tensors])
            return function(*arguments)

        return run

    with (
        patch("rl.captured.captured", captured),
        patch("rl.sac.update.captured", captured),
        patch("rl.dqn.learn.captured", captured),
        watched() as waits,
    ):
        module.train.__wrapped__(resolve(find(script), composed))
    return waits.steady(SCRIPTS[script], loop_lines(source)), shapes


def with_line(script: str, line: str) -> str:
    """The script with a line put into its loop, before the method is called after a step."""
    before, call, after = source_of(script).partition("method.after_step(state)")
    indent = before[before.rindex("\n") + 1 :]
    return f"{before}{line}\n{indent}{call}{after}"


@pytest.mark.parametrize(
    ("script", "change"),
    [
        *(("vision", f"method={method}") for method in methods_of(find("vision"))),
        ("language", "method=fire"),
        ("language", "precision=fp16"),
        ("dqn", "method=fire"),
        ("dqn", "method=plasticity_injection"),
        ("sac", "method=fire"),
        ("sac", "method=l2_init"),
    ],
)
def test_loops_wait_for_the_device_at_documented_places_only(script, change, tmp_path):
    found, _ = rehearse(script, tmp_path, change)
    assert found.keys() - UNITS == DOCUMENTED.get(script, set()), found


@pytest.mark.parametrize("method", [m for m in methods_of(find("vision")) if len(variants(m)) > 1])
def test_the_official_variants_do_too(method, tmp_path):
    found, _ = rehearse("vision", tmp_path, f"method={method}", "method.variant=official", "compat=official")
    assert found.keys() <= UNITS, found


@pytest.mark.parametrize("net", ["resnet18", "vgg16", "vit_tiny"])
def test_nets_stay_on_the_device(net):
    with watched() as waits:
        model = build(net, classes=5, channels=3, image_size=32, width=24).to(DEVICE)
        before = len(waits.found)
        model(torch.zeros(2, 3, 32, 32, device=DEVICE)).sum().backward()
        assert len(waits.found) == before


@pytest.mark.skipif(DEVICE != "meta", reason="a GPU rounds differently")
def test_the_stand_in_computes_what_a_cpu_does(tmp_path):
    rehearse("vision", tmp_path / "stand_in", "method=fire")
    rehearse("vision", tmp_path / "cpu", "method=fire", "device=cpu")
    one, two = (next((tmp_path / name).rglob("metrics.jsonl")) for name in ("stand_in", "cpu"))
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("script", list(SCRIPTS))
def test_a_number_read_in_the_loop_is_found(script, tmp_path):
    source = with_line(script, "next(next(iter(state.nets.values())).parameters()).detach().sum().item()")
    found, _ = rehearse(script, tmp_path, "method=none", source=source)
    function = "train_in" if script == "language" else "train"
    assert found.keys() - DOCUMENTED.get(script, set()) == {f"{SCRIPTS[script]} {function}"}, found


@pytest.mark.parametrize("script", list(SCRIPTS))
@pytest.mark.parametrize(
    "line",
    [
        "next(next(iter(state.nets.values())).parameters()).detach().flatten()[:2] + torch.ones(2)",
        f"torch.randn(2, device='{DEVICE}', generator=torch.Generator())",
    ],
)
def test_something_of_the_cpu_in_the_loop_is_found(script, line, tmp_path):
    with pytest.raises((DevicesMixed, RuntimeError), match="device"):
        rehearse(script, tmp_path, "method=none", source=with_line(script, line))


@pytest.mark.parametrize("script", ["dqn", "sac"])
def test_captured_updates_have_static_shapes(script, tmp_path):
    _, shapes = rehearse(script, tmp_path, "method=fire", "compile=true")
    assert len(shapes) > 10
    assert len({str(each) for each in shapes}) == 1
