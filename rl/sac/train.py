"""Soft actor-critic with SimBa networks and one intervention in the middle of the run (figure 4b).

    python rl/sac/train.py method=fire
    python rl/sac/train.py experiment=fig4b_walk size=paper method=shrink_perturb seed=2

`step` counts environment steps: agent steps times action_repeat. Phase 0 ends at the midpoint. All methods of one seed
continue from its end (networks, optimizers, replay, normaliser, simulator). Every random number is a pure function of
the seed, its purpose and the agent step.
"""

import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from anywhere

from harness import stop

if __name__ == "__main__":
    stop.exit_at_once()  # on Ctrl-C while torch is imported

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from harness.launch import launch, needs, open_run, pick_device
from rl.sac.settings import DOMAIN

needs(DOMAIN)

from fire_core.errors import UserError
from fire_core.measure.plasticity import plasticity, relative_norm
from fire_core.methods import Method, create
from fire_core.optim_state import reset_optimizer_state
from fire_core.seeding import derive
from fire_core.state import Phase, State, snapshot
from harness.runs import generator, numpy_generator
from harness.runs.metrics import finite
from harness.transfer import send
from harness.trigger import RunTrigger
from rl.evaluate import play_episodes
from rl.replay import FlatReplay
from rl.sac.env import EvaluationTasks, Task, physics
from rl.sac.network import Actor, Critics, Temperature
from rl.sac.normaliser import RunningNormaliser
from rl.sac.policy import explore, mean_policy, normalise, on_scale, random_play
from rl.sac.update import Learner, actor_pass, update

NEVER = 1e8  # from this value of run.checkpoint_seconds on (three years), no checkpoint is expected


@launch(DOMAIN)
def train(cfg: DictConfig) -> None:
    # ------------------------------------------------------------------------------------------ method and run
    method = create(**cfg.method)
    run = open_run(DOMAIN, cfg, method, env=cfg.env.name)
    if run.finished:
        return

    # ------------------------------------------------------------------------------------------ task and learner
    device = pick_device(cfg.device)
    task = Task(cfg.env.name, cfg.env.action_repeat)
    if run.trunk is not None or cfg.run.checkpoint_seconds < NEVER or cfg.run.checkpoint_steps:
        physics(task.environment)  # raises UserError if the state of the task cannot be saved
    tests = EvaluationTasks(cfg.eval_episodes, cfg.env.name, cfg.env.action_repeat)
    learner = build(cfg, task, device)
    normaliser = RunningNormaliser(task.observation_size)
    official = cfg.compat == "official"
    replay = FlatReplay(min(cfg.replay, cfg.steps), task.observation_size, task.action_size)
    state = State(
        nets={"actor": learner.actor, "critics": learner.critics},
        optimizers=learner.optimizers,
        followers=[(learner.target, learner.critics)],
        initial=snapshot({"actor": learner.actor, "critics": learner.critics}),
    )
    method.check(state)
    trigger = RunTrigger(cfg.get("trigger"))
    weights = {name: sum(p.numel() for p in net.parameters()) for name, net in state.nets.items()}
    sizes = f"{task.observation_size} observations, {task.action_size} actions"
    print(f"{cfg.env.name}: {sizes}; weights {weights}")

    with run:
        # -------------------------------------------------------------------------------------- where to begin
        at: dict[str, Any] = {"step": 0, "episode": 0, "phase": 0, "return": 0.0}
        finished: list[float] = []  # returns of the training episodes since the last evaluation
        last: dict[str, Tensor] = {}  # measured in the latest update
        results: dict[str, float] = {}  # of the latest evaluation
        saved = run.resume()
        state.phase = saved["at"]["phase"] if saved is not None else 0
        adopt(method, learner, state)
        # In the official loop, the first action of each half is uniform, and its observation is not counted.
        blind = official and saved is None
        if saved is None:
            observation = task.reset(episode_seed(cfg, 0))
            if not official:
                normaliser.update(observation)
        else:
            at, finished, last = saved["at"], saved["finished"], saved["last"]
            results = saved["results"]
            load(learner, state, method, saved)
            trigger.load_state_dict(saved.get("watch", {}))
            normaliser.load_state_dict(saved["normaliser"])
            replay.load_state_dict(saved["replay"])
            task.load_state_dict(saved["task"])
            observation = saved["observation"].numpy()

        def parts() -> dict[str, Any]:
            return {
                "at": dict(at),
                "finished": list(finished),
                "last": last,
                "results": results,
                "nets": {name: net.state_dict() for name, net in learner.nets().items()},
                "optimizers": {name: each.state_dict() for name, each in learner.optimizers.items()},
                "method": method.checkpoint(),
                "watch": trigger.state_dict(),
                "normaliser": normaliser.state_dict(),
                "replay": replay.state_dict(),
                "task": task.state_dict(),
                "observation": torch.from_numpy(observation.copy()),
            }

        policy = mean_policy(learner, normaliser, device)

        def begin_episode() -> np.ndarray:
            at["episode"], at["return"] = at["episode"] + 1, 0.0
            first = task.reset(episode_seed(cfg, at["episode"]))
            if not official:
                normaliser.update(first)
            return first

        def test(step: int) -> dict[str, float]:
            tests.seeds = [derive(cfg.seed, "evaluation", step, i) % 2**31 for i in range(tests.count)]
            method.before_evaluation(state)
            result = play_episodes(tests, policy, tests.count, cfg.eval_limit).summary()
            method.after_evaluation(state)
            return result | on_scale(cfg.env.name, result["eval_return"]) | measured(step)

        def measured(step: int) -> dict[str, float]:
            result = {}
            if len(replay):
                stored = replay.sample(min(512, len(replay)), numpy_generator(cfg.seed, "probe", step))
                batch = normalise(stored, normaliser, device)
                result |= plasticity(learner.actor, batch.observations)
                if trigger.measures:
                    shape, draw = (len(stored.rewards), task.action_size), generator(cfg.seed, "probe", step)
                    normal = torch.randn(shape, generator=draw)
                    gradients = actor_pass(learner, batch, normal.to(device))[1]["actor"]
                    result["relative_gradient"] = relative_norm(gradients, learner.trained["actor"])
            return result

        # -------------------------------------------------------------------------------------- the loop
        if saved is None:
            run.log(phase=0, step=0, **random_play(cfg), **test(0))
        started = time.perf_counter(), at["step"]
        hidden = None if cfg.run.progress else True  # None: hidden unless in a terminal
        bar = tqdm(total=cfg.steps, initial=at["step"], unit="step", mininterval=5, disable=hidden)
        while at["step"] < cfg.steps:
            # ---------------------------------------------------------------------------------- boundary
            begins = at["step"] == cfg.midpoint and at["phase"] == 0
            if (due := trigger.due(1 if begins else None)) is not None:
                if run.trunk is not None:
                    run.leave_trunk(at["step"], parts())
                index, cause = due
                before = measured(at["step"])
                at["phase"] = state.phase = index
                state.generator = generator(cfg.seed, "method", index)
                report = method.at_boundary(state, Phase(index, "after the midpoint"))
                # In the official code, nothing at all changes in the run without intervention.
                if not official or method.name != "none":
                    state.copy_followers()
                    treated = () if method.changes_structure else report.parameters
                    changed = [*treated, *renew(cfg, learner, normaliser, replay)]
                    reset_optimizer_state(state.optimizers, cfg.optimizer_state, changed)
                if method.changes_structure:
                    learner.renew_optimizers()
                adopt(method, learner, state)
                # There a treated run is a new process, which starts a new episode; `none` continues the old process.
                if official and method.name != "none":
                    observation, blind = begin_episode(), True
                phase = int(at["step"] >= cfg.midpoint)
                steps_done = at["step"] * task.action_repeat
                where = {"phase": phase, "act": index, "step": steps_done, "cause": cause}
                run.boundary(report=report, **where)
                run.timing(phase=index, boundary_seconds=report.seconds)
                after = test(at["step"])
                run.log_act(where, before, after)
                what = f"return {after['eval_return']:.1f} right after; {report.seconds:.3f} s"
                tqdm.write(f"{cause}: {method.name}, {what}")
                started = time.perf_counter(), at["step"]

            # ---------------------------------------------------------------------------------- one agent step
            noise = generator(cfg.seed, "noise", at["step"])
            if official and not blind:
                # The policy does not act on an episode's last observation, so it is not counted.
                normaliser.update(observation)
            if at["step"] < cfg.learning_starts or blind:
                warm_up = numpy_generator(cfg.seed, "warm_up", at["step"])
                action = warm_up.uniform(-1, 1, task.action_size).astype(np.float32)
            else:
                action = explore(learner, normaliser, observation, noise, device)
            check_finite(action, cfg, at["step"])
            following, reward, terminated, truncated = task.step(action)
            blind = False
            if not official:
                normaliser.update(following)
            replay.add(observation, action, reward, following, terminated)
            observation = following
            at["step"] += 1
            at["return"] += reward
            if terminated or truncated:
                finished.append(at["return"])
                observation = begin_episode()

            # ---------------------------------------------------------------------------------- updates
            if at["step"] >= cfg.learning_starts + (not official):
                draws = numpy_generator(cfg.seed, "replay", at["step"])
                together = replay.sample(cfg.batch_size * cfg.updates_per_step, draws, device)
                together = normalise(together, normaliser, device)
                for batch in together.split(cfg.batch_size):
                    shape = (2, cfg.batch_size, task.action_size)
                    normal = send(torch.randn(shape, generator=noise), device)
                    last = update(learner, batch, normal, method.penalty(state))
                    method.after_step(state)

            # ---------------------------------------------------------------------------------- record it
            if at["step"] % cfg.eval_every == 0 or at["step"] in (cfg.midpoint, cfg.steps):
                method.after_epoch(state)
                when = f"at agent step {at['step']}"
                results = {name: finite(float(value), f"{name} {when}", cfg) for name, value in last.items()}
                results |= test(at["step"])
                if finished:
                    results["train_return"] = float(np.mean(finished))
                finished.clear()
                phase = int(at["step"] > cfg.midpoint)
                run.log(phase=phase, step=at["step"] * task.action_repeat, **results)
                trigger.look(at["step"] * task.action_repeat, results)
                seconds, steps = time.perf_counter() - started[0], at["step"] - started[1]
                started = time.perf_counter(), at["step"]
                run.timing(phase=at["phase"], step=at["step"], seconds=seconds, agent_steps=steps)
                bar.set_postfix_str(f"return {results['eval_return']:.1f}")
                if bar.disable:
                    steps_done = at["step"] * task.action_repeat
                    print(f"step {steps_done:,}: return {results['eval_return']:.1f}", flush=True)
            bar.update()
            if run.due(at["step"]):
                run.save(at["step"], parts())

        # -------------------------------------------------------------------------------------- end
        bar.close()
        method.before_evaluation(state)  # the weights that are tested
        trained = {"actor": learner.actor.state_dict(), "normaliser": normaliser.state_dict()}
        run.save(at["step"], trained, name="final")
        method.after_evaluation(state)
        run.finish({"steps": at["step"] * task.action_repeat, **results})
    what = f"return {results['eval_return']:.1f} over {cfg.eval_episodes} episodes"
    print(f"{method.name}: {what}\nin {run.folder}")


def build(cfg: DictConfig, task: Task, device: torch.device) -> Learner:
    """Return a learner with newly initialised networks and optimizers."""
    sizes = (task.observation_size, task.action_size)
    actor_norm, critic_norm = (net.norm or "layer" for net in (cfg.actor, cfg.critic))
    draw = generator(cfg.seed, "init", "actor")
    actor = Actor(*sizes, cfg.actor.width, cfg.actor.blocks, draw, actor_norm).to(device)
    draw, shape = generator(cfg.seed, "init", "critics"), (cfg.critic.width, cfg.critic.blocks)
    critics = Critics(*sizes, *shape, cfg.critic.count, draw, critic_norm).to(device)
    return Learner(
        actor=actor,
        critics=critics,
        target=deepcopy(critics),
        temperature=Temperature(cfg.temperature).to(device),
        discount=cfg.discount,
        tau=cfg.tau,
        target_entropy=-cfg.target_entropy * task.action_size,
        learning_rate=cfg.learning_rate,
        weight_decay=cfg.weight_decay,
        precision=cfg.precision,
        compile=cfg.compile,
    )


def adopt(method: Method, learner: Learner, state: State) -> None:
    """Replace the optimizers of actor and critics by those that the method wants in the phase of `state`."""
    for name, net in state.nets.items():
        learner.optimizers[name] = method.optimizer(net, learner.optimizers[name], Phase(state.phase))


def load(learner: Learner, state: State, method: Method, saved: dict[str, Any]) -> None:
    """Load networks, optimizers and the method's state from a checkpoint, after repeating any change of structure."""
    if state.phase > 0 and method.changes_structure:
        method.rebuild(state)
        learner.renew_optimizers()
        adopt(method, learner, state)
    for name, net in learner.nets().items():
        net.load_state_dict(saved["nets"][name])
    for name, optimizer in learner.optimizers.items():
        optimizer.load_state_dict(saved["optimizers"][name])
    method.resume(saved["method"], state)


def renew(
    cfg: DictConfig, learner: Learner, normaliser: RunningNormaliser, replay: FlatReplay
) -> list[torch.nn.Parameter]:
    """Restart temperature and observation statistics at the boundary, each where its setting is "renew".

    Returns the parameters that have changed.
    """
    changed = []
    if cfg.boundary.temperature == "renew":
        changed.append(learner.temperature.log_alpha)
        with torch.no_grad():
            learner.temperature.log_alpha.fill_(float(np.log(cfg.temperature)))
    if cfg.boundary.normaliser == "renew":
        normaliser.load_state_dict(RunningNormaliser(normaliser.mean.size).state_dict())
        # The policy acts at once, so the statistics start from a sample of the replay.
        stored = replay.sample(min(len(replay), 10_000), numpy_generator(cfg.seed, "renew"))
        normaliser.update(stored.observations.numpy())
    return changed


def episode_seed(cfg: DictConfig, episode: int) -> int:
    """Return the seed of a training episode's reset."""
    return derive(cfg.seed, "episode", episode) % 2**31


def check_finite(action: np.ndarray, cfg: DictConfig, step: int) -> None:
    """Raise UserError if an action is not finite, before the simulator gets it."""
    if not np.isfinite(action).all():
        raise UserError(
            f"the policy's action is {action.tolist()} at agent step {step}: try a learning_rate below {cfg.learning_rate}"
        )


if __name__ == "__main__":
    train()
