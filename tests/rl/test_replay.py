"""Replays: no stored transition crosses an episode, stacks are the wrapper's, and going back to a checkpoint is exact."""

import io

import numpy as np
import pytest
import torch

from rl import replay as module
from rl.replay import FlatReplay, FrameReplay

STACK = 4


class Played:
    """A replay of two environments, and what a frame-stack wrapper over each of them saw. Frames are (episode number, step
    number). Episodes of the first environment terminate after three steps, those of the second are truncated after five."""

    def __init__(self, steps, capacity=40):
        self.seen, self.episode, self.age = [], np.full(2, -1), np.zeros(2, int)
        self.replay = FrameReplay(capacity, 2, (1, 2))
        self.restart()
        self.play(steps)

    def frames(self):
        return np.stack([self.episode, self.age], axis=1)[:, None].astype(np.uint8)

    def restart(self):
        """Begin the next episodes, wherever the present ones are."""
        self.episode += 1
        self.age[:] = 0
        self.stacks = [[frame] * STACK for frame in self.frames()]
        self.replay.start(self.frames())

    def play(self, steps):
        for _ in range(steps):
            number, before = self.replay.count, np.array(self.stacks)
            self.age += 1
            finals = self.frames()
            after = [[*stack[1:], frame] for stack, frame in zip(self.stacks, finals)]
            ended = self.age == (3, 5)
            terminated, truncated = ended & [True, False], ended & [False, True]
            self.seen.append((before, np.array(after), terminated))
            self.episode += ended
            self.age[ended] = 0
            frames = self.frames()
            self.stacks = [[frames[i]] * STACK if ended[i] else after[i] for i in range(2)]
            chosen, rewards = np.array([number % 7, number % 5]), np.array([number, -number], np.float32)
            self.replay.add(chosen, rewards, terminated, truncated, frames, finals)

    def check(self):
        """Every transition that can be drawn is exactly the wrapper's."""
        for time in range(max(0, self.replay.count - self.replay.depth), self.replay.count):
            batch = self.replay.transitions(np.array([time, time]), np.array([0, 1]))
            observations, following, terminated = self.seen[time]
            np.testing.assert_array_equal(batch.observations, observations)
            np.testing.assert_array_equal(batch.next_observations, following)
            assert batch.terminated.tolist() == terminated.tolist()
            assert batch.rewards.tolist() == [time, -time]
            assert batch.actions.tolist() == [time % 7, time % 5]


def test_n_step_returns_by_hand():
    """Episode of four steps that terminates in game 0 and is truncated in game 1; then three steps of the next one. Rewards
    1, 2, 4, ... ; discount one half; three steps. Both lie over the end of the ring."""
    replay = FrameReplay(32, 2, (1, 1), stack=2, n_step=3, discount=0.5)
    picture, nothing = lambda number: np.full((2, 1, 1), number, np.uint8), np.zeros(2, bool)
    replay.start(picture(0))
    for _ in range(first := replay.length - 2):
        replay.add(nothing, np.ones(2), nothing, nothing, picture(9), picture(9))
    replay.start(picture(0))
    for number in range(7):
        ends = number == 3
        terminated, truncated = np.array([ends, False]), np.array([False, ends])
        frame = 10 if ends else number + 1 + 6 * (number > 3)  # 10, 11, 12, 13 after the end
        replay.add(nothing, np.full(2, 2.0**number), terminated, truncated, picture(frame), picture(4))
    by_hand = {  # time: (sum of rewards, stack that follows, steps), and whether game 0 terminates there
        0: (1 + 2 / 2 + 4 / 4, (2, 3), 3, False),
        1: (2 + 4 / 2 + 8 / 4, (3, 4), 3, True),
        2: (4 + 8 / 2, (3, 4), 2, True),
        3: (8, (3, 4), 1, True),
        4: (16 + 32 / 2 + 64 / 4, (12, 13), 3, False),
        5: (32 + 64 / 2, (12, 13), 2, False),  # the third step has not been played
        6: (64, (12, 13), 1, False),
    }
    for restarted in (False, True):
        if restarted:  # as at a boundary: what is played afterwards belongs to another episode
            replay.start(picture(20))
            replay.add(nothing, np.full(2, 128.0), nothing, nothing, picture(21), picture(4))
        batch = replay.transitions(first + np.repeat(np.arange(7), 2), np.tile([0, 1], 7))
        for time, (reward, following, steps, terminated) in by_hand.items():
            for game in range(2):
                row, expected = 2 * time + game, (reward, following, steps, terminated and game == 0)
                stack = tuple(batch.next_observations[row].flatten().tolist())
                found = (batch.rewards[row].item(), stack, batch.steps[row].item())
                assert (*found, bool(batch.terminated[row])) == expected, (time, game, restarted)
            assert batch.observations[2 * time, -1].item() == (time if time < 4 else time + 6)


def test_sampling_reaches_all_of_the_last_capacity_and_nothing_else():
    batch = Played(33, capacity=20).replay.sample(4000, np.random.default_rng(0))
    drawn, counts = np.unique(batch.rewards.numpy(), return_counts=True)
    assert sorted(np.abs(drawn).tolist()) == sorted([*range(23, 33)] * 2)
    assert counts.min() > 140 and counts.max() < 260  # 200 expected, sd 14: four sd either way


def restored(replay):
    """A new replay that has been loaded from a checkpoint of this one; its samples have the layout of channels-last."""
    torch.save(replay.state_dict(), file := io.BytesIO())
    file.seek(0)
    again = FrameReplay(20, 2, (1, 2), channels_last=True)
    again.load_state_dict(torch.load(file, weights_only=True))
    return again


@pytest.mark.parametrize("between, block", [(1, 3), (13, 256)])
def test_every_transition_of_every_checkpoint_equals_the_frame_stack_wrapper(between, block, monkeypatch):
    """Saved after every `between` steps until the ring has wrapped around several times. Odd turns continue with the
    restored replay, even ones with the saved one. At last a restart truncates episodes and keeps their next frames."""
    monkeypatch.setattr(module, "BLOCK", block)
    played = Played(0, capacity=20)
    for turn in range(121 // between):
        played.play(between)
        assert len(played.replay) == min(20, 2 * between * (turn + 1))
        saved, played.replay = played.replay, restored(played.replay)
        played.check()
        assert played.replay.sample(8, np.random.default_rng(0)).next_observations.stride()[1] == 1
        if turn % 2 == 0:
            played.replay = saved
    assert played.age.any()
    played.restart()  # it replaces the newest frame, which the checkpoint has too
    saved, played.replay = played.replay, restored(played.replay)
    newest = saved.count % saved.length
    assert torch.equal(played.replay.frames[newest], saved.frames[newest])
    played.check()
    played.play(2)
    played.check()


def test_a_checkpoint_holds_the_frames_that_a_transition_can_show(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 4)
    for steps, oldest in ((9, 0), (43, 43 - 20 - STACK + 1)):
        blocks = Played(steps).replay.state_dict()["frames"]
        assert [first for first, *_ in blocks] == list(range(oldest, steps + 1, 4))
        assert blocks[-1][1] == steps + 1


def test_flat_replay_returns_what_was_added_and_resumes():
    replay, again = FlatReplay(30, 3, 2), FlatReplay(30, 3, 2)
    for number in range(55):
        if number == 5:
            assert set(replay.sample(200, np.random.default_rng(0)).rewards.tolist()) == set(range(5))
        if number == 50:
            state = replay.state_dict()
        replay.add(np.full(3, number), np.full(2, -number), number, np.full(3, number + 1), number % 4 == 0)
    again.load_state_dict(state)
    batch = again.sample(2000, np.random.default_rng(1))
    numbers = batch.rewards
    assert set(numbers.tolist()) == set(range(20, 50))
    column = numbers[:, None]
    expected = column.expand(-1, 3), -column.expand(-1, 2), numbers, column.expand(-1, 3) + 1
    assert all(map(torch.equal, batch, (*expected, (numbers % 4 == 0).float())))
