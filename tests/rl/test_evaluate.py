"""Evaluation counts the episodes fixed beforehand, whatever their length; the official protocol drops long ones."""

import numpy as np

from rl.evaluate import play_episodes, play_steps


class Alternating:
    """Two environments play episodes of `wanted` lengths in turn, each begins with another one; returns are lengths."""

    count = 2

    def __init__(self, wanted):
        self.wanted, self.rounds = wanted, 0

    def reset(self):
        self.number, self.rounds = self.rounds + np.arange(2), self.rounds + 1
        self.lengths = np.zeros(2, int)  # the running episodes are dropped
        return self.lengths

    def step(self, actions):
        assert actions.shape == (2,)
        self.lengths += 1
        ended = self.lengths == np.take(self.wanted, self.number, mode="wrap")
        finished = [(float(length), int(length)) for length in self.lengths[ended]]
        self.number[ended] += 1
        self.lengths[ended] = 0
        last = self.number % 2 == 0
        return self.lengths, np.ones(2, np.float32), ended & last, ended & ~last, finished


def still(observations):
    return np.zeros(len(observations), int)


def test_a_fixed_number_of_episodes_is_played_to_its_end():
    result = play_episodes(Alternating([2, 30]), still, 8, max_steps=1000)
    assert sorted(result.returns) == [2] * 4 + [30] * 4 and result.lengths == result.returns
    summary = {"eval_return": 16, "eval_return_std": 14, "eval_return_min": 2, "eval_return_max": 30}
    assert result.summary() == summary | {"eval_length": 16, "eval_episodes": 8, "eval_unfinished": 0}


def test_the_official_protocol_drops_what_does_not_end():
    result = play_steps(Alternating([2, 30]), still, 2 * 40)
    assert sorted(result.returns) == [2, 2, 2, 30, 30]  # the other 30s were running: mean 13.2, not 16
    assert result.unfinished == 2
    nothing = play_steps(Alternating([50]), still, 2 * 40)
    assert nothing.summary() == {"eval_return": 0.0, "eval_episodes": 0, "eval_unfinished": 2}
