"""Replays: no stored transition crosses an episode, stacks are the wrapper's, resume and forks are exact."""

import errno
import io

import numpy as np
import pytest
import torch

from fire_core.errors import UserError
from rl import columns
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
        records, finals, terminated, truncated = (
            [],
            np.zeros((2, 1, 2), np.uint8),
            np.zeros(2, bool),
            np.zeros(2, bool),
        )
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
        rewards = np.array([number, -number], np.float32)
        replay.add(
            np.array([number % 7, number % 5]), rewards, terminated, truncated, environment.frames(), finals
        )
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


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 4, 19, 20, 21, 22, 23, 24, 25, 26, 57, 143])
def test_every_transition_equals_the_frame_stack_wrapper(tmp_path, steps, mapped):
    environment, records = Counting(), []
    replay = FrameReplay(
        40, 2, (1, 2), folder=tmp_path / "replay" if mapped else None, reserve=3 if mapped else None
    )
    replay.start(environment.frames())
    fill(replay, environment, steps, records)
    assert len(replay) == min(40, 2 * steps)
    check_all(replay, records)


def test_n_step_returns_by_hand():
    """Episode of four steps that terminates in game 0 and is truncated in game 1; then three steps of the next one, of which
    game 0 loses a life in the second. Rewards 1, 2, 4, ... ; discount one half; three steps."""
    replay = FrameReplay(32, 2, (1, 1), stack=2, n_step=3, discount=0.5)
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
                found = (
                    batch.rewards[row].item(),
                    stack,
                    batch.steps[row].item(),
                    bool(batch.terminated[row]),
                )
                assert found == expected, (time, game, restarted)
            assert batch.observations[2 * time, -1].item() == (time if time < 4 else time + 6)


@pytest.mark.parametrize("steps", [7, 24, 57])
def test_one_step_returns_of_a_longer_rule_are_the_plain_ones(steps):
    """Through a fork and over the end of the ring: where a transition of up to five steps has one, it is the same."""
    plain, longer = FrameReplay(40, 2, (1, 2)), FrameReplay(40, 2, (1, 2), n_step=5, discount=0.9)
    for replay in (plain, longer):
        environment = Counting()
        replay.start(environment.frames())
        fill(replay, environment, steps, [])
    replays = [replay.fork(None, new_rows=5) for replay in (plain, longer)]
    times = np.arange(max(0, steps - 20), steps).repeat(2)
    one, many = (replay.transitions(times, np.arange(len(times)) % 2) for replay in replays)
    short = many.steps == 1
    assert short.sum() >= 4 and all(torch.equal(a[short], b[short]) for a, b in zip(one[:5], many[:5]))
    assert torch.equal(one.observations, many.observations) and many.steps.max() == 5


def test_sampling_reaches_all_of_the_last_capacity_and_nothing_else():
    environment, records = Counting(), []
    replay = FrameReplay(20, 2, (1, 2))
    replay.start(environment.frames())
    fill(replay, environment, 33, records)
    batch = replay.sample(4000, np.random.default_rng(0))
    drawn, counts = np.unique(batch.rewards.numpy(), return_counts=True)
    assert sorted(np.abs(drawn).tolist()) == sorted([*range(23, 33)] * 2)
    assert counts.min() > 140 and counts.max() < 260  # 200 expected, sd 14: four sd either way


def test_the_layout_of_samples_changes_nothing_but_their_strides(tmp_path):
    """Also through a fork, whose samples mix its own frames with its parent's."""
    batches = []
    for layout in (False, True):
        replay = FrameReplay(40, 2, (5, 7), channels_last=layout)
        frames = np.random.default_rng(0).integers(0, 256, (16, 2, 5, 7), np.uint8)
        replay.start(frames[0])
        nothing = np.zeros(2, bool)
        for number, frame in enumerate(frames[1:]):
            if number == 8:
                replay = replay.fork(None, new_rows=12)
            replay.add(nothing, nothing, nothing, nothing, frame)
        batches.append(replay.sample(64, np.random.default_rng(1)))
    for usual, last in zip(batches[0][:5], batches[1][:5], strict=True):
        assert torch.equal(usual, last)
    assert batches[0].observations.stride()[-1] == 1
    assert batches[1].observations.stride()[1] == batches[1].next_observations.stride()[1] == 1


def test_restart_in_the_middle_truncates_and_keeps_the_true_next_frame():
    environment, records = Counting(lengths=(50, 60)), []
    replay = FrameReplay(40, 2, (1, 2))
    replay.start(environment.frames())
    fill(replay, environment, 7, records)
    environment.episode += 1
    environment.step_number[:] = 0
    environment.stacks = [environment._first(i) for i in range(2)]
    replay.start(environment.frames())
    fill(replay, environment, 6, records)
    check_all(replay, records)
    assert not replay.facts["terminated"].any()


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("restart", [False, True])
def test_going_back_to_a_checkpoint_is_exact_although_the_ring_went_on(tmp_path, mapped, restart):
    folder = tmp_path / "replay" if mapped else None
    environment, records = Counting(), []
    replay = FrameReplay(20, 2, (1, 2), folder=folder, reserve=6 if mapped else None)
    replay.start(environment.frames())
    fill(replay, environment, 40, records)
    stream = io.BytesIO()
    torch.save(replay.state_dict(), stream)
    assert not replay.must_save
    if restart:
        replay.start(np.full((2, 1, 2), 200, np.uint8))
    fill(replay, environment, 6, [])
    assert replay.must_save == mapped
    stream.seek(0)
    again = FrameReplay(20, 2, (1, 2), folder=folder, reserve=6 if mapped else None, existing=mapped)
    again.load_state_dict(torch.load(stream, weights_only=True))
    assert again.count == 40
    check_all(again, records)
    continued = np.full((2, 1, 2), 9, np.uint8)
    nothing = np.zeros(2, bool)
    again.add(np.zeros(2), np.zeros(2), nothing, nothing, continued)
    assert again.transitions(np.array([40]), np.array([0])).next_observations[0, -1, 0, 0] == 9


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_each_checkpoint_that_is_kept_can_be_gone_back_to(tmp_path, kept):
    """Saved as rarely as the ring allows, the oldest of the kept checkpoints still finds all it needs on the disk."""
    options = {"folder": tmp_path / "replay", "reserve": 7, "checkpoints": kept}
    environment, records, checkpoints = Counting(), [], []
    replay = FrameReplay(20, 2, (1, 2), **options)
    replay.start(environment.frames())
    for _ in range(60):
        fill(replay, environment, 1, records)
        if replay.must_save:
            stream = io.BytesIO()
            torch.save(replay.state_dict(), stream)
            checkpoints = [*checkpoints, (stream, list(records))][-kept:]
    while not replay.must_save:  # as far beyond the last one as it gets
        fill(replay, environment, 1, [])
    for stream, known in reversed(checkpoints):
        stream.seek(0)
        again = FrameReplay(20, 2, (1, 2), existing=True, **options)
        again.load_state_dict(torch.load(stream, weights_only=True))
        check_all(again, known)
    more = options | {"reserve": None, "checkpoints": 5}  # a resume that is to keep more of them
    assert FrameReplay(20, 2, (1, 2), existing=True, **more).rows == replay.rows
    with pytest.raises(UserError, match="reserve=2 rows for 3 checkpoints"):
        FrameReplay(20, 2, (1, 2), folder=tmp_path / "other", reserve=2, checkpoints=3)


@pytest.mark.parametrize("new_rows", [3, 200])
def test_forks_share_the_old_frames_and_never_write_them(tmp_path, new_rows):
    environment, records = Counting(), []
    trunk = FrameReplay(40, 2, (1, 2), folder=tmp_path / "trunk", reserve=4)
    trunk.start(environment.frames())
    fill(trunk, environment, 33, records)
    state = trunk.state_dict()
    before = {path.name: path.read_bytes() for path in (tmp_path / "trunk").iterdir()}
    base = FrameReplay(40, 2, (1, 2), folder=tmp_path / "trunk", reserve=4, existing=True, read_only=True)
    base.load_state_dict(state)
    for name in ("a", "b"):
        fork = base.fork(tmp_path / name, new_rows=new_rows)
        check_all(fork, records)
        own, own_environment = list(records), environment_at(environment)
        steps = min(new_rows, 45)
        fill(fork, own_environment, steps, own)
        check_all(fork, own)
        resumed = base.fork(tmp_path / name, new_rows=new_rows, existing=True)
        resumed.load_state_dict(fork.state_dict())
        check_all(resumed, own)
        assert len(resumed) == 40
    after = {path.name: path.read_bytes() for path in (tmp_path / "trunk").iterdir()}
    assert before == after
    assert base.fork(None, new_rows=3).frames.nbytes < base.frames.nbytes / 4
    with pytest.raises(ValueError):
        base.frames[0] = 1


@pytest.mark.parametrize("name", ["frames", "actions", "rewards", "terminated", "ended", "age"])
@pytest.mark.parametrize("forked", [False, True])
def test_a_flipped_bit_in_the_files_is_found(name, forked, tmp_path):
    replay = FrameReplay(40, 2, (1, 2), folder=tmp_path / "one", reserve=4)
    replay.start(Counting().frames())
    fill(replay, Counting(), 15, [])
    state, damaged = replay.state_dict(), replay
    if forked:  # whose frames of the first half are those of the parent
        fork = replay.fork(tmp_path / "two", new_rows=10)
        fill(fork, Counting(), 3, [])
        state, damaged = fork.state_dict(), fork if name != "frames" else replay
    again = replay.fork(tmp_path / "two", new_rows=10, existing=True) if forked else replay
    again.load_state_dict(state)
    (damaged.frames if name == "frames" else damaged.facts[name]).view(np.uint8).reshape(-1)[8] ^= 1
    with pytest.raises(UserError, match="is damaged: steps 0 to 14 differ from their checksum"):
        again.load_state_dict(state)


def test_a_restart_right_after_a_checkpoint_is_no_damage(tmp_path):
    replay = FrameReplay(40, 2, (1, 2), folder=tmp_path, reserve=4)
    replay.start(Counting().frames())
    fill(replay, Counting(), 14, [])
    before = replay.state_dict()
    replay.start(Counting().frames() + 1)
    after = replay.state_dict()
    for state in (after, before):
        replay.load_state_dict(state)
    assert before["row_checksums"] != after["row_checksums"]


@pytest.mark.parametrize("at", [10, 20, 60])
def test_a_flipped_bit_in_the_head_of_a_file_is_one_line(at, tmp_path):
    FrameReplay(40, 2, (1, 2), folder=tmp_path / "one")
    content = bytearray((tmp_path / "one/age.npy").read_bytes())
    content[at] ^= 4
    (tmp_path / "one/age.npy").write_bytes(content)
    with pytest.raises(UserError, match=r"replay file .*age.npy (is damaged|holds)[^\n]*$"):
        FrameReplay(40, 2, (1, 2), folder=tmp_path / "one", existing=True)


def environment_at(environment):
    copy = Counting(environment.lengths, environment.truncate)
    copy.episode, copy.step_number = environment.episode.copy(), environment.step_number.copy()
    copy.stacks = [list(stack) for stack in environment.stacks]
    return copy


def test_bad_sizes_and_full_disks_are_one_clear_line(tmp_path):
    with pytest.raises(UserError, match=r"41: give a positive multiple of 2"):
        FrameReplay(41, 2, (1, 2))
    with pytest.raises(UserError, match=r"GB of disk at .* are free"):
        FrameReplay(10**10, 2, (1000, 1000), folder=tmp_path / "x")
    with pytest.raises(UserError, match=r"GB of memory but"):
        FrameReplay(10**10, 2, (1000, 1000))
    with pytest.raises(UserError, match="empty"):
        FrameReplay(40, 2, (1, 2)).sample(1, np.random.default_rng(0))
    with pytest.raises(UserError, match="is missing"):
        FrameReplay(40, 2, (1, 2), folder=tmp_path / "none", existing=True)
    FrameReplay(40, 2, (1, 2), folder=tmp_path / "here")
    with pytest.raises(UserError, match="asks for"):
        FrameReplay(40, 2, (1, 3), folder=tmp_path / "here", existing=True)
    (tmp_path / "here" / "frames.npy").write_bytes(b"")
    with pytest.raises(
        UserError, match=r"frames.npy is damaged .*: delete .* and run the same command again"
    ):
        FrameReplay(40, 2, (1, 2), folder=tmp_path / "here", existing=True)


def test_a_failed_allocation_is_one_clear_line_and_leaves_nothing(tmp_path, monkeypatch):
    """Free space that the system reports is not always there: quotas, other processes."""

    def fails(*_):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(columns.os, "posix_fallocate", fails)
    with pytest.raises(UserError, match=r"frames.npy of .* GB cannot be written \(Disk quota exceeded\)"):
        FrameReplay(40, 2, (1, 2), folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_system_that_cannot_allocate_gets_the_ring_all_the_same(tmp_path, monkeypatch):
    """macOS."""
    monkeypatch.delattr(columns.os, "posix_fallocate")
    environment, records = Counting(), []
    replay = FrameReplay(40, 2, (1, 2), folder=tmp_path)
    replay.start(environment.frames())
    fill(replay, environment, 33, records)
    check_all(replay, records)


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
