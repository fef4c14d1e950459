"""Two processes (gloo, CPU) against one: the same weights, bit-equal replicas, errors on every rank."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fire_core import Report, State, UserError, find_targets, fire, reset_optimizer_state
from fire_core.engine import Treated, observe, treat_model
from fire_core.methods import create
from fire_core.methods.controls import random_orthogonal
from fire_core.methods.dash import dash
from tests.tiny_nets import Net

EXACT = {"solver": "exact"}
SOLVERS = ({"iterations": 5}, EXACT, EXACT | {"strength": 0.5}, EXACT | {"scale": "initial"})
BATCHES = [(torch.arange(i, i + 12)[None], torch.linspace(-1, 1 + i, 37)[None, None]) for i in (0, 9)]
STARTS = {"full_reset": {}, "shrink_perturb": {"shrink": 0.3}, "fire": {"targets": "conv", "reset": "linear"}}


def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.head(net.last(net.tall(net.wide(net.fused(net.conv(net.tokens(x).mT).mT)).relu())))


def make() -> Net:
    """Tall, wide, uneven over two ranks, convolutional, fused, tied."""
    torch.manual_seed(0)
    shapes = {"fused": (6, 18), "wide": (18, 5), "tall": (5, 24), "last": (24, 8)}
    layers = {"tokens": nn.Embedding(37, 8), "conv": nn.Conv1d(8, 6, 3, padding=1)}
    layers |= {name: nn.Linear(*shape) for name, shape in shapes.items()}
    layers["attention"] = nn.MultiheadAttention(6, 2)
    net = Net(forward, **layers, head=nn.Linear(8, 37, bias=False))
    net.fused.fused_rows = {"q": 6, "k": 6, "v": 6}
    net.head.weight = net.tokens.weight
    return net


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    parameters = {name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.clone() for n, p in parameters.items()}


def sharded() -> Net:
    model = make()
    fully_shard(model.tall), fully_shard(model.attention)
    return fully_shard(model)


def message(action: Callable[[], object]) -> str:
    try:
        action()
    except (UserError, RuntimeError) as error:
        return str(error)
    return "no error"


def outcome(model: nn.Module, report: Report) -> tuple[dict, dict, list[str], list[str]]:
    """Weights, figures, and the names of what was changed, as the report and as its parameters have it."""
    names = {id(p): name.removeprefix("module.") for name, p in model.named_parameters()}
    own = sorted(names[id(p)] for p in report.parameters)
    return full(model), report.to_dict(), sorted(report.changed), own


def fired(model: nn.Module, **settings: object) -> tuple[dict, dict, list[str], list[str]]:
    if settings.get("scale") == "initial":  # named and sharded as the model's own parameters
        settings["initial"] = {name: 2.0 * p.detach() for name, p in model.named_parameters()}
    return outcome(model, fire(model, **settings))


def fired_models() -> dict:
    """What FIRE makes of models of each kind with settings of this number, and what methods make of replicas."""
    found = {}
    for i, settings in enumerate(SOLVERS):
        found["plain", i] = fired(make(), group=dist.group.WORLD, **settings)
        strided = make()  # as channels_last: one weight is not stored in the order of its dimensions
        strided.conv.weight.data = strided.conv.weight.data.mT.contiguous().mT
        found["ddp", i] = fired(DistributedDataParallel(strided), **settings)
        found["fsdp2", i] = fired(sharded(), **settings)
    wrapped, cut, mesh = DistributedDataParallel(make()), make(), init_device_mesh("cpu", (2,))
    # as tensor parallelism cuts a row-parallel layer; all else is replicated
    cut.last.weight = nn.Parameter(distribute_tensor(cut.last.weight.detach(), mesh, [Shard(1)]))
    found["columns", 1] = fired(cut, **SOLVERS[1])
    found["table", 1] = fired(wrapped, targets=find_targets(wrapped), **SOLVERS[1])
    prefixed = DistributedDataParallel(make()).state_dict()
    for method, settings in STARTS.items():
        found["start", method] = towards_the_start(DistributedDataParallel(make()), method, **settings)
        given = {"initial": prefixed, **settings}
        found["prefixed start", method] = towards_the_start(DistributedDataParallel(make()), method, **given)
    found["sharded start", "rescale"] = towards_the_start(sharded(), "rescale", sharded().state_dict())
    return found


def forgets_what_was_changed(model: nn.Module) -> bool:
    """`report.parameters` are the optimizer's own objects, whatever wraps or shards the model: Adam counts anew for them."""
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    held, report = len(optimizer.state), fire(model)
    dropped = reset_optimizer_state(optimizer, "clear_changed", report)
    forgotten = dropped == len(report.changed) == held - len(optimizer.state) > 0
    optimizer.step()
    steps = sorted(float(state["step"]) for state in optimizer.state.values())
    return forgotten and steps == [1.0] * dropped + [2.0] * (held - dropped)


def evaluated() -> bool:
    """After an evaluation, FSDP2 leaves whole weights, and what is written into these is lost."""
    model, other, tokens = sharded(), fully_shard(make()), torch.zeros(1, 3, dtype=torch.long)
    with torch.no_grad():
        other(tokens)
    for each in (model, other):
        fire(each), each(tokens).sum().backward()
    return all(torch.equal(p, full(model)[name]) for name, p in full(other).items())


def dry_run() -> bool:
    model = sharded()
    before, report = full(model), fire(model, dry_run=True)
    count = len(find_targets(make()).included)
    return stays(model, before) and not report.changed and len(report.treated()) == count


def twins() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))


def drawn_at_random(model: nn.Module) -> tuple[dict, int]:
    """Weights after `random_orthogonal`, and the next number of its generator."""
    generator = torch.Generator().manual_seed(3)
    random_orthogonal(model, generator=generator)
    return full(model), int(torch.randint(1000, (), generator=generator))


def stays(model: nn.Module, start: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(p, start[name]) for name, p in full(model).items())


def failures(rank: int) -> dict:
    found, model = {}, sharded()
    start, local = full(model), model.fused.weight.to_local().detach()
    old = local.clone()
    if rank == 1:  # in a weight that rank 0 treats
        local[0, 0] = torch.nan
    found["nan"] = message(lambda: fire(model))
    local.copy_(old)
    found["nan untouched"] = stays(model, start)
    wrapped = DistributedDataParallel(make())
    if rank == 1:
        wrapped.module.last.weight.data += 1.0
    start = full(wrapped)
    found["replicas differ"] = message(lambda: fire(wrapped))
    found["replicas untouched"] = stays(wrapped, start)
    failing, error = sharded(), torch.OutOfMemoryError("no memory left")
    treat = Mock(side_effect=error if rank == 1 else lambda stack, group: Treated(stack))
    table = find_targets(failing)
    found["out of memory"] = message(lambda: treat_model(failing, table, treat, action="none"))
    found["boundary method"] = message(observe(sharded(), action="halved", method="halve").__enter__)
    flat = FullyShardedDataParallel(make(), use_orig_params=True, device_id=torch.device("cpu"))
    found["fsdp1"] = message(lambda: find_targets(flat))
    return found


def towards_the_start(model: nn.Module, method: str, initial: dict | None = None, **settings: object):
    """The outcome of a method that reads the starting weights, which are whole on every rank."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    state = State({"net": model}, initial={"net": initial or make().state_dict()})
    return outcome(model, create(method, **settings).boundary(state))


def dashed(model: nn.Module, batches: list) -> dict:
    dash(model, batches, lambda output, y: (output * y).sum(), alpha=1.0)
    return full(model)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    found = {"fired": fired_models(), "failures": failures(rank)}
    found["random"] = drawn_at_random(fully_shard(twins()))
    wrapped = {"ddp": DistributedDataParallel(make()), "fsdp2": sharded()}
    wrapped["nested"] = nn.ModuleDict({"a": DistributedDataParallel(make())})
    found["changed"] = {name: forgets_what_was_changed(model) for name, model in wrapped.items()}
    model, treat = make(), Mock(side_effect=lambda stack, group: Treated(stack))
    treat_model(model, find_targets(model), treat, action="noted", group=dist.group.WORLD)
    mine = [target.parameter for call in treat.call_args_list for target in call.args[1]]
    found |= {"dry run": dry_run() and evaluated(), "mine": mine}  # what this rank treated itself
    found["dash"] = dashed(DistributedDataParallel(make()), BATCHES[rank : rank + 1])
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=2)
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_random_matrices_are_those_of_one_process(ranks):
    expected, following = drawn_at_random(twins())
    assert not torch.allclose(expected["0.weight"], expected["1.weight"], atol=0.1)
    for found in ranks:
        weights, number = found["random"]
        assert number == following
        assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


def test_two_processes_equal_one(ranks: list[dict]) -> None:
    alone = {i: fired(make(), **settings) for i, settings in enumerate(SOLVERS)}
    alone |= {method: towards_the_start(make(), method, **settings) for method, settings in STARTS.items()}
    alone["rescale"] = towards_the_start(make(), "rescale")
    for key, found in ranks[0]["fired"].items():
        expected, other = alone[key[1]], ranks[1]["fired"][key]
        assert found[2:] == other[2:] == expected[2:], key
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(found[0], other[0], rtol=0, atol=0)
        for report in (found[1], other[1]):
            for row, wanted in zip(report["rows"], expected[1]["rows"], strict=True):
                for name, value in wanted.items():
                    near = pytest.approx(value, rel=1e-3, abs=1e-5) if isinstance(value, float) else value
                    assert row[name] == near, (key, name)


def test_dash_follows_the_mean_of_all_ranks(ranks: list[dict]) -> None:
    whole = tuple(torch.cat(parts) for parts in zip(*BATCHES, strict=True))
    for name, weight in dashed(make(), [whole]).items():
        assert all(torch.allclose(found["dash"][name], weight, atol=1e-6) for found in ranks), name
        assert torch.equal(ranks[0]["dash"][name], ranks[1]["dash"][name])


def test_changed_means_the_same_for_every_wrapper_and_a_dry_run_changes_nothing(ranks: list[dict]) -> None:
    assert all(r["dry run"] and r["changed"] == {"ddp": True, "fsdp2": True, "nested": True} for r in ranks)


SAID = {"nan": "fused.weight", "replicas differ": "last.weight", "fsdp1": "summon_full_params"}
SAID |= {"out of memory": "rank 1: OutOfMemoryError: no memory left", "boundary method": "random_orthogonal"}


@pytest.mark.parametrize("failure, said", SAID.items())
def test_errors_reach_every_rank_and_nothing_is_written(ranks: list[dict], failure: str, said: str) -> None:
    for rank in ranks:
        assert said in rank["failures"][failure]
        assert all(rank["failures"][f"{name} untouched"] for name in ("nan", "replicas"))


def test_the_ranks_share_the_work(ranks: list[dict]) -> None:
    first, second = (set(rank["mine"]) for rank in ranks)
    assert first and second and not first & second
    assert first | second == {t.parameter for t in find_targets(make()).included}
