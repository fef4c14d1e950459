"""Speed of the DQN games, replay and updates against the usual stack.

    python -m benchmarks.bench_dqn [--rounds 5] [--device cuda] [--only-updates]

The usual stack is gymnasium's AtariPreprocessing and FrameStackObservation in a (synchronous or asynchronous) vector
environment, and a ring that stores every observation as a full stack. Both sides take the same random actions, clip
rewards and store every step. Also measured: updates per second in the usual form and in ours (eager, compiled, channels
last, bf16), each from its own replay; the time to draw a batch; bytes of both replays.
"""

import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ale_py
import gymnasium
import numpy as np
import torch

from benchmarks.measuring import loop_rows, parser, record_loops, seconds, take_turns
from rl.dqn.env import Games
from rl.dqn.learn import Learner, update
from rl.dqn.network import DQN
from rl.replay import Batch, FrameReplay

COUNT = 4
SIZE = 84


class UsualGames:
    """Four games behind gymnasium's wrappers, and a replay in its usual form: observations are stored as whole stacks;
    the next observation is the row that follows."""

    def __init__(self, game: str, steps: int, asynchronous: bool = False):
        gymnasium.register_envs(ale_py)
        name = "".join(word.capitalize() for word in game.split("_")) + "NoFrameskip-v4"

        def make() -> gymnasium.Env:
            env = gymnasium.wrappers.AtariPreprocessing(gymnasium.make(name), noop_max=0, screen_size=SIZE)
            return gymnasium.wrappers.FrameStackObservation(env, 4)

        kind = gymnasium.vector.AsyncVectorEnv if asynchronous else gymnasium.vector.SyncVectorEnv
        self.games = kind([make] * COUNT, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)
        self.observations = np.zeros((steps, COUNT, 4, SIZE, SIZE), np.uint8)
        self.actions = np.zeros((steps, COUNT), np.int64)
        self.rewards = np.zeros((steps, COUNT), np.float32)
        self.ended = np.zeros((steps, COUNT), bool)

    def play(self) -> None:
        """Play random actions in all games until the replay is full."""
        generator = np.random.default_rng(0)
        observations, _ = self.games.reset(seed=0)
        for row in range(len(self.actions)):
            actions = generator.integers(self.games.single_action_space.n, size=COUNT)
            self.observations[row], self.actions[row] = observations, actions
            observations, rewards, terminated, truncated, _ = self.games.step(actions)
            self.rewards[row], self.ended[row] = np.sign(rewards), terminated | truncated

    def sample(self, size: int, generator: np.random.Generator) -> Batch:
        rows = generator.integers(len(self.actions) - 1, size=size)
        games = generator.integers(COUNT, size=size)
        return Batch(
            torch.from_numpy(self.observations[rows, games]),
            torch.from_numpy(self.actions[rows, games]),
            torch.from_numpy(self.rewards[rows, games]),
            torch.from_numpy(self.observations[rows + 1, games]),
            torch.from_numpy(self.ended[rows, games].astype(np.float32)),
        )

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in (self.observations, self.actions, self.rewards, self.ended))


class OurGames:
    """Four games and the replay of the suite, whose files lie in a temporary folder."""

    def __init__(self, game: str, steps: int, threads: int = 1):
        self.games, self.steps = Games(game, COUNT, (SIZE, SIZE), seed=0, threads=threads), steps
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name)
        self.replay = FrameReplay(steps * COUNT, COUNT, (SIZE, SIZE), folder=path, reserve=0)

    def play(self) -> None:
        """Play random actions in all games until the replay is full."""
        generator = np.random.default_rng(0)
        self.replay.start(self.games.reset()[:, -1])
        for _ in range(self.steps):
            actions = generator.integers(self.games.actions, size=COUNT)
            step = self.games.step(actions)
            ended = step.terminated, step.truncated
            self.replay.add(
                actions, np.sign(step.rewards), *ended, step.observations[:, -1], step.final_frames
            )


def bench_acting(game: str, asynchronous: bool, rounds: int, steps: int) -> None:
    """Compare steps per second and the bytes of both replays."""
    threads = min(COUNT, os.cpu_count() or 1) if asynchronous else 1  # same cores for both sides
    kind = "asynchronous" if asynchronous else "synchronous"
    setting = f"acting, {game}, {COUNT} games, {kind}, {threads} emulator thread(s)"
    usual, ours = UsualGames(game, steps, asynchronous), OurGames(game, steps, threads)
    sides = {"usual": usual, setting: ours}
    rates = take_turns(sides, rounds, lambda side: steps * COUNT / seconds(side.play, wall=True))
    usual.games.close()
    (row,) = loop_rows("dqn", "environment steps/s", "cpu", rates)
    record_loops([row | {"replay_bytes_ratio": round(ours.replay.bytes / usual.bytes, 3)}])


def bench_learning(rounds: int, device: torch.device) -> None:
    """Compare updates per second of the published network, drawing a batch included.

    The usual form is eager, has an optimizer that updates one parameter after another, and reads the loss back. Ours
    is timed in several forms.
    """
    count = 20 if device.type == "cpu" else 500
    ours, usual = OurGames("breakout", 250), UsualGames("breakout", 250)
    ours.play()
    usual.play()
    replay, name = ours.replay, "updates, batch 32, "
    loops = {
        "usual": learning_loop(usual, device, read=True, fused=False, foreach=False),
        f"{name}eager": learning_loop(replay, device, fused=True),
        f"{name}compiled": learning_loop(replay, device, True, fused=True),
        f"{name}channels last": learning_loop(replay, device, False, True, fused=True),
        f"{name}channels last, compiled": learning_loop(replay, device, True, True, fused=True),
        f"{name}channels last, compiled, bf16": learning_loop(replay, device, True, True, "bf16", fused=True),
    }
    rates = take_turns(
        loops, rounds, lambda loop: count / seconds(lambda: [next(loop) for _ in range(count)], device)
    )
    generator = np.random.default_rng(0)
    draw = statistics.median(seconds(lambda: replay.sample(32, generator)) for _ in range(10 * rounds))
    rows = loop_rows("dqn", "updates/s", device.type, rates)
    record_loops([row | {"sampling_share": round(draw * row["ours"], 4)} for row in rows])


def learning_loop(
    replay: FrameReplay | UsualGames,
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
    command = parser(__doc__)
    command.add_argument("--game", default="breakout", help="of the measurements of acting (breakout)")
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--steps", type=int, default=1000, help="steps of the four games in a round")
    command.add_argument("--device", default="cpu", help="device of the updates")
    command.add_argument("--only-updates", action="store_true", help="leave out acting")
    options = command.parse_args()
    torch.set_num_threads(1)
    for asynchronous in () if options.only_updates else (False, True):
        bench_acting(options.game, asynchronous, options.rounds, options.steps)
    bench_learning(options.rounds, torch.device(options.device))


if __name__ == "__main__":
    main()
