"""The settings of rl/sac/train.py, and what the harness must know about that script."""

from dataclasses import dataclass

from omegaconf import DictConfig

from fire_core.errors import UserError
from harness.settings import Domain, Keys, group, key


@dataclass
class ControlTask:
    name: str = key("task: h1-walk-v0, Hopper-v5 or any other continuous task of gymnasium")
    backend: str = key("always gymnasium; the identities of runs hold it", choices=("gymnasium",))
    action_repeat: int = key("environment steps per agent step", least=1)


@dataclass
class ActorKeys:
    width: int = key("features", least=1)
    blocks: int = key("residual blocks, or hidden layers after the first where norm is none", least=0)
    norm: str | None = key("none: a plain network; null: layer", choices=(None, "layer", "none"), added=True)


@dataclass
class CriticKeys(ActorKeys):
    count: int = key("number of critics", least=1)


@dataclass
class SacBoundary:
    temperature: str = key("entropy temperature at the boundary", choices=("renew", "keep"))
    normaliser: str = key("observation statistics at the boundary", choices=("renew", "keep"))


@dataclass
class Sac(Keys):
    env: ControlTask = group(ControlTask)
    actor: ActorKeys = group(ActorKeys)
    critic: CriticKeys = group(CriticKeys)
    boundary: SacBoundary = group(SacBoundary)
    compat: str = key("fair: the boundary renews the same under method=none", choices=("fair", "official"))
    steps: int = key("agent steps: environment steps divided by env.action_repeat", least=1)
    midpoint: int = key("agent steps before the boundary", least=1)
    learning_starts: int = key("agent steps of random actions before the first update", least=0)
    eval_every: int = key("agent steps between evaluations", least=1)
    eval_episodes: int = key("episodes per evaluation", least=1)
    eval_limit: int = key("largest number of agent steps in an evaluation episode", least=1)
    random_episodes: int = key("episodes of random actions at the start", least=1)
    updates_per_step: int = key("gradient steps per agent step", least=1, most=1000)
    replay: int = key("transitions that the replay holds", least=1)
    weight_decay: float = key("weight decay of actor and critics", least=0, most=1e6)
    discount: float = key("discount of later rewards", least=0, most=1)
    tau: float = key("share of the critics that the target critics take over in an update", least=0, most=1)
    temperature: float = key("initial entropy temperature", above=0, most=1e6)
    target_entropy: float = key("the target is minus this, times the number of actions", least=0, most=1e6)
    precision: str = key("in bf16, output layers and losses stay fp32", choices=("fp32", "tf32", "bf16"))
    stack: int = key("runs of a sweep (-m) that one process trains together", least=1, numbers=False)
    workers: bool = key("simulate each task of a stack in a process of its own", numbers=False)


def check(cfg: DictConfig) -> None:
    """Raise UserError unless the midpoint lies between the start of learning and the end of the run."""
    if not cfg.learning_starts < cfg.midpoint < cfg.steps:
        between = f"after learning_starts={cfg.learning_starts} and before steps={cfg.steps}"
        raise UserError(f"midpoint={cfg.midpoint} must lie {between}")


DOMAIN = Domain(
    name="sac",
    script="rl/sac/train.py",
    keys=Sac,
    shown=("env.name",),
    at_boundary=("boundary",),
    # One update passes through the networks several times, so there is no one loss and no one set of activations.
    gives=frozenset({"gradients", "batches", "initial", "optimizers"}),
    refuses={"fire_all": "fire does the same here", "fire_muon": "it is for supervised training"},
    check=check,
    needs=("gymnasium", "mujoco", "psutil"),
    watched=("eval_return", "train_return", "critic_loss", "actor_loss"),
    extras=("sac", "humanoid"),
    results=("eval_return",),
)
