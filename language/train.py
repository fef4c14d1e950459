"""Continual pretraining in two phases: many passes over corpus A, then one over a mixture of A and B.

    python language/train.py experiment=fig3_best method=fire size=small seed=1
    torchrun --nproc-per-node=8 language/train.py experiment=fig3_best method=fire size=paper

`phase_1` (index 0) is the trunk, trained once for all methods. `phase_2` (index 1) starts from a checkpoint of it
(`boundary.fork`: best, last or an iteration of phase_1.save_at). `step` counts optimizer steps of the whole run,
`iteration` those of the phase.
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere

from harness import stop

if __name__ == "__main__":
    stop.exit_at_once()  # on Ctrl-C while torch is imported

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from tqdm import tqdm

from harness.launch import launch, needs, open_run
from language.settings import DOMAIN, check_settings

needs(DOMAIN)

from fire_core.errors import UserError
from fire_core.measure.plasticity import plasticity, relative_gradient
from fire_core.methods import create
from fire_core.optim_state import reset_optimizer_state
from fire_core.state import Phase, State, snapshot
from harness.runs import generator, seeded
from harness.runs.metrics import finite
from harness.transfer import send
from harness.trigger import RunTrigger
from language.data import Corpus
from language.distributed import FollowerRun, World, save_decision
from language.evaluate import autocast, evaluate
from language.model import Decoder, adamw, token_loss
from language.schedule import PhasePlan, open_corpora, phase_plans
from language.throughput import peak_flops, synchronise


@launch(DOMAIN)
def train(cfg: DictConfig) -> None:
    """Train one run, alone or as one of several processes."""
    with World(cfg.device) as world:
        train_in(world, cfg)


def train_in(world: World, cfg: DictConfig) -> None:
    """Train both phases of a run, with the method at the boundary or whenever its trigger fires."""
    # ------------------------------------------------------------------------------------------ method and run
    method = create(**cfg.method)
    shape = check_settings(cfg)
    run = open_run(DOMAIN, cfg, method, model=cfg.model.name) if world.is_leader else FollowerRun()
    if world.from_leader(run.finished if world.is_leader else None):
        return

    # ------------------------------------------------------------------------------------------ data and model
    if method.watches_training and world.size > 1:
        raise UserError(
            f"method={method.name} with {world.size} processes: it scores units on the batches of one process, so "
            "the copies of the network would diverge; use one process"
        )
    micro_batches = world.share_of(cfg.accumulation)
    corpora = open_in_turn(world, cfg)
    plans = phase_plans(cfg, corpora)
    fork = None if cfg.boundary.fork == "last" else str(cfg.boundary.fork)
    torch.set_float32_matmul_precision("high" if cfg.tf32 else "highest")
    with seeded(cfg.seed, "init"):
        net = Decoder(shape)
    initial = snapshot({"net": net})
    net.to(world.device)
    forward: nn.Module = torch.compile(net) if cfg.compile else net  # type: ignore[assignment]
    trained = world.wrap(forward)
    adam = adamw(net, betas=tuple(cfg.betas), weight_decay=cfg.weight_decay)
    state = State({"net": net}, initial=initial, loss=token_loss, compiled=cfg.compile)
    method.check(state)
    trigger = RunTrigger(cfg.get("trigger"))
    peak = peak_flops(world.device, cfg.precision, cfg.run.peak_tflops)
    print(describe(net, plans, corpora), flush=True)

    with run, seeded(cfg.seed, "train", world.rank):
        # -------------------------------------------------------------------------------------- where to begin
        at: dict[str, Any] = {"phase": 0, "iteration": 0, "step": 0, "best": float("inf")}
        results: dict[str, float] = {}  # of the last evaluation
        loss_sum, count = torch.zeros((), device=world.device), 0
        scaler = torch.amp.GradScaler(world.device.type, enabled=cfg.precision == "fp16")

        def parts() -> dict[str, Any]:
            return {
                "net": net.state_dict(),
                "optimizer": state.optimizers["net"].state_dict(),
                "scaler": scaler.state_dict(),
                "method": method.checkpoint(),
                "watch": trigger.state_dict(),
                "random": torch.get_rng_state(),
                "loss_sum": world.mean(loss_sum.clone()),
                "count": count,
                "at": dict(at),
                "results": dict(results),
            }

        def restore(saved: dict[str, Any]) -> None:
            nonlocal count, results
            at.update(saved["at"])
            results = dict(saved.get("results", {}))
            trigger.load_state_dict(saved.get("watch", {}))
            # at iteration 0 of a phase, its boundary is still to come
            before = at["phase"] > 0 and at["iteration"] == 0
            state.phase = at["phase"] - before if trigger.rule is None else trigger.acts
            state.optimizers["net"] = method.optimizer(net, adam, Phase(state.phase))
            method.rebuild(state)
            net.load_state_dict(saved["net"])
            state.optimizers["net"].load_state_dict(saved["optimizer"])
            scaler.load_state_dict(saved["scaler"])
            method.resume(saved["method"], state)
            loss_sum.copy_(saved["loss_sum"])
            count = saved["count"]
            if world.is_leader:
                torch.set_rng_state(saved["random"])

        def tested(block: int) -> dict[str, float]:
            method.before_evaluation(state)
            losses = evaluate(forward, corpora, cfg, world, block)
            method.after_evaluation(state)
            return losses

        state.optimizers["net"] = method.optimizer(net, adam, Phase(0))
        saved = world.from_leader(run.resume(fork))
        if saved is not None:
            restore(saved)
        # whether `saved` is the fork of a finished trunk, and not a checkpoint of a run that is still in phase 1
        forked = world.is_leader and saved is not None and run.trunk not in (None, run.place)
        if world.from_leader(forked and at["phase"] == 0):
            at.update(phase=1, iteration=0)

        for phase in plans[at["phase"] :]:
            block = phase.mixture.block
            state.generator = generator(cfg.seed, "method", phase.index)
            state.batches = lambda phase=phase: coming_batches(phase, cfg.boundary.batches, world.device)
            probe, probe_targets = (part[:8] for part in next(coming_batches(phase, 1, world.device)))
            if at["iteration"] == 0 and (phase.index == 0 or trigger.rule is not None):
                first = tested(block)
                run.log(phase=phase.index, iteration=0, step=at["step"], **first)

            per_pass = max(1, phase.mixture.tokens // (cfg.accumulation * cfg.batch_size * block))
            hidden = None if cfg.run.progress and world.is_leader else True
            bar = tqdm(None, phase.name, phase.stop_at, initial=at["iteration"], unit="it", disable=hidden)
            started, timed = time.perf_counter(), 0
            net.train()
            while at["iteration"] < phase.stop_at:
                # ------------------------------------------------------------------------------ boundary
                begins = phase.index > 0 and at["iteration"] == 0
                if (due := trigger.due(phase.index if begins else None)) is not None:
                    index, cause = due
                    before = tested(block) | plasticity(net, probe)
                    state.phase, state.generator = index, generator(cfg.seed, "method", index)
                    report = method.at_boundary(state, Phase(index, phase.name))
                    state.copy_followers()
                    reset_optimizer_state(state.optimizers, cfg.optimizer_state, report)
                    state.optimizers["net"] = method.optimizer(net, adam, Phase(index, phase.name))
                    world.same_weights(net)
                    scaler = torch.amp.GradScaler(world.device.type, enabled=cfg.precision == "fp16")
                    loss_sum.zero_()
                    count = 0
                    where = {"phase": phase.index, "act": index, "step": at["step"], "cause": cause}
                    run.boundary(report=report, **where)
                    run.timing(phase=phase.index, boundary_seconds=report.seconds)
                    run.log_act(where, before, tested(block) | plasticity(net, probe))
                    print(f"{cause}: {method.name}; {method_summary(report)}", flush=True)
                    started = time.perf_counter()

                # ------------------------------------------------------------------------------ one iteration
                optimizer = state.optimizers["net"]
                for group in optimizer.param_groups:
                    group["lr"] = phase.rate(at["iteration"]) * group.get("rate_factor", 1.0)
                optimizer.zero_grad(set_to_none=True)
                for micro in micro_batches:
                    last = micro == micro_batches[-1]
                    batch = phase.mixture.batch(at["iteration"], micro)
                    tokens, targets = (send(part, world.device) for part in batch)
                    with world.without_sync(trained, last):
                        with autocast(world.device, cfg.precision):
                            loss = trained(tokens, targets) / len(micro_batches)
                        scaler.scale(loss + method.penalty(state) if last else loss).backward()
                    loss_sum += loss.detach()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), cfg.clip_norm)
                scaler.step(optimizer)
                scaler.update()
                method.after_step(state)
                at["iteration"] += 1
                at["step"] += 1
                count, timed = count + 1, timed + 1
                if at["iteration"] % per_pass == 0:
                    method.after_epoch(state)
                bar.update()

                # ------------------------------------------------------------------------------ record it
                if at["iteration"] % phase.eval_every == 0 or at["iteration"] == phase.stop_at:
                    synchronise(world.device)
                    tokens_done = timed * cfg.accumulation * cfg.batch_size * block
                    seconds = time.perf_counter() - started
                    rate = tokens_done / seconds
                    used = {"mfu": rate * net.flops_per_token(block) / (peak * world.size)} if peak else {}
                    used |= {"train_seconds": seconds, "tokens_per_second": rate}
                    run.timing(phase=phase.index, iteration=at["iteration"], **used)
                    mean_loss = float(world.mean(loss_sum.clone())) / count
                    mean_loss = finite(mean_loss, f"training loss at step {at['step']}", cfg)
                    results = {"train_loss": mean_loss} | tested(block)
                    loss_sum.zero_()
                    count = 0
                    figures = dict(results)
                    if trigger.measures:
                        figures |= plasticity(net, probe)
                        gradient = relative_gradient(net, probe, probe_targets, token_loss)
                        figures["relative_gradient"] = gradient
                    run.log(phase=phase.index, iteration=at["iteration"], step=at["step"], **figures)
                    trigger.look(at["step"], world.from_leader(figures))
                    bar.set_postfix_str(f"{brief(results)}, {rate:,.0f} tokens/s")
                    if phase.index == 0 and results["val_loss_a"] < at["best"]:
                        at["best"] = results["val_loss_a"]
                        run.save(at["step"], parts(), name="best")
                    started, timed = time.perf_counter(), 0
                if at["iteration"] in phase.save_at:
                    run.save(at["step"], parts(), name=str(at["iteration"]))
                if save_decision(world, run, at["step"]):
                    run.save(at["step"], parts())
            bar.close()
            print(f"{phase.name}, {phase.stop_at} iterations: {brief(results)}", flush=True)
            if phase.index == 0:
                saved = world.from_leader(run.leave_trunk(at["step"], parts(), fork))
                if saved is not None:
                    restore(saved)
                at.update(phase=1, iteration=0)
                if saved is not None:
                    run.save(at["step"], parts())

        # -------------------------------------------------------------------------------------- end
        method.before_evaluation(state)  # the weights that are tested
        run.save(at["step"], {"net": net.state_dict()}, name="final")
        method.after_evaluation(state)
        run.finish({"steps": at["step"], "fork": str(cfg.boundary.fork), **results})
    if world.is_leader:
        print(f"{method.name}: {brief(results)}\nin {run.folder}")


def open_in_turn(world: World, cfg: DictConfig) -> tuple[Corpus, Corpus]:
    """Return the corpora on every process. Process 0 goes first, prepares them if necessary and checks the files."""
    mine = open_corpora(cfg) if world.is_leader else None
    world.from_leader(0)
    return mine or open_corpora(cfg, check=False)


def coming_batches(phase: PhasePlan, count: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the first micro-batch of each of the first `count` iterations, for methods that use the coming data."""
    for iteration in range(count):
        inputs, targets = phase.mixture.batch(iteration, 0)
        yield send(inputs, device), send(targets, device)


def method_summary(report: Any) -> str:
    """Return the number of treated matrices and their mean deviation from isometry before and after, as text."""
    rows = report.treated()
    if not rows:
        return "no matrix treated"
    before = sum(row.dfi_before for row in rows) / len(rows)
    after = sum(row.dfi_after for row in rows) / len(rows)
    return f"{len(rows)} matrices in {report.seconds:.2f} s; mean DfI {before:.1f} -> {after:.1f}"


def describe(net: Decoder, plans: list[PhasePlan], corpora: tuple[Corpus, Corpus]) -> str:
    """Return the sizes of net, corpora and phases as one line."""
    texts = ", ".join(f"{c.name} {len(c.train):,} tokens" for c in corpora)
    lengths = ", ".join(f"{p.name} {p.stop_at:,} of {p.iterations:,} iterations" for p in plans)
    return f"{sum(p.numel() for p in net.parameters()):,} parameters; {texts}; {lengths}"


def brief(results: dict[str, float]) -> str:
    """Return the losses as text, as in `train 3.412, A 3.520, B 4.101, mixture 3.811`."""
    names = {"train_loss": "train", "val_loss_a": "A", "val_loss_b": "B", "val_loss_mix": "mixture"}
    return ", ".join(f"{short} {results[key]:.3f}" for key, short in names.items() if key in results)


if __name__ == "__main__":
    if int(os.environ.get("RANK", "0")) > 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # only process 0 prints
    train()
