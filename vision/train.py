"""Image classification over phases: warm start, continual, class-incremental, and three probes, in one loop.

    python vision/train.py experiment=fig2a_cifar10_resnet18 method=fire size=small seed=1

`step` counts optimizer steps over the whole run, `epoch` the epochs of a phase. Protocols are in vision/protocols.py,
methods in fire_core/methods/.
"""

import sys
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

from fire_core.measure.plasticity import curvature, plasticity, relative_gradient
from harness.launch import launch
from harness.runs import generator, seeded
from harness.runs.metrics import finite
from harness.session import Session
from harness.trial import part_of, seed_of
from vision.data import load
from vision.evaluate import brief, evaluate, reestimated, train_accuracy
from vision.images import Images
from vision.models import build
from vision.official import switches
from vision.official.inputs import show_images
from vision.protocols import PhaseData, batch_indices, make_batch, make_phases, pick
from vision.settings import DOMAIN


@launch(DOMAIN)
def train(cfg: DictConfig) -> None:
    """Train all phases of a run, with the method at each boundary or whenever its trigger fires."""
    session = Session(DOMAIN, cfg, model=cfg.model.name)
    if session.finished:
        return

    # ------------------------------------------------------------------------------------------ data and network
    device = session.device
    torch.set_float32_matmul_precision("high" if cfg.precision == "tf32" else "highest")
    images = load(**cfg.data, root=cfg.run.data_root, device=device)
    if cfg.normalisation == "official":
        images = switches.with_statistics(images)
    protocol = OmegaConf.to_container(cfg.protocol)
    phases = make_phases(**protocol, images=images, seed=cfg.seed, splits=cfg.splits)
    schedule = [(phase, epoch) for phase in phases for epoch in range(phase.epochs)]
    first = phases[0].epochs
    schedule = schedule[: first + part_of(cfg, len(schedule) - first)]
    net = new_net(cfg, images, device)
    forward = torch.compile(net, dynamic=False) if cfg.compile else net
    adam = torch.optim.Adam(net.parameters(), lr=cfg.learning_rate, fused=True)
    at = session.at
    at |= {"epochs": 0, "batch": 0, "loss_sum": torch.zeros((), device=device)}
    coming = lambda: one_pass(images, phases[at["phase"]], cfg)  # noqa: E731
    treatment = session.attach({"net": net}, {"net": adam}, loss=cross_entropy, batches=coming)
    if session.method.variant == "official":
        show_images(treatment.state, images, phases, seed=cfg.seed, batch_size=cfg.batch_size)
    weights = sum(p.numel() for p in net.parameters())
    session.say(f"{images}; {weights:,} parameters; {len(schedule)} epochs")

    # ------------------------------------------------------------------------------------------ what is measured
    def probe() -> tuple[Tensor, Tensor]:
        """The first images of the phase."""
        phase, count = phases[at["phase"]], cfg.metrics_samples
        return make_batch(images, phase, phase.indices[:count], phase.labels[:count])

    def measure() -> dict[str, float]:
        return plasticity(net, probe()[0])

    def test() -> dict[str, float]:
        """Test after a boundary, as the net is and with new statistics of batch norm."""
        with treatment.evaluating():
            found = evaluate(net, images, phases[at["phase"]], cfg)
            found |= reestimated(net, images, phases[at["phase"]], cfg, coming())
        if cfg.run.curvature:
            draw = generator(cfg.seed, "curvature", treatment.state.phase)
            found["hessian_norm"] = curvature(net.train(), *probe(), cross_entropy, generator=draw)
        return found

    # ------------------------------------------------------------------------------------------ training
    with session:
        results: dict[str, float] = {}
        bar = session.progress(len(schedule), at["epochs"], "epoch")
        for phase, epoch in schedule[at["epochs"] :]:
            net.train(cfg.mode_at_boundary == "train")  # for methods that use the net as they find it
            session.intervene(phase.index, measure, test)

            # ---------------------------------------------------------------------------------- one epoch
            session.seconds()  # of training alone, without the tests before it
            set_learning_rate(treatment.optimizer, cfg, phase, epoch)
            net.train()
            count = len(phase.indices)
            order = batch_indices(
                seed_of(cfg, phase.index), phase.index, epoch, count, cfg.batch_size, device
            )
            for batch in order[at["batch"] :]:
                done = (epoch + at["batch"] / len(order)) / phase.epochs
                chosen = pick(phases, phase, batch, done, cfg.gradual or 0.0)
                inputs, labels = make_batch(images, phase, *chosen)
                model = forward if len(batch) == cfg.batch_size else net  # one shape, so one compiled graph
                with torch.autocast(device.type, torch.bfloat16, enabled=cfg.precision == "bf16"):
                    loss = cross_entropy(model(inputs), labels)
                treatment.optimizer.zero_grad(set_to_none=True)
                (loss + treatment.penalty()).backward()
                treatment.before_step()
                nn.utils.clip_grad_norm_(net.parameters(), cfg.clip_norm)
                treatment.optimizer.step()
                treatment.after_step()
                at["loss_sum"] += loss.detach() * len(batch)
                at["batch"] += 1
                at["step"] += 1
                session.save_if_due()
            treatment.after_pass()

            # ---------------------------------------------------------------------------------- record it
            last = epoch + 1 == phase.epochs or (phase, epoch) == schedule[-1]
            what = f"training loss in phase {phase.index} at step {at['step']}"
            values = {"train_loss": finite(float(at["loss_sum"]) / count, what, cfg)}
            session.timing(epoch=epoch + 1, train_seconds=session.seconds())
            measured = measure() if last or session.trigger.measures else {}
            if session.trigger.measures:
                measured["relative_gradient"] = relative_gradient(net, *probe(), cross_entropy)
            with treatment.evaluating():
                if last or (epoch + 1) % of_phase(cfg.eval_every, phase) == 0:
                    values |= evaluate(net, images, phase, cfg)
                if last:
                    values["train_accuracy"] = train_accuracy(net, images, phase, cfg)
            values |= measured
            results |= values
            session.log(epoch=epoch + 1, step=at["step"], **values)
            at |= {"epochs": at["epochs"] + 1, "batch": 0, "loss_sum": torch.zeros_like(at["loss_sum"])}
            bar.update()
            bar.set_postfix_str(f"phase {phase.index}, {brief(results)}")
            if last:
                session.say(f"phase {phase.index} ({phase.name}), epoch {epoch + 1}: {brief(results)}")
            if last and phase.index == 0:
                session.leave_trunk()
        with treatment.evaluating():
            session.finish({"net": net.state_dict()}, results, brief(results))


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


def of_phase(setting: Any, phase: PhaseData) -> Any:
    """Return the value of a setting in a phase; it may have one value for each."""
    return setting[phase.index] if OmegaConf.is_list(setting) else setting


def set_learning_rate(
    optimizer: torch.optim.Optimizer, cfg: DictConfig, phase: PhaseData, epoch: int
) -> None:
    """Set the rate of an epoch: a linear rise over `warmup_share` of the phase, then constant; or the official one."""
    if cfg.schedule == "official":
        factor = switches.rate_factor(epoch, phase.epochs)
    else:
        factor = min(1.0, (epoch + 1) / max(1, round(of_phase(cfg.warmup_share, phase) * phase.epochs)))
    for group in optimizer.param_groups:
        group["lr"] = cfg.learning_rate * factor * group.get("rate_factor", 1.0)


if __name__ == "__main__":
    train()
