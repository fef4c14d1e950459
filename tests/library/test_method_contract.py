"""The contract that every method keeps. A file in fire_core/methods is picked up here without another edit."""

import math
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves

import vision.official  # noqa: F401 (registers the official variants)
from fire_core import UserError, attach
from fire_core.methods import Method, available, create, variants
from tests.polar_cases import gaussian
from tests.tiny_nets import Conv, hooks, train_step
from vision.models import build

NETS = {
    "resnet18": {"width": 4, "image_size": 16},
    "vit_tiny": {"width": 24, "depth": 1, "heads": 2, "image_size": 16},
    "vgg16": {"width": 4, "image_size": 32},
}
# Settings with which methods act on these nets within a few steps: those with a period, a threshold or an age in steps.
SOON = {
    "cbp": {"replacement_rate": 0.2, "maturity": 1}, "snr": {"update_every": 2, "longest": 4},
    "redo": {"every_steps": 2, "threshold": 0.9, "samples": 16},
    "hare_tortoise": {"period": 2, "momentum": 0.5}, "weight_clipping": {"factor": 0.5},
    "cpr": {"every_steps": 2, "rate": 0.5}, "regrama": {"every_steps": 2, "threshold": 0.9},
    "swr": {"every_steps": 2, "factor": 0.3, "decay": 0.5}, "nap": {"every_steps": 2},
    "l2_er": {"every_steps": 4, "rate": 0.1}, "rewarm": {"steps": 3}, "spectral": {"warm_up": 3},
    "plasticity_injection": {"head": "fc2"}, "cbp official": {"replacement_rate": 0.2, "maturity": 2},
    "redo official": {"threshold": 0.9}, "snr official": {"percentile": 0.5},
}  # fmt: skip
CASES = {name: (name, SOON.get(name, {})) for name in available()}
for _name in (name for name in available() if "official" in variants(name)):
    CASES[f"{_name} official"] = _name, {"variant": "official", **SOON.get(f"{_name} official", {})}
DURING = [  # those that act between boundaries
    case
    for case, (name, settings) in CASES.items()
    if name != "none" and (type(create(name, **settings)).treat is Method.treat or "every_steps" in settings)
]
IN_PLACE = [case for case in CASES if "official" not in case and not create(CASES[case][0]).changes_structure]


class Versioned(torch.nn.Identity):  # refuses a state without its version, as MNASNet of torchvision does
    _version, get_extra_state, set_extra_state = 1, lambda self: {"calls": 0}, lambda self, extra: None

    def _load_from_state_dict(self, state, prefix, local, *rest):
        assert local["version"] == 1
        super()._load_from_state_dict(state, prefix, local, *rest)


class Training:
    """A few steps of a small net with a method, as any loop makes them: two boundaries and a test after each pass."""

    def __init__(self, case="none", net="tiny", dtype=torch.float32, first_phase=0, seed=0, **settings):
        torch.manual_seed(seed)
        shape = NETS.get(net, {"image_size": 8})
        self.net = (Conv() if net == "tiny" else build(net, classes=5, channels=3, **shape)).to(dtype)
        self.net.to(memory_format=torch.channels_last if net == "resnet18" else torch.preserve_format)
        self.net.versioned = Versioned()
        inputs = gaussian(2, 8, 3, shape["image_size"], shape["image_size"], seed=5).to(dtype)
        self.data = list(zip(inputs, torch.arange(16).view(2, 8) * 3 % 5))
        name, usual = CASES[case]
        method = create(name, first_phase=first_phase, **{**usual, **settings})
        adam, batches = torch.optim.Adam(self.net.parameters(), lr=1e-3), partial(self.batches)
        batches.test_inputs = lambda count: self.data[0][0]
        given = {"loss": cross_entropy, "batches": batches, "optimizer_state": "clear_changed"}
        self.treatment = attach(method, self.net, adam, **given)
        self.loading, self.steps, self.tested = False, 0, []

    def batches(self):
        assert not self.loading  # the data are not there yet when a checkpoint is loaded
        return iter(self.data[: torch.randint(2, 3, ())])  # draws a number, as a loader that shuffles

    def train(self, steps):
        for _ in range(steps):
            inputs, labels = self.data[self.steps % 2]
            train_step(self.treatment, cross_entropy(self.net(inputs), labels))
            self.steps += 1
            if self.steps % 2 == 0:
                self.treatment.after_pass()
                with self.treatment.evaluating(), torch.no_grad():
                    with self.treatment.evaluating(), pytest.raises(UserError, match="outside evaluating"):
                        self.tested.append(self.weights())
                        self.treatment.state_dict()
                    assert torch.equal(self.weights(), self.tested[-1])
        return self

    def all_phases(self):
        self.train(2).treatment.boundary(1)
        self.train(3).treatment.boundary(2)
        return self.train(3)

    def weights(self):
        return torch.cat([v.flatten().double() for v in self.net.state_dict().values() if torch.is_tensor(v)])

    def everything(self):
        """All numbers of the run: weights, those that were tested, the optimizer's memory, the random stream."""
        memory = filter(torch.is_tensor, tree_leaves(self.treatment.optimizer.state_dict()))
        return [self.weights(), *self.tested, *memory, torch.get_rng_state()]

    def save(self):
        kept = {"steps": self.steps, "tested": self.tested, "random": torch.get_rng_state()}
        return {"treatment": self.treatment.state_dict(), **kept}

    def load(self, saved):
        self.loading = True
        self.treatment.load_state_dict(saved["treatment"])
        torch.set_rng_state(saved["random"])
        self.loading, self.steps, self.tested = False, saved["steps"], list(saved["tested"])
        return self


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.fixture(scope="module")
def plain():
    return Training().all_phases().everything()


@pytest.mark.parametrize("case", IN_PLACE)
@pytest.mark.parametrize("net, dtype", [("resnet18", torch.float32), ("vit_tiny", torch.bfloat16)])
def test_runs_in_every_model_keeps_parameter_identity_and_reports_what_changed(case, net, dtype):
    run = Training(case, net, dtype)
    identity = {n: (id(p), p.data_ptr(), p.shape, p.dtype) for n, p in run.net.named_parameters()}
    placed = hooks(run.net)
    run.train(2)
    before, weights = {n: p.detach().clone() for n, p in run.net.named_parameters()}, run.weights()
    report = run.treatment.boundary(1)
    assert torch.equal(weights, run.weights()) == (not report.changed)
    changed = {f"net.{n}" for n, p in run.net.named_parameters() if not torch.equal(p, before[n])}
    assert changed <= report.changed
    assert {row.parameter for row in report.treated()} <= {f"net.{n}" for n in before}
    assert all(row.dfi_after is not None or row.reason for row in report.rows)
    run.train(3).treatment.boundary(2)
    assert run.train(3).weights().isfinite().all()
    assert identity == {n: (id(p), p.data_ptr(), p.shape, p.dtype) for n, p in run.net.named_parameters()}
    run.treatment.method.close()
    assert placed == hooks(run.net)


@pytest.mark.parametrize("case", CASES)
def test_changes_something_and_leaves_the_random_stream_alone(case, plain):
    found = Training(case).all_phases().everything()
    assert same(found, plain) == (case == "none") and torch.equal(found[-1], plain[-1])


@pytest.mark.parametrize("case", CASES)
def test_does_nothing_before_its_first_phase(case, plain):
    run = Training(case, first_phase=3)
    fresh = deepcopy(run.treatment.method.state_dict())
    assert same(run.all_phases().everything(), plain) and run.treatment.method.state_dict() == fresh


@pytest.mark.parametrize("case", CASES)
def test_turned_off_it_changes_nothing(case, plain):
    cls = type(create(CASES[case][0], **CASES[case][1]))
    if cls.off is None:  # what it replaces is replaced or not, and the last has a threshold of its own
        replaces = cls.changes_optimizer or cls.changes_structure
        assert replaces or case in ("full_reset", "clear", "snr official"), f"give {case} an `off`"
        return
    assert same(Training(case, **cls.off).all_phases().everything(), plain)


@pytest.mark.parametrize("case", CASES)
def test_resumes_and_needs_every_key_of_its_state(case, tmp_path):
    net = "vgg16" if case == "snr official" else "tiny"  # a deep net has units that are silent all the time
    dtype = torch.bfloat16 if case == "upgd" else torch.float32  # its averages stay float32 all the same
    make = partial(Training, case, net, dtype)
    whole, saves = make(), []
    for steps in (1, 4):
        whole.train(steps)
        torch.save(whole.save(), tmp_path / f"{whole.steps}.pt")
        saves.append(torch.load(tmp_path / f"{whole.steps}.pt", weights_only=True))
        if whole.steps == 1:
            whole.train(1).treatment.boundary(1)

    def finished(run):
        if run.steps == 1:
            run.train(1).treatment.boundary(1)
        run.train(11 - run.steps).treatment.boundary(2)
        return run.train(2).everything()

    wanted = finished(whole)

    def differs(saved):
        try:
            return not same(finished(make(seed=1).load(saved)), wanted)
        except AssertionError:  # it looks at data that are not there yet
            return True

    assert not any(map(differs, saves)), "resumed, it differs: does `remembers` name all that it needs?"
    fresh, used, needed = make().treatment.method.state_dict(), set(), set()
    for saved in saves:
        state = saved["treatment"]["method"]["state"]
        for key in (key for key, blank in fresh.items() if str(state[key]) != str(blank)):
            used.add(key)
            without = deepcopy(saved)
            without["treatment"]["method"]["state"][key] = fresh[key]
            needed |= {key} if differs(without) else set()
    assert needed == used, f"a run of {case} resumes without some of its state"


@pytest.mark.parametrize("case", DURING)
def test_a_step_that_overflows_leaves_no_trace(case):
    run, scaler = Training(case), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    treatment, method = run.treatment, run.treatment.method
    for step in range(6):
        inputs, labels = run.data[step % 2]
        loss = cross_entropy(run.net(inputs), labels) + treatment.penalty()
        treatment.optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step == 3:
            next(run.net.parameters()).grad.fill_(math.inf)
        weights, memory = [p.detach().clone() for p in run.net.parameters()], deepcopy(method.state_dict())
        scaler.unscale_(treatment.optimizer)
        treatment.before_step()
        scale = scaler.get_scale()
        scaler.step(treatment.optimizer)
        scaler.update()
        treatment.after_step(skipped=scaler.get_scale() < scale)
        if step == 3:
            assert all(map(torch.equal, weights, run.net.parameters()))
            assert str(method.state_dict()) == str(memory)
        if step % 2:
            treatment.after_pass()
    assert run.weights().isfinite().all()


def test_the_state_of_another_method_is_left_alone():
    first = Training("cbp").train(3)
    torch.rand(2, generator=first.treatment.state.generator)
    run = Training("hare_tortoise").load(first.save())
    assert torch.equal(*(torch.rand(2, generator=r.treatment.state.generator) for r in (first, run)))
    assert torch.equal(run.weights(), Training("cbp").train(3).weights())
    assert run.treatment.method.state_dict() == Training("hare_tortoise").treatment.method.state_dict()
