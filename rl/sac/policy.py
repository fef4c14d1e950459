"""Acting with the SAC actor: in training and in evaluation, and random actions for comparison; what networks read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from fire_core.errors import UserError
from fire_core.seeding import derive
from harness.runs import numpy_generator
from harness.transfer import send
from rl.evaluate import Policy, play_episodes
from rl.replay import Batch, FlatReplay
from rl.sac.env import EvaluationTasks
from rl.sac.humanoid.tasks import TASKS
from rl.sac.network import sample_action
from rl.sac.normaliser import RunningNormaliser
from rl.sac.update import Learner


def mean_policy(learner: Learner, normaliser: RunningNormaliser) -> Policy:
    """Return the policy of evaluation, without noise: observations (n, size) -> actions (n, actions) in (-1, 1)."""

    def policy(observations: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            inputs = send(torch.from_numpy(normaliser.normalise(observations)), learner.device)
            mean, _ = learner.actor(inputs)
        return torch.tanh(mean).cpu().numpy()

    return policy


def explore(
    learner: Learner, normaliser: RunningNormaliser, observation: np.ndarray, noise: torch.Generator
) -> np.ndarray:
    """Return one action (actions,) in (-1, 1), drawn from the policy. Raises UserError if it is not finite."""
    inputs = send(torch.from_numpy(normaliser.normalise(observation)).unsqueeze(0), learner.device)
    with torch.no_grad():
        mean, log_std = learner.actor(inputs)
        normal = send(torch.randn(mean.shape, generator=noise), learner.device)
        action, _ = sample_action(mean, log_std, normal)
    chosen = action.squeeze(0).cpu().numpy()
    if not np.isfinite(chosen).all():
        remedy = f"try a learning_rate below {learner.learning_rate}"
        raise UserError(f"the policy's action is {chosen.tolist()}: {remedy}")
    return chosen


def normalise(batch: Batch, normaliser: RunningNormaliser) -> Batch:
    """Return a replay sample with its observations normalised by the present statistics."""
    mean, inverse = normaliser.affine(batch.rewards.device)
    now, following = batch.observations, batch.next_observations
    return batch._replace(observations=(now - mean) * inverse, next_observations=(following - mean) * inverse)


def stored_batches(
    cfg: DictConfig, replay: FlatReplay, normaliser: RunningNormaliser, step: int, device: torch.device
) -> Iterator[tuple[dict[str, Tensor | tuple[Tensor, ...]], None]]:
    """Yield 100 times the inputs of both networks, by name, from the replay, for methods that look at data."""
    draws = numpy_generator(cfg.seed, "stored_batches", step)
    for _ in range(100):
        batch = normalise(replay.sample(cfg.batch_size, draws, device), normaliser)
        yield {"actor": batch.observations, "critics": (batch.observations, batch.actions)}, None


def on_scale(env: str, value: float) -> dict[str, float]:
    """Return {"eval_normalized": score} if the task has published random and success scores, else {}."""
    task = TASKS.get(env.removesuffix("-v0").removesuffix("-primitive"))
    if task is None:
        return {}
    return {"eval_normalized": (value - task.random_return) / (task.success_return - task.random_return)}


def random_play(cfg: DictConfig) -> dict[str, float]:
    """Return mean and deviation of the returns of uniformly random actions, a level that learning should exceed."""
    tasks = EvaluationTasks(cfg.random_episodes, cfg.env.name, cfg.env.action_repeat)
    tasks.use_seeds([derive(cfg.seed, "random", i) % 2**31 for i in range(tasks.count)])
    draws, shape = numpy_generator(cfg.seed, "random"), (tasks.count, tasks.tasks[0].action_size)
    result = play_episodes(tasks, lambda o: draws.uniform(-1, 1, shape), tasks.count, cfg.eval_limit)
    return {"random_return": result.mean, "random_return_std": float(np.std(result.returns))}
