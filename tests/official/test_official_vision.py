"""Every cell of Figure 2 at size=paper is the official experiment: nets, data, schedules, boundaries, optimizers, tests."""

import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from analysis.paper import panels
from fire_core import attach
from fire_core.methods import available, create
from harness.config import CONF, compose, options, read_yaml, resolve
from harness.domains import find
from tests.tiny_nets import beginning, fill, images, labels, largest, read_arrays, u
from tests.training_scripts import SMALLEST, train_here, with_method
from vision import evaluate, schedule
from vision.images import Images, pixel_statistics
from vision.models import build
from vision.official import switches
from vision.protocols import make_phases
from vision.schedule import batch_indices, set_learning_rate

VISION = find("vision")

FOLDER = Path(__file__).resolve().parent
NETS = json.loads((FOLDER / "models.json").read_text())
TRAINING = json.loads((FOLDER / "training.json").read_text())
THEIRS = {"cifar10_resnet18": "CIFAR10_RESNET18", "cifar100_vit_tiny": "CIFAR100_TinyViT",
          "tiny_imagenet_vgg16": "TinyImageNet_VGG16"}  # fmt: skip
# experiment: name in the recorded files
CELLS = {name: f"{name[3:5]}_{THEIRS[name[6:]]}" for name in panels() if name.startswith("fig2")}
DATA_SETS = {"cifar10": ("CIFAR10", 50_000, 10), "cifar100": ("CIFAR100", 50_000, 100),
             "tiny_imagenet": ("TinyImageNet", 100_000, 200)}  # fmt: skip
DATA_OF_NET = {net: next(name for name in DATA_SETS if net.endswith(f"_{name}")) for net in NETS}


@cache
def composed(experiment: str):
    return compose(VISION, [f"experiment={experiment}", "size=paper", "method=none"])


@cache
def paper(experiment: str):
    return resolve(VISION, composed(experiment))


@cache
def method_of(experiment: str, name: str):
    return with_method(composed(experiment), name).method


@cache
def rows_of(name: str) -> dict:
    """Lines of a recorded file by cell."""
    found = defaultdict(list)
    with (gzip.open if name.endswith(".gz") else open)(FOLDER / name, "rt") as file:
        for row in csv.DictReader(file):
            found[row["cell"]].append(row)
    return found


def experiments_on(data: str) -> list[str]:
    return [name for name in CELLS if paper(name).data.name == data]


def images_like(name: str) -> Images:
    """As many images and classes as data set `name` has, all of one grey pixel's memory."""
    _, count, classes = DATA_SETS[name]
    grey, size = torch.tensor(128, dtype=torch.uint8), 64 if name == "tiny_imagenet" else 32
    train, test = ((grey.expand(n, 3, size, size), torch.arange(n) * 7 % classes) for n in (count, 10_000))
    return Images(name, *train, *test, classes, torch.full((3,), 0.5), torch.ones(3))


def phases_of(experiment: str, seed: int = 1):
    cfg = paper(experiment)
    images = images_like(cfg.data.name)
    return cfg, images, make_phases(**cfg.protocol, images=images, seed=seed, splits=cfg.splits)


def build_paper(net: str):
    cfg, about = paper(experiments_on(DATA_OF_NET[net])[0]), NETS[net]
    return build(**cfg.model, classes=about["classes"], channels=3, image_size=about["size"])


def all_cells(fidelity, data: str, what: str, difference: float, tolerance: float) -> None:
    """Record a comparison for every cell on this data set."""
    for experiment in experiments_on(data):
        fidelity("cell", experiment, what, float(difference), tolerance)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("net", NETS)
def test_nets_compute_the_same(net, mode, fidelity):
    """Logits, loss, every gradient's norm and direction, and the running statistics after one forward pass.
    An input of a ReLU that is zero up to rounding differs in sign between CPUs, so nets with ReLU are held to 1e-3."""
    about, recorded = NETS[net], beginning(f"{net}.{mode}.", read_arrays(FOLDER / "models.npz"))
    model, order = build_paper(net), [name for name, *_ in about["tensors"]]
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes == {name: shape for name, _, shape, _ in about["tensors"]}
    fill(model, order=order).train(mode == "train")
    logits = model(images(1000, 8, about["size"]))
    loss = cross_entropy(logits, labels(8, about["classes"]))
    loss.backward()
    weights = dict(model.named_parameters())
    gradients = [weights[name].grad.flatten().double() for name in order if name in weights]
    norms = torch.stack([gradient.norm() for gradient in gradients])
    probes = torch.stack([each @ u(2000 + j, len(each)) for j, each in enumerate(gradients)])
    their_norms = recorded["grad_norm"].double()
    real = their_norms > 1e-6 * their_norms.max()  # the rest is rounding noise
    kinks = any(isinstance(module, torch.nn.ReLU) for module in model.modules())
    off = (probes - recorded["grad_probe"]).abs() / their_norms
    found = {
        "logits": (largest(logits, recorded["logits"]), 1e-5 if net.startswith("vgg16") else 3e-6),
        "loss": (abs(loss.item() / about["loss"][mode] - 1), 1e-6),
        "gradient norms": ((norms / their_norms - 1)[real].abs().max(), 1e-3 if kinks else 1e-5),
        "gradient probes": (off[real].max(), 1e-2 if kinks else 1e-4),
    }
    if mode == "train" and len(recorded.get("buffer_norm_after", ())):
        statistics = [name for name, kind, *_ in about["tensors"] if kind.startswith("running")]
        after = torch.stack([model.state_dict()[name].norm() for name in statistics])
        found["running statistics"] = (after / recorded["buffer_norm_after"] - 1).abs().max(), 1e-6
    for what, comparison in found.items():
        all_cells(fidelity, DATA_OF_NET[net], f"net: {what}, {mode} mode", *comparison)


@pytest.mark.parametrize("net", NETS)
def test_nets_start_the_same(net, fidelity):
    """Mean, deviation, least and greatest entry of every tensor over the draws of seeds 1, 2, 3, buffers included.
    After a pass of zeros, the statistics of VGG's later layers are rounding errors, which differ between CPUs."""
    states = []
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        model = build_paper(net)
        if paper(experiments_on(DATA_OF_NET[net])[0]).batch_norm_start == "official":
            switches.pass_zeros(model, 3, NETS[net]["size"])
        states.append(model.state_dict())
    found = {"parameters": 0.0, "buffers": 0.0}
    statistics = [name for name, kind, *_ in NETS[net]["tensors"] if kind.startswith("running")]
    rounding = statistics[8:] if net.startswith("vgg16") else []
    for name, kind, _, recorded in (entry for entry in NETS[net]["tensors"] if entry[0] not in rounding):
        drawn = torch.cat([state[name].flatten().double() for state in states])
        moments = torch.stack([drawn.mean(), drawn.std(correction=0), drawn.min(), drawn.max()])
        group = "buffers" if kind.startswith("running") or kind == "count" else "parameters"
        found[group] = max(found[group], largest(moments, torch.tensor(recorded, dtype=torch.float64)))
    for group, difference in found.items():
        tolerance = 1e-4 if rounding and group == "buffers" else 1e-6
        all_cells(fidelity, DATA_OF_NET[net], f"net: {group} at the start", difference, tolerance)


@pytest.mark.parametrize("seed", TRAINING["seeds"])
@pytest.mark.parametrize("experiment", CELLS)
def test_seeds_mean_the_same_images(experiment, seed, fidelity):
    cfg, images, phases = phases_of(experiment, seed)
    recorded = TRAINING["splits"][str(seed)][DATA_SETS[cfg.data.name][0]]
    if cfg.protocol.name == "class_incremental":
        order = torch.tensor(recorded["class_order"])
        wrong, share = 0, len(order) // len(phases)
        for phase in phases:
            seen = order[: share * (phase.index + 1)].sort().values
            wanted = torch.isin(images.train_labels, seen).nonzero().flatten()
            wrong += not torch.equal(phase.seen, seen)
            wrong += not torch.equal(phase.indices.sort().values, wanted)
    else:
        first, taken = torch.tensor(recorded["first_training_indices"]), phases[0].indices
        wrong = int((taken[: len(first)] != first).sum())
        wrong += abs(int(taken.sum()) - recorded["sum_of_first_tenth"])
        for before, after in pairwise(phases):
            wrong += not torch.equal(after.indices[: len(before)], before.indices)
    fidelity("cell", experiment, f"data: images of seed {seed}", wrong, 0)


@pytest.mark.parametrize("experiment", CELLS)
def test_stages_have_the_same_size(experiment, fidelity):
    cfg, images, phases = phases_of(experiment)
    stages, steps = rows_of("stages.csv")[CELLS[experiment]], 0
    for phase, stage in zip(phases, stages, strict=True):
        batches = batch_indices(1, phase.index, 0, len(phase.indices), cfg.batch_size)
        seen = torch.arange(images.classes) if phase.seen is None else phase.seen
        found = {"images": len(phase.indices), "classes": len(phase.labels.unique()), "epochs": phase.epochs}
        found |= {"steps_per_epoch": len(batches), "images_in_last_batch": len(batches[-1])}
        found |= {"optimizer_steps": phase.epochs * len(batches), "first_step": steps}
        found["test_images_of_the_stage"] = int(torch.isin(images.test_labels, seen).sum())
        steps += found["optimizer_steps"]
        for what, value in found.items():
            other = f"data: stages with other {what.replace('_', ' ')}"
            fidelity("cell", experiment, other, value != int(stage[what]), 0)


@pytest.mark.parametrize("name", DATA_SETS)
def test_images_are_normalised_the_same(name, fidelity):
    assert {paper(experiment).normalisation for experiment in experiments_on(name)} == {"official"}
    images = switches.with_statistics(images_like(name))
    pixels = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for part in ("train", "test"):
        difference = largest(images.normalise(pixels, test=part == "test"), normalised(pixels, name, part))
        all_cells(fidelity, name, f"data: pixels, {part}", difference, 2e-6)
    images.name = "image_folder"
    assert switches.with_statistics(images) is images, "other data keep their own statistics"


def normalised(pixels: torch.Tensor, name: str, part: str) -> torch.Tensor:
    """Pictures of a part of a data set as the authors normalise them."""
    recorded = TRAINING["normalisation"][DATA_SETS[name][0]]
    constants = recorded["train"] if recorded[part] == "same" else recorded[part]
    mean, std = (torch.tensor(constants[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    return (pixels / 255 - mean) / std


@pytest.mark.parametrize("experiment", CELLS)
def test_every_epoch_has_the_same_learning_rate(experiment, fidelity):
    cfg, _, phases = phases_of(experiment)
    net = build("cnn", classes=3, channels=3, image_size=8, width=4)
    adam = torch.optim.Adam(net.parameters(), lr=cfg.learning_rate)
    treatment = attach(create(**method_of(experiment, "muon")), net, adam)
    recorded = rows_of("schedules.csv.gz")[CELLS[experiment]]
    assert len(recorded) == sum(phase.epochs for phase in phases)
    for row in recorded:
        phase, epoch = phases[int(row["stage"])], int(row["epoch"])
        set_learning_rate(adam, cfg, phase, epoch)
        found = {"Adam": (adam.param_groups[0]["lr"], row["lr_adam"])}
        if phase.index != treatment.state.phase:
            treatment.boundary(phase.index)
        optimizer = treatment.optimizer
        assert (optimizer is adam) == (row["muon_run_optimizer"] == "adam")
        set_learning_rate(optimizer, cfg, phase, epoch)
        groups = optimizer.param_groups
        if optimizer is not adam:
            matrices = [group["lr"] for group in groups if any(p.ndim > 1 for p in group["params"])]
            found["Muon, matrices"] = (max(matrices), row["muon_run_lr_matrices"])
        found["Muon, the rest"] = (min(group["lr"] for group in groups), row["muon_run_lr_rest"])
        for what, (ours, theirs) in found.items():
            fidelity("cell", experiment, f"schedule: rate of {what}", abs(ours - float(theirs)), 1e-12)


@pytest.mark.parametrize("experiment", CELLS)
def test_methods_act_in_the_same_stages(experiment, fidelity):
    columns = {name: f"{name}_acts" for name in ("cbp", "snr", "redo")}
    columns |= dict.fromkeys(("shrink_perturb", "full_reset", "dash", "fire"), "boundary_methods_act")
    columns |= dict.fromkeys(("parseval", "l2_init"), "regularisers_act")
    stages = rows_of("stages.csv")[CELLS[experiment]]
    for name, column in columns.items():
        first = create(**method_of(experiment, name)).first_phase
        wrong = sum((int(stage["stage"]) >= first) != bool(int(stage[column])) for stage in stages)
        fidelity("cell", experiment, f"boundary: stages in which {name} acts", wrong, 0)


OUR_NAMES = {("shrink_perturb", "coefficient"): "shrink", ("muon", "lr_matrices"): "rate_factor"}
# held by the tests of the methods; the last one, the default optimizer's, by that of the schedule
ASIDE = {"eps", "betas", "decay", "period", "tau_reset_freq", "targets", "layers", "lr_rest"}


def tuned_in(experiment: str) -> Iterator[tuple[str, str, str]]:
    """Yield method, our name of the setting, and value of every setting in the run scripts of a cell."""
    for row in rows_of("tuned.csv")[CELLS[experiment]]:
        for key, _, value in (each.partition("=") for each in filter(None, row["settings"].split("; "))):
            yield row["method"], OUR_NAMES.get((row["method"], key), key), value.split()[0]


@pytest.mark.parametrize("experiment", CELLS)
def test_tuned_values_are_those_of_the_run_scripts(experiment, fidelity):
    compared = [each for each in tuned_in(experiment) if each[1] not in ASIDE]
    assert len(compared) >= 12
    for name, key, value in compared:
        wanted = float(value) / (1e-3 if key == "rate_factor" else 1.0)
        difference = abs(float(method_of(experiment, name)[key]) - wanted) / wanted
        fidelity("cell", experiment, f"tuned: {name}.{key}", difference, 1e-12)


def test_a_search_covers_the_values_of_the_run_scripts():
    """Of the methods that the paper has; the values of later rivals are their papers'."""
    tuned = defaultdict(set)
    for name, key, value in (each for experiment in CELLS for each in tuned_in(experiment)):
        tuned[name, key].add(value)
    for name in options("search"):
        axes = dict(read_yaml(CONF / "search" / f"{name}.yaml")["hydra"]["sweeper"]["params"])
        assert axes.pop("method") == name
        for key, values in axes.items():
            known = tuned[name, key.removeprefix("method.")]
            assert set(map(float, known)) <= set(map(float, str(values).split(",")))


@pytest.fixture(scope="module", params=CELLS)
def run(request, tmp_path_factory):
    """What a run of a cell does on coloured squares, in order: pictures prepared, steps, boundaries, ends of epochs."""
    experiment = request.param
    cfg, draw, labels = paper(experiment), torch.Generator().manual_seed(1), torch.arange(60) % 3
    size = 32 if cfg.model.name == "vgg16" else 8
    pictures = torch.randint(256, (60, 3, size, size), dtype=torch.uint8, generator=draw)
    parts = pictures[:40], labels[:40], pictures[40:], labels[40:]
    images = Images(cfg.data.name, *parts, 3, *pixel_statistics(pictures[:40]))
    seen, epoch_ended, base = [], [], available()["none"]

    def make_inputs(images, phase, indices, *, test=False, plain=schedule.make_inputs):
        inputs = plain(images, phase, indices, test=test)
        seen.append(("test" if test else "look", indices.clone(), inputs.clone()))
        return inputs

    def boundary(self, state):
        net, offered = state.nets["net"], [inputs.clone() for inputs in state.batches.last_inputs(10)]
        seen.append(("boundary", net.training, state.initial["net"], offered))
        return type(self).__mro__[1].boundary(self, state)

    def after_step(self, state):
        optimizer = state.optimizers["net"]
        clipped = torch.stack([p.grad.norm() for p in state.nets["net"].parameters()]).norm()
        taken = {int(memory["step"]) for memory in optimizer.state.values()}
        seen.append(("step", float(clipped), taken, optimizer))

    def after_pass(self, state):
        epoch_ended.append(True)

    def after_evaluation(self, state):
        if epoch_ended:
            seen.append(("end of epoch",))
            epoch_ended.clear()

    overrides = [f"experiment={experiment}", "method.first_phase=0", "compat=official", "threads=1"]
    overrides += ["run.trunk=false", "method=none", "eval_batch_size=7", "batch_size=6"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "load", lambda *_, **__: images)
        for module in (schedule, evaluate):
            patch.setattr(module, "make_inputs", make_inputs)
        for call in (boundary, after_step, after_pass, after_evaluation):
            patch.setattr(base, call.__name__, call)
        patch.setattr(base, "variant", "official")  # which asks for the inputs of the phase before
        patch.setitem(SMALLEST, "vision", overrides)
        train_here("vision", tmp_path_factory.mktemp("runs"))
    return experiment, images, seen


def places_of(seen: list, kind: str) -> list[int]:
    """Where events of this kind are among all events; there must be some."""
    found = [i for i, event in enumerate(seen) if event[0] == kind]
    assert found
    return found


def test_a_new_optimizer_begins_each_phase(run, fidelity):
    experiment, _, seen = run
    recorded, cfg = TRAINING["optimizer"], paper(experiment)
    assert cfg.optimizer_state == "clear"
    clip_norm = TRAINING["gradient_clip"]["global_norm"]
    pairs = {"batch size": (cfg.batch_size, TRAINING["batch_size"]), "clipping": (cfg.clip_norm, clip_norm)}
    names = {"epsilon": "eps", "weight decay": "weight_decay", "rate": "lr", "betas": "betas"}
    for boundary in places_of(seen, "boundary"):
        last = places_of(seen[:boundary], "step")[-1]
        assert seen[last][2] != {1}, "the run is too short to tell"
        _, _, remembered, optimizer = next(event for event in seen[boundary:] if event[0] == "step")
        pairs |= {what: (optimizer.defaults[key], recorded[key]) for what, key in names.items()}
        pairs["steps that it remembers"] = max(remembered), 1
        for what, (ours, theirs) in pairs.items():
            fidelity("cell", experiment, f"optimizer: {what}", np.abs(np.subtract(ours, theirs)).max(), 0)


def test_gradients_are_clipped(run, fidelity):
    experiment, _, seen = run
    limit = TRAINING["gradient_clip"]["global_norm"]
    norm = max(event[1] for event in seen if event[0] == "step")
    fidelity("cell", experiment, "optimizer: largest norm of a gradient", abs(norm / limit - 1), 1e-4)


def test_methods_find_the_net_as_the_official_loop_leaves_it(run, fidelity):
    experiment, _, seen = run
    assert paper(experiment).batch_norm_start == "official"
    modes = {stage["mode_at_boundary"] for stage in rows_of("stages.csv")[CELLS[experiment]][1:]}
    for boundary in places_of(seen, "boundary"):
        _, training, initial, _ = seen[boundary]
        mode = "train" if training else "eval"
        fidelity("cell", experiment, "boundary: mode of the net", {mode} != modes, 0)
        variances = [value for key, value in initial.items() if key.endswith("running_var")]
        assert bool(variances) == (paper(experiment).model.name != "vit_tiny")
        if variances:
            counts = {int(value) for key, value in initial.items() if key.endswith("num_batches_tracked")}
            assert counts == {1}
            # of the first batch norm; VGG's convolutions have biases, whose rounding grows from layer to layer
            difference = float((variances[0] - 0.9).abs().max())
            fidelity("cell", experiment, "boundary: running variance of a full reset", difference, 1e-7)


def test_methods_can_see_the_last_batches_of_the_phase_before(run):
    _, _, seen = run
    for boundary in places_of(seen, "boundary"):
        offered, last_epoch = seen[boundary][3], places_of(seen[:boundary], "end of epoch")[-1]
        trained_on = [seen[i - 1][2] for i in places_of(seen[:last_epoch], "step")]
        assert 2 <= len(offered) <= 3 and all(map(torch.equal, offered, trained_on[-len(offered) :]))


def test_an_epoch_ends_with_a_test_and_then_the_method(run, fidelity):
    experiment, images, seen = run
    ends = places_of(seen, "end of epoch")
    assert len(ends) == 3
    wanted = normalised(images.test_images, images.name, "test")
    for end in ends:
        tests = [e for e in seen[places_of(seen[:end], "step")[-1] : end] if e[0] == "test"]
        assert tests, "the method was called before the test"
        assert torch.equal(torch.cat([event[1] for event in tests]), torch.arange(len(images.test_labels)))
        difference = largest(torch.cat([event[2] for event in tests]), wanted)
        fidelity("cell", experiment, "evaluation: test pictures before the method acts", difference, 2e-6)
