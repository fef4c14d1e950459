"""Updates in a loop without data, recording, evaluation and environments: what a script could reach on a device.

Networks, batches, precision and compilation are those of the script's settings; batches are random numbers that stay on the
device. Used by `benchmarks.gpu_check`.
"""

from collections.abc import Callable

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.measuring import seconds
from harness.config import compose
from harness.domains import find
from language.evaluate import autocast
from language.model import Decoder, adamw
from language.settings import check_settings
from rl.dqn.learn import Learner
from rl.dqn.network import DQN
from rl.replay import Batch
from rl.sac.env import Task
from rl.sac.update import build as sac_learner
from rl.sac.update import update
from vision.models import build

Update = Callable[[], object]


def vision(cfg: DictConfig, device: str) -> tuple[Update, float]:
    """The update of a classifier, and its steps: 1."""
    layout = torch.channels_last if cfg.channels_last else torch.contiguous_format
    net = build(**cfg.model, classes=10, channels=3, image_size=cfg.data.image_size).to(
        device, memory_format=layout
    )
    inputs = torch.randn(cfg.batch_size, 3, cfg.data.image_size, cfg.data.image_size, device=device)
    labels = torch.randint(10, (cfg.batch_size,), device=device)
    model = torch.compile(net, dynamic=False) if cfg.compile else net
    adam = torch.optim.Adam(net.parameters(), lr=cfg.learning_rate, fused=True)

    def step() -> None:
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=cfg.precision == "bf16"):
            loss = cross_entropy(model(inputs), labels)
        adam.zero_grad(set_to_none=True)
        loss.backward()
        adam.step()

    return step, 1.0


def language(cfg: DictConfig, device: str) -> tuple[Update, float]:
    """The update of one micro-batch, and its tokens."""
    net = Decoder(check_settings(cfg)).to(device)
    tokens, targets = torch.randint(cfg.model.vocabulary, (2, cfg.batch_size, cfg.model.block), device=device)
    model = torch.compile(net, dynamic=False) if cfg.compile else net
    optimizer = adamw(net, betas=tuple(cfg.betas), weight_decay=cfg.weight_decay)
    scaler = torch.amp.GradScaler(torch.device(device).type, enabled=cfg.precision == "fp16")

    def step() -> None:
        with autocast(torch.device(device), cfg.precision):
            loss = model(tokens, targets)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step, tokens.numel()


def dqn(cfg: DictConfig, device: str) -> tuple[Update, float]:
    """The update of a Q-network, and its updates: 1."""
    side, layers = cfg.env.frame_size, [tuple(layer) for layer in cfg.network.convolutions]
    layout = torch.channels_last if cfg.channels_last else torch.contiguous_format
    net, target = (
        DQN(9, (side, side), layers, cfg.network.hidden).to(device, memory_format=layout) for _ in range(2)
    )
    learner = Learner(net, target, cfg.discount, bool(cfg.double), cfg.precision, cfg.compile)
    frames = torch.randint(256, (2, cfg.batch_size, 4, side, side), dtype=torch.uint8, device=device)
    numbers = torch.rand(cfg.batch_size, device=device)
    batch = Batch(frames[0], (9 * numbers).long(), numbers, frames[1], numbers.round())
    adam = torch.optim.Adam(net.parameters(), lr=cfg.learning_rate, eps=cfg.adam_epsilon, fused=True)

    def step() -> None:
        _, _, slopes = learner.gradients(learner, learner.trained(), batch)
        for parameter, slope in zip(net.parameters(), slopes, strict=True):
            parameter.grad = slope
        adam.step()

    return step, 1.0


def sac(cfg: DictConfig, device: str) -> tuple[Update, float]:
    """The update of all networks, and the agent steps that it belongs to."""
    task = Task(cfg.env.name, cfg.env.action_repeat)
    learner = sac_learner(cfg, task.observation_size, task.action_size, torch.device(device))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    count, observations, actions = cfg.batch_size, task.observation_size, task.action_size
    batch = Batch(
        random(count, observations),
        random(count, actions),
        random(count),
        random(count, observations),
        0 * random(count),
    )
    noise = random(2, count, actions)
    return lambda: update(learner, batch, noise), 1 / cfg.updates_per_step


def rate(domain: str, changes: list[str], device: str, updates: int = 100) -> float:
    """Return what a loop of updates alone reaches in the unit of `benchmarks.speed.RATES`, at the settings of a script."""
    cfg = compose(find(domain), ["method=none", *changes])
    tf32 = cfg.get("tf32") or cfg.precision == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.benchmark = True
    step, of_an_update = {"vision": vision, "language": language, "dqn": dqn, "sac": sac}[domain](cfg, device)

    def several() -> None:
        for _ in range(updates):
            step()

    several()  # compiles
    taken = min(seconds(several, device, wall=True) for _ in range(3))
    torch.set_float32_matmul_precision("highest")
    return updates * of_an_update / taken
