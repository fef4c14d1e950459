"""Evaluation of a policy in fresh environments.

Environments need `count`, `reset() -> observations`, `step(actions) -> observations, rewards, terminated, truncated, ...`,
and for `play_steps` `lengths` and, as the last item of a step, the (return, length) of the episodes that ended in it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Policy = Callable[[np.ndarray], np.ndarray]


@dataclass
class Evaluation:
    """Returns and lengths of the evaluated episodes.

    `unfinished`: those that the step limit cut off. `play_episodes` includes their return so far, `play_steps` does not.
    """

    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    unfinished: int = 0

    @property
    def mean(self) -> float:
        """Mean return; 0 if no episode counted, as in the official code."""
        return float(np.mean(self.returns)) if self.returns else 0.0

    def summary(self) -> dict[str, float]:
        """Return statistics of the returns, mean length and number of the episodes, for the log."""
        figures = {"eval_return": self.mean}
        if self.returns:
            figures["eval_return_std"] = float(np.std(self.returns))
            figures |= {"eval_return_min": min(self.returns), "eval_return_max": max(self.returns)}
            figures["eval_length"] = float(np.mean(self.lengths))
        return figures | {"eval_episodes": len(self.returns), "eval_unfinished": self.unfinished}


def play_episodes(environments: Any, policy: Policy, episodes: int, max_steps: int) -> Evaluation:
    """Play exactly `episodes` episodes, in rounds of one per environment, and return the result.

    `policy` maps observations (n, ...) to actions (n, ...). `episodes` is a multiple of the number of environments. Within a
    round, those whose episode has ended wait for the others, so that short episodes are not counted more often than long
    ones. An episode that still runs after `max_steps` steps is cut off and counted with its return so far.
    """
    result = Evaluation()
    for _ in range(episodes // environments.count):
        observations, running = environments.reset(), np.ones(environments.count, bool)
        scores, lengths = np.zeros(environments.count), np.zeros(environments.count, np.int64)
        for _ in range(max_steps):
            observations, rewards, terminated, truncated, *_ = environments.step(policy(observations))
            scores += np.where(running, rewards, 0.0)
            lengths += running
            running = running & ~(terminated | truncated)
            if not running.any():
                break
        result.returns += scores.tolist()
        result.lengths += lengths.tolist()
        result.unfinished += int(running.sum())
    return result


def play_steps(environments: Any, policy: Policy, steps: int) -> Evaluation:
    """Play `steps` steps over all environments and return the episodes that ended in them (official protocol).

    Environments restart in the step that ends an episode. Short episodes are favoured: those that still run are dropped.
    """
    result, observations = Evaluation(), environments.reset()
    for _ in range(steps // environments.count):
        observations, *_, finished = environments.step(policy(observations))
        for score, length in finished:
            result.returns.append(score)
            result.lengths.append(length)
    result.unfinished = int((environments.lengths > 0).sum())
    return result
