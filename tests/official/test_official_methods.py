"""Every method against numbers recorded from the authors' code (tests/official/README.md)."""

import itertools
import json
from collections import Counter
from copy import deepcopy
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fire_core import State, UserError
from fire_core.methods import create
from fire_core.methods.fire import fire
from fire_core.methods.muon import orthogonalize
from fire_core.solvers.polar import polar
from tests import tiny_nets
from tests.official.test_official_vision import NETS, build_paper
from tests.tiny_nets import METHODS, batch, fill, largest, load, load_into, net, state_of, u, untouched
from vision.official.cbp import columns_of, linked_layers, mean_outgoing
from vision.official.resets import magnitude, scores
from vision.official.watched_units import OutputRecorder, chain, last_rows

LAYERS, MOMENTS = json.loads((METHODS / "layers.json").read_text()), ("exp_avg", "exp_avg_sq")
KINDS, CELLS = pytest.mark.parametrize("kind", ["conv", "vit"]), pytest.mark.parametrize("cell", NETS)


def worst(model: nn.Module, arrays: dict, prefix: str, leave_out: tuple[str, ...] = ()) -> float:
    """Largest difference between the model and the stored tensors `<prefix>.<name>`."""
    own, stored = model.state_dict(), tiny_nets.beginning(f"{prefix}.", arrays)
    compared = [key for key in own if key in stored and key not in leave_out]
    return max(largest(own[key], stored[key].reshape(own[key].shape)) for key in compared)


def loaded(method: str, kind: str, at: str, phase: int = 1) -> tuple[dict, dict, nn.Module, State]:
    """What is recorded of a method, and a net with its state, filled with the values recorded at this moment."""
    arrays, settings = load(method)
    model = load_into(net(kind), arrays, f"{kind}.{at}")
    return arrays, settings, model, state_of(model, phase=phase)


def rows_changed(model: nn.Module, before: dict) -> dict[str, list[int]]:
    """Names and rows of the tensors that differ from those before; a number is a row."""
    differ = {key: torch.atleast_1d(value != before[key]) for key, value in model.state_dict().items()}
    rows = {key: each.flatten(1).any(1) if each.ndim > 1 else each for key, each in differ.items()}
    return {key: each.nonzero().flatten().tolist() for key, each in rows.items() if each.any()}


def steps_of(adam: torch.optim.Adam, model: nn.Module) -> dict[str, float]:
    return {key: float(adam.state[p]["step"]) for key, p in model.named_parameters()}


def recycled(calls: Mock) -> dict[str, list[int]]:
    """The rows in the calls of a method's `recycle`, by layer."""
    return {layer.name: rows.tolist() for _, _, layer, rows in (call.args for call in calls.call_args_list)}


def end_of_epoch(method, state: State) -> None:
    for call in (method.after_pass, method.before_evaluation, method.after_evaluation):
        call(state)


def official(name: str, state: State, seed: int = 5, **settings: float):
    """A method that begins here, and draws from the global generator as the official code does."""
    method = create(name, variant="official", first_phase=0, **settings)
    method.check(state)
    torch.manual_seed(seed)
    method.stream = lambda state: torch.default_generator
    return method


@pytest.mark.parametrize("case, targets", [("conv.all", "all"), ("vit.all", "all"), ("vit.is_vit", "qk")])
def test_fire(case, targets, fidelity):
    arrays, settings = load("fire")
    model = net(case.split(".")[0])
    before = deepcopy(model.state_dict())
    create("fire", targets=targets).boundary(state_of(model))
    assert rows_changed(model, before).keys() == set(settings["cases"][case]["changed"])
    fidelity("method", "fire", f"weights, {case}", worst(model, arrays, f"{case}.after"), 2e-6)


def test_fire_iterations_and_scales(fidelity):
    arrays, settings = load("fire")
    for name, case in settings["matrices"].items():
        start = u(case["u_number"], *case["shape"]).float()
        for n in case["iterations"]:
            ours = polar(start, "newton_schulz", iterations=n).factor
            difference = largest(ours, arrays[f"{name}.after{n}"])
            fidelity("method", "fire", f"{name}, {n} iterations", difference, 2e-6)
    for name, case in settings["layers"].items():
        out, columns, *kernel = case["shape"]
        layer = nn.Conv2d(columns, out, kernel) if kernel else nn.Linear(columns, out)
        layer.weight.data = arrays[f"{name}.before"].clone()
        fire(layer)
        fidelity("method", "fire", f"scale of {name}", largest(layer.weight, arrays[f"{name}.after"]), 2e-6)


def test_shrink_perturb(fidelity):
    arrays, settings = load("shrink_perturb")
    for kind, coefficient in itertools.product(("conv", "vit"), settings["coefficients"]):
        state = state_of(net(kind, 500))
        model = fill(state.nets["net"])
        create("shrink_perturb", shrink=coefficient).boundary(state)
        difference = worst(model, arrays, f"{kind}.after{coefficient}")
        fidelity("method", "shrink_perturb", f"weights, {kind}, {coefficient}", difference, 3e-7)


def test_full_reset(fidelity):
    arrays, _ = load("full_reset")
    state = state_of(load_into(net("conv"), arrays, "init"))
    load_into(state.nets["net"], arrays, "old")
    create("full_reset").boundary(state)
    fidelity("method", "full_reset", "weights and buffers", worst(state.nets["net"], arrays, "after"), 0.0)


@pytest.mark.parametrize("case", load("dash")[1]["cases"])
def test_dash(case, fidelity):
    arrays, settings = load("dash")
    values, kind = settings["cases"][case], case.split(".")[0]
    model = net(kind)
    state = state_of(model)
    state.batches = lambda: (batch(kind, b["u_number"], b["size"]) for b in settings["batches"])
    model.train(values["mode"] == "train")
    before = deepcopy(model.state_dict())
    create("dash", variant="official", alpha=values["alpha"], floor=values["floor"]).boundary(state)
    # batch norm takes the gradient of conv1's bias away in training mode: what is left is rounding
    noise = ("conv1.bias",) if case.startswith("conv.train") else ()
    fidelity("method", "dash", f"weights, {case}", worst(model, arrays, f"{case}.after", noise), 2e-6)
    assert rows_changed(model, before).keys() == set(values["changed"])
    assert model.training == (values["mode"] == "train")


def compare_penalty(name, kind, state, coefficient, tolerance, fidelity) -> None:
    """Loss and gradients."""
    arrays, settings = load(name)
    loss = create(name, coefficient=coefficient, first_phase=0).penalty(state)
    fidelity("method", name, f"loss, {kind}", abs(float(loss.detach()) / settings["loss"][kind] - 1), 1e-6)
    loss.backward()
    for key, p in state.nets["net"].named_parameters():
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        difference = largest(gradient, arrays[f"{kind}.gradient.{key}"])
        fidelity("method", name, f"gradient of {kind}.{key}", difference, tolerance)


@KINDS
def test_parseval(kind, fidelity):
    compare_penalty("parseval", kind, state_of(net(kind)), 1.0, 2e-5, fidelity)


@CELLS
def test_parseval_of_the_official_nets(cell, fidelity):
    _, settings = load("parseval")
    model = fill(build_paper(cell), order=[name for name, *_ in NETS[cell]["tensors"]])
    with torch.no_grad():
        loss = create("parseval", coefficient=1.0, first_phase=0).penalty(state_of(model))
    recorded = settings["official_nets"][cell]["loss"]
    fidelity("method", "parseval", f"loss, {cell}", abs(float(loss) / recorded - 1), 1e-6)


@KINDS
def test_l2_init(kind, fidelity):
    arrays, settings, model, state = loaded("l2_init", kind, "init")
    load_into(model, arrays, f"{kind}.weights")
    compare_penalty("l2_init", kind, state, settings["coefficient"], 1e-8, fidelity)


@CELLS
def test_layers_of_the_official_nets(cell, fidelity):
    recorded, model = LAYERS[cell], build_paper(cell)
    weights = {name.removesuffix(".weight"): p for name, p in model.named_parameters()}
    ours = {name: place for place, name in enumerate(layer.name for layer in chain(model))}
    theirs = {name: place for place, name in enumerate(recorded["redo_and_snr_hooked"])}
    assert len(ours) == len(theirs)
    layers, linked = chain(model), linked_layers(model)
    reads = [(layer, reader) for layer in layers for reader, _ in layer.outgoing]
    pairs = [[ours[layer.name], ours[to], layer.units, weights[to].shape[1]] for layer, to in reads]
    wanted = [[theirs[p["from"]], theirs[p["to"]], p["units"], p["columns"]] for p in recorded["pairs"]]
    for method in ("redo", "snr"):
        fidelity("method", method, f"layers and what reads them, {cell}", pairs != wanted, 0)
    read = [place for place, *_ in pairs]
    assert read[:-1] == [theirs[name] for name in recorded["redo_reset_rows_of"]]
    assert read == [theirs[name] for name in recorded["snr_reset_rows_of"]]
    wrong = [ours[layer.name] for layer in linked] != [theirs[name] for name in recorded["cbp"]]
    fidelity("method", "cbp", f"layers, {cell}", wrong, 0)
    for layer, entry in zip(linked, recorded["cbp"].values(), strict=True):
        assert columns_of(layer) == entry["units"]
        readers = [theirs[name] for name in [entry["outgoing"]] if name]
        assert [ours[reader] for reader, _ in layer.outgoing] == readers
        assert len(layer.norms) == (entry["norm"] is not None)
        assert (2 / weights[layer.name][0].numel()) ** 0.5 == pytest.approx(entry["std"])


@KINDS
def test_redo_scores(kind, fidelity):
    arrays, settings, model, _ = loaded("redo", kind, "before")
    layers = chain(model.eval())
    assert [layer.name for layer in layers] == settings["hooked_in_forward_order"][kind]
    [values] = OutputRecorder(model, layers, magnitude).look([batch(kind, 1010, 8)[0]], training=False)
    for layer in layers[:-1]:
        name = layer.name  # after the ReLU; the last 8 samples are those of this pass
        seen, score = magnitude(layer, arrays[f"{kind}.buffer.{name}"]), arrays[f"{kind}.score.{name}"]
        fidelity("method", "redo", f"activations of {kind}.{name}", largest(values[name], seen[-8:]), 2e-6)
        fidelity("method", "redo", f"scores of {kind}.{name}", largest(scores(seen), score), 5e-6)


@pytest.mark.parametrize("case", load("redo")[1]["cases"])
def test_redo(case, fidelity, monkeypatch):
    kind = case.split(".")[0]
    arrays, settings, model, state = loaded("redo", kind, "before")
    values = settings["cases"][case]
    state.optimizers["net"] = adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    for key, p in model.named_parameters():
        moments = {moment: arrays[f"{kind}.before.{moment}.{key}"].clone() for moment in MOMENTS}
        adam.state[p] = {"step": arrays[f"{kind}.before.step.{key}"].reshape(()).clone(), **moments}
    method = official("redo", state, 7, threshold=values["threshold"])
    state.batches = SimpleNamespace(test_inputs=lambda count: None)
    seen = {layer.name: magnitude(layer, arrays[f"{kind}.buffer.{layer.name}"]) for layer in chain(model)}
    monkeypatch.setattr(OutputRecorder, "look", lambda *a, **k: [seen])
    before = deepcopy(model.state_dict())
    method.after_test(state)
    assert rows_changed(model, before) == values["tensors_changed"]
    fidelity("method", "redo", f"weights, {case}", worst(model, arrays, f"{case}.after"), 0.0)
    assert steps_of(adam, model) == values["adam_step_after"] and values["moments_changed"] == []
    for key, p in model.named_parameters():
        assert all(torch.equal(adam.state[p][m], arrays[f"{kind}.before.{m}.{key}"]) for m in MOMENTS)
        p.grad = arrays.get(f"{case}.next_gradient.{key}")
    start = deepcopy(model.state_dict())
    adam.step()
    for key, p in model.named_parameters():
        if (update := arrays.get(f"{case}.next_update.{key}")) is not None:
            fidelity("method", "redo", f"next step of {case}, {key}", largest(p - start[key], update), 2e-7)


def test_redo_looks_at_the_last_test_images_after_the_test_alone():
    model = net("conv").train()
    state = state_of(model)
    state.optimizers["net"] = torch.optim.Adam(model.parameters())
    state.batches = lambda: pytest.fail("looked at training data")
    state.batches.test_inputs = lambda count: batch("conv", 1010, 8)[0] if count == 512 else None
    method = create("redo", variant="official", threshold=0.5)
    with untouched(model):  # an evaluation without the end of an epoch is that of a boundary
        for act in (method.after_step, method.before_evaluation, method.after_evaluation, method.after_pass):
            act(state)
    with untouched(model.bn1):
        method.after_evaluation(state)
    recycled = method.counts["recycled"]
    assert recycled > 0 and model.training and tiny_nets.hooks(model) == 0
    state.phase = 0
    end_of_epoch(method, state)  # first_phase is 1: off before
    assert method.counts["recycled"] == recycled


@KINDS
def test_cbp(kind, fidelity):
    """Twelve steps; features and outgoing weights as recorded, so that rounding does not add up."""
    arrays, settings, model, state = loaded("cbp", kind, "start")
    case = settings["cases"][kind]
    values = {key: case[key] for key in ("replacement_rate", "maturity", "decay")}
    method = official("cbp", state, case["seed"], **values)
    layers = method.layers["net"]
    assert [layer.name for layer in layers] == list(case["layers"])
    for entry in case["steps"]:
        prefix = f"{kind}.s{entry['step']}"
        load_into(model, arrays, f"{prefix}.before")
        replaced = {}
        for layer in layers:
            memory, where = method.memory["net"][layer.name], f"{kind}.{layer.name}, step {entry['step']}"
            names = (f"{prefix}.{what}.{layer.name}" for what in ("feature", "age", "mean_feature"))
            feature, age, magnitude = map(arrays.__getitem__, names)
            if (outgoing := arrays.get(f"{prefix}.outgoing.{layer.name}")) is not None:
                for reader, _ in layer.outgoing:
                    difference = largest(mean_outgoing(model.get_submodule(reader)), outgoing)
                    fidelity("method", "cbp", f"outgoing weights, {where}", difference, 1e-6)
            memory["kept"] = torch.zeros(0, len(feature))
            chosen = method.choose(model, layer, memory, feature[None])
            if len(chosen):
                replaced[layer.name] = chosen.tolist()
                method.recycle(state, "net", layer, chosen)
            assert float(memory["due"]) == pytest.approx(entry["accumulated_after"][layer.name], abs=1e-9)
            assert memory["age"].tolist() == age.tolist()
            fidelity("method", "cbp", f"magnitude, {where}", largest(memory["magnitude"], magnitude), 1e-6)
        assert replaced == {name: part["output_columns"] for name, part in entry["replaced"].items()}
        if entry["replaced"]:
            what = f"weights after step {entry['step']}, {kind}"
            fidelity("method", "cbp", what, worst(model, arrays, f"{prefix}.after"), 0.0)


@KINDS
def test_cbp_features(kind, fidelity):
    arrays, settings, model, state = loaded("cbp", kind, "start", phase=0)
    case, method = settings["cases"][kind], official("cbp", state)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(4):
        inputs, wanted = batch(kind, 1000 + step, 8)
        adam.zero_grad()
        cross_entropy(model(inputs), wanted).backward()
        adam.step()
        method.after_step(state)
        for name in case["layers"]:
            if name == "conv1" and step:  # its bias has no gradient but rounding, which Adam turns into steps
                continue
            memory = method.memory["net"][name]
            assert len(memory["kept"]) == case["steps"][step]["buffer_samples"]
            difference = largest(memory["kept"].mean(dim=0), arrays[f"{kind}.s{step}.feature.{name}"])
            fidelity("method", "cbp", f"features of {kind}.{name}, step {step}", difference, 2e-5)


def test_cbp_draws_normal_weights():
    deviation = load("cbp")[1]["law_of_new_weights"]["conv_16x3x3"]["std_formula"]
    model = nn.Sequential(nn.Conv2d(16, 4000, 3), nn.MaxPool2d(2), nn.Conv2d(4000, 2, 1), nn.Conv2d(2, 1, 1))
    method = official("cbp", state := state_of(model))
    method.recycle(state, "net", method.layers["net"][0], torch.arange(4000))
    assert model[0].weight.std().item() == pytest.approx(deviation, rel=5e-3)
    assert model[0].weight.abs().max() > 3 * deviation  # not uniform
    assert (model[0].bias == 0).all() and (model[2].weight == 0).all()


@pytest.mark.parametrize("case", [c for c in load("snr")[1]["cases"] if c.startswith("mlp")])
def test_snr_over_96_steps(case, fidelity):
    arrays, settings = load("snr")
    weights = {"fc1": torch.eye(8), "fc2": u(4000, 6, 8), "fc3": u(4001, 3, 6)}
    biases = [0.0] * 8, [0.3, -0.2, -0.9, -1.5, 0.1, -0.6], [0.0] * 3
    model = nn.Sequential()
    for (name, weight), bias in zip(weights.items(), biases, strict=True):
        model.add_module(name, tiny_nets.linear(weight.tolist(), bias))
        model.add_module(f"{name}_relu", nn.ReLU())
    adam = torch.optim.Adam(model.parameters(), lr=0.0)
    start, state = deepcopy(model.state_dict()), state_of(model, adam, phase=0)
    method = official("snr", state, percentile=settings["cases"][case]["percentile"])
    memory, method.recycle = method.memory["net"], Mock(wraps=method.recycle)
    for step in range(96):
        row = 2.0 * arrays["mlp.fires"][step].float() - 1.0
        model(row.expand(int(arrays[f"{case}.batch"][step]), 8)).sum().backward()
        if step == 0:
            adam.step()
        method.recycle.reset_mock()
        method.after_step(state)
        for name in weights:
            kept = memory[name]["kept"]
            assert len(kept) == int(arrays[f"{case}.buffer"][step])
            assert kept.any(0).tolist() == arrays[f"{case}.fired.{name}"][step].bool().tolist(), (step, name)
            for key in ("age", "tau"):
                ours, theirs = memory[name][key], arrays[f"{case}.{key}.{name}"][step]
                fidelity("method", "snr", f"{key} of {name}, step {step}, {case}", largest(ours, theirs), 0.0)
            if name != "fc3":
                due = arrays[f"{case}.reset.{name}"][step].nonzero().flatten().tolist()
                assert recycled(method.recycle).get(name, []) == due
        if step == 0:
            fidelity("method", "snr", f"weights, {case}", worst(model, arrays, f"{case}.step0.after"), 0.0)
            assert steps_of(adam, model) == settings["cases"][case]["adam_step_after_step0"]
        model.load_state_dict(start)
    for name, known in memory.items():
        counted = Counter(pair for ages in known["silences"].tolist() for pair in enumerate(ages) if pair[1])
        theirs = arrays[f"{case}.histogram_last.{name}"].int().tolist()
        assert counted == {(unit, age): count for unit, age, count in theirs if age}


@KINDS
def test_snr_at_its_first_step(kind, fidelity):
    arrays, settings, model, state = loaded("snr", kind, "before", phase=0)
    case = settings["cases"][kind]
    state.optimizers["net"] = adam = torch.optim.Adam(model.parameters(), lr=0.0)
    for p in model.parameters():
        adam.state[p] = {"step": torch.tensor(1.0)} | {key: torch.full_like(p, 0.5) for key in MOMENTS}
    method = official("snr", state, percentile=case["percentile"])
    before, method.recycle = deepcopy(model.state_dict()), Mock(wraps=method.recycle)
    # the stored masks come from the pass before Adam's step: hand over what it saw
    for layer in method.layers["net"]:
        fired = arrays[f"{kind}.fired.{layer.name}"].bool()
        method.recorders["net"].values[layer.name] = fired.expand(case["buffer"], -1)
    method.after_step(state)
    masked = {name: rows for name, rows in case["masked"].items() if rows and name != case["layers"][-1]}
    assert recycled(method.recycle) == masked and rows_changed(model, before) == case["rows_changed"]
    assert steps_of(adam, model) == case["adam_step_after"]
    assert all((adam.state[p]["exp_avg"] == 0.5).all() for p in model.parameters())


def test_snr_keeps_test_images_between_epochs():
    model = net("conv").train()
    state, images = state_of(model, phase=0), -batch("conv", 1010, 8)[0]
    state.batches = SimpleNamespace(test_inputs=lambda count: images.repeat(count // 8, 1, 1, 1))
    method = official("snr", state)
    memory = method.memory["net"]["conv1"]

    def step(number: int) -> torch.Tensor:
        model.train()(batch("conv", number, 256)[0])
        method.after_step(state)
        return memory["kept"].clone()

    assert len(step(1000)) == 256
    end_of_epoch(method, state)
    test_rows = memory["kept"].clone()
    assert len(test_rows) == 512 and memory["steps"] == 1
    kept = step(1001)
    assert len(kept) == 512 and torch.equal(kept[:256], test_rows[256:])
    method.close()


@pytest.mark.parametrize("name", ["cbp", "snr"])
def test_hooks_hold_the_end_of_the_stage_before(name):
    """As hooks that watched all of it, where the weights stand still: four batches of 200, of which 512 samples stay."""
    model = net("conv").train()
    state, method = state_of(model, phase=0), create(name, variant="official")
    batches = [batch("conv", 1000 + i, 200)[0] for i in range(4)]
    watching, watched = method.watch(model, method.find_layers(state, "net")), {}
    for inputs in batches:
        model(inputs)
        for layer, rows in watching.values.items():
            watched[layer] = last_rows(watched.get(layer, rows[:0]), rows)
    watching.remove()
    state.batches = SimpleNamespace(last_inputs={512: batches[1:]}.get)
    state.phase = 1
    with untouched(model.eval()):
        method.boundary(state)
    assert not model.training
    memory = method.memory["net"]
    assert memory.keys() == watched.keys()
    for layer, rows in watched.items():
        assert len(rows) == 512 and torch.equal(memory[layer]["kept"], rows)
    model.train()(batch("conv", 1010, 256)[0])
    method.after_step(state)
    for layer, rows in watched.items():
        assert torch.equal(memory[layer]["kept"][:256], rows[256:])
        if name == "snr":
            assert (memory[layer]["tau"] == 512).all()
    state.batches, state.phase = None, 2
    method.boundary(state)  # the hooks were there all the time
    method.close()
    state.phase = 1
    with pytest.raises(UserError, match=f"{name}: variant=official looks at further images"):
        create(name, variant="official").boundary(state)


@CELLS
def test_muon_groups(cell, fidelity):
    of_muon, of_adam = load("muon")[1]["groups"][cell]["groups"]
    model = build_paper(cell)
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    *muon, rest = create("muon", variant="official").build(model, adam).param_groups
    matrices = [p for group in muon for p in group["params"]]
    wrong = (len(matrices), sum(map(torch.numel, matrices))) != (len(of_muon["tensors"]), of_muon["count"])
    fidelity("method", "muon", f"tensors and entries of the matrices group, {cell}", wrong, 0)
    assert sum(map(torch.numel, rest["params"])) == of_adam["count"]
    for group in muon:
        assert (group["lr"], group["momentum"]) == (of_muon["lr"], of_muon["momentum"])
    assert rest["eps"] == of_adam["eps"] and list(rest["betas"]) == of_adam["betas"]


def test_muon_steps(fidelity):
    arrays, settings = load("muon")
    model = nn.Module()  # `head`, biases and `tiny` go to Adam
    for name, values in tiny_nets.beginning("before.", arrays).items():
        model.register_parameter(name, nn.Parameter(values.clone()))
    default = torch.optim.Adam(model.parameters(), lr=settings["lr_adam"])
    optimizer = create("muon", variant="official").build(model, default)
    for step in (1, 2):
        start = deepcopy(model.state_dict())
        for name, p in model.named_parameters():
            p.grad = arrays[f"gradient{step}.{name}"].clone()
        optimizer.step()
        for name, p in model.named_parameters():
            where, after = f"{name}, step {step}", arrays[f"after{step}.{name}"]
            if f"exp_avg{step}.{name}" in arrays:
                fidelity("method", "muon", f"Adam part, {where}", largest(p, after), 1e-6)
                continue
            momentum, theirs = (arrays[f"{what}{step}.{name}"] for what in ("momentum_buffer", "update"))
            difference = largest(optimizer.state[p]["momentum_buffer"], momentum)
            fidelity("method", "muon", f"momentum of {where}", difference, 1e-6)
            ours = (start[name] - p.detach()) / settings["lr_muon"]
            cosine = torch.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0)
            fidelity("method", "muon", f"1 - cosine of {where}", 1 - cosine, 0.02)
            fidelity("method", "muon", f"norm of {where}", abs(float(ours.norm() / theirs.norm()) - 1), 0.1)
            p.data.copy_(after)  # rounding does not add up


def test_muon_orthogonalises_as_recorded(fidelity):
    arrays, _ = load("muon")
    for key in (key for key in arrays if key.startswith("ns") and key.endswith(".in")):
        ours, theirs = orthogonalize(arrays[key]), arrays[key.removesuffix("in") + "out"].float()
        cosine = torch.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0)
        fidelity("method", "muon", f"1 - cosine of {key}", 1 - cosine, 0.02)


def test_a_setting_that_the_official_code_does_not_have_is_refused():
    with pytest.raises(UserError, match="compensate=False has no effect with variant=official; leave it at"):
        create("cbp", variant="official", compensate=False)
    assert create("cbp", variant="official", compensate=True).compensate
