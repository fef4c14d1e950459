"""Image classification over phases: warm start, continual, class-incremental, and three probes, in one loop.

    python vision/train.py experiment=fig2a_cifar10_resnet18 method=fire size=small seed=1

`step` counts optimizer steps over the whole run, `epoch` the epochs of a phase. Protocols are in vision/protocols.py,
methods in fire_core/methods/.
"""

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
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from fire_core.measure.plasticity import curvature, plasticity, relative_gradient
from fire_core.methods import create
from fire_core.optim_state import reset_optimizer_state
from fire_core.phases import Phase, snapshot
from harness.launch import launch, open_run, pick_device
from harness.runs import generator, seeded
from harness.runs.metrics import finite
from harness.trigger import RunTrigger
from vision.data import load
from vision.evaluate import brief, evaluate, train_accuracy
from vision.images import Images
from vision.models import build
from vision.official import switches
from vision.official.inputs import show_images
from vision.official.state import ImageState
from vision.protocols import PhaseData, batch_indices, make_batch, make_phases
from vision.settings import DOMAIN


@launch(DOMAIN)
def train(cfg: DictConfig) -> None:
    """Train all phases of a run, with the method at each boundary or whenever its trigger fires."""
    # ------------------------------------------------------------------------------------------ method and run
    method = create(**cfg.method)
    run = open_run(DOMAIN, cfg, method, model=cfg.model.name)
    if run.finished:
        return

    # ------------------------------------------------------------------------------------------ data and model
    device = pick_device(cfg.device)
    torch.set_float32_matmul_precision("high" if cfg.precision == "tf32" else "highest")
    images = load(**cfg.data, root=cfg.run.data_root, device=device)
    if cfg.normalisation == "official":
        images = switches.with_statistics(images)
    protocol = OmegaConf.to_container(cfg.protocol)
    phases = make_phases(**protocol, images=images, seed=cfg.seed, splits=cfg.splits)
    schedule = [(phase, epoch) for phase in phases for epoch in range(phase.epochs)]
    net = new_net(cfg, images, device)
    forward = torch.compile(net) if cfg.compile else net
    adam = torch.optim.Adam(net.parameters(), lr=cfg.learning_rate, fused=True)
    state = ImageState({"net": net}, initial=snapshot({"net": net}), loss=cross_entropy, compiled=cfg.compile)
    method.check(state)
    trigger = RunTrigger(cfg.get("trigger"))
    print(
        f"{images}; {sum(p.numel() for p in net.parameters()):,} parameters; {len(schedule)} epochs",
        flush=True,
    )

    with run, seeded(cfg.seed, "train"):
        # -------------------------------------------------------------------------------------- where to begin
        # treated: index of the last boundary or act of a trigger at which the method was applied
        at = {"epochs": 0, "batch": 0, "step": 0, "treated": -1}
        loss_sum = torch.zeros((), device=device)
        saved = run.resume()
        if saved is not None:
            at, loss_sum = saved["at"], saved["loss_sum"].to(device)
            state.phase = max(at["treated"], 0)
        state.optimizers["net"] = method.optimizer(net, adam, Phase(state.phase))
        if saved is not None:
            net.load_state_dict(saved["net"])
            state.optimizers["net"].load_state_dict(saved["optimizer"])
            method.resume(saved["method"], state)
            trigger.load_state_dict(saved.get("watch", {}))
            torch.set_rng_state(saved["random"])

        def parts() -> dict[str, Any]:
            return {
                "net": net.state_dict(),
                "optimizer": state.optimizers["net"].state_dict(),
                "method": method.checkpoint(),
                "watch": trigger.state_dict(),
                "random": torch.get_rng_state(),
                "loss_sum": loss_sum,
                "at": dict(at),
            }

        results: dict[str, float] = {}
        bar = tqdm(
            total=len(schedule),
            initial=at["epochs"],
            unit="epoch",
            disable=None if cfg.run.progress else True,
        )
        for phase, epoch in schedule[at["epochs"] :]:
            first_images = phase.indices[: cfg.metrics_samples], phase.labels[: cfg.metrics_samples]
            probe, probe_labels = make_batch(images, phase, *first_images)
            state.generator = generator(cfg.seed, "method", phase.index)
            state.batches = lambda phase=phase: one_pass(images, phase, cfg)
            show_images(state, images, phases, phase.index, seed=cfg.seed, batch_size=cfg.batch_size)

            # ---------------------------------------------------------------------------------- boundary
            begins = phase.index > 0 and at["treated"] < phase.index
            if (due := trigger.due(phase.index if begins else None)) is not None:
                index, cause = due
                before = plasticity(net, probe)
                net.train(cfg.mode_at_boundary == "train")  # for methods that use the net as they find it
                state.generator = generator(cfg.seed, "method", index)
                report = method.at_boundary(state, Phase(index, phase.name))
                reset_optimizer_state(state.optimizers, cfg.optimizer_state, report)
                state.optimizers["net"] = method.optimizer(net, adam, Phase(index, phase.name))
                state.phase = at["treated"] = index
                where = {"phase": phase.index, "act": index, "step": at["step"], "cause": cause}
                run.boundary(report=report, **where)
                run.timing(phase=phase.index, boundary_seconds=report.seconds)
                after = plasticity(net, probe)
                method.before_evaluation(state)
                after |= evaluate(net, images, phase, cfg)
                method.after_evaluation(state)
                if cfg.run.curvature:
                    draw = generator(cfg.seed, "curvature", index)
                    net.train()
                    after["hessian_norm"] = curvature(net, probe, probe_labels, cross_entropy, generator=draw)
                run.log_act(where, before, after)
                tqdm.write(
                    f"act {index} ({cause}): {method.name}, {len(report.treated())} matrices, {report.seconds:.3f} s"
                )

            # ---------------------------------------------------------------------------------- one epoch
            started, first = time.perf_counter(), at["batch"]
            set_learning_rate(state.optimizers["net"], cfg, phase, epoch)
            net.train()
            count = len(phase.indices)
            for batch in batch_indices(cfg.seed, phase.index, epoch, count, cfg.batch_size, device)[first:]:
                inputs, labels = make_batch(images, phase, phase.indices[batch], phase.labels[batch])
                with torch.autocast(device.type, torch.bfloat16, enabled=cfg.precision == "bf16"):
                    loss = cross_entropy(forward(inputs), labels)
                state.optimizers["net"].zero_grad(set_to_none=True)
                (loss + method.penalty(state)).backward()
                nn.utils.clip_grad_norm_(net.parameters(), cfg.clip_norm)
                state.optimizers["net"].step()
                method.after_step(state)
                loss_sum += loss.detach() * len(batch)
                at["batch"] += 1
                at["step"] += 1
                if run.due(at["step"]):
                    run.save(at["step"], parts())
            method.after_epoch(state)

            # ---------------------------------------------------------------------------------- record it
            last = epoch + 1 == phase.epochs
            what = f"training loss in phase {phase.index} at step {at['step']}"
            values = {"train_loss": finite(float(loss_sum) / count, what, cfg)}
            run.timing(phase=phase.index, epoch=epoch + 1, train_seconds=time.perf_counter() - started)
            measured = plasticity(net, probe) if last or trigger.measures else {}
            if trigger.measures:
                measured["relative_gradient"] = relative_gradient(net, probe, probe_labels, cross_entropy)
            method.before_evaluation(state)
            if last or (epoch + 1) % cfg.eval_every == 0:
                values |= evaluate(net, images, phase, cfg)
            if last:
                values["train_accuracy"] = train_accuracy(net, images, phase, cfg)
            method.after_evaluation(state)
            values |= measured
            run.log(phase=phase.index, epoch=epoch + 1, step=at["step"], **values)
            trigger.look(at["step"], values)
            results |= values
            loss_sum.zero_()
            at["epochs"], at["batch"] = at["epochs"] + 1, 0
            bar.update()
            bar.set_postfix_str(f"phase {phase.index}, " + brief(results))
            if last:
                tqdm.write(f"phase {phase.index} ({phase.name}), epoch {phase.epochs}: {brief(results)}")
            if last and phase.index == 0:
                run.leave_trunk(at["step"], parts())

        # -------------------------------------------------------------------------------------- end
        bar.close()
        method.before_evaluation(state)  # the weights that are tested
        run.save(at["step"], {"net": net.state_dict()}, name="final")
        method.after_evaluation(state)
        run.finish({"steps": at["step"], **results})
    print(f"{method.name}: {brief(results)}\nin {run.folder}")


def new_net(cfg: DictConfig, images: Images, device: torch.device) -> nn.Module:
    """Return the network of the config for these images, with newly drawn weights."""
    shape = {"classes": images.classes, "channels": images.channels, "image_size": images.image_size}
    with seeded(cfg.seed, "init"):
        net = build(**cfg.model, **shape)
        if cfg.batch_norm_start == "official":
            switches.pass_zeros(net, images.channels, images.image_size)
    return net.to(device, memory_format=torch.channels_last if cfg.channels_last else torch.preserve_format)


def one_pass(images: Images, phase: PhaseData, cfg: DictConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the phase's training set once, in batches, for methods that use the coming data."""
    device = phase.indices.device
    for batch in batch_indices(cfg.seed, phase.index, -1, len(phase.indices), cfg.batch_size, device):
        yield make_batch(images, phase, phase.indices[batch], phase.labels[batch])


def set_learning_rate(
    optimizer: torch.optim.Optimizer, cfg: DictConfig, phase: PhaseData, epoch: int
) -> None:
    """Set the rate of an epoch: a linear rise over `warmup_share` of the phase, then constant; or the official one."""
    if cfg.schedule == "official":
        factor = switches.rate_factor(epoch, phase.epochs)
    else:
        share = cfg.warmup_share[phase.index] if OmegaConf.is_list(cfg.warmup_share) else cfg.warmup_share
        factor = min(1.0, (epoch + 1) / max(1, round(share * phase.epochs)))
    for group in optimizer.param_groups:
        group["lr"] = cfg.learning_rate * factor * group.get("rate_factor", 1.0)


if __name__ == "__main__":
    train()
