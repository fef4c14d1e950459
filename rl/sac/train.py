"""Soft actor-critic with SimBa networks and one intervention in the middle of the run (figure 4b).

    python rl/sac/train.py experiment=fig4b_walk size=paper method=shrink_perturb seed=2

`at["step"]` counts agent steps; what is logged counts environment steps: agent steps times action_repeat. Phase 0 ends at
the midpoint. Every random number is a pure function of the seed, its purpose and a count (of steps, episodes or draws).
"""

import sys
from functools import partial
from operator import call
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from anywhere

from harness import stop

if __name__ == "__main__":
    stop.handle(stop.exit_at_once)  # on Ctrl-C while torch is imported

import numpy as np
import torch
from omegaconf import DictConfig

from harness.launch import launch, needs
from rl.sac.settings import DOMAIN

needs(DOMAIN)

from fire_core.measure.plasticity import plasticity, relative_norm
from fire_core.seeding import derive
from harness.device import send
from harness.runs import generator, numpy_generator
from harness.runs.metrics import finite
from harness.session import Session
from rl.evaluate import play_episodes
from rl.replay import FlatReplay
from rl.sac.env import EvaluationTasks, Task
from rl.sac.policy import RunningNormaliser, exploit, explore, on_scale, random_play, stored_batches
from rl.sac.stack import shared_passes
from rl.sac.update import Learner, actor_pass, build, update
from rl.sac.worker import InWorker

NEVER = 1e8  # from this value of run.checkpoint_seconds on (three years), no checkpoint is expected


@launch(DOMAIN)
def train(cfg: DictConfig) -> None:
    """Train both halves of a run, with the method at the midpoint or whenever its trigger fires."""
    session = Session(DOMAIN, cfg, env=cfg.env.name)
    if session.finished:
        return

    # ------------------------------------------------------------------------------------------ task and learner
    device = session.device
    place, kind = InWorker if cfg.workers else call, (cfg.env.name, cfg.env.action_repeat)
    task, tests = place(Task, *kind), place(EvaluationTasks, cfg.eval_episodes, *kind)
    sizes = observation_size, action_size = task.observation_size, task.action_size
    if session.run.trunk is not None or cfg.run.checkpoint_seconds < NEVER or cfg.run.checkpoint_steps:
        task.state_dict()  # raises UserError if the state of the task cannot be saved
    learner = build(cfg, *sizes, device)
    learner.passes = shared_passes(learner)
    normaliser = RunningNormaliser(observation_size)
    replay = FlatReplay(min(cfg.replay, cfg.steps), *sizes)
    official = cfg.compat == "official"
    untouched = official and session.method.name == "none"  # there, nothing at all changes in this run
    renewed = None if untouched else lambda: renew(cfg, learner, normaliser, replay)
    nets = {"actor": learner.actor, "critics": learner.critics}

    at, session.repeat = session.at, cfg.env.action_repeat
    # `returns` are those of the training episodes since the last evaluation, `last` is the latest update
    at |= {"episode": 0, "return": 0.0, "returns": [], "last": {}, "results": {}}
    treatment = session.attach(
        nets,
        learner.optimizers,
        followers=[(learner.target, learner.critics)],
        batches=lambda: stored_batches(cfg, replay, normaliser, at["step"], device),
        renew=learner.new_optimizers,
        **({"optimizer_state": "keep"} if untouched else {}),
    )
    learner.optimizers = treatment.optimizers
    slow = {"target": learner.target, "temperature": learner.temperature}
    session.keep(**slow, normaliser=normaliser, replay=replay, task=task)
    weights = {name: sum(p.numel() for p in net.parameters()) for name, net in nets.items()}
    session.say(f"{cfg.env.name}: {observation_size} observations, {action_size} actions; weights {weights}")

    # ------------------------------------------------------------------------------------------ what is measured
    def measure() -> dict[str, float]:
        if not len(replay):
            return {}
        draws = numpy_generator(cfg.seed, "probe", at["step"])
        batch = normaliser.batch(replay.sample(min(512, len(replay)), draws, device))
        found = plasticity(learner.actor, batch.observations)
        if session.trigger.measures:
            shape, draw = (len(batch.rewards), action_size), generator(cfg.seed, "probe", at["step"])
            gradients = actor_pass(learner, batch, torch.randn(shape, generator=draw).to(device))[1]["actor"]
            found["relative_gradient"] = relative_norm(gradients, learner.trained["actor"])
        return found

    def test() -> dict[str, float]:
        count, policy = cfg.eval_episodes, partial(exploit, learner, normaliser)
        tests.use_seeds([derive(cfg.seed, "evaluation", at["step"], i) % 2**31 for i in range(count)])
        with treatment.evaluating():
            result = play_episodes(tests, policy, count, cfg.eval_limit).summary()
        return result | on_scale(cfg.env.name, result["eval_return"])

    # ------------------------------------------------------------------------------------------ the two halves
    def begin_episode(episode: int) -> np.ndarray:
        at.update({"episode": episode, "return": 0.0})
        observation = task.reset(derive(cfg.seed, "episode", episode) % 2**31)
        if not official:
            normaliser.update(observation)
        return observation

    with session:
        # In the official loop, the first action of each half is uniform, and its observation is not counted.
        blind = official and not session.resumed
        if not session.resumed:
            begin_episode(0)
            session.log(watched=False, **random_play(cfg), **test(), **measure())
        observation = task.observation
        bar = session.progress(cfg.steps, at["step"], "step")
        while at["step"] < cfg.steps:
            acted = session.intervene(int(at["step"] >= cfg.midpoint), measure, test, renewed)
            if acted is not None and official and not untouched:  # there, it starts as a new process
                observation, blind = begin_episode(at["episode"] + 1), True

            # ---------------------------------------------------------------------------------- one agent step
            noise = generator(cfg.seed, "noise", at["step"])
            if official and not blind:
                # The policy does not act on an episode's last observation, so it is not counted.
                normaliser.update(observation)
            if at["step"] < cfg.learning_starts or blind:
                warm_up = numpy_generator(cfg.seed, "warm_up", at["step"])
                action = warm_up.uniform(-1, 1, action_size).astype(np.float32)
            else:
                action = explore(learner, normaliser, observation, noise)
            following, reward, terminated, truncated = task.step(action)
            blind = False
            if not official:
                normaliser.update(following)
            replay.add(observation, action, reward, following, terminated)
            at["step"] += 1
            at["return"] += reward
            observation = following
            if terminated or truncated:
                at["returns"].append(at["return"])
                observation = begin_episode(at["episode"] + 1)

            # ---------------------------------------------------------------------------------- updates
            if at["step"] >= cfg.learning_starts + (not official):
                draws = numpy_generator(cfg.seed, "replay", at["step"])
                together = replay.sample(cfg.batch_size * cfg.updates_per_step, draws, device)
                for batch in normaliser.batch(together).split(cfg.batch_size):
                    normal = torch.randn((2, cfg.batch_size, action_size), generator=noise)
                    penalty = treatment.penalty()
                    at["last"] = update(learner, batch, send(normal, device), penalty, treatment.before_step)
                    treatment.after_step()

            # ---------------------------------------------------------------------------------- record it
            if at["step"] % cfg.eval_every == 0 or at["step"] in (cfg.midpoint, cfg.steps):
                treatment.after_pass()
                what = f"%s at agent step {at['step']}"
                results = {name: finite(float(value), what % name, cfg) for name, value in at["last"].items()}
                session.timing(step=at["step"] * session.repeat, agent_steps=at["step"])
                results |= test() | measure()
                if at["returns"]:
                    results["train_return"] = float(np.mean(at["returns"]))
                at |= {"results": results, "returns": []}
                session.log(**results)
                mean = f"return {results['eval_return']:.1f}"
                bar.set_postfix_str(mean)
                if bar.disable:
                    session.say(f"step {at['step'] * session.repeat:,}: {mean}")
                if at["step"] == cfg.midpoint:
                    session.leave_trunk()
            bar.update()
            session.save_if_due()

        mean = f"return {at['results']['eval_return']:.1f} over {cfg.eval_episodes} episodes"
        session.finish({"actor": learner.actor, "normaliser": normaliser}, at["results"], mean)


def renew(
    cfg: DictConfig, learner: Learner, normaliser: RunningNormaliser, replay: FlatReplay
) -> list[torch.nn.Parameter]:
    """Copy the critics into their targets, and restart temperature and statistics where the settings of the boundary say
    "renew". Return the parameters that the optimizers must see as changed."""
    learner.target.load_state_dict(learner.critics.state_dict())  # whether or not a method has changed them
    if cfg.boundary.normaliser == "renew":
        normaliser.load_state_dict(RunningNormaliser(normaliser.mean.size).state_dict())
        # The policy acts at once, so the statistics start from a sample of the replay.
        stored = replay.sample(min(len(replay), 10_000), numpy_generator(cfg.seed, "renew"))
        normaliser.update(stored.observations.numpy())
    if cfg.boundary.temperature == "keep":
        return []
    with torch.no_grad():
        learner.temperature.log_alpha.fill_(float(np.log(cfg.temperature)))
    return [learner.temperature.log_alpha]


if __name__ == "__main__":
    train()
