"""What the networks read, normalised observations, and acting: in training, in evaluation, and at random to compare."""

from collections.abc import Iterator

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from fire_core.errors import UserError
from fire_core.seeding import derive
from harness.device import send
from harness.runs import numpy_generator
from rl.evaluate import play_episodes
from rl.replay import Batch, FlatReplay
from rl.sac.env import EvaluationTasks
from rl.sac.humanoid.tasks import TASKS
from rl.sac.network import sample_action
from rl.sac.update import Learner

EPSILON = 1e-8


class RunningNormaliser:
    """Mean and (population) variance per coordinate of all observations seen, in float64, as in SimBa (section 4).

    Starts from mean 0, variance 1 and a count of 1e-4, which the first observations outweigh at once. Nothing is clipped.
    """

    def __init__(self, size: int):
        self.mean = np.zeros(size)
        self.variance = np.ones(size)
        self.count = 1e-4

    def update(self, observations: np.ndarray) -> None:
        """Merge observations (n, size) or one (size,) by the parallel formula of Chan et al. (1979)."""
        batch = np.asarray(observations, dtype=np.float64).reshape(-1, self.mean.size)
        count, mean, variance = len(batch), batch.mean(axis=0), batch.var(axis=0)
        total = self.count + count
        delta = mean - self.mean
        between = np.square(delta) * (self.count * count / total)
        self.variance = (self.variance * self.count + variance * count + between) / total
        self.mean, self.count = self.mean + delta * (count / total), total

    def normalise(self, observations: np.ndarray) -> np.ndarray:
        """Return float32 (x - mean) / sqrt(variance + 1e-8) of observations (..., size), without updating."""
        return ((observations - self.mean) / np.sqrt(self.variance + EPSILON)).astype(np.float32)

    def batch(self, batch: Batch) -> Batch:
        """Return a replay sample with its observations normalised, in float32 on its device."""
        both = np.stack([self.mean, 1.0 / np.sqrt(self.variance + EPSILON)]).astype(np.float32)
        mean, inverse = send(torch.from_numpy(both), batch.rewards.device)
        now, following = ((part - mean) * inverse for part in (batch.observations, batch.next_observations))
        return batch._replace(observations=now, next_observations=following)

    def state_dict(self) -> dict:
        mean, variance = (torch.from_numpy(values.copy()) for values in (self.mean, self.variance))
        return {"mean": mean, "variance": variance, "count": self.count}

    def load_state_dict(self, state: dict) -> None:
        self.mean, self.variance = (state[name].numpy().copy() for name in ("mean", "variance"))
        self.count = float(state["count"])


@torch.no_grad()
def exploit(learner: Learner, normaliser: RunningNormaliser, observations: np.ndarray) -> np.ndarray:
    """Return the actions of evaluation, without noise: observations (n, size) -> actions (n, actions) in (-1, 1)."""
    mean, _ = learner.actor(send(torch.from_numpy(normaliser.normalise(observations)), learner.device))
    return torch.tanh(mean).cpu().numpy()


@torch.no_grad()
def explore(
    learner: Learner, normaliser: RunningNormaliser, observation: np.ndarray, noise: torch.Generator
) -> np.ndarray:
    """Return one action (actions,) in (-1, 1), drawn from the policy. Raises UserError if it is not finite."""
    inputs = send(torch.from_numpy(normaliser.normalise(observation)).unsqueeze(0), learner.device)
    mean, log_std = learner.actor(inputs)
    normal = send(torch.randn(mean.shape, generator=noise), learner.device)
    action, _ = sample_action(mean, log_std, normal)
    chosen = action.squeeze(0).cpu().numpy()
    if not np.isfinite(chosen).all():
        remedy = f"try a learning_rate below {learner.learning_rate}"
        raise UserError(f"the policy's action is {chosen.tolist()}: {remedy}")
    return chosen


def stored_batches(
    cfg: DictConfig, replay: FlatReplay, normaliser: RunningNormaliser, step: int, device: torch.device
) -> Iterator[tuple[dict[str, Tensor | tuple[Tensor, ...]], None]]:
    """Yield 100 times the inputs of both networks, by name, from the replay, for methods that look at data."""
    draws = numpy_generator(cfg.seed, "stored_batches", step)
    for _ in range(100):
        batch = normaliser.batch(replay.sample(cfg.batch_size, draws, device))
        yield {"actor": batch.observations, "critics": (batch.observations, batch.actions)}, None


def on_scale(env: str, value: float) -> dict[str, float]:
    """Return {"eval_normalized": score} if the task has published random and success scores, else {}."""
    if (task := TASKS.get(env.removesuffix("-v0").removesuffix("-primitive"))) is None:
        return {}
    return {"eval_normalized": (value - task.random_return) / (task.success_return - task.random_return)}


def random_play(cfg: DictConfig) -> dict[str, float]:
    """Return mean and deviation of the returns of uniformly random actions, a level that learning should exceed."""
    tasks = EvaluationTasks(cfg.random_episodes, cfg.env.name, cfg.env.action_repeat)
    tasks.use_seeds([derive(cfg.seed, "random", i) % 2**31 for i in range(tasks.count)])
    draws, shape = numpy_generator(cfg.seed, "random"), (tasks.count, tasks.tasks[0].action_size)
    result = play_episodes(tasks, lambda o: draws.uniform(-1, 1, shape), tasks.count, cfg.eval_limit)
    return {"random_return": result.mean, "random_return_std": float(np.std(result.returns))}
