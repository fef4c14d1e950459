"""Updates in a loop without data, recording, evaluation and environments, for `benchmarks.gpu_check`: what a script could
reach on a device. Networks, batch size, precision and compilation are those of the script's settings, batches are random."""

from collections.abc import Callable

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from benchmarks.measuring import seconds
from harness.config import compose
from harness.device import autocast, set_precision
from harness.domains import find
from language.model import Decoder, adamw
from language.settings import check_settings
from rl.dqn.learn import Learner
from rl.dqn.train import make_net, make_optimizer
from rl.replay import Batch
from rl.sac.env import Task
from rl.sac.update import build as sac_learner
from rl.sac.update import update
from vision.models import build

Loop = tuple[Callable[[], object], float]  # an update, and what it counts in the unit of `benchmarks.speed`


def supervised(
    cfg: DictConfig, device: str, net: nn.Module, optimizer: Optimizer, loss_of: Callable[[nn.Module], Tensor]
) -> Callable[[], object]:
    """Return one update of a network, of which `loss_of` returns the loss."""
    model = torch.compile(net, dynamic=False) if cfg.compile else net
    place = torch.device(device)
    scaler = torch.amp.GradScaler(place.type, enabled=cfg.precision == "fp16")

    def step() -> None:
        with autocast(place, cfg.precision):
            loss = loss_of(model)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def vision(cfg: DictConfig, device: str) -> Loop:
    layout, side = torch.channels_last if cfg.channels_last else torch.contiguous_format, cfg.data.image_size
    net = build(**cfg.model, classes=10, channels=3, image_size=side).to(device, memory_format=layout)
    inputs = torch.randn(cfg.batch_size, 3, side, side, device=device)
    labels = torch.randint(10, (cfg.batch_size,), device=device)
    adam = torch.optim.Adam(net.parameters(), lr=cfg.learning_rate, fused=True)
    return supervised(cfg, device, net, adam, lambda model: cross_entropy(model(inputs), labels)), 1.0


def language(cfg: DictConfig, device: str) -> Loop:
    """One micro-batch, and its tokens."""
    net = Decoder(check_settings(cfg)).to(device)
    tokens, targets = torch.randint(cfg.model.vocabulary, (2, cfg.batch_size, cfg.model.block), device=device)
    optimizer = adamw(net, betas=tuple(cfg.betas), weight_decay=cfg.weight_decay)
    return supervised(cfg, device, net, optimizer, lambda model: model(tokens, targets)), tokens.numel()


def dqn(cfg: DictConfig, device: str) -> Loop:
    side, layout = cfg.env.frame_size, torch.channels_last if cfg.channels_last else torch.contiguous_format
    net, target = (make_net(cfg, 9).to(device, memory_format=layout) for _ in range(2))
    learner = Learner(net, target, cfg.discount, bool(cfg.double), cfg.precision, cfg.compile)
    frames = torch.randint(256, (2, cfg.batch_size, 4, side, side), dtype=torch.uint8, device=device)
    numbers = torch.rand(cfg.batch_size, device=device)
    batch = Batch(frames[0], (9 * numbers).long(), numbers, frames[1], numbers.round())
    adam = make_optimizer(net, cfg)

    def step() -> None:
        _, _, slopes = learner.gradients(learner, learner.trained(), batch)
        for parameter, slope in zip(net.parameters(), slopes, strict=True):
            parameter.grad = slope
        adam.step()

    return step, 1.0


def sac(cfg: DictConfig, device: str) -> Loop:
    """The update of all networks, and the agent steps that it belongs to."""
    task, count = Task(cfg.env.name, cfg.env.action_repeat), cfg.batch_size
    observed, acted = task.observation_size, task.action_size
    learner = sac_learner(cfg, observed, acted, torch.device(device))
    shapes = ((count, observed), (count, acted), (count,), (count, observed), (count,))
    batch = Batch(*(torch.rand(shape, device=device) for shape in shapes))
    noise = torch.randn(2, count, acted, device=device)
    return lambda: update(learner, batch, noise), 1 / cfg.updates_per_step


def rate(domain: str, changes: list[str], device: str, updates: int = 100) -> float:
    """Return what a loop of updates alone reaches in a second, at the settings of a script."""
    cfg = compose(find(domain), ["method=none", *changes])
    set_precision(cfg)
    step, counts = {"vision": vision, "language": language, "dqn": dqn, "sac": sac}[domain](cfg, device)
    taken = [seconds(lambda: [step() for _ in range(updates)], device, wall=True) for _ in range(4)]
    torch.set_float32_matmul_precision("highest")
    return updates * counts / min(taken[1:])  # the first round compiles
