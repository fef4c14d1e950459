"""Continual pretraining in two phases: many passes over corpus A, then one over a mixture of A and B.

    python language/train.py experiment=fig3_best method=fire size=small seed=1
    torchrun --nproc-per-node=8 language/train.py experiment=fig3_best method=fire size=paper

`phase_1` (index 0) is the trunk, trained once for all methods; `phase_2` starts from a checkpoint of it (`boundary.fork`).
`step` counts optimizer steps of the whole run, `iteration` those of the phase.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere

from harness import stop

if __name__ == "__main__":
    stop.handle(stop.exit_at_once)  # on Ctrl-C while torch is imported

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from harness.launch import launch, needs
from language.settings import DOMAIN, check_settings

needs(DOMAIN)

from fire_core import snapshot
from fire_core.measure.plasticity import plasticity, relative_gradient
from harness.device import autocast
from harness.runs import seeded
from harness.runs.metrics import finite
from harness.session import Session
from language.distributed import World
from language.evaluate import evaluate
from language.model import Decoder, adamw, token_loss
from language.schedule import describe, open_corpora, phase_plans


@launch(DOMAIN)
def train(cfg: DictConfig) -> None:
    """Train one run, alone or as one of several processes."""
    with World(cfg.device) as world:
        train_in(world, cfg)


def train_in(world: World, cfg: DictConfig) -> None:
    """Train both phases of a run, with the method at the boundary or whenever its trigger fires."""
    shape = check_settings(cfg)
    fork = None if cfg.boundary.fork == "last" else str(cfg.boundary.fork)
    session = Session(DOMAIN, cfg, world=world, fork=fork, model=cfg.model.name)
    if session.finished:
        return

    # ------------------------------------------------------------------------------------------ data and network
    device = world.device
    world.check(session.method)
    micro_batches = world.share_of(cfg.accumulation)
    plans = phase_plans(cfg, open_corpora(cfg, world))
    with seeded(cfg.seed, "init"):
        net = Decoder(shape)
    initial = snapshot({"net": net})
    net.to(device)
    forward: nn.Module = torch.compile(net, dynamic=False) if cfg.compile else net  # type: ignore[assignment]
    trained = world.wrap(forward)
    adam = adamw(net, betas=tuple(cfg.betas), weight_decay=cfg.weight_decay)
    scaler = torch.amp.GradScaler(device.type, enabled=cfg.precision == "fp16")
    new_scale = scaler.state_dict()
    # the training loss of all processes since the last evaluation, as the sum of `count` iterations
    new_sum = {"loss_sum": torch.zeros((), device=device), "count": 0}
    at = session.at
    at["data"] = [corpus.manifest["made_from"] for corpus in plans[0].mixture.corpora]
    at |= {"iteration": 0, "best": float("inf"), "results": {}} | new_sum
    coming = lambda: plans[at["phase"]].coming(cfg.boundary.batches, device)  # noqa: E731
    treatment = session.attach({"net": net}, {"net": adam}, initial=initial, loss=token_loss, batches=coming)
    session.keep(scaler=scaler)
    session.say(f"{sum(p.numel() for p in net.parameters()):,} parameters; {describe(plans)}")

    # ------------------------------------------------------------------------------------------ what is measured
    def probe() -> tuple[Tensor, Tensor]:
        """The first windows of the phase."""
        tokens, targets = next(coming())
        return tokens[:8], targets[:8]

    def test() -> dict[str, float]:
        with treatment.evaluating():
            return evaluate(net, forward, plans[at["phase"]], world)

    def measure() -> dict[str, float]:
        return test() | plasticity(net, probe()[0])

    def restart() -> tuple[()]:
        """What a boundary changes beside the weights."""
        world.same_weights(net)
        scaler.load_state_dict(new_scale)
        at.update(new_sum)
        return ()

    # ------------------------------------------------------------------------------------------ training
    with session:
        if session.forked and at["phase"] == 0:
            at |= {"phase": 1, "iteration": 0} | new_sum
        for phase in plans[at["phase"] :]:
            at["phase"] = phase.index
            if at["iteration"] == 0 and (phase.index == 0 or session.trigger.rule is not None):
                session.log(watched=False, iteration=0, step=at["step"], **test())
            iteration_tokens = cfg.accumulation * cfg.batch_size * phase.mixture.block
            per_pass = max(1, phase.mixture.tokens // iteration_tokens)
            bar = session.progress(phase.stop_at, at["iteration"], "it", phase.name)
            timed = 0
            net.train()
            while at["iteration"] < phase.stop_at:
                session.intervene(phase.index, measure, also=restart)

                # ------------------------------------------------------------------------------ one iteration
                optimizer = treatment.optimizer
                for group in optimizer.param_groups:
                    group["lr"] = phase.rate(at["iteration"]) * group.get("rate_factor", 1.0)
                optimizer.zero_grad(set_to_none=True)
                for micro in micro_batches:
                    last = micro == micro_batches[-1]
                    tokens, targets = phase.batch(at["iteration"], micro, device)
                    with world.without_sync(trained, last):
                        with autocast(device, cfg.precision):
                            loss = trained(tokens, targets) / len(micro_batches)
                        scaler.scale(loss + treatment.penalty() if last else loss).backward()
                    at["loss_sum"] = at["loss_sum"] + world.mean(loss.detach())
                scaler.unscale_(optimizer)
                treatment.before_step()
                norm = nn.utils.clip_grad_norm_(net.parameters(), cfg.clip_norm)
                scaler.step(optimizer)
                scaler.update()
                treatment.after_step(skipped=lambda norm=norm: scaler.is_enabled() and not norm.isfinite())
                timed += 1
                for count in ("count", "iteration", "step"):
                    at[count] += 1
                if at["iteration"] % per_pass == 0:
                    treatment.after_pass()
                bar.update()

                # ------------------------------------------------------------------------------ record it
                if at["iteration"] % phase.eval_every == 0 or at["iteration"] == phase.stop_at:
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
                    seconds = session.timing(iteration=at["iteration"], tokens=at["step"] * iteration_tokens)
                    rate, timed = timed * iteration_tokens / seconds, 0
                    mean = float(at["loss_sum"]) / at["count"]
                    mean = finite(mean, f"training loss at step {at['step']}", cfg)
                    at |= {"results": {"train_loss": mean} | test()} | new_sum
                    measured = {}
                    if session.trigger.measures:
                        measured = plasticity(net, probe()[0])
                        measured["relative_gradient"] = relative_gradient(net, *probe(), token_loss)
                    session.log(iteration=at["iteration"], step=at["step"], **at["results"], **measured)
                    bar.set_postfix_str(f"{brief(at['results'])}, {rate:,.0f} tokens/s")
                    if phase.index == 0 and at["results"]["val_loss_a"] < at["best"]:
                        at["best"] = at["results"]["val_loss_a"]
                        session.save("best")
                if at["iteration"] in phase.save_at:
                    session.save(f"{'phase_2_' * phase.index}{at['iteration']}")
                session.save_if_due()
            session.say(f"{phase.name}, {phase.stop_at} iterations: {brief(at['results'])}")
            if phase.index == 0:
                session.leave_trunk()
                at |= {"phase": 1, "iteration": 0} | new_sum
                if fork is not None:
                    session.save()
        results = {"fork": str(cfg.boundary.fork), **at["results"]}
        session.finish({"net": net}, results, brief(results))


def brief(results: dict[str, float]) -> str:
    """Return the losses as text, as in `train 3.412, A 3.520, B 4.101, mixture 3.811`."""
    names = {"train_loss": "train", "val_loss_a": "A", "val_loss_b": "B", "val_loss_mix": "mixture"}
    return ", ".join(f"{short} {results[key]:.3f}" for key, short in names.items() if key in results)


if __name__ == "__main__":
    if int(os.environ.get("RANK", "0")) > 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # only process 0 prints
    train()
