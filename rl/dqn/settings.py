"""The settings of rl/dqn/train.py, and what the harness must know about that script."""

from dataclasses import dataclass

from omegaconf import DictConfig

from fire_core.errors import UserError
from harness.settings import Domain, Keys, RunKeys, group, key


@dataclass
class Game:
    game: str = key("asterix, breakout, any other of ale-py, or catch")
    frame_size: int = key("pixels per side", least=1)
    environments: int = key("games played side by side", least=1)
    sticky: float = key("chance that the last action is repeated", least=0, most=1)


@dataclass
class Network:
    convolutions: list[list[int]] = key("[channels, kernel, stride] of each convolution", least=1)
    hidden: int = key("features of the hidden layer", least=1)


@dataclass
class DqnRun(RunKeys):
    emulator_threads: int = key("threads of the emulators", least=1, numbers=False)


@dataclass
class Dqn(Keys):
    env: Game = group(Game)
    network: Network = group(Network)
    compat: str = key("protocol, see rl/dqn/README.md", choices=("official", "corrected"))
    total_steps: int = key("transitions over all environments", least=1)
    midpoint: int = key("transitions before the boundary", least=1)
    replay_capacity: int = key("transitions that the replay holds", least=1)
    learning_starts: int = key("transitions before the first update", least=0)
    updates_per_transition: float = key("gradient steps per transition", above=0, most=1000)
    epsilon_steps: int = key("transitions over which exploration falls", least=1)
    epsilon_final: float = key("share of random actions after that", least=0, most=1)
    discount: float = key("discount of later rewards", least=0, most=1)
    adam_epsilon: float = key("epsilon in Adam's denominator", least=0, most=1)
    target_every: int = key("transitions between copies into the target network", least=1)
    n_step: int | None = key("rewards that a target sums up; null: 1", least=1, most=1000, added=True)
    double: bool | None = key("the trained network chooses the next action; null: false", added=True)
    eval_every: int = key("transitions between evaluations", least=1)
    eval_epsilon: float = key("share of random actions in evaluation", least=0, most=1)
    eval_steps: int = key("compat=official: steps per evaluation", least=1)
    eval_episodes: int = key("compat=corrected: episodes per evaluation", least=1)
    eval_max_steps: int = key("compat=corrected: largest number of steps in an evaluation episode", least=1)
    random_episodes: int = key("episodes of random actions at the start", least=1)
    log_every: int = key("transitions between lines of metrics", least=1)
    metrics_samples: int = key("stacks of frames on which plasticity is measured", least=1)
    precision: str = key("precision of the updates; last layer and loss stay fp32", choices=("fp32", "bf16"))
    channels_last: bool = key("use the channels-last memory format; changes numbers by rounding only")
    run: DqnRun = group(DqnRun)


def check(cfg: DictConfig) -> None:
    """Raise UserError for the first setting that does not fit the others, with its value and what would fit."""
    layers, n = cfg.network.convolutions, cfg.env.environments
    if not layers or any(len(layer) != 3 for layer in layers):
        raise UserError(f"network.convolutions={layers}: give [channels, kernel, stride] for each")
    if not cfg.learning_starts < cfg.midpoint < cfg.total_steps:
        between = f"after learning_starts={cfg.learning_starts} and before total_steps={cfg.total_steps}"
        raise UserError(f"midpoint={cfg.midpoint} must lie {between}")
    counted = ["total_steps", "midpoint", "log_every", "eval_every", "learning_starts", "replay_capacity"]
    counted += ["target_every", "random_episodes", *([] if cfg.compat == "official" else ["eval_episodes"])]
    for name in counted:
        if cfg[name] % n:
            raise UserError(f"{name}={cfg[name]} is no multiple of env.environments={n}: all step at once")
    if cfg.compat == "official" and cfg.eval_steps < n:
        raise UserError(f"eval_steps={cfg.eval_steps} must be at least env.environments={n}")
    updates = cfg.updates_per_transition * n
    if updates < 1 or abs(updates - round(updates)) > 1e-9:
        both = f"updates_per_transition={cfg.updates_per_transition} with env.environments={n}"
        raise UserError(f"{both} gives {updates:g} updates a step: it must be a whole number, at least 1")
    if cfg.n_step and cfg.n_step * n > cfg.replay_capacity:
        held = f"replay_capacity={cfg.replay_capacity} holds {cfg.replay_capacity // n} steps of each game"
        raise UserError(f"n_step={cfg.n_step}: {held}, give at most that")
    if cfg.midpoint % cfg.target_every:
        wrong = f"midpoint={cfg.midpoint} must be a multiple of target_every={cfg.target_every}"
        raise UserError(f"{wrong}: the boundary begins with a fresh copy in the target network")


DOMAIN = Domain(
    name="dqn",
    script="rl/dqn/train.py",
    keys=Dqn,
    shown=("env.game",),
    refuses={"fire_muon": "it is for supervised training"},
    check=check,
    needs=("gymnasium", "ale_py", "psutil"),
    watched=("eval_return", "train_return", "td_loss"),
    extras=("dqn",),
    results=("eval_return",),
)
