"""Later rivals against numbers recorded from their authors' code, or where none is known from ports (rivals/README.md)."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from fire_core import attach
from fire_core.attach import Attached
from fire_core.measure.metrics import effective_rank
from fire_core.methods import Method, cpr, create
from fire_core.methods.adamo import isometry_gradient
from fire_core.methods.l2_er import rank_step
from fire_core.methods.upgd import PerturbedDescent
from fire_core.units import find_unit_layers
from tests.tiny_nets import Conv, beginning, largest, linear, read_arrays, u

RULES, SPECTRAL = 3e-7, 1e-5
RECORDED = read_arrays(Path(__file__).parent / "rivals" / "rivals.npz")


def recorded(file: str, case: str = "") -> dict[str, Tensor]:
    """The arrays of one case, by the rest of their names."""
    return beginning(f"{file}/{case}." if case else f"{file}/", RECORDED)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


class Plain(Conv):
    """`Conv` without batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.Identity(), nn.Identity()
        self.conv2 = nn.Conv2d(6, 8, 3, padding=1)


NETS = {"mlp": mlp, "conv": Plain, "convbn": Conv}


def put(values: list[Tensor], vector: Tensor) -> None:
    """Copy a flat vector into tensors, in order."""
    with torch.no_grad():
        for value, part in zip(values, vector.split([v.numel() for v in values]), strict=True):
            value.copy_(part.reshape(value.shape))


def net_of(kind: str, vector: Tensor | None = None) -> nn.Module:
    net = NETS[kind]()
    put(list(net.state_dict().values()), RECORDED[f"inputs/{kind}.start"])
    if vector is not None:
        put(list(net.parameters()), vector)
    return net


def with_gradients(net: nn.Module, recorded: Iterable[Tensor]) -> Iterator[int]:
    """Give the weights the gradients of each step, and yield its number, from 1."""
    for step, gradients in enumerate(recorded, 1):
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        put([p.grad for p in net.parameters()], gradients)
        yield step


def weights_of(net: nn.Module) -> Tensor:
    return parameters_to_vector(net.parameters()).detach()


def agrees(ours: nn.Module, known: dict[str, Tensor], name: str, tolerance: float = RULES) -> bool:
    """Whether weights are recorded under this name. They must be those of the net then."""
    if name in known:
        assert largest(weights_of(ours), known[name]) < tolerance, name
    return name in known


PLAIN = {"lr": 0.01, "weight_decay": 0.01, "adaptive": False}
ADAPTIVE = {"lr": 0.001, "weight_decay": 0.001, "adaptive": True}
NOISY = {"decay": 0.9, "sigma": 0.1}
UPGD = {
    "upgd/mlp.global": {**PLAIN, "decay": 0.999, "sigma": 0.0},
    "upgd/mlp.global_noise": {**PLAIN, **NOISY},
    "upgd_adaptive/mlp.clipping_repo": {**ADAPTIVE, "decay": 0.999, "sigma": 0.0},
    # twice the rate with half the weight decay: the factor 2 of the version for reinforcement learning
    "upgd_adaptive/mlp.rl_noise": {**ADAPTIVE, **NOISY, "lr": 0.002, "weight_decay": 0.0005, "eps": 1e-5},
    "upgd_conv/conv.clipping_repo": {**ADAPTIVE, "decay": 0.999, "sigma": 0.0},
}


@pytest.mark.parametrize("case", UPGD)
def test_upgd(case, monkeypatch):
    file, _, name = case.partition("/")
    known, net = recorded(file, name), net_of(name.partition(".")[0])
    optimizer, compared = PerturbedDescent(net.parameters(), **UPGD[case]), 0
    if "noise" in known:
        noise = iter(known["noise"].flatten())
        draw = lambda shape, **_: torch.stack([next(noise) for _ in range(shape.numel())]).reshape(shape)  # noqa: E731
        monkeypatch.setattr(torch, "randn", draw)
    for step in with_gradients(net, known["gradients"]):
        optimizer.step()
        compared += agrees(net, known, f"after{step}")
    assert compared >= 2


def test_upgd_where_every_utility_is_negative():
    """The ratio to the negative maximum is then 1 or more, and the least useful weights are protected most."""
    known = recorded("upgd", "negative")
    weight = nn.Parameter(known["start"].clone())
    optimizer = PerturbedDescent([weight], lr=0.1, weight_decay=0.0, decay=0.9, sigma=0.0, adaptive=False)
    for step in (1, 2, 3):
        weight.grad = known["gradient"]
        optimizer.step()
        assert largest(weight, known[f"after{step}"]) < RULES


def test_upgd_where_nothing_is_useful_makes_no_nan():
    weight = nn.Parameter(torch.tensor([0.0, 1.0]))
    weight.grad = torch.tensor([1.0, 1.0])
    PerturbedDescent([weight], lr=1.0, weight_decay=0.0, decay=0.9, sigma=0.0, adaptive=False).step()
    assert weight.tolist() == [-0.5, 0.0]  # utilities 0 and -0.1 over 1e-30: U = 1/2 and 0


CLIPPING = {"mlp.sgd": {}, "mlp.adam": {"factor": 2.0}, "mlp.keep_last": {"targets": "all,-head"}}
CLIPPING |= {"conv.sgd": {}, "convbn.sgd": {}}


@pytest.mark.parametrize("case", CLIPPING)
def test_weight_clipping(case):
    known, kind = recorded("weight_clipping", case), case.partition(".")[0]
    net, settings = net_of(kind), {"factor": 1.0, "targets": "all", "first_phase": 0} | CLIPPING[case]
    treatment = attach(create("weight_clipping", **settings), net)
    for step in (step for step in (1, 2) if f"unclipped{step}" in known):
        put(list(net.parameters()), known[f"unclipped{step}"])
        treatment.after_step()
        theirs = net_of(kind, known[f"after{step}"]).state_dict()
        for name, ours in net.named_parameters():
            difference = largest(ours, theirs[name])
            # theirs clamps norms too
            assert difference > 0.01 if name.startswith("bn") else difference < RULES


def test_hare_and_tortoise():
    known, net = recorded("hare_tortoise", "copies"), net_of("convbn")
    treatment = attach(create("hare_tortoise", momentum=0.9, passes=3, first_phase=0), net)

    def state_is(vector: Tensor, values: dict[str, Tensor]) -> bool:
        pairs = zip(values.values(), vector.split([v.numel() for v in values.values()]), strict=True)
        return all(largest(a.flatten(), b) < RULES for a, b in pairs if a.is_floating_point())

    for step in (1, 2, 7, 8):
        if step == 7:  # theirs went on from shared memory for a step
            for _ in range(2):
                treatment.after_pass()
            put(list(treatment.method.tortoise["net"].values()), known["tortoise6"])
        put(list(net.state_dict().values()), known[f"hare{step}"])
        treatment.after_step()
        assert state_is(known[f"tortoise{step}"], treatment.method.tortoise["net"])
        if step % 2 == 0:
            assert state_is(known[f"hare{step}"], net.state_dict())
            treatment.after_pass()
            assert state_is(known[f"copied{step}"], net.state_dict())


def test_adamo_gradient_is_twice_that_of_the_port():
    """Its penalty has a factor of 1/2, and the paper's, as others read it, has none."""
    known = recorded("adamo", "matrix")
    for kind in ("tall", "square", "wide", "row"):
        theirs = known[f"{kind}.plain.gradient"]
        assert largest(isometry_gradient(known[kind]) / 2, theirs) < 2e-6 * float(theirs.abs().max())


def test_adamo_of_the_port():
    known, net = recorded("adamo", "mlp"), net_of("mlp")
    adam = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.0)
    treatment = attach(create("adamo", reading="code", coefficient=0.1, first_phase=0), net, adam)
    for step in with_gradients(net, known["gradients"]):
        treatment.before_step()
        adam.step()
        agrees(net, known, f"before{step}")
        treatment.after_step()
        agrees(net, known, f"after{step}")


@pytest.mark.parametrize("case", ["mlp.k1", "mlp.k2", "mlp.k3", "conv.k2"])
def test_spectral(case):
    kind, power = case.split(".k")
    known, net = recorded("spectral", case), net_of(kind, RECORDED[f"spectral/{kind}.start"])
    treatment = attach(create("spectral", coefficient=1.0, power=int(power), first_phase=0), net)
    assert abs(treatment.penalty().item() / known["penalty"].item() - 1) < 0.03  # without a warm-up, 0.6 off
    for _ in range(500):
        treatment.penalty()
    loss = treatment.penalty()
    loss.backward()
    assert abs(loss.item() / known["penalty"].item() - 1) < SPECTRAL
    gradient = parameters_to_vector(p.grad for p in net.parameters())
    assert largest(gradient, known["gradient"]) < SPECTRAL * float(known["gradient"].abs().max())


def test_effective_rank():
    known = recorded("l2_er")
    for case in ("rank0", "rank1", "rank2"):
        features = known[f"{case}.features"].clone().requires_grad_(True)
        rank = effective_rank(torch.linalg.svdvals(features.double()), 1e-8)
        rank.backward()
        wanted = float(known[f"{case}.effective_rank"])
        assert abs(rank.item() - wanted) < min(1e-5, 1e-6 * wanted)
        assert largest(features.grad, known[f"{case}.gradient"]) < 2e-6


def test_the_rank_step_climbs_the_mean_effective_rank():
    known, net = recorded("l2_er", "loss"), net_of("mlp")
    before, inputs = weights_of(net), RECORDED["inputs/mlp.x"]
    layers, _ = find_unit_layers(net, inputs[0])
    rank_step(net, layers, [((batch,), {}) for batch in inputs[:4]], rate=1.0)
    assert largest(before - weights_of(net), known["gradient"]) < 1e-6 * float(known["gradient"].abs().max())


def trained_on_recorded(net: nn.Module, method: Method, rate: float) -> Iterator[tuple[int, Attached]]:
    """Make the twelve recorded steps of SGD, and yield before the method acts on each."""
    inputs, labels = RECORDED["inputs/mlp.x"], RECORDED["inputs/mlp.y"]
    sgd = torch.optim.SGD(net.parameters(), lr=rate)
    treatment = attach(method, net, sgd, batches=lambda: iter([(inputs[0], labels[0])]))
    treatment.boundary(1)
    for step in range(12):
        sgd.zero_grad()
        cross_entropy(net(inputs[step]), labels[step]).backward()
        treatment.before_step()
        sgd.step()
        yield step + 1, treatment


def test_l2_er():
    known, net = recorded("l2_er", "train"), net_of("mlp")
    method = create("l2_er", rate=0.01, decay=1e-3, every_steps=4, last_layers=0)
    for step, treatment in trained_on_recorded(net, method, rate=0.01):
        agrees(net, known, f"after{step}", 1e-6)
        treatment.after_step()
        agrees(net, known, f"rank{step}", 1e-6)
    method.close()


def channels_first(known: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arrays of the convolutional net, whose first Linear had its columns in the order row, column, channel."""
    net = net_of("conv", torch.arange(len(known["start"])))
    net.fc1.weight.data = net.fc1.weight.unflatten(1, (4, 4, 8)).permute(0, 3, 1, 2).flatten(1).detach()
    places = weights_of(net).long()
    return {name: v[..., places] if v.shape[-1:] == places.shape else v for name, v in known.items()}


def stand_in(shape: torch.Size) -> Tensor:
    """The draw of the recorded runs: sqrt(6 / fan_in) u(900 + n mod 97), with inputs before outputs."""
    values = ((6 / shape[1:].numel()) ** 0.5 * u(900 + shape.numel() % 97, shape.numel())).float()
    if len(shape) == 4:
        return values.reshape(*shape[2:], shape[1], shape[0]).permute(3, 2, 0, 1)
    drawn = values.reshape(shape[1], shape[0]).mT
    return drawn.unflatten(1, (4, 4, 8)).permute(0, 3, 1, 2).flatten(1) if shape[1] == 128 else drawn


def prepared(case: str, method: Method) -> tuple[dict, nn.Module, torch.optim.Adam, Attached]:
    """What is recorded, and its net with a method after a boundary."""
    file, _, name = case.partition("/")
    known, kind = recorded(file, name), name.partition(".")[0]
    known = channels_first(known) if kind == "conv" else known
    net = net_of(kind, known["start"])
    inputs = torch.zeros(2, 8) if kind == "mlp" else torch.zeros(2, 3, 8, 8)
    adam = torch.optim.Adam(net.parameters(), lr=1e-3)
    treatment = attach(method, net, adam, batches=lambda: iter([(inputs, None)]))
    treatment.boundary(1)
    return known, net, adam, treatment


CPR = {
    "cpr/mlp.sigmoid": {"rate": 0.1, "decay": 0.9}, "cpr/mlp.adam": {"rate": 0.015, "decay": 0.99},
    "cpr_conv/conv.sigmoid": {"rate": 0.1, "decay": 0.9},
}  # fmt: skip


@pytest.mark.parametrize("case", CPR)
def test_cpr(case, monkeypatch):
    monkeypatch.setattr(cpr, "draw", lambda law, shape, stream: stand_in(shape))
    known, net, _, treatment = prepared(case, create("cpr", every_steps=3, **CPR[case]))
    mixed = 0
    for step in with_gradients(net, known["gradients"]):
        treatment.before_step()
        if f"alone{step}" in known:
            put(list(net.parameters()), known[f"alone{step}"])
        before = weights_of(net)
        treatment.after_step()
        if agrees(net, known, f"after{step}"):
            mixed += not torch.equal(before, weights_of(net))
        if f"utility{step}" in known:
            utilities = [memory["utility"] for memory in treatment.method.memory["net"].values()]
            assert largest(torch.cat(utilities), known[f"utility{step}"]) < 2e-6
    assert mixed >= 2


REGRAMA = {"regrama/mlp.adam_alone": {}, "regrama/mlp.capped": {"most": 0.1}, "regrama_conv/conv.sgd": {}}


@pytest.mark.parametrize("case", REGRAMA)
def test_regrama(case):
    """The same units are replaced; the rows of their new weights are those of the stand-in there, drawn ones here."""
    method, replaced = create("regrama", every_steps=3, threshold=0.6, **REGRAMA[case]), 0
    known, net, adam, treatment = prepared(case, method)
    for step in with_gradients(net, known["gradients"]):
        treatment.before_step()
        chosen = {f"{layer.name}.weight": units for _, layer, units in method.pending}
        if f"alone{step}" not in known:
            treatment.after_step()
            continue
        put(list(net.parameters()), known[f"alone{step}"])
        for p in net.parameters():
            adam.state[p] = {"exp_avg": torch.ones_like(p), "exp_avg_sq": torch.ones_like(p)}
        treatment.after_step()
        parts = known[f"after{step}"].split([p.numel() for p in net.parameters()])
        for (key, ours), part in zip(net.named_parameters(), parts, strict=True):
            theirs, rows = part.view_as(ours), torch.zeros(len(ours), dtype=torch.bool)
            rows[chosen.get(key, [])] = True
            assert torch.equal(ours[~rows], theirs[~rows]), key
            if rows.any():
                bound = (6 / ours[0].numel()) ** 0.5  # below 0.41 of which the default draw is
                assert largest(theirs[rows], stand_in(ours.shape)[rows]) < RULES
                assert 0.5 * bound < float(ours[rows].detach().abs().max()) <= bound
                assert not adam.state[ours]["exp_avg"][rows].any()
                replaced += int(rows.sum())
    assert replaced >= 5


SWR = {
    "mlp.threshold": {"factor": 0.05, "every_steps": 3}, "mlp.mean": {"factor": 0.05, "every_steps": 3},
    "mlp.average": {"factor": 0.05, "every_steps": 3, "decay": 0.9},
    "mlp.proportional": {"utility": "magnitude", "rule": "proportional", "factor": 0.01, "every_steps": 2},
}  # fmt: skip


@pytest.mark.parametrize("case", SWR)
def test_swr(case, monkeypatch):
    known, net = recorded("swr", case), net_of("mlp")
    method = create("swr", **SWR[case], first_phase=0)
    treatment, compared = attach(method, net, torch.optim.SGD(net.parameters(), lr=0.05)), 0
    method.draw = lambda start, count, stream: torch.stack([next(draws) for _ in range(count)])
    if "binomial" in known:
        bernoulli = iter(known["binomial"].tolist())
        monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(1.0 - next(bernoulli)))
    for step in with_gradients(net, known["gradients"]):
        draws = iter(known.get(f"draws{step}", torch.zeros(1000)))
        if f"before{step}" not in known:
            if method.decay:
                break  # the average needs every step
            treatment.after_step()
            continue
        put(list(net.parameters()), known[f"before{step}"])
        treatment.before_step()
        before = weights_of(net)
        treatment.after_step()
        if agrees(net, known, f"after{step}"):
            compared += not torch.equal(before, weights_of(net))
    assert compared


def test_swr_draws_from_the_law_of_the_start():
    method, stream = create("swr"), torch.Generator().manual_seed(0)
    drawn = method.draw(torch.randn(100, 100) * 0.3 + 2.0, 5000, stream)
    assert abs(float(drawn.mean()) - 2.0) < 0.02 and abs(float(drawn.std()) - 0.3) < 0.01
    assert method.draw(torch.ones(8), 5, stream).tolist() == [1.0] * 5
    assert create("swr", fresh="mean").draw(torch.tensor([1.0, 3.0]), 2, stream).tolist() == [2.0, 2.0]


def test_nap():
    known = recorded("nap_third_party", "norm_named")
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    put(list(net.parameters()), known["initial"])
    treatment = attach(create("nap", first_phase=0), net)
    put(list(net.parameters()), known["before"])
    treatment.after_step()
    for ours, theirs in zip(net.parameters(), known["after"].split([p.numel() for p in net.parameters()])):
        if ours.ndim > 1:  # the port squeezes gains and biases of the norm layer
            assert largest(ours.flatten(), theirs) < RULES


def test_nap_keeps_a_norm_for_each_matrix_of_a_stack_and_leaves_zeros_alone():
    net, one, full = nn.Linear(2, 2, bias=False), torch.eye(2), torch.ones(2, 2)
    net.stacked_matrices = True
    net.weight = nn.Parameter(torch.stack([one, 2 * one, 0 * one]))
    treatment = attach(create("nap", first_phase=0), net)
    net.weight.data = torch.stack([3 * one, one, full])
    treatment.after_step()
    assert largest(net.weight, torch.stack([one, 2 * one, full])) < 1e-6


def test_cbp(monkeypatch):
    """The units of least utility in all 12 steps. Where several have it, theirs are taken; so are their drawn weights."""
    known, net = recorded("cbp_lop", "contribution"), net_of("mlp")
    method = create("cbp", compensate=False, replacement_rate=0.03, decay=0.9, maturity=3, fresh="he_uniform")
    choose, replaced = method.choose, 0

    def chosen_by_both(net, layer, memory, measured):
        number, readers = (0, 16) if layer.name == "0" else (1, 4)
        ours = choose(net, layer, memory, measured)
        # their utility is a mean over outgoing weights
        corrected = memory["utility"] / (1 - 0.9 ** memory["age"]) / readers
        if f"corrected{step}.{number}" not in known:
            assert len(ours) == 0
            return ours
        assert largest(corrected, known[f"corrected{step}.{number}"]) < 1e-6
        theirs = (known[f"age{step}.{number}"] == 0).nonzero().flatten()
        assert torch.equal(corrected[ours], corrected[theirs])
        return theirs

    monkeypatch.setattr(method, "choose", chosen_by_both)
    for step, treatment in trained_on_recorded(net, method, rate=0.05):
        agrees(net, known, f"alone{step}", 1e-6)
        old = net_of("mlp", weights_of(net))
        treatment.after_step()
        for number, memory in enumerate(method.memory["net"].values()):
            if f"age{step}.{number}" in known:
                assert torch.equal(memory["age"].float(), known[f"age{step}.{number}"].float())
                assert largest(memory["mean"], known[f"mean{step}.{number}"]) < RULES
        if f"after{step}" not in known:
            continue
        theirs = net_of("mlp", known[f"after{step}"])
        for ours, wanted, before in zip(net.parameters(), theirs.parameters(), old.parameters(), strict=True):
            drawn = (ours != before) & (ours != 0)
            assert largest(ours[~drawn], wanted[~drawn]) < 1e-6
            if drawn.any():
                assert wanted[drawn].abs().max() <= (6 / ours.shape[1]) ** 0.5
                assert 0.5 < float(ours[drawn].detach().abs().max()) * (ours.shape[1] / 6) ** 0.5 <= 1
                replaced += 1
        put(list(net.parameters()), known[f"after{step}"])
    assert replaced == 8
    method.close()


@pytest.mark.parametrize("settings", [{}, {"low": 0.5, "high": 2.0}])
def test_singular_clip(settings):
    known, method = recorded("singular_clip"), create("singular_clip", **settings)
    keys = [key for key in known if key.endswith(f"both.{method.low}_{method.high}.after")]
    assert len(keys) == 7
    for key in keys:
        before = known[f"{key.partition('.')[0]}.before"]
        net = linear(before.tolist())
        attach(method, {"net": net}).boundary(1)
        singular = torch.linalg.svdvals(before.double())
        if singular[-1] < 1e-6:  # where lost rank is lifted, the directions are arbitrary
            clamped = singular.clamp(method.low, method.high)
            assert largest(torch.linalg.svdvals(net.weight.detach()), clamped) < SPECTRAL
        else:
            assert largest(net.weight, known[key]) < SPECTRAL
            assert torch.equal(before, known[key]) == torch.equal(net.weight, before)
