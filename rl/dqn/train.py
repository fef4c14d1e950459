"""DQN on an Atari game, with a boundary in the middle of the run.

    python rl/dqn/train.py experiment=fig4a_asterix size=paper method=shrink_perturb seed=2

`step` counts environment steps (transitions) over all environments. The protocol of the games is in rl/dqn/env.py.
"""

import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from anywhere

from harness import stop

if __name__ == "__main__":
    stop.handle(stop.exit_at_once)  # on Ctrl-C while torch is imported

import numpy as np
import torch
from omegaconf import DictConfig
from torch import nn

from harness.launch import launch, needs
from rl.dqn.settings import DOMAIN

needs(DOMAIN)

from harness.runs import NumpyStreams, numpy_generator, seeded
from harness.session import Session
from rl.dqn.learn import Learner, epsilon, td_loss, td_targets, update, with_actions
from rl.dqn.measure import Window, brief, measure_network
from rl.dqn.network import DQN
from rl.dqn.play import act, evaluate, make_games, random_play
from rl.replay import Batch, FrameReplay

SAY_SECONDS = 60  # between printed lines if there is no progress bar


@launch(DOMAIN)
def train(cfg: DictConfig) -> None:
    """Train one agent, with the method at the midpoint or whenever its trigger fires."""
    session = Session(DOMAIN, cfg, game=cfg.env.game, compat=cfg.compat)
    if session.finished:
        return

    # ------------------------------------------------------------------------------------------ games and networks
    device = session.device
    games = make_games(cfg, "games")
    with seeded(cfg.seed, "init"):
        layout = {"memory_format": torch.channels_last if cfg.channels_last else torch.preserve_format}
        net = make_net(cfg, games.actions).to(device, **layout)
    target = deepcopy(net)
    learner = Learner(net, target, cfg.discount, bool(cfg.double), cfg.precision, cfg.compile)
    frame = cfg.env.frame_size, cfg.env.frame_size
    rule = {"channels_last": cfg.channels_last, "n_step": cfg.n_step or 1, "discount": cfg.discount}
    replay = FrameReplay(min(cfg.replay_capacity, cfg.total_steps), games.count, frame, device=device, **rule)
    window = Window()
    streams = NumpyStreams(cfg.seed, "policy", "replay")
    updates = round(cfg.updates_per_transition * games.count)
    at = session.at
    at |= {"updates": 0, "figures": {}, "probe": None}  # transitions on which plasticity is measured
    official = cfg.compat == "official"
    treatment = session.attach(
        {"net": net},
        {"net": make_optimizer(net, cfg)},
        followers=[(target, net)],
        loss=td_loss,
        batches=lambda: replay_batches(cfg, replay, learner, device),
        # The official code has a new optimizer after plasticity injection, and keeps no moments.
        renew=(lambda: {"net": make_optimizer(net, cfg)}) if official else None,
    )
    session.keep(target=target, replay=replay, games=games, streams=streams, window=window)

    # ------------------------------------------------------------------------------------------ what is measured
    def measure() -> dict[str, float]:
        if at["probe"] is None:
            return {}
        fields = {name: values.to(device) for name, values in at["probe"].items()}
        return measure_network(learner, Batch(**fields))

    def test() -> dict[str, float]:
        with treatment.evaluating():
            return evaluate(cfg, net, at["step"])

    # ------------------------------------------------------------------------------------------ training
    with session:
        if not session.resumed:
            replay.start(games.reset()[:, -1])
            first = random_play(cfg) | test()
            session.log(watched=False, step=0, **first)
            session.say(f"random actions {first['random_return']:.2f}, untrained {brief(first, window)}")
        bar = session.progress(cfg.total_steps, at["step"], "step")
        said = 0.0
        while at["step"] < cfg.total_steps:
            report = session.intervene(int(at["step"] >= cfg.midpoint), measure, test)
            if report is not None and official:
                replay.start(games.reset()[:, -1])

            # ---------------------------------------------------------------------------------- act
            exploring = epsilon(at["step"], cfg.learning_starts, cfg.epsilon_steps, cfg.epsilon_final)
            actions = act(cfg, net, games, exploring, streams["policy"])
            step = games.step(actions)
            frames = step.observations[:, -1], step.final_frames
            replay.add(actions, np.sign(step.rewards), step.terminated, step.truncated, *frames)
            window.episodes += step.finished
            at["step"] += games.count
            bar.update(games.count)

            # ---------------------------------------------------------------------------------- learn
            if at["step"] > cfg.learning_starts:
                if at["probe"] is None:
                    probe = replay.sample(cfg.metrics_samples, numpy_generator(cfg.seed, "probe"), device)
                    at["probe"] = {k: v for k, v in probe._asdict().items() if v is not None}
                for _ in range(updates):
                    batch = replay.sample(cfg.batch_size, streams["replay"], device)
                    window.add(*update(learner, treatment, batch))
                    at["updates"] += 1
                if at["step"] % cfg.target_every == 0:
                    target.load_state_dict(net.state_dict())

            # ---------------------------------------------------------------------------------- record
            if at["step"] % cfg.log_every == 0:
                line = window.close(at["step"], net, cfg)
                if session.trigger.measures and at["probe"] is not None:
                    line |= measure()
                    line["relative_gradient"] = line["probe_gradient_norm"] / line["weight_norm"]
                said += session.timing(step=at["step"], updates=at["updates"])
                session.log(step=at["step"], epsilon=exploring, **line)
                if bar.disable and said >= SAY_SECONDS and "train_return" in line:
                    said = 0.0
                    session.say(f"step {at['step']:,}: training episodes {line['train_return']:.2f}")
                treatment.after_pass()
            if at["step"] % cfg.eval_every == 0 or at["step"] in (cfg.midpoint, cfg.total_steps):
                at["figures"] = test() | measure()
                session.log(step=at["step"], updates=at["updates"], **at["figures"])
                session.say(f"step {at['step']:,}: {brief(at['figures'], window)}")
            if at["step"] == cfg.midpoint:
                session.leave_trunk()
            session.save_if_due()
        results = {"updates": at["updates"], **at["figures"]}
        session.finish({"net": net}, results, brief(results, window))


def make_net(cfg: DictConfig, actions: int) -> DQN:
    return DQN(actions, (cfg.env.frame_size,) * 2, cfg.network.convolutions, cfg.network.hidden)


def make_optimizer(net: nn.Module, cfg: DictConfig) -> torch.optim.Optimizer:
    """Return Adam over the trainable parameters."""
    trainable = [p for p in net.parameters() if p.requires_grad]
    return torch.optim.Adam(trainable, lr=cfg.learning_rate, eps=cfg.adam_epsilon, fused=True)


def replay_batches(cfg: DictConfig, replay: Any, learner: Learner, device: torch.device) -> Any:
    """Yield 100 batches (inputs, actions and targets) from the replay, for methods that look at data."""
    stream = numpy_generator(cfg.seed, "boundary_batches")
    for _ in range(100):
        batch = replay.sample(cfg.batch_size, stream, device)
        yield batch.observations, with_actions(batch, td_targets(learner, batch))


if __name__ == "__main__":
    train()
