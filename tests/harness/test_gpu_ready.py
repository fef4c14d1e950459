"""On the pretended GPU no run mixes devices, the steady loop reads nothing, and what is compiled has one shape."""

import statistics
import sys
from functools import partial

import pytest
import torch
from pretended_gpu import GPU, Counts, Gpu, pretended_gpu
from training_scripts import SCRIPTS, train_here

from fire_core import find_targets, fire
from fire_core.attach import Attached
from vision.models import build

SHORT = {
    "vision": [], "language": ["phase_1.iterations=6", "phase_1.save_at=[]", "phase_2.iterations=4"],
    "dqn": ["total_steps=240", "midpoint=160"], "sac": ["steps=80", "midpoint=60", "env.action_repeat=1"],
}  # fmt: skip
# Host reads in a step: the emulators and the simulator need the actions, and SNR the units that are due.
ACTS = {"dqn": {"rl/dqn/play.py act": 1}, "sac": {"rl/sac/policy.py explore": 1}}
SNR = {"fire_core/methods/snr.py indices": 1}


def steady(counts: Counts) -> dict[str, float]:
    """Return the median over all steps of the reads at each place, without zeros. Records and boundaries are rare."""
    places = {place for _, place in counts.reads}
    median = {p: statistics.median(counts.reads[s, p] for s in range(counts.step)) for p in places}
    return {place: number for place, number in median.items() if number}


@pytest.mark.parametrize(
    "script, method",
    [
        *((script, method) for script in SCRIPTS for method in ("fire", "full_reset")),
        ("vision", "snr method.variant=official method.first_phase=0"),
        *((script, "l2_init method.first_phase=0") for script in ("language", "dqn", "sac")),
        ("dqn", "upgd method.first_phase=0"),
    ],
)
def test_a_run_is_on_one_device_and_its_loop_reads_what_it_must(script, method, tmp_path):
    with pretended_gpu() as counts:
        train_here(script, tmp_path, *SHORT[script], *f"method={method}".split())
    assert steady(counts) == ACTS.get(script, {}) | (SNR if "snr" in method else {})
    assert statistics.median(counts.operations[step] for step in range(counts.step)) > 20


def test_a_stopped_run_resumes_on_the_gpu(tmp_path, monkeypatch):
    given = ["method=fire", "run.checkpoint_steps=1", "run.trunk=false"]
    after_step = Attached.after_step

    def stopping(self, *args, **kwargs):
        after_step(self, *args, **kwargs)
        if self.state.phase == 1:
            raise KeyboardInterrupt

    with pretended_gpu(), monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Attached, "after_step", stopping)
        train_here("vision", tmp_path, *given)
    with pretended_gpu() as counts:
        train_here("vision", tmp_path, *given)
    assert counts.step == 20  # of 25: the checkpoint is that of phase 0's end
    assert list(tmp_path.rglob("DONE"))


def test_what_fails_or_waits_on_cuda_is_noticed():
    with pretended_gpu() as counts:
        there, here = torch.ones(3, device=GPU), torch.ones(3)
        with pytest.raises(RuntimeError, match="add on tensors of the CPU and of the GPU"):
            there + here
        with pytest.raises(RuntimeError, match="a CPU generator"):
            torch.randn(3, device=GPU, generator=torch.Generator())
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        assert isinstance(there * 2.0 + torch.tensor(1.0), Gpu)  # numbers may come from the CPU
        assert not counts.reads
        waits = (lambda x: x.sum().item(), lambda x: bool(x[0]), lambda x: x[x > 0])
        for number, wait in enumerate((*waits, Gpu.cpu, Gpu.tolist, Gpu.nonzero, here.copy_), 1):
            wait(there)
            assert sum(counts.reads.values()) == number


@pytest.mark.parametrize("script, graphs", [("vision", 1), ("language", 2)])
def test_graphs_are_static_one_for_training_and_one_for_evaluation(script, graphs, tmp_path, monkeypatch):
    compiled = []

    def backend(graph, inputs):
        compiled.append(any(isinstance(each, torch.SymInt) for each in inputs))
        return graph

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    more = {"vision": ["batch_size=32"], "language": ["eval_windows=3", "eval_batch_size=2", "batch_size=4"]}
    more = [*SHORT[script], *more[script], "method=none", "compile=true", "run.trunk=false"]
    train_here(script, tmp_path, *more)
    torch._dynamo.reset()
    assert compiled == [False] * graphs


def test_fire_multiplies_matrices_of_one_shape_together(monkeypatch):
    monkeypatch.setitem(sys.modules["fire_core.solvers.polar"].STACK_BYTES, "cpu", 2**40)
    net = build("resnet18", classes=5, channels=3, image_size=16, width=4)
    shapes = {target.shape for target in find_targets(net).included}
    with torch.profiler.profile() as profile:
        report = fire(net, iterations=5)
    assert len(report.treated()) > 10 * len(shapes)
    products = [each.count for each in profile.key_averages() if each.key in ("aten::bmm", "aten::baddbmm")]
    assert 5 * len(shapes) < sum(products) <= 2 * 5 * len(shapes) + 20
