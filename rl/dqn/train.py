"""DQN on an Atari game, with a boundary in the middle of the run.

    python rl/dqn/train.py method=fire
    python rl/dqn/train.py experiment=fig4a_asterix size=paper method=shrink_perturb seed=2

`step` counts environment steps (transitions) over all environments. The methods are in fire_core/methods/, the
protocol of the games in rl/dqn/env.py.
"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from anywhere

from harness import stop

if __name__ == "__main__":
    stop.exit_at_once()  # on Ctrl-C while torch is imported

import numpy as np
import torch
from omegaconf import DictConfig
from torch import nn
from tqdm import tqdm

from harness.launch import launch, needs, open_run, pick_device
from rl.dqn.settings import DOMAIN

needs(DOMAIN)

from fire_core.methods import Method, create
from fire_core.optim_state import reset_optimizer_state
from fire_core.state import Phase, State, snapshot
from harness.runs import generator, numpy_generator, seeded
from harness.trigger import RunTrigger
from rl.dqn.learn import Learner, epsilon, td_loss, td_targets, update, with_actions
from rl.dqn.measure import Window, brief, measure
from rl.dqn.network import DQN
from rl.dqn.play import act, evaluate, make_games, random_play
from rl.replay import Batch, FrameReplay

SAY_SECONDS = 60  # between printed lines if there is no progress bar


@launch(DOMAIN)
def train(cfg: DictConfig) -> None:
    # ------------------------------------------------------------------------------------------ method and run
    method = create(**cfg.method)
    run = open_run(DOMAIN, cfg, method, game=cfg.env.game, compat=cfg.compat)
    if run.finished:
        return

    # ------------------------------------------------------------------------------------------ games and networks
    device = pick_device(cfg.device)
    games = make_games(cfg, "games")
    with seeded(cfg.seed, "init"):
        layout = {"memory_format": torch.channels_last if cfg.channels_last else torch.preserve_format}
        net, target = (make_net(cfg, games.actions).to(device, **layout) for _ in range(2))
    target.load_state_dict(net.state_dict())
    learner = Learner(net, target, cfg.discount, bool(cfg.double), cfg.target_ema, cfg.precision)
    if cfg.compile:
        learner.compile(device)
    state = State(
        {"net": net},
        followers=[(target, net)],
        initial=snapshot({"net": net}),
        loss=td_loss,
        compiled=cfg.compile,
    )
    method.check(state)
    trigger = RunTrigger(cfg.get("trigger"))
    adam = make_optimizer(net, cfg)
    random = {name: numpy_generator(cfg.seed, name) for name in ("policy", "replay")}
    replay = make_replay(cfg, device)
    updates = round(cfg.updates_per_transition * games.count)
    between_copies = max(1, round(cfg.updates_per_transition * cfg.target_every))

    with run, seeded(cfg.seed, "train"):
        # -------------------------------------------------------------------------------------- where to begin
        at = {"step": 0, "updates": 0, "treated": 0}  # treated: number of times the method has acted
        probe: Batch | None = None  # fixed transitions on which plasticity is measured
        window, figures = Window(), {}

        def tested() -> dict[str, float]:
            method.before_evaluation(state)
            scores = evaluate(cfg, net, device, at["step"])
            method.after_evaluation(state)
            return scores

        saved = run.resume()
        if saved is None:
            state.optimizers["net"] = method.optimizer(net, adam, Phase(0))
            observations = games.reset()
            replay.start(observations[:, -1])
            first = random_play(cfg) | tested()
            run.log(phase=0, step=0, **first)
            tqdm.write(f"random actions {first['random_return']:.2f}, untrained {brief(first, window)}")
        else:
            at = saved["at"]
            probe = Batch(**{k: v.to(device) for k, v in saved["probe"].items()}) if saved["probe"] else None
            state.phase = at["treated"]
            adam = restore(saved, method, state, target, cfg)
            trigger.load_state_dict(saved.get("watch", {}))
            window.load_state_dict(saved["window"])
            figures = saved["figures"]
            observations = games.load_state_dict(saved["games"])
            replay.load_state_dict(saved["replay"])
            for name, stream in random.items():
                stream.bit_generator.state = saved["random"][name]
        state.generator = generator(cfg.seed, "method", state.phase)
        state.batches = lambda: replay_batches(cfg, replay, learner, device)

        def parts() -> dict[str, Any]:
            return {
                "net": net.state_dict(),
                "target": target.state_dict(),
                "optimizer": state.optimizers["net"].state_dict(),
                "method": method.checkpoint(),
                "watch": trigger.state_dict(),
                "replay": replay.state_dict(),
                "games": games.state_dict(),
                "random": {name: stream.bit_generator.state for name, stream in random.items()},
                "torch": torch.get_rng_state(),
                "window": window.state_dict(),
                "figures": figures,
                "probe": {k: v for k, v in probe._asdict().items() if v is not None} if probe else {},
                "at": dict(at),
            }

        bar = tqdm(
            total=cfg.total_steps, initial=at["step"], unit="step", disable=None if cfg.run.progress else True
        )
        clock = said = time.perf_counter()
        while at["step"] < cfg.total_steps:
            # ---------------------------------------------------------------------------------- boundary
            begins = at["step"] == cfg.midpoint and not at["treated"]
            if (due := trigger.due(1 if begins else None)) is not None:
                index, cause = due
                state.generator = generator(cfg.seed, "method", index)
                before = measure(learner, probe)
                report = method.at_boundary(state, Phase(index, "second half"))
                if report.changed:
                    state.copy_followers()
                new = method.changes_structure  # the new parameters are in no optimizer yet
                reset_optimizer_state(state.optimizers, cfg.optimizer_state, () if new else report)
                if new:
                    adam = renewed(state.optimizers["net"], net, cfg)
                state.optimizers["net"] = method.optimizer(net, adam, Phase(index))
                state.phase = at["treated"] = index
                if cfg.compat == "official":
                    observations = games.reset()
                    replay.start(observations[:, -1])
                phase = int(at["step"] >= cfg.midpoint)
                where = {"phase": phase, "act": index, "step": at["step"], "cause": cause}
                run.boundary(report=report, **where)
                after = measure(learner, probe) | tested()
                run.log_act(where, before, after)
                tqdm.write(f"{cause}: {method.name}, evaluation right after {after['eval_return']:.2f}")
                clock = time.perf_counter()

            # ---------------------------------------------------------------------------------- act
            exploring = epsilon(at["step"], cfg.learning_starts, cfg.epsilon_steps, cfg.epsilon_final)
            actions = act(net, observations, exploring, games.actions, random["policy"], device, cfg.compat)
            step = games.step(actions)
            rewards = np.sign(step.rewards)
            lost = step.lost if cfg.terminal_on_life_loss else None
            frames = step.observations[:, -1], step.final_frames
            replay.add(actions, rewards, step.terminated, step.truncated, *frames, lost)
            observations = step.observations
            at["step"] += games.count
            window.episodes += [(episode.score, episode.length) for episode in step.finished]
            bar.update(games.count)

            # ---------------------------------------------------------------------------------- learn
            if at["step"] > cfg.learning_starts:
                if probe is None:
                    probe = replay.sample(cfg.metrics_samples, numpy_generator(cfg.seed, "probe"), device)
                primed = at["updates"] >= (cfg.priming or 0)
                for _ in range(updates if primed else cfg.priming):
                    batch = replay.sample(cfg.batch_size, random["replay"], device)
                    penalty = method.penalty(state)
                    loss, value = update(learner, state.optimizers["net"], batch, penalty)
                    method.after_step(state)
                    window.add(loss, value)
                    at["updates"] += 1
                    if not primed and at["updates"] % between_copies == 0:
                        learner.copy()
                if at["step"] % cfg.target_every == 0:
                    learner.copy()

            # ---------------------------------------------------------------------------------- record
            if at["step"] % cfg.log_every == 0:
                line = window.close(at["step"], net)
                if trigger.measures and probe is not None:
                    line |= measure(learner, probe)
                    line["relative_gradient"] = line["probe_gradient_norm"] / line["weight_norm"]
                phase = int(at["step"] > cfg.midpoint)
                run.log(phase=phase, step=at["step"], epsilon=exploring, **line)
                trigger.look(at["step"], line)
                run.timing(step=at["step"], updates=at["updates"], seconds=time.perf_counter() - clock)
                clock = time.perf_counter()
                if bar.disable and clock - said >= SAY_SECONDS and "train_return" in line:
                    said = clock
                    print(f"step {at['step']:,}: training episodes {line['train_return']:.2f}", flush=True)
                method.after_epoch(state)
            if at["step"] % cfg.eval_every == 0 or at["step"] in (cfg.midpoint, cfg.total_steps):
                figures = tested() | measure(learner, probe)
                phase = int(at["step"] > cfg.midpoint)
                run.log(phase=phase, step=at["step"], updates=at["updates"], **figures)
                trigger.look(at["step"], figures)
                tqdm.write(f"step {at['step']:,}: {brief(figures, window)}")
            if at["step"] == cfg.midpoint and run.trunk is not None:
                run.leave_trunk(at["step"], parts())
            if run.due(at["step"]):
                run.save(at["step"], parts())

        # -------------------------------------------------------------------------------------- end
        bar.close()
        method.before_evaluation(state)  # the weights that are tested
        run.save(at["step"], {"net": net.state_dict()}, name="final")
        method.after_evaluation(state)
        run.finish({"steps": at["step"], "updates": at["updates"], **figures})
    print(f"{method.name}: {brief(figures, window)}\nin {run.folder}")


def make_net(cfg: DictConfig, actions: int) -> DQN:
    """Return a newly initialised network."""
    layers = [tuple(layer) for layer in cfg.network.convolutions]
    return DQN(actions, (cfg.env.frame_size, cfg.env.frame_size), layers, cfg.network.hidden)


def make_replay(cfg: DictConfig, device: torch.device) -> FrameReplay:
    """Return an empty replay. Raises UserError where memory is too small."""
    shape = (cfg.env.frame_size, cfg.env.frame_size)
    rule = {"channels_last": cfg.channels_last, "n_step": cfg.n_step or 1, "discount": cfg.discount}
    return FrameReplay(cfg.replay_capacity, cfg.env.environments, shape, device=device, **rule)


def make_optimizer(net: nn.Module, cfg: DictConfig) -> torch.optim.Optimizer:
    """Return Adam over the trainable parameters."""
    trainable = [p for p in net.parameters() if p.requires_grad]
    return torch.optim.Adam(trainable, lr=cfg.learning_rate, eps=cfg.adam_epsilon, fused=True)


def renewed(old: torch.optim.Optimizer, net: nn.Module, cfg: DictConfig) -> torch.optim.Optimizer:
    """Return a new optimizer after a change of structure, with the state that surviving parameters still have.

    With compat=official its state is empty, as in the official code, which has such a change only in plasticity
    injection.
    """
    new = make_optimizer(net, cfg)
    if cfg.compat != "official":
        kept = {id(p) for group in new.param_groups for p in group["params"]}
        new.state.update({p: memory for p, memory in old.state.items() if id(p) in kept})
    return new


def restore(
    saved: dict[str, Any], method: Method, state: State, target: nn.Module, cfg: DictConfig
) -> torch.optim.Optimizer:
    """Restore structure, networks, optimizer and method from a checkpoint. Return the Adam of the run."""
    net = state.nets["net"]
    method.rebuild(state)
    adam = make_optimizer(net, cfg)
    state.optimizers["net"] = method.optimizer(net, adam, Phase(state.phase))
    net.load_state_dict(saved["net"])
    target.load_state_dict(saved["target"])
    state.optimizers["net"].load_state_dict(saved["optimizer"])
    method.resume(saved["method"], state)
    torch.set_rng_state(saved["torch"])
    return adam


def replay_batches(cfg: DictConfig, replay: Any, learner: Learner, device: torch.device) -> Any:
    """Yield 100 batches (inputs, actions and targets) from the replay, for methods that look at data at a boundary."""
    stream = numpy_generator(cfg.seed, "boundary_batches")
    for _ in range(100):
        batch = replay.sample(cfg.batch_size, stream, device)
        yield batch.observations, with_actions(batch, td_targets(learner, batch))


if __name__ == "__main__":
    train()
