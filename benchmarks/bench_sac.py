"""SAC updates per second against a plain PyTorch loop.

    python -m benchmarks.bench_sac [--rounds 7] [--device cpu]

The plain loop has the same networks, losses and settings in the form that single-file SAC scripts have: two critics
one after the other, `torch.distributions` for the policy, losses that send gradients through all networks, an
optimizer that updates one parameter after another, one replay sample per update; float32. Ours is timed in float32 and
with bfloat16 matrix products (`precision=bf16`), each eager and compiled (`compile=true`). A ratio is the median over
the rounds, of processor seconds of one thread on a CPU and of wall-clock seconds on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from benchmarks.measuring import loop_rows, parser, record_loops, seconds, take_turns
from harness.device import missing_compiler
from rl.replay import Batch, FlatReplay
from rl.sac.network import Actor, Critics, Temperature
from rl.sac.update import Learner, update

OBSERVATIONS, ACTIONS, DISCOUNT, TAU, RATE = 51, 19, 0.99, 0.005, 1e-4


@dataclass(frozen=True)
class Setting:
    """Widths, depth and batch of one setting, and how many updates are timed."""

    name: str
    actor: int
    critic: int
    blocks: int
    batch: int
    updates: int  # per turn
    together: int  # updates per replay sample


SETTINGS = (
    Setting("paper (128/1, 512/2, batch 256)", 128, 512, 2, 256, 4, 2),
    Setting("small h1 (64/1, 128/1, batch 128)", 64, 128, 1, 128, 60, 1),
    Setting("small hopper (64/1, 64/1, batch 64)", 64, 64, 1, 64, 150, 1),
)


class PlainBlock(nn.Module):
    """The residual block of a single critic."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class PlainCritic(nn.Module):
    """A single critic: observations and actions -> values (batch,)."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        layers = [PlainBlock(width) for _ in range(blocks)]
        self.net = nn.Sequential(
            nn.Linear(OBSERVATIONS + ACTIONS, width),
            *layers,
            nn.LayerNorm(width, eps=1e-6),
            nn.Linear(width, 1),
        )

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        return self.net(torch.cat([observations, actions], 1)).view(-1)


class PlainLoop:
    """The usual form of a SAC update, around the same networks."""

    def __init__(self, setting: Setting, replay: FlatReplay, device: torch.device) -> None:
        self.setting, self.replay, self.device = setting, replay, device
        self.draw = np.random.default_rng(1)
        self.actor = Actor(OBSERVATIONS, ACTIONS, setting.actor, 1).to(device)
        self.critics = [PlainCritic(setting.critic, setting.blocks).to(device) for _ in range(2)]
        self.targets = deepcopy(self.critics)
        self.log_alpha = torch.zeros(1, requires_grad=True, device=device)
        plain = {"lr": RATE, "foreach": False, "fused": False}
        self.actor_optimizer = torch.optim.AdamW(self.actor.parameters(), weight_decay=0.01, **plain)
        both = [p for critic in self.critics for p in critic.parameters()]
        self.critic_optimizer = torch.optim.AdamW(both, weight_decay=0.01, **plain)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], **plain)

    def turn(self) -> None:
        """Run the updates of one turn."""
        for _ in range(self.setting.updates):
            self.update(self.replay.sample(self.setting.batch, self.draw, self.device))

    def act(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Return sampled actions (batch, actions) and their log-densities (batch,)."""
        mean, log_std = self.actor(observations)
        normal = Normal(mean, log_std.exp())
        sample = normal.rsample()
        action = torch.tanh(sample)
        log_density = normal.log_prob(sample) - torch.log(1 - action.pow(2) + 1e-6)
        return action, log_density.sum(1)

    def update(self, batch: Batch) -> None:
        """Take one step of actor, temperature, critics and target critics."""
        action, log_density = self.act(batch.observations)
        lowest = torch.min(*(critic(batch.observations, action) for critic in self.critics))
        actor_loss = (self.log_alpha.exp().detach() * log_density - lowest).mean()
        self.actor_optimizer.zero_grad()
        actor_loss.backward()
        self.actor_optimizer.step()

        alpha_loss = (self.log_alpha.exp() * (-log_density.detach() + 9.5)).mean()
        self.alpha_optimizer.zero_grad()
        alpha_loss.backward()
        self.alpha_optimizer.step()

        with torch.no_grad():
            action, log_density = self.act(batch.next_observations)
            lowest = torch.min(*(target(batch.next_observations, action) for target in self.targets))
            value = lowest - self.log_alpha.exp() * log_density
            wanted = batch.rewards + DISCOUNT * (1 - batch.terminated) * value
        values = [critic(batch.observations, batch.actions) for critic in self.critics]
        critic_loss = sum(nn.functional.mse_loss(value, wanted) for value in values)
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()
        for critic, target in zip(self.critics, self.targets):
            for new, old in zip(critic.parameters(), target.parameters()):
                old.data.copy_(TAU * new.data + (1 - TAU) * old.data)


def filled_replay() -> FlatReplay:
    """Return a replay with 20,000 random transitions."""
    replay, draw = FlatReplay(20_000, OBSERVATIONS, ACTIONS), np.random.default_rng(0)
    for _ in range(20_000):
        observation, following = draw.normal(size=(2, OBSERVATIONS))
        replay.add(observation, draw.uniform(-1, 1, ACTIONS), draw.random(), following, draw.random() < 0.01)
    return replay


def our_turn(
    setting: Setting, replay: FlatReplay, device: torch.device, precision: str, compiled: bool
) -> Callable[[], None]:
    """Return a function that runs one turn of our updates, `setting.together` of them per replay sample."""
    actor = Actor(OBSERVATIONS, ACTIONS, setting.actor, 1).to(device)
    critics = Critics(OBSERVATIONS, ACTIONS, setting.critic, setting.blocks).to(device)
    temperature = Temperature().to(device)
    learner = Learner(
        actor, critics, deepcopy(critics), temperature, DISCOUNT, TAU, -9.5, RATE, 0.01, precision, compiled
    )
    draw, noise = np.random.default_rng(1), torch.Generator().manual_seed(1)

    def turn() -> None:
        for _ in range(setting.updates // setting.together):
            together = replay.sample(setting.together * setting.batch, draw, device)
            for batch in together.split(setting.batch):
                update(learner, batch, torch.randn((2, setting.batch, ACTIONS), generator=noise).to(device))

    return turn


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--rounds", type=int, default=7)
    command.add_argument("--device", default="cpu")
    options = command.parse_args()
    torch.set_num_threads(1)
    device, replay = torch.device(options.device), filled_replay()
    forms = [(p, compiled) for p in ("fp32", "bf16") for compiled in (False, True)]
    if device.type == "cpu" and (compiler := missing_compiler()):
        print(f"compiled updates are left out: there is no {compiler!r} here")
        forms = [(p, False) for p, compiled in forms if not compiled]
    for setting in SETTINGS:
        turns = {"usual": PlainLoop(setting, replay, device).turn}
        for p, compiled in forms:
            name = f"{setting.name}, {p}{', compiled' if compiled else ''}"
            turns[name] = our_turn(setting, replay, device, p, compiled)
        rates = take_turns(
            turns, options.rounds, lambda turn, count=setting.updates: count / seconds(turn, device)
        )
        record_loops(loop_rows("sac", "updates/s", str(device), rates))


if __name__ == "__main__":
    main()
