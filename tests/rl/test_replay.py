"""Replays: no stored transition crosses an episode, stacks are the wrapper's, resume and forks are exact."""

import copy
import errno
import io

import numpy as np
import pytest
import torch

from fire_core.errors import UserError
from rl import frame_file
from rl.replay import FlatReplay, FrameReplay

STACK = 4


class Counting:
    """Two environments whose frames are (episode number, step number) and whose episodes have given lengths."""

    def __init__(self, lengths=(3, 5), truncate=(False, True)):
        self.lengths, self.truncate = lengths, truncate
        self.episode, self.step_number = np.zeros(2, int), np.zeros(2, int)
        self.stacks = [self._first(i) for i in range(2)]

    def frame(self, index):
        return np.array([[self.episode[index], self.step_number[index]]], np.uint8)

    def _first(self, index):
        return [self.frame(index)] * STACK

    def frames(self):
        return np.stack([stack[-1] for stack in self.stacks])

    def step(self):
        """What a frame-stack wrapper over each environment sees, kept as a list of plain tuples."""
        records, finals = [], np.zeros((2, 1, 2), np.uint8)
        terminated, truncated = np.zeros((2, 2), bool)
        for i in range(2):
            observation = np.stack(self.stacks[i])
            self.step_number[i] += 1
            finals[i] = self.frame(i)
            self.stacks[i] = [*self.stacks[i][1:], self.frame(i)]
            after = np.stack(self.stacks[i])
            if self.step_number[i] == self.lengths[i]:
                (truncated if self.truncate[i] else terminated)[i] = True
                self.episode[i] += 1
                self.step_number[i] = 0
                self.stacks[i] = self._first(i)
            records.append((observation, after, terminated[i]))
        return records, finals, terminated, truncated


def fill(replay, environment, steps, records):
    for _ in range(steps):
        number = replay.count
        seen, finals, terminated, truncated = environment.step()
        chosen, rewards = np.array([number % 7, number % 5]), np.array([number, -number], np.float32)
        replay.add(chosen, rewards, terminated, truncated, environment.frames(), finals)
        records.append(seen)


def check_all(replay, records):
    """Every transition that can be drawn is exactly the wrapper's."""
    oldest = max(0, replay.count - replay.depth)
    for time in range(oldest, replay.count):
        batch = replay.transitions(np.array([time, time]), np.array([0, 1]))
        for index in range(2):
            observation, after, terminated = records[time][index]
            np.testing.assert_array_equal(batch.observations[index].numpy(), observation)
            np.testing.assert_array_equal(batch.next_observations[index].numpy(), after)
            assert batch.terminated[index].item() == terminated
        assert batch.rewards.tolist() == [time, -time]
        assert batch.actions.tolist() == [time % 7, time % 5]


def started(folder, steps, capacity=40, **options):
    """A replay of two environments after some steps, its environments, and what a wrapper saw of them."""
    environment, records = Counting(), []
    replay = FrameReplay(capacity, 2, (1, 2), folder, **options)
    replay.start(environment.frames())
    fill(replay, environment, steps, records)
    return replay, environment, records


def forked(trunk, folder, **options):
    """A new fork of a replay."""
    place = {"parent": trunk.path.parent, "fork_time": trunk.count}
    fork = FrameReplay(trunk.capacity, 2, trunk.frame_shape, folder, **place, **options)
    fork.load_state_dict(trunk.state_dict())
    return fork


def written(state):
    """What a checkpoint file gives back."""
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


@pytest.mark.parametrize("steps", [1, 4, 19, 20, 21, 24, 26, 57, 143])
def test_every_transition_equals_the_frame_stack_wrapper(tmp_path, steps):
    replay, _, records = started(tmp_path, steps, reserve=3)
    assert len(replay) == min(40, 2 * steps)
    check_all(replay, records)


def test_n_step_returns_by_hand(tmp_path):
    """Episode of four steps that terminates in game 0 and is truncated in game 1; then three steps of the next one, of which
    game 0 loses a life in the second. Rewards 1, 2, 4, ... ; discount one half; three steps."""
    replay = FrameReplay(32, 2, (1, 1), tmp_path, stack=2, n_step=3, discount=0.5)
    picture = lambda number: np.full((2, 1, 1), number, np.uint8)  # noqa: E731
    replay.start(picture(0))
    for number in range(7):
        ends, nothing = number == 3, np.zeros(2, bool)
        terminated, truncated = np.array([ends, False]), np.array([False, ends])
        lost = np.array([number == 5, False])
        frame = 10 if ends else number + 1 + 6 * (number > 3)  # 10, 11, 12, 13 after the end
        replay.add(nothing, np.full(2, 2.0**number), terminated, truncated, picture(frame), picture(4), lost)
    by_hand = {  # time: (sum of rewards, stack that follows, steps), and whether game 0 terminates there
        0: (1 + 2 / 2 + 4 / 4, (2, 3), 3, False),
        1: (2 + 4 / 2 + 8 / 4, (3, 4), 3, True),
        2: (4 + 8 / 2, (3, 4), 2, True),
        3: (8, (3, 4), 1, True),
        4: (16 + 32 / 2 + 64 / 4, (12, 13), 3, None),  # game 0 stops at the lost life
        5: (32 + 64 / 2, (12, 13), 2, None),  # the third step has not been played
        6: (64, (12, 13), 1, False),
    }
    for restarted in (False, True):
        if restarted:  # as at a boundary: what is played afterwards belongs to another episode
            replay.start(picture(20))
            replay.add(nothing, np.full(2, 128.0), nothing, nothing, picture(21))
        batch = replay.transitions(np.repeat(np.arange(7), 2), np.tile([0, 1], 7))
        for time, (reward, following, steps, terminated) in by_hand.items():
            for game in range(2):
                row, expected = 2 * time + game, (reward, following, steps, bool(terminated and game == 0))
                if game == 0 and terminated is None:
                    expected = (32, (11, 12), 2, True) if time == 4 else (32, (11, 12), 1, True)
                stack = tuple(batch.next_observations[row].flatten().tolist())
                found = (batch.rewards[row].item(), stack, batch.steps[row].item())
                assert (*found, bool(batch.terminated[row])) == expected, (time, game, restarted)
            assert batch.observations[2 * time, -1].item() == (time if time < 4 else time + 6)


def test_sampling_reaches_all_of_the_last_capacity_and_nothing_else(tmp_path):
    replay, _, _ = started(tmp_path, 33, capacity=20)
    batch = replay.sample(4000, np.random.default_rng(0))
    drawn, counts = np.unique(batch.rewards.numpy(), return_counts=True)
    assert sorted(np.abs(drawn).tolist()) == sorted([*range(23, 33)] * 2)
    assert counts.min() > 140 and counts.max() < 260  # 200 expected, sd 14: four sd either way


def test_the_layout_of_samples_changes_nothing_but_their_strides(tmp_path):
    """Also through a fork, whose samples mix its own frames with its parent's."""
    batches = []
    for layout in (False, True):
        replay = FrameReplay(40, 2, (5, 7), tmp_path / f"{layout}", channels_last=layout)
        frames = np.random.default_rng(0).integers(0, 256, (16, 2, 5, 7), np.uint8)
        replay.start(frames[0])
        nothing = np.zeros(2, bool)
        for number, frame in enumerate(frames[1:]):
            if number == 8:
                replay = forked(replay, tmp_path / f"{layout} fork", most_new_rows=12, channels_last=layout)
            replay.add(nothing, nothing, nothing, nothing, frame)
        batches.append(replay.sample(64, np.random.default_rng(1)))
    for usual, last in zip(batches[0][:5], batches[1][:5], strict=True):
        assert torch.equal(usual, last)
    assert batches[0].observations.stride()[-1] == 1
    assert batches[1].observations.stride()[1] == batches[1].next_observations.stride()[1] == 1


def test_restart_in_the_middle_truncates_and_keeps_the_true_next_frame(tmp_path):
    environment, records = Counting(lengths=(50, 60)), []
    replay = FrameReplay(40, 2, (1, 2), tmp_path)
    replay.start(environment.frames())
    fill(replay, environment, 7, records)
    environment.episode += 1
    environment.step_number[:] = 0
    environment.stacks = [environment._first(i) for i in range(2)]
    replay.start(environment.frames())
    fill(replay, environment, 6, records)
    check_all(replay, records)
    assert not replay.facts["terminated"].any()


@pytest.mark.parametrize("restart", [False, True])
def test_going_back_to_a_checkpoint_is_exact_although_the_ring_went_on(tmp_path, restart):
    replay, environment, records = started(tmp_path, 40, capacity=20, reserve=6)
    state = written(replay.state_dict())
    assert not replay.must_save
    if restart:
        replay.start(np.full((2, 1, 2), 200, np.uint8))
    fill(replay, environment, 6, [])
    assert replay.must_save
    again = FrameReplay(20, 2, (1, 2), tmp_path, existing=True)
    again.load_state_dict(state)
    assert again.count == 40
    check_all(again, records)
    nothing = np.zeros(2, bool)
    again.add(np.zeros(2), np.zeros(2), nothing, nothing, np.full((2, 1, 2), 9, np.uint8))
    assert again.transitions(np.array([40]), np.array([0])).next_observations[0, -1, 0, 0] == 9


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_each_checkpoint_that_is_kept_can_be_gone_back_to(tmp_path, kept):
    """Saved as rarely as the ring allows, the oldest of the kept checkpoints still finds all it needs on the disk."""
    replay, environment, records = started(tmp_path, 0, capacity=20, reserve=7, checkpoints=kept)
    checkpoints = []
    for _ in range(60):
        fill(replay, environment, 1, records)
        if replay.must_save:
            checkpoints = [*checkpoints, (written(replay.state_dict()), list(records))][-kept:]
    while not replay.must_save:  # as far beyond the last one as it gets
        fill(replay, environment, 1, [])
    for state, known in reversed(checkpoints):
        # a resume may keep more of them
        again = FrameReplay(20, 2, (1, 2), tmp_path, existing=True, checkpoints=5)
        again.load_state_dict(state)
        check_all(again, known)
        assert again.reserve == 7


@pytest.mark.parametrize("new_rows", [3, 200])
def test_forks_share_the_old_frames_and_never_write_them(tmp_path, new_rows):
    trunk, environment, records = started(tmp_path / "trunk", 33, reserve=4)
    trunk.state_dict()
    before = trunk.path.read_bytes()
    for name in ("a", "b"):
        fork = forked(trunk, tmp_path / name, most_new_rows=new_rows)
        check_all(fork, records)
        own = list(records)
        fill(fork, copy.deepcopy(environment), min(new_rows, 45), own)
        check_all(fork, own)
        place = {"parent": tmp_path / "trunk", "fork_time": 33, "most_new_rows": new_rows}
        resumed = FrameReplay(40, 2, (1, 2), tmp_path / name, existing=True, **place)
        resumed.load_state_dict(written(fork.state_dict()))
        check_all(resumed, own)
        assert len(resumed) == 40
    assert trunk.path.read_bytes() == before
    assert new_rows > 3 or fork.frames.nbytes < trunk.frames.nbytes / 4
    with pytest.raises(ValueError):
        fork.old_frames[0] = 1


@pytest.mark.parametrize("place", ["own", "fork", "parent"])
def test_a_flipped_bit_in_the_frames_is_found(place, tmp_path):
    replay, _, _ = started(tmp_path / "one", 15, reserve=4)
    damaged, loads = replay, replay
    if place != "own":  # the frames of its first half are those of the parent
        loads = forked(replay, tmp_path / "two", most_new_rows=10)
        fill(loads, Counting(), 3, [])
        damaged = loads if place == "fork" else replay
    state = loads.state_dict()
    loads.load_state_dict(state)
    damaged.frames.reshape(-1)[8] ^= 1
    damaged.frames.flush()
    with pytest.raises(UserError, match=r"is damaged: steps \d+ to \d+ differ from their checksum"):
        loads.load_state_dict(state)


def test_every_frame_that_can_be_drawn_has_a_checksum(tmp_path):
    replay, environment, _ = started(tmp_path, 45)
    replay.state_dict()  # a block of rows that can be drawn only in part at the next checkpoint
    fill(replay, environment, 12, [])
    state = replay.state_dict()
    for time in range(57 - replay.depth - STACK + 1, 57):
        damaged = replay.frames[replay._slot(time)].reshape(-1)
        damaged[0] ^= 1
        with pytest.raises(UserError, match="is damaged"):
            replay.load_state_dict(state)
        damaged[0] ^= 1
    replay.load_state_dict(state)


@pytest.mark.parametrize("at", [10, 20, 60])
def test_a_flipped_bit_in_the_head_of_the_file_is_one_line(at, tmp_path):
    path = FrameReplay(40, 2, (1, 2), tmp_path / "one").path
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"replay file .*frames.npy is damaged[^\n]*$"):
        FrameReplay(40, 2, (1, 2), tmp_path / "one", existing=True)


def test_bad_files_and_full_disks_are_one_clear_line(tmp_path):
    with pytest.raises(UserError, match=r"GB of disk at .* are free"):
        FrameReplay(10**10, 2, (1000, 1000), tmp_path)
    with pytest.raises(UserError, match=r"GB of memory but"):
        FlatReplay(10**12, 100, 100)
    FrameReplay(40, 2, (1, 2), tmp_path / "here")
    with pytest.raises(UserError, match="is missing"):
        FrameReplay(40, 2, (1, 2), tmp_path / "none", existing=True)
    with pytest.raises(UserError, match="is damaged"):
        FrameReplay(40, 2, (1, 3), tmp_path / "here", existing=True)
    path = tmp_path / "here" / "frames.npy"
    np.save(path, np.load(path)[:20])
    with pytest.raises(UserError, match=r"damaged \(20 rows, at least 25 are needed"):
        FrameReplay(40, 2, (1, 2), tmp_path / "here", existing=True)
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"is damaged .*: delete .* and run the same command again"):
        FrameReplay(40, 2, (1, 2), tmp_path / "here", existing=True)


def test_a_failed_allocation_is_one_clear_line_and_leaves_nothing(tmp_path, monkeypatch):
    """Free space that the system reports is not always there: quotas, other processes."""

    def fails(*_):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(frame_file.os, "posix_fallocate", fails)
    with pytest.raises(UserError, match=r"frames.npy of .* GB cannot be written \(Disk quota exceeded\)"):
        FrameReplay(40, 2, (1, 2), tmp_path)
    assert not list(tmp_path.iterdir())


def test_flat_replay_returns_what_was_added_and_resumes():
    replay = FlatReplay(30, 3, 2)

    def add(number):
        replay.add(np.full(3, number), np.full(2, -number), number, np.full(3, number + 1), number % 4 == 0)

    for number in range(50):
        add(number)
        if number == 4:
            assert set(replay.sample(200, np.random.default_rng(0)).rewards.tolist()) == set(range(5))
    state = replay.state_dict()
    for number in range(50, 55):
        add(number)
    again = FlatReplay(30, 3, 2)
    again.load_state_dict(state)
    batch = again.sample(2000, np.random.default_rng(1))
    numbers = batch.rewards
    assert set(numbers.tolist()) == set(range(20, 50))
    assert torch.equal(batch.observations, numbers[:, None].expand(-1, 3))
    assert torch.equal(batch.next_observations, numbers[:, None].expand(-1, 3) + 1)
    assert torch.equal(batch.actions, -numbers[:, None].expand(-1, 2))
    assert torch.equal(batch.terminated, (numbers % 4 == 0).float())


@pytest.mark.parametrize("steps", [7, 24, 57])
def test_one_step_returns_of_a_longer_rule_are_the_plain_ones(steps, tmp_path):
    """Through a fork and over the end of the ring: where a transition of up to five steps has one, it is the same."""
    replays = []
    for name, rule in (("plain", {}), ("longer", {"n_step": 5, "discount": 0.9})):
        trunk, environment = FrameReplay(40, 2, (1, 2), tmp_path / name, **rule), Counting()
        trunk.start(environment.frames())
        fill(trunk, environment, steps, [])
        replays.append(forked(trunk, tmp_path / f"{name} fork", most_new_rows=5, **rule))
    times = np.arange(max(0, steps - 20), steps).repeat(2)
    one, many = (replay.transitions(times, np.arange(len(times)) % 2) for replay in replays)
    short = many.steps == 1
    assert short.sum() >= 4 and all(torch.equal(a[short], b[short]) for a, b in zip(one[:5], many[:5]))
    assert torch.equal(one.observations, many.observations) and many.steps.max() == 5
