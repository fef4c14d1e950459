"""Measurements of a DQN run: plasticity on fixed transitions, and averages between two lines of the log."""

from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from fire_core.errors import UserError
from fire_core.measure.metrics import deviation_from_isometry
from fire_core.measure.plasticity import plasticity
from fire_core.passes import in_mode
from fire_core.targets import find_targets
from harness.runs.metrics import finite
from rl.dqn.learn import Learner, td_loss, td_targets, with_actions
from rl.replay import Batch


@torch.no_grad()
def measure_network(learner: Learner, probe: Batch) -> dict[str, float]:
    """Return dormant share, feature rank, norms and DfI of the trained network on the transitions `probe`.

    `probe_gradient_norm` is that of the TD loss on all of them, `dfi_<parameter>` the mean over the matrices of one stored
    weight (the taps of a convolution). Raises UserError where a weight is not finite.
    """
    net = learner.net
    if not all(bool(parameter.isfinite().all()) for parameter in net.parameters()):
        raise UserError("the network holds weights that are not finite: try a lower learning_rate")
    figures = plasticity(net, probe.observations)
    with in_mode(net, training=False), torch.enable_grad():
        wanted = with_actions(probe, td_targets(learner, probe))
        gradients = torch.autograd.grad(td_loss(net(probe.observations), wanted), learner.trained())
    figures["probe_gradient_norm"] = float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())
    by_parameter: dict[str, list[Tensor]] = {}
    for matrix in find_targets(net).included:
        by_parameter.setdefault(matrix.parameter, []).append(deviation_from_isometry(matrix.matrix(net)))
    return figures | {f"dfi_{name}": float(torch.stack(each).mean()) for name, each in by_parameter.items()}


class Window:
    """Loss, mean target and training episodes since the last line of the log; `train_return` is the last mean return."""

    def __init__(self) -> None:
        self.episodes: list[tuple[float, int]] = []
        self.loss, self.value, self.count = torch.zeros(()), torch.zeros(()), 0
        self.train_return: float | None = None

    def add(self, loss: Tensor, value: Tensor) -> None:
        """Add the loss and the mean target of one update. They stay on the device, so nothing is synchronised."""
        self.loss, self.value = self.loss.to(loss.device) + loss, self.value.to(value.device) + value
        self.count += 1

    def close(self, step: int, net: nn.Module, cfg: DictConfig) -> dict[str, float]:
        """Return the averages and the last gradient norm, and start a new window; UserError if the loss is not finite."""
        figures: dict[str, float] = {"train_episodes": len(self.episodes)}
        if self.episodes:
            scores, lengths = zip(*self.episodes)
            figures["train_return"] = self.train_return = float(np.mean(scores))
            figures |= {"train_return_max": max(scores), "train_length": float(np.mean(lengths))}
        if self.count:
            figures["td_loss"] = finite(float(self.loss) / self.count, f"TD loss at step {step}", cfg)
            figures["mean_target"] = float(self.value) / self.count
            squares = [p.grad.square().sum() for p in net.parameters() if p.grad is not None]
            figures["gradient_norm"] = float(torch.stack(squares).sum().sqrt())
        self.episodes, self.count = [], 0
        self.loss, self.value = torch.zeros(()), torch.zeros(())
        return figures

    def state_dict(self) -> dict[str, Any]:
        return vars(self).copy()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self).update(saved)


def brief(figures: dict[str, float], window: Window) -> str:
    """Return the measurements as one line for the terminal."""
    line = "" if window.train_return is None else f"training episodes {window.train_return:.2f}, "
    unfinished = f", {figures['eval_unfinished']} unfinished" if figures.get("eval_unfinished") else ""
    line += f"evaluation {figures['eval_return']:.2f} ({figures['eval_episodes']} episodes{unfinished})"
    if "dormant_share" in figures:
        line += f", dormant {figures['dormant_share']:.0%}, feature rank {figures['feature_rank']:.0f}"
    return line
