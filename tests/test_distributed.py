"""Two processes (gloo, CPU) against one: the same weights, bit-equal replicas, errors on every rank."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fire_core import find_targets, fire
from fire_core.distributed import checksum, project
from fire_core.errors import UserError
from fire_core.fire import Treated, apply_to_targets
from fire_core.gram_form import gram_projection
from tests.polar_cases import deviation, relative_error, spread, with_spectrum

SOLVERS = (
    {"solver": "newton_schulz", "iterations": 5},
    {"solver": "exact"},
    {"solver": "exact", "strength": 0.5},
)


class Net(nn.Module):
    """Tall, wide, uneven over two ranks, convolutional, fused, tied."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(37, 8)
        self.conv = nn.Conv1d(8, 6, 3, padding=1)
        self.fused = nn.Linear(6, 18)
        self.fused.fused_rows = {"q": 6, "k": 6, "v": 6}
        self.wide = nn.Linear(18, 5)
        self.tall = nn.Linear(5, 24)
        self.last = nn.Linear(24, 8)
        self.head = nn.Linear(8, 37, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.tokens(x).mT).mT
        return self.head(self.last(self.tall(self.wide(self.fused(x)).relu())))


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    parameters = {name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.clone() for n, p in parameters.items()}


def sharded() -> Net:
    model = make()
    fully_shard(model.tall)
    return fully_shard(model)


def replicated_and_sharded() -> Net:
    model = make()
    return fully_shard(
        model, mesh=init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("copy", "cut"))
    )


def cut_by_columns() -> Net:
    """As tensor parallelism cuts a row-parallel layer; all else is replicated."""
    model = make()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model.last.weight = nn.Parameter(distribute_tensor(model.last.weight.detach(), mesh, [Shard(1)]))
    return model


def message(action: Callable[[], object]) -> str:
    try:
        action()
    except UserError as error:
        return str(error)
    return "no error"


def replicated_models() -> dict:
    found = {}
    for name, wrap in (("plain", lambda model: model), ("ddp", DistributedDataParallel)):
        for i, settings in enumerate(SOLVERS):
            for share in (True, False):
                model = wrap(make())
                report = project(model, share=share, **settings)
                found[name, i, share] = (full(model), report.to_dict(), sorted(report.changed))
    return found


def sharded_models() -> dict:
    found = {}
    for i, settings in enumerate(SOLVERS):
        for gram_form in (True, False):
            model = sharded()
            report = project(model, gram_form=gram_form, **settings)
            found["fsdp2", i, gram_form] = (full(model), report.to_dict(), sorted(report.changed))
    for name, build in (("hybrid", replicated_and_sharded), ("columns", cut_by_columns)):
        model = build()
        report = project(model, **SOLVERS[1])
        found[name, 1, True] = (full(model), report.to_dict(), sorted(report.changed))
    model = sharded()
    fire(model, solver="exact")
    found["routed"] = full(model)
    return found


def another_method() -> tuple[dict, str]:
    """A treatment that is not FIRE, through the same door: every target matrix is halved."""
    model = sharded()
    table = find_targets(model)
    report = apply_to_targets(
        model, table, lambda stack, group: Treated(stack / 2), action="halved", method="half"
    )
    return full(model), report.method


def training_goes_on() -> bool:
    """The parameters stay the optimizer's, forward and backward work, the projected values are used."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [id(p) for p in model.parameters()]
    project(model)
    x = torch.arange(12)[None]
    reference = make()
    fire(reference)
    same = torch.allclose(model(x), reference(x), atol=1e-5)
    model(x).square().mean().backward()
    optimizer.step()
    reference(x).square().mean().backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    after = full(model)
    stepped = all(torch.allclose(after[n], p, atol=1e-5) for n, p in reference.named_parameters())
    return same and stepped and before == [id(p) for p in model.parameters()]


def failures(rank: int) -> dict:
    found = {}
    model = sharded()
    for parameter in (model.wide.weight, model.tall.weight):
        with torch.no_grad():
            start = full(model)
            old = parameter.to_local().clone()
            if rank == 1:
                parameter.to_local()[0, 0] = torch.nan
            name = "wide" if parameter is model.wide.weight else "tall"
            found[f"nan in {name}"] = message(lambda: project(model))
            parameter.to_local().copy_(old)
            found[f"{name} untouched"] = all(torch.equal(p, start[n]) for n, p in full(model).items())
    model = make()
    if rank == 1:
        model.last.weight.data += 1.0
    found["replicas differ"] = message(lambda: project(model, share=False))
    found["unshared shards"] = message(lambda: project(sharded(), share=False))
    for use_orig_params in (False, True):
        flat = FullyShardedDataParallel(
            make(), use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
        found["fsdp1", use_orig_params] = message(lambda flat=flat: find_targets(flat))
    return found


def who_works() -> list[str]:
    """Parameters that this rank projected itself."""
    from fire_core import distributed

    mine: list[str] = []
    original = distributed.fire

    def counted(tree: nn.Module, **settings: object) -> object:
        mine.extend(name for name, _ in tree.named_parameters())
        return original(tree, **settings)

    distributed.fire = counted
    project(make())
    distributed.fire = original
    return mine


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    found = {
        "replicated": replicated_models(),
        "sharded": sharded_models(),
        "training": training_goes_on(),
        "another": another_method(),
        "failures": failures(rank),
        "mine": who_works(),
    }
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=2)
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def alone() -> list[tuple[dict, dict, list]]:
    expected = []
    for settings in SOLVERS:
        model = make()
        report = fire(model, **settings)
        expected.append((full(model), report.to_dict(), sorted(report.changed)))
    return expected


def assert_rows_match(actual: dict, expected: dict) -> None:
    assert [row["name"] for row in actual["rows"]] == [row["name"] for row in expected["rows"]]
    for row, other in zip(actual["rows"], expected["rows"]):
        for key in ("dfi_before", "dfi_after", "dfi_factor", "sfe", "norm_before", "norm_after"):
            value = other[key] if other[key] is None else pytest.approx(other[key], rel=1e-3, abs=1e-5)
            assert row[key] == value, (row["name"], key)
        assert (row["action"], row["reason"]) == (other["action"], other["reason"])


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_two_processes_equal_one(ranks: list[dict], alone: list, kind: str) -> None:
    for key, (weights, report, changed) in [
        entry for entry in ranks[0][kind].items() if entry[0] != "routed"
    ]:
        expected_weights, expected_report, expected_changed = alone[key[1]]
        assert changed == expected_changed
        for name, weight in expected_weights.items():
            assert torch.allclose(weights[name], weight, atol=2e-6), (key, name)
        assert_rows_match(report, expected_report)


def test_replicas_are_bit_equal(ranks: list[dict]) -> None:
    for kind in ("replicated", "sharded"):
        for key, first in ranks[0][kind].items():
            second = ranks[1][kind][key]
            weights = (first, second) if key == "routed" else (first[0], second[0])
            assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]), key


def test_fire_on_a_sharded_model_is_routed(ranks: list[dict], alone: list) -> None:
    for name, weight in alone[1][0].items():
        assert torch.allclose(ranks[0]["sharded"]["routed"][name], weight, atol=2e-6), name


def test_other_treatments_are_routed_too(ranks: list[dict]) -> None:
    expected = make()
    with torch.no_grad():
        for target in find_targets(expected).included:
            target.write(expected, target.matrix(expected) / 2)
    for rank in ranks:
        weights, method = rank["another"]
        assert method == "half"
        assert all(torch.equal(weights[name], weight) for name, weight in full(expected).items())


def test_training_goes_on_after_a_projection(ranks: list[dict]) -> None:
    assert ranks[0]["training"] and ranks[1]["training"]


def test_the_ranks_share_the_work(ranks: list[dict]) -> None:
    first, second = (set(rank["mine"]) for rank in ranks)
    assert first and second and not first & second
    assert first | second == {t.parameter for t in find_targets(make()).included}


def test_errors_reach_every_rank_and_nothing_is_written(ranks: list[dict]) -> None:
    for rank in ranks:
        for name in ("wide", "tall"):
            assert f"{name}.weight" in rank["failures"][f"nan in {name}"]
            assert rank["failures"][f"{name} untouched"]
        assert "last.weight" in rank["failures"]["replicas differ"]
        assert "share=False" in rank["failures"]["unshared shards"]


def test_flattened_shards_are_refused(ranks: list[dict]) -> None:
    for rank in ranks:
        for use_orig_params in (False, True):
            assert "summon_full_params" in rank["failures"]["fsdp1", use_orig_params]


@pytest.mark.parametrize(
    "setting",
    [
        {"scale": "offical"},
        {"normalize": "spektral"},
        {"iterations": 0},
        {"precision": "bf8"},
        {"tolerance": -1},
    ],
)
def test_bad_settings_are_refused_before_anything_is_sent(setting: dict) -> None:
    with pytest.raises(UserError, match=next(iter(setting))):
        project(make(), **setting)


def test_a_misspelt_setting_is_named() -> None:
    with pytest.raises(UserError, match="no setting 'strenght'; did you mean 'strength'"):
        project(make(), strenght=0.5)


def test_one_process_without_a_group_is_told_so() -> None:
    with pytest.raises(UserError, match="init_process_group"):
        project(make())


@pytest.mark.parametrize("settings", SOLVERS)
def test_gram_form_equals_the_direct_form(settings: dict) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 40, dtype=torch.float64))
    weight = model[0].weight.detach().clone()
    target = find_targets(model).included[0]
    projection = gram_projection(*torch.linalg.eigh(weight.T @ weight), target, settings)
    report = fire(model, **settings)
    assert torch.allclose(weight @ projection.factor, model[0].weight, atol=1e-7)
    for key in ("dfi_before", "dfi_after", "dfi_factor", "sfe", "norm_before", "norm_after"):
        assert getattr(projection.row, key) == pytest.approx(getattr(report.treated()[0], key), abs=1e-6), key


@pytest.mark.parametrize("decades", [1.0, 4.0, 4.5, 4.9])
def test_gram_form_is_exact_on_ill_conditioned_weights_and_says_what_it_measured(decades: float) -> None:
    weight = with_spectrum(400, 64, spread(64, decades))
    target = find_targets(nn.Sequential(nn.Linear(64, 400))).included[0]
    values, vectors = torch.linalg.eigh(weight.double().T @ weight.double())
    projection = gram_projection(values, vectors, target, {"solver": "exact", "scale": "none"})
    stored = (weight.double() @ projection.factor).float()
    assert deviation(stored) <= 1e-8
    assert relative_error(stored, weight) <= 1e-5 + 2e-7 * 10**decades
    spoilt = (stored * 1.001).double()
    projection.measure(spoilt.T @ spoilt)
    row = projection.row
    assert row.residual == row.dfi_after == row.dfi_factor == pytest.approx(float(deviation(spoilt)))
    assert row.norm_after == pytest.approx(float(spoilt.norm()))


def test_gram_form_declines_what_it_would_spoil() -> None:
    target = find_targets(nn.Sequential(nn.Linear(2, 8))).included[0]
    for values in ([0.0, 1.0], [1e-11, 1.0], [-1.0, 1.0], [float("nan")] * 2):
        assert (
            gram_projection(torch.tensor(values, dtype=torch.float64), torch.eye(2).double(), target, {})
            is None
        )


def test_checksum_sees_bits_and_order() -> None:
    a = torch.tensor([1.0, 2.0, 3.0])
    assert checksum(a) == checksum(a.clone())
    assert (
        len(
            {
                checksum(a),
                checksum(a.flip(0)),
                checksum(a + 1e-6),
                checksum(torch.zeros(3)),
                checksum(-torch.zeros(3)),
            }
        )
        == 5
    )
