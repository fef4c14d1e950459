"""Speed of the DQN games, replay and updates against the usual stack.

    python -m benchmarks.bench_dqn [--rounds 5] [--device cuda] [--only-updates]

The usual stack is gymnasium's AtariPreprocessing and FrameStackObservation in a (synchronous or asynchronous) vector
environment, and a ring that stores every observation as a full stack. Both sides take the same random actions, clip
rewards and store every step. The two sides take turns, so that other work on the machine slows both; the ratio of each
round and their median are printed.

Also measured: updates per second in the usual form and in ours (eager, compiled, channels last, bf16), each from its
own replay; the time to draw a batch; bytes of both replays.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gymnasium
import numpy as np
import torch

from analysis.results_file import loop_row, merge_loops, print_row
from benchmarks.time_and_memory import seconds
from rl.dqn.env import Games
from rl.dqn.learn import Learner, update
from rl.dqn.network import DQN
from rl.replay import Batch, FrameReplay

COUNT = 4
SIZE = 84


class StackRing:
    """Replay in its usual form: observations are stored as whole stacks; the next observation is the row that
    follows."""

    def __init__(self, rows: int):
        self.observations = np.zeros((rows, COUNT, 4, SIZE, SIZE), np.uint8)
        self.actions = np.zeros((rows, COUNT), np.int64)
        self.rewards = np.zeros((rows, COUNT), np.float32)
        self.terminated = np.zeros((rows, COUNT), bool)
        self.rows, self.count = rows, 0

    def add(
        self, observations: np.ndarray, actions: np.ndarray, rewards: np.ndarray, ended: np.ndarray
    ) -> None:
        row = self.count % self.rows
        self.observations[row], self.actions[row] = observations, actions
        self.rewards[row], self.terminated[row] = rewards, ended
        self.count += 1

    def sample(self, size: int, generator: np.random.Generator) -> Batch:
        rows = generator.integers(min(self.count, self.rows) - 1, size=size)
        games = generator.integers(COUNT, size=size)
        return Batch(
            torch.from_numpy(self.observations[rows, games]),
            torch.from_numpy(self.actions[rows, games]),
            torch.from_numpy(self.rewards[rows, games]),
            torch.from_numpy(self.observations[rows + 1, games]),
            torch.from_numpy(self.terminated[rows, games].astype(np.float32)),
        )

    @property
    def bytes(self) -> int:
        return self.observations.nbytes + self.actions.nbytes + self.rewards.nbytes + self.terminated.nbytes


def usual_environments(game: str, asynchronous: bool) -> gymnasium.vector.VectorEnv:
    """Return a vector environment of four games behind gymnasium's wrappers."""
    import ale_py

    gymnasium.register_envs(ale_py)
    name = "".join(word.capitalize() for word in game.split("_")) + "NoFrameskip-v4"

    def make() -> gymnasium.Env:
        env = gymnasium.wrappers.AtariPreprocessing(gymnasium.make(name), noop_max=0, screen_size=SIZE)
        return gymnasium.wrappers.FrameStackObservation(env, 4)

    kind = gymnasium.vector.AsyncVectorEnv if asynchronous else gymnasium.vector.SyncVectorEnv
    return kind([make] * COUNT, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)


def act_usual(environments: gymnasium.vector.VectorEnv, ring: StackRing, steps: int) -> None:
    """Play `steps` steps of random actions in all games and store them in `ring`."""
    generator = np.random.default_rng(0)
    observations, _ = environments.reset(seed=0)
    for _ in range(steps):
        actions = generator.integers(environments.single_action_space.n, size=COUNT)
        following, rewards, terminated, truncated, _ = environments.step(actions)
        ring.add(observations, actions, np.sign(rewards), terminated | truncated)
        observations = following


def act_ours(games: Games, replay: FrameReplay, steps: int) -> None:
    """Play `steps` steps of random actions in all games and store them in `replay`."""
    generator = np.random.default_rng(0)
    replay.start(games.reset()[:, -1])
    for _ in range(steps):
        actions = generator.integers(games.actions, size=COUNT)
        step = games.step(actions)
        frames = step.observations[:, -1]
        replay.add(actions, np.sign(step.rewards), step.terminated, step.truncated, frames, step.final_frames)


def bench_acting(
    game: str, asynchronous: bool, rounds: int, steps: int, folder: Path
) -> tuple[FrameReplay, StackRing]:
    """Print steps per second of both sides, add them to bench_loops.csv, and return the filled replays, ours first."""
    threads = min(COUNT, os.cpu_count() or 1) if asynchronous else 1  # same cores for both sides
    usual = usual_environments(game, asynchronous)
    games = Games(game, COUNT, (SIZE, SIZE), seed=0, threads=threads)
    ring = StackRing(steps)
    replay = FrameReplay(steps * COUNT, COUNT, (SIZE, SIZE), folder=folder, reserve=0)
    ours, theirs = [], []
    for _ in range(rounds):
        theirs.append(steps * COUNT / seconds(lambda: act_usual(usual, ring, steps), wall=True))
        ours.append(steps * COUNT / seconds(lambda: act_ours(games, replay, steps), wall=True))
    usual.close()
    kind = "asynchronous" if asynchronous else "synchronous"
    row = loop_row(
        "dqn",
        f"acting, {game}, {COUNT} games, {kind}, {threads} emulator thread(s)",
        "environment steps/s",
        "cpu",
        ours,
        theirs,
    )
    row["replay_bytes_ratio"] = round(replay.bytes / ring.bytes, 3)
    merge_loops([row])
    print_row(row)
    return replay, ring


def played(folder: Path, steps: int = 250) -> tuple[FrameReplay, StackRing]:
    """Return both replays, ours first, after `steps` steps of random play in four games of Breakout."""
    usual, games = usual_environments("breakout", False), Games("breakout", COUNT, (SIZE, SIZE), seed=0)
    ring = StackRing(steps)
    replay = FrameReplay(steps * COUNT, COUNT, (SIZE, SIZE), folder=folder, reserve=0)
    act_usual(usual, ring, steps)
    act_ours(games, replay, steps)
    usual.close()
    return replay, ring


def bench_learning(replay: FrameReplay, ring: StackRing, rounds: int, device: torch.device) -> None:
    """Print updates per second of the published network, drawing a batch included, and add them to bench_loops.csv.

    The usual form is eager, has an optimizer that updates one parameter after another, and reads the loss back. Ours
    is timed in several forms. The first turn of each is not counted.
    """
    loops = {
        "usual": learning_loop(ring, device, read=True, fused=False, foreach=False),
        "eager": learning_loop(replay, device, fused=True),
        "compiled": learning_loop(replay, device, True, fused=True),
        "channels last": learning_loop(replay, device, False, True, fused=True),
        "channels last, compiled": learning_loop(replay, device, True, True, fused=True),
        "channels last, compiled, bf16": learning_loop(replay, device, True, True, "bf16", fused=True),
    }
    count = 20 if device.type == "cpu" else 500
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(rounds + 1):
        for name, loop in loops.items():
            taken = seconds(lambda loop=loop: [next(loop) for _ in range(count)], device)
            if turn > 0:
                rates[name].append(count / taken)
    generator = np.random.default_rng(0)
    sampling, stacks = (
        statistics.median(seconds(lambda r=r: r.sample(32, generator)) for _ in range(10 * rounds))
        for r in (replay, ring)
    )
    print(
        f"batch of 32: {1000 * sampling:.2f} ms from our mapped replay, {1000 * stacks:.2f} ms from full stacks"
    )
    for name in [name for name in loops if name != "usual"]:
        setting = f"updates, batch 32, {name}"
        row = loop_row("dqn", setting, "updates/s", device.type, rates[name], rates["usual"])
        share = sampling * statistics.median(rates[name])
        row["sampling_share"] = round(share, 4)
        merge_loops([row])
        print_row(row)


def learning_loop(
    replay: FrameReplay | StackRing,
    device: torch.device,
    compiled: bool = False,
    channels_last: bool = False,
    precision: str = "fp32",
    read: bool = False,
    **adam: bool,
) -> Iterator[None]:
    """Run one update per step of the iterator, forever; `read` reads the loss back each time."""
    generator = np.random.default_rng(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    net, target = (DQN(4).to(device, memory_format=layout) for _ in range(2))
    learner = Learner(net, target, 0.99, precision=precision)
    if compiled:
        learner.compile(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=6.25e-5, eps=1.5e-4, **adam)
    while True:
        if isinstance(replay, FrameReplay):
            replay.channels_last = channels_last  # the loops share this replay
        batch = Batch(*(values.to(device) for values in replay.sample(32, generator)[:5]))
        loss, _ = update(learner, optimizer, batch)
        if read:
            loss.item()
        yield


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--game", default="breakout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000, help="steps of the four games in a round")
    parser.add_argument("--device", default="cpu", help="device of the updates")
    parser.add_argument("--only-updates", action="store_true", help="leave out acting")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only_updates:
        with tempfile.TemporaryDirectory() as folder:
            bench_learning(*played(Path(folder)), options.rounds, torch.device(options.device))
        return
    for asynchronous in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            replays = bench_acting(options.game, asynchronous, options.rounds, options.steps, Path(folder))
            if not asynchronous:
                bench_learning(*replays, options.rounds, torch.device(options.device))


if __name__ == "__main__":
    main()
