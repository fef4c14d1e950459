"""Acting with the DQN network, in training and in evaluation, and random actions for comparison."""

import numpy as np
import torch
from omegaconf import DictConfig
from torch import nn

from fire_core.seeding import derive
from harness.device import send
from harness.runs import numpy_generator
from rl.dqn.env import SCORES, Games
from rl.dqn.games import LONGEST
from rl.evaluate import play_episodes, play_steps


def make_games(cfg: DictConfig, purpose: str, position: int = 0) -> Games:
    """Return new games, for training or for another `purpose`; their seed depends on the purpose and its position."""
    size, seed = cfg.env.frame_size, derive(cfg.seed, purpose, position) % 2**31
    atari = {"threads": cfg.run.emulator_threads, "grey_last": cfg.compat == "official"}
    return Games(cfg.env.game, cfg.env.environments, (size, size), seed=seed, sticky=cfg.env.sticky, **atari)


def act(
    cfg: DictConfig, net: nn.Module, games: Games, exploring: float, stream: np.random.Generator
) -> np.ndarray:
    """Return epsilon-greedy actions (n,) for the present observations of `games`.

    With compat=official, one draw decides for all environments whether they explore.
    """
    draws = stream.random() if cfg.compat == "official" else stream.random(games.count)
    explore = np.broadcast_to(draws < exploring, games.count)
    uniform = stream.integers(games.actions, size=games.count)
    if explore.all():
        return uniform
    with torch.no_grad():
        stacks = send(torch.from_numpy(games.observations), next(net.parameters()).device)
        best = net(stacks).argmax(dim=1).cpu().numpy()
    return np.where(explore, uniform, best)


def evaluate(cfg: DictConfig, net: nn.Module, position: int) -> dict[str, float]:
    """Return the scores of the current policy in new games: greedy except for a share `eval_epsilon` of random actions.

    The training games and their streams are not touched; the streams here depend on the seed and `position` alone.
    """
    games = make_games(cfg, "evaluation", position)
    stream = numpy_generator(cfg.seed, "evaluation", position)

    def policy(_: np.ndarray) -> np.ndarray:
        return act(cfg, net, games, cfg.eval_epsilon, stream)

    if cfg.compat == "official":
        result = play_steps(games, policy, cfg.eval_steps)
    else:
        result = play_episodes(games, policy, cfg.eval_episodes, cfg.eval_max_steps)
    figures = result.summary()
    if cfg.env.game in SCORES:
        random, human = SCORES[cfg.env.game]
        figures["eval_normalized"] = (result.mean - random) / (human - random)
    return figures


def random_play(cfg: DictConfig) -> dict[str, float]:
    """Return mean and deviation of the returns of uniformly random actions, a level that learning should exceed.

    Their episodes end where those of training do, and not at `eval_max_steps`.
    """
    games, stream, count = make_games(cfg, "random"), numpy_generator(cfg.seed, "random"), cfg.random_episodes
    result = play_episodes(games, lambda o: stream.integers(games.actions, size=len(o)), count, LONGEST)
    return {"random_return": result.mean, "random_return_std": float(np.std(result.returns))}
