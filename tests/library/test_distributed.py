"""Two processes (gloo, CPU) against one: the same weights, bit-equal replicas, errors on every rank.

Both processes run every check, a function of their rank, and one test for each of them reads what became of it.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fire_core import Report, State, UserError, find_targets, fire, reset_optimizer_state
from fire_core.engine import Treated, observe, treat_model
from fire_core.methods import Method, create
from fire_core.methods.controls import random_orthogonal
from fire_core.methods.dash import dash
from tests.tiny_nets import Net, untouched

EXACT = {"solver": "exact"}
SOLVERS = ({"iterations": 5}, EXACT, EXACT | {"strength": 0.5}, EXACT | {"scale": "initial"})
BATCHES = [(torch.arange(i, i + 12)[None], torch.linspace(-1, 1 + i, 37)[None, None]) for i in (0, 9)]
LINEAR_LAYERS = {"targets": "conv", "reset": "linear"}
STARTS = (("full_reset", {}), ("shrink_perturb", {"shrink": 0.3}), ("fire", LINEAR_LAYERS))


def forward(net: Net, x: Tensor) -> Tensor:
    hidden = net.wide(net.fused(net.conv(net.tokens(x).mT).mT)).relu()
    return net.head(net.last(net.tall(hidden)))


def make() -> Net:
    """Tall, wide, uneven over two ranks, convolutional, fused, tied."""
    torch.manual_seed(0)
    shapes = {"fused": (6, 18), "wide": (18, 5), "tall": (5, 24), "last": (24, 8)}
    layers = {"tokens": nn.Embedding(37, 8), "conv": nn.Conv1d(8, 6, 3, padding=1)}
    layers |= {name: nn.Linear(*shape) for name, shape in shapes.items()}
    net = Net(forward, **layers, head=nn.Linear(8, 37, bias=False))
    net.fused.fused_rows = {"q": 6, "k": 6, "v": 6}
    net.head.weight = net.tokens.weight
    return net


def strided() -> Net:
    """As channels_last: one weight is not stored in the order of its dimensions."""
    model = make()
    model.conv.weight.data = model.conv.weight.data.mT.contiguous().mT
    return model


def full(model: nn.Module) -> dict[str, Tensor]:
    parameters = {name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.clone() for n, p in parameters.items()}


@contextmanager
def stays(model: nn.Module) -> Iterator[None]:
    """Fail if a weight of a sharded model changes inside the block."""
    before = full(model)
    yield
    assert all(torch.equal(p, before[name]) for name, p in full(model).items())


error = partial(pytest.raises, (UserError, RuntimeError))


def sharded() -> Net:
    model = make()
    fully_shard(model.tall)
    return fully_shard(model)


def cut_by_columns() -> Net:
    """As tensor parallelism cuts a row-parallel layer; all else is replicated."""
    model = make()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model.last.weight = nn.Parameter(distribute_tensor(model.last.weight.detach(), mesh, [Shard(1)]))
    return model


def twins() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))


CHECKS: dict[str, Callable[[int], None]] = {}


def check(function: Callable[[int], None]) -> Callable[[int], None]:
    CHECKS[function.__name__] = function
    return function


def assert_close(weights: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-6) -> None:
    """Near the expected ones, and the same bits on every rank."""
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert torch.allclose(weight, expected[name], atol=tolerance), name
        first = weight.clone(memory_format=torch.contiguous_format)
        dist.broadcast(first, 0)
        assert torch.equal(weight, first), name


def assert_same_report(report: Report, expected: Report) -> None:
    ours, theirs = report.to_dict(), expected.to_dict()
    assert ours["changed"] == theirs["changed"] and ours["share"] == theirs["share"]
    for row, other in zip(ours["rows"], theirs["rows"], strict=True):
        for key in ("dfi_before", "dfi_after", "dfi_factor", "sfe", "norm_before", "norm_after"):
            value, wanted = row[key], other[key]
            assert value == wanted or value == pytest.approx(wanted, rel=1e-3, abs=1e-5), (row["name"], key)
        assert all(row[key] == other[key] for key in ("name", "action", "reason"))


def fired(model: nn.Module, **settings: object) -> tuple[dict[str, Tensor], Report]:
    if settings.get("scale") == "initial":  # named and sharded as the model's own parameters
        settings["initial"] = {name: 2.0 * p.detach() for name, p in model.named_parameters()}
    report = fire(model, **settings)
    return full(model), report


@check
def two_processes_equal_one(rank: int) -> None:
    for settings in SOLVERS:
        expected, expected_report = fired(make(), **settings)
        found = [fired(make(), group=dist.group.WORLD, **settings), fired(sharded(), **settings)]
        found.append(fired(DistributedDataParallel(strided()), **settings))
        if settings == EXACT:
            wrapped = DistributedDataParallel(make())
            found.append(fired(wrapped, targets=find_targets(wrapped), **settings))
            found.append(fired(cut_by_columns(), **settings))
        for weights, report in found:
            assert_close(weights, expected)
            assert_same_report(report, expected_report)


@check
def random_matrices_are_those_of_one_process(rank: int) -> None:
    """Equal layers on different ranks get different matrices, and no rank's generator runs ahead."""
    models, following = (twins(), fully_shard(twins())), []
    for model in models:
        generator = torch.Generator().manual_seed(3)
        random_orthogonal(model, generator=generator)
        following.append(torch.randint(1000, (), generator=generator))
    assert following[0] == following[1]
    assert_close(full(models[1]), full(models[0]), tolerance=0.0)
    assert not torch.allclose(models[0][0].weight, models[0][1].weight, atol=0.1)


@check
def dash_follows_the_mean_of_all_ranks(rank: int) -> None:
    whole = tuple(torch.cat(parts) for parts in zip(*BATCHES, strict=True))
    models = make(), DistributedDataParallel(make())
    for model, batches in zip(models, ([whole], BATCHES[rank : rank + 1])):
        dash(model, batches, lambda output, y: (output * y).sum(), alpha=1.0)
    assert_close(full(models[1]), full(models[0]), tolerance=1e-6)


@check
def methods_that_read_the_starting_weights_treat_replicas(rank: int) -> None:
    """Names are those of the module inside DistributedDataParallel, also where the starting weights carry its prefix."""

    def treated(method: Method, model: nn.Module, initial: dict) -> tuple[dict, Report, list[str]]:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        report = method.boundary(State({"net": model}, initial={"net": initial}))
        names = {id(p): name.removeprefix("module.") for name, p in model.named_parameters()}
        return full(model), report, [names[id(p)] for p in report.parameters]

    for name, settings in STARTS:
        method, bare = create(name, **settings), make().state_dict()
        expected, expected_report, parameters = treated(method, make(), bare)
        for initial in (bare, DistributedDataParallel(make()).state_dict()):
            weights, report, found = treated(method, DistributedDataParallel(make()), initial)
            assert found == parameters
            assert_close(weights, expected)
            assert_same_report(report, expected_report)


@check
def training_goes_on(rank: int) -> None:
    """The parameters stay the optimizer's, forward and backward work, the projected values are used."""
    x, model, reference = torch.arange(12)[None], sharded(), make()
    before, outputs = [id(p) for p in model.parameters()], []
    for net in (model, reference):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        fire(net)
        outputs.append(net(x))
        outputs[-1].square().mean().backward()
        optimizer.step()
    assert torch.allclose(*outputs, atol=1e-5) and before == [id(p) for p in model.parameters()]
    assert_close(full(model), full(reference), tolerance=1e-5)


@check
def the_optimizer_forgets_what_was_changed(rank: int) -> None:
    """`report.parameters` are the optimizer's own objects, whatever wraps or shards the model."""
    nested = nn.ModuleDict({"a": DistributedDataParallel(make())})
    for model in (DistributedDataParallel(make()), sharded(), nested):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        held, report = len(optimizer.state), fire(model)
        dropped = reset_optimizer_state(optimizer, "clear_changed", report)
        assert dropped == len(report.changed) == held - len(optimizer.state) > 0


@check
def a_dry_run_writes_nothing(rank: int) -> None:
    model = sharded()
    with stays(model):
        report = fire(model, dry_run=True)
    assert not report.changed and len(report.treated()) == len(find_targets(make()).included)


@check
def errors_reach_every_rank_and_nothing_is_written(rank: int) -> None:
    model = sharded()
    for name in ("wide", "tall"):
        local = model.get_submodule(name).weight.to_local().detach()
        with stays(model):
            old = local.clone()
            if rank == 1:
                local[0, 0] = torch.nan
            with error(match=f"{name}.weight"):
                fire(model)
            local.copy_(old)
    model, wrapped = make(), DistributedDataParallel(make())
    if rank == 1:
        for differing in (model, wrapped.module):
            differing.last.weight.data += 1.0
    with untouched(model), error(match=r"last\.weight"):
        fire(model, group=dist.group.WORLD)
    with error(match=r"last\.weight"):
        fire(wrapped)

    def fails_on_one_rank(stack: Tensor, group: list) -> Treated:
        if rank == 1:
            raise torch.OutOfMemoryError("no memory left")
        return Treated(stack)

    failing = sharded()
    with error(match="rank 1: OutOfMemoryError: no memory left"):
        treat_model(failing, find_targets(failing), fails_on_one_rank, action="none")
    with error(match="random_orthogonal"), observe(sharded(), action="halved", method="halve"):
        pass
    flat = FullyShardedDataParallel(make(), use_orig_params=True, device_id=torch.device("cpu"))
    with error(match="summon_full_params"):
        find_targets(flat)


@check
def the_ranks_share_the_work(rank: int) -> None:
    mine: list[str] = []

    def noted(stack: Tensor, group: list) -> Treated:
        mine.extend(target.parameter for target in group)
        return Treated(stack)

    model, parts = make(), [None, None]
    table = find_targets(model)
    treat_model(model, table, noted, action="noted", group=dist.group.WORLD)
    dist.all_gather_object(parts, mine)
    first, second = map(set, parts)
    assert first and second and not first & second
    assert first | second == {target.parameter for target in table.included}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    where = {"init_method": f"file://{folder}/rendezvous", "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", rank=rank, world_size=2, **where)
    failed = {}
    for name, function in CHECKS.items():
        try:
            function(rank)
        except Exception:
            failed[name] = traceback.format_exc()
    torch.save(failed, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The traceback of each check that failed, for each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(failed: list[dict[str, str]], name: str) -> None:
    assert [rank.get(name, "") for rank in failed] == ["", ""]
