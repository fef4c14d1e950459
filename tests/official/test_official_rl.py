"""compat=official against the official pipelines, rebuilt here from OpenCV, gymnasium and two-pass statistics."""

import numpy as np
import pytest
from training_scripts import compose_config

from harness.runs import numpy_generator
from rl.dqn.play import make_games

GAMES = {"asterix": "Asterix", "beam_rider": "BeamRider", "demon_attack": "DemonAttack"}


class OfficialFrames:
    """One game, an agent step at a time: maximum of the last two frames per colour, area-resized, then grey, by OpenCV."""

    def __init__(self, game: str):
        import ale_py
        import gymnasium

        gymnasium.register_envs(ale_py)
        self.env, self.cv2 = gymnasium.make(f"{GAMES[game]}NoFrameskip-v4"), pytest.importorskip("cv2")

    def picture(self, colours: np.ndarray) -> np.ndarray:
        small = self.cv2.resize(colours, (84, 84), interpolation=self.cv2.INTER_AREA)
        return self.cv2.cvtColor(small, self.cv2.COLOR_RGB2GRAY)

    def reset(self, **seed: int) -> np.ndarray:
        return self.picture(self.env.reset(**seed)[0])

    def step(self, action: int) -> tuple[np.ndarray, bool]:
        frames, ended = [], False
        while len(frames) < 4 and not ended:
            frame, _, ended, _, _ = self.env.step(action)
            frames.append(frame)
        return self.picture(np.maximum.reduce(frames[-2:])), ended


@pytest.mark.parametrize("game", GAMES)
def test_frames_are_those_of_the_official_stack(game, fidelity):
    official, games = OfficialFrames(game), {}
    what = [f"experiment=fig4a_{game}", "size=paper", "env.environments=1", "env.sticky=0"]
    for compat in ("official", "corrected"):
        games[compat] = make_games(compose_config("dqn", [*what, f"compat={compat}"]), "games")
    generator, expected = np.random.default_rng(0), official.reset(seed=0)
    frames = {compat: each.reset()[0, -1] for compat, each in games.items()}
    largest, differing, total, ends = 0, 0, 0, 0
    for _ in range(400):
        largest = max(largest, int(np.abs(frames["official"].astype(int) - expected).max()))
        differing, total = differing + int((frames["corrected"] != expected).sum()), total + expected.size
        action = int(generator.integers(games["official"].actions))
        expected, ended = official.step(action)
        frames = {key: each.step(np.array([action])).observations[0, -1] for key, each in games.items()}
        if ended:  # ours has begun the next episode already
            expected, ends = official.reset(), ends + 1
    assert ends >= 1 or game != "asterix"
    assert 0.001 < differing / total < 0.1
    fidelity("cell", f"fig4a_{game}", "observations: largest difference of a pixel, of 255", largest, 0)


@pytest.fixture(scope="module")
def sac(tmp_path_factory) -> dict[str, dict]:
    """Checkpoints of official Hopper runs one agent step after the midpoint at 60; updates begin at step 30."""
    from tests.rl.test_sac_train import after_one_update

    folder = tmp_path_factory.mktemp("sac")
    return {m: after_one_update(folder, m, "compat=official") for m in ("none", "fire")}


@pytest.mark.parametrize("method, unseen", [("none", [0]), ("fire", [0, 60])])
def test_the_normaliser_counts_what_the_policy_acted_on(sac, method, unseen, fidelity):
    """Not the last observation of an episode, and not the first of a process: a treated run is a new one at step 60."""
    saved = sac[method]
    width = len(saved["kept"]["normaliser"]["mean"])  # a row begins with the observation
    acted_on = saved["kept"]["replay"]["rows"][:, :width].double().numpy()
    # episodes ended, so there is something to leave out
    assert len(acted_on) == 61 and saved["at"]["episode"] >= 2
    counted = np.delete(acted_on, unseen, axis=0)
    found, n, prior = saved["kept"]["normaliser"], len(counted), 1e-4
    assert found["count"] == pytest.approx(prior + n, abs=1e-9)
    # two passes over them, and a prior of mean 0, variance 1 and that count
    mean = counted.sum(axis=0) / (prior + n)
    variance = (prior * (1 + mean**2) + np.square(counted - mean).sum(axis=0)) / (prior + n)
    shift = np.abs(found["mean"].numpy() - mean) / np.sqrt(variance)
    spread = np.abs(found["variance"].numpy() / variance - 1)
    for what, difference in (("mean, in deviations", shift), ("variance, relative", spread)):
        fidelity("cell", "fig4b", f"observation statistics of {method}: {what}", difference.max(), 1e-5)


def test_the_first_update_follows_the_last_transition_of_the_warm_up(sac, fidelity):
    """`none` keeps its optimizers over the midpoint, so they count all updates of the run; `fire` has new ones."""
    states = {method: saved["treatment"]["optimizers"]["actor"]["state"] for method, saved in sac.items()}
    taken = {method: {float(memory["step"]) for memory in state.values()} for method, state in states.items()}
    fidelity("cell", "fig4b", "updates after 61 steps with 30 of warm-up", abs(max(taken["none"]) - 32), 0)
    assert taken == {"none": {32.0}, "fire": {1.0}}


def test_a_treated_run_begins_a_new_episode_and_none_goes_on(sac):
    assert sac["fire"]["at"]["episode"] == sac["none"]["at"]["episode"] + 1


def test_a_treated_run_begins_its_second_half_with_a_uniform_action(sac):
    uniform = numpy_generator(1, "warm_up", 60).uniform(-1, 1, 3).astype(np.float32)
    width = len(sac["none"]["kept"]["normaliser"]["mean"])
    row = slice(width, -width - 2)  # observation, action, reward, observation, terminated
    assert (sac["fire"]["kept"]["replay"]["rows"][60, row].numpy() == uniform).all()
    assert (sac["none"]["kept"]["replay"]["rows"][60, row].numpy() != uniform).all()
