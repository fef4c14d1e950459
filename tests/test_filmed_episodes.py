"""Strips of pictures from finished runs: the folders hold fresh networks, which play as trained ones do."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from omegaconf import OmegaConf

from analysis import filmed_episodes
from fire_core.errors import UserError

pytest.importorskip("ale_py")
pytest.importorskip("mujoco")

from rl.dqn import play
from rl.dqn.network import DQN

GAME = {
    "seed": 1, "compat": "corrected", "eval_epsilon": 0.001, "eval_max_steps": 40,
    "env": {"game": "catch", "frame_size": 21, "environments": 2, "sticky": 0.25},
    "network": {"convolutions": [[4, 6, 3], [4, 2, 2]], "hidden": 8}, "channels_last": False,
}  # fmt: skip


def finished(folder: Path, domain: str, config: dict, final: dict) -> Path:
    """A run folder that holds just what a strip reads."""
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps({"domain": domain}))
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    torch.save(final, folder / "checkpoint" / "final.pt")
    return folder


@pytest.fixture
def game(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    net = DQN(3, (21, 21), [(4, 6, 3), (4, 2, 2)], 8)
    return finished(tmp_path / "none" / "seed_1", "dqn", GAME, {"net": net.state_dict()})


def test_the_large_frames_show_what_the_network_sees(game: Path) -> None:
    """Frames of 160 pixels, averaged down to 20, light up where the ones of 20 pixels do: both emulators are in step."""
    config = yaml.safe_load((game / "config.yaml").read_text())
    config["env"]["frame_size"] = 20
    seen = []
    original = play.greedy

    def watched(*arguments):
        policy = original(*arguments)

        def keep(observations: np.ndarray) -> np.ndarray:
            seen.append(observations[0, -1])
            return policy(observations)

        return keep

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(play, "greedy", watched)
        torch.manual_seed(0)
        final = {"net": DQN(3, (20, 20), [(4, 6, 3), (4, 2, 2)], 8).state_dict()}
        episode = filmed_episodes.play_game(
            OmegaConf.create(config | {"run": {"emulator_threads": 1}}), final
        )
    assert len(episode.pictures) == len(seen) > 2
    for small, large in zip(seen, episode.pictures):
        blocks = large.reshape(20, 8, 20, 8).mean(axis=(1, 3))
        assert np.corrcoef(small.ravel(), blocks.ravel())[0, 1] > 0.5
    assert episode.score in (-1.0, 0.0, 1.0)


def test_a_strip_is_written_and_says_the_return(
    game: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "new" / "strip.png"
    assert filmed_episodes.main([str(game), "--out", str(out), "--frames", "3"]) == 0
    assert out.stat().st_size > 1000
    assert "none (continue), seed 1: return" in capsys.readouterr().out
    figure = filmed_episodes.draw([("a", filmed_episodes.play(game))], 3)
    assert len(figure.axes) == 3 and any("return" in text.get_text() for text in figure.axes[0].texts)


def test_an_episode_of_the_robot(tmp_path: Path) -> None:
    from rl.sac.env import Task
    from rl.sac.normaliser import RunningNormaliser
    from rl.sac.train import build

    config = {
        "seed": 1, "env": {"name": "h1-walk-primitive-v0", "backend": "gymnasium", "action_repeat": 2}, "eval_limit": 12,
        "actor": {"width": 8, "blocks": 1}, "critic": {"width": 8, "blocks": 1, "count": 2}, "temperature": 0.01,
        "discount": 0.99, "tau": 0.005, "target_entropy": 0.5, "learning_rate": 1e-4, "weight_decay": 0.01,
        "precision": "fp32", "compile": False,
    }  # fmt: skip
    task = Task(**config["env"])
    learner = build(OmegaConf.create(config), task, torch.device("cpu"))
    final = {
        "actor": learner.actor.state_dict(),
        "normaliser": RunningNormaliser(task.observation_size).state_dict(),
    }
    folder = finished(tmp_path / "fire" / "seed_2", "sac", config, final)
    try:
        episode = filmed_episodes.play(folder)
    except UserError as error:
        if "OpenGL" not in str(error):
            raise
        pytest.skip(str(error))
    assert len(episode.pictures) == 13 and episode.pictures[0].shape == (240, 200, 3)
    assert episode.seconds == pytest.approx(0.04) and episode.score > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [("meta", "is not a run of rl/dqn or rl/sac"), ("weights", "structure the method has not changed")],
)
def test_what_cannot_be_filmed_is_one_line(
    game: Path, tmp_path: Path, capsys, change: str, message: str
) -> None:
    if change == "meta":
        (game / "meta.json").write_text(json.dumps({"domain": "vision"}))
    else:
        torch.save({"net": {"other": torch.zeros(1)}}, game / "checkpoint" / "final.pt")
    assert filmed_episodes.main([str(game), "--out", str(tmp_path / "a.png")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "a.png").exists()
