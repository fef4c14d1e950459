"""One episode of each of several finished runs as a row of pictures.

    python -m analysis.filmed_episodes RUN RUN --out episodes.png

The final network plays as in evaluation; episodes of one seed start alike. A game is filmed by a second emulator with
larger frames, which gets the same seed and the same actions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from analysis.plot import Figure, look, plt
from fire_core.errors import UserError, print_error
from fire_core.seeding import derive
from harness.runs import checkpoint
from harness.runs.folders import read_meta

GAME_PIXELS = 160
ROBOT_PIXELS = (200, 240)  # width, height


class Episode(NamedTuple):
    """Pictures of the start and after each step (grey or RGB), the raw return, and the seconds between two pictures."""

    pictures: list[np.ndarray]
    score: float
    seconds: float


def play(folder: Path) -> Episode:
    """Play one episode of the run in `folder`. Raises UserError unless this is a run of DQN or SAC with its final
    checkpoint."""
    domain = read_meta(folder).get("domain")
    players: dict[str | None, Callable[[DictConfig, dict], Episode]] = {"dqn": play_game, "sac": play_task}
    if domain not in players:
        raise UserError(f"{folder} is not a run of rl/dqn or rl/sac: give folders that end in seed_...")
    cfg = OmegaConf.merge(OmegaConf.load(folder / "config.yaml"), {"run": {"emulator_threads": 1}})
    assert isinstance(cfg, DictConfig)
    return players[domain](cfg, checkpoint.load(folder / "checkpoint" / "final.pt"))


def play_game(cfg: DictConfig, final: dict) -> Episode:
    """Play the first of the run's games. The network sees its own frame size; pictures are 160 x 160."""
    from rl.dqn.play import greedy, make_games
    from rl.dqn.train import make_net

    seen, filmed = (
        make_games(OmegaConf.merge(cfg, {"env": {"frame_size": size}}), "strip")  # type: ignore[arg-type]
        for size in (cfg.env.frame_size, GAME_PIXELS)
    )
    net = make_net(cfg, seen.actions)
    load(net, final["net"])
    policy = greedy(cfg, net, torch.device("cpu"), -1)
    observations, pictures, score = seen.reset(), [filmed.reset()[0, -1]], 0.0
    for _ in range(cfg.eval_max_steps):
        actions = policy(observations)
        step, ours = seen.step(actions), filmed.step(actions)
        observations, score = step.observations, score + float(step.rewards[0])
        if step.terminated[0] or step.truncated[0]:
            break
        pictures.append(ours.observations[0, -1])
    seen.close()
    filmed.close()
    return Episode(pictures, score, 4 / 60)  # four frames of a console that shows 60 a second


def play_task(cfg: DictConfig, final: dict) -> Episode:
    """Play one episode of a task of the H1 robot. Raises UserError for other tasks."""
    from rl.sac.env import Task, physics
    from rl.sac.humanoid.rendering import Camera
    from rl.sac.normaliser import RunningNormaliser
    from rl.sac.policy import mean_policy
    from rl.sac.train import build

    if not cfg.env.name.startswith("h1-"):
        raise UserError(f"{cfg.env.name}: a strip shows games and the tasks of the H1 robot")
    task = Task(**cfg.env)
    learner, normaliser = build(cfg, task, torch.device("cpu")), RunningNormaliser(task.observation_size)
    load(learner.actor, final["actor"])
    normaliser.load_state_dict(final["normaliser"])
    policy = mean_policy(learner, normaliser, torch.device("cpu"))
    observation, score = task.reset(derive(cfg.seed, "strip") % 2**31), 0.0
    model, data = physics(task.environment)
    camera = Camera(model, *ROBOT_PIXELS)
    pictures = [camera.image(data)]
    for _ in range(cfg.eval_limit):
        observation, reward, terminated, truncated = task.step(policy(observation[None])[0])
        score += reward
        pictures.append(camera.image(data))
        if terminated or truncated:
            break
    camera.close()
    return Episode(pictures, score, data.time / (len(pictures) - 1))


def name_of(folder: Path) -> str:
    """Return method and seed, read from the names of the run's folders."""
    return f"{look(folder.parent.name).name}, {folder.name.replace('_', ' ')}"


def load(net: torch.nn.Module, weights: dict) -> None:
    """Load `weights` into `net`. Raises UserError if they do not fit, as after plasticity injection, which changes the
    structure."""
    try:
        net.load_state_dict(weights)
    except RuntimeError:
        raise UserError("a strip needs a network whose structure the method has not changed") from None


def draw(episodes: Sequence[tuple[str, Episode]], frames: int) -> Figure:
    """Return a figure with one row per run: `frames` pictures, at the same times in all rows, spread over the longest
    episode. The rows of shorter episodes end early."""
    longest = max(len(episode.pictures) for _, episode in episodes)
    times = np.linspace(0, longest - 1, frames).round().astype(int)
    height, width = episodes[0][1].pictures[0].shape[:2]
    figure, grid = plt.subplots(
        len(episodes), frames, figsize=(frames, len(episodes) * (height / width + 0.25)), squeeze=False
    )
    for row, (name, episode) in zip(grid, episodes):
        for axis, time in zip(row, times):
            axis.axis("off")
            if time < len(episode.pictures):
                axis.imshow(episode.pictures[time], cmap="gray", vmin=0, vmax=255)
                axis.set_title(f"{time * episode.seconds:.1f} s", fontsize=6, pad=2)
        lasted = f"{(len(episode.pictures) - 1) * episode.seconds:.1f} s"
        row[0].text(
            0,
            1.22,
            f"{name}: return {episode.score:.0f} in {lasted}",
            transform=row[0].transAxes,
            fontsize=7.5,
        )
    figure.subplots_adjust(0.005, 0.01, 0.995, 0.88, wspace=0.03, hspace=0.4)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write the picture. Raises UserError where it cannot be written or matplotlib does not know the file ending."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {path}: {error}") from error


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.filmed_episodes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", nargs="+", type=Path, help="as in runs/fig4a_asterix/medium/fire/seed_1")
    parser.add_argument("--frames", type=int, default=7, help="pictures per episode; default 7")
    parser.add_argument("--out", type=Path, required=True, help="the picture to write")
    options = parser.parse_args(given)
    try:
        if options.frames < 2:
            raise UserError(f"--frames {options.frames}: give 2 or more")
        episodes = [(name_of(folder), play(folder)) for folder in options.run]
        save(draw(episodes, options.frames), options.out)
    except UserError as error:
        print_error(error)
        return 2
    for name, episode in episodes:
        print(f"{name}: return {episode.score:.1f} in {len(episode.pictures) - 1} steps")
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
