"""Image classification over phases: warm start, continual, class-incremental, and three probes, in one loop.

    python vision/train.py experiment=fig2a_cifar10_resnet18 method=fire size=small seed=1

`step` counts optimizer steps over the whole run, `epoch` the epochs of a phase. Protocols are in vision/protocols.py,
methods in fire_core/methods/.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere

from harness import stop

if __name__ == "__main__":
    stop.exit_at_once()  # on Ctrl-C while torch is imported

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fire_core.measure.plasticity import curvature, plasticity, relative_gradient
from harness.launch import launch
from harness.runs import generator
from harness.runs.metrics import finite
from harness.session import Session
from vision.data import load
from vision.evaluate import brief, evaluate
from vision.models import new_net
from vision.official import switches
from vision.official.inputs import show_images
from vision.protocols import PhaseData, coming_batches, make_batch, make_phases, schedule_of, training_batches
from vision.settings import DOMAIN


@launch(DOMAIN)
def train(cfg: DictConfig) -> None:
    """Train all phases of a run, with the method at each boundary or whenever its trigger fires."""
    session = Session(DOMAIN, cfg, model=cfg.model.name)
    if session.finished:
        return

    # ------------------------------------------------------------------------------------------ data and network
    images = load(**cfg.data, root=cfg.run.data_root, device=session.device)
    if cfg.normalisation == "official":
        images = switches.with_statistics(images)
    phases = make_phases(**cfg.protocol, images=images, seed=cfg.seed, splits=cfg.splits)
    schedule = schedule_of(cfg, phases)
    net = new_net(cfg, images, session.device)
    compiled = torch.compile(net, dynamic=False) if cfg.compile else net
    adam = torch.optim.Adam(net.parameters(), lr=cfg.learning_rate, fused=True)
    at = session.at
    at |= {"epochs": 0, "batch": 0, "loss_sum": torch.zeros((), device=session.device)}
    coming = lambda: coming_batches(cfg, images, phases[at["phase"]])  # noqa: E731
    treatment = session.attach({"net": net}, {"net": adam}, loss=cross_entropy, batches=coming)
    show_images(treatment.state, cfg, images, phases)  # for the official variants of methods
    session.say(f"{images}; {sum(p.numel() for p in net.parameters()):,} parameters; {len(schedule)} epochs")

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
            found = evaluate(net, images, phases[at["phase"]], cfg, coming=coming())
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
            optimizer = treatment.optimizer
            set_learning_rate(optimizer, cfg, phase, epoch)
            net.train()
            for inputs, labels in training_batches(cfg, images, phases, phase, epoch, at["batch"]):
                model = compiled if len(labels) == cfg.batch_size else net  # one shape, so one compiled graph
                with torch.autocast(session.device.type, torch.bfloat16, enabled=cfg.precision == "bf16"):
                    loss = cross_entropy(model(inputs), labels)
                optimizer.zero_grad(set_to_none=True)
                (loss + treatment.penalty()).backward()
                treatment.before_step()
                nn.utils.clip_grad_norm_(net.parameters(), cfg.clip_norm)
                optimizer.step()
                treatment.after_step()
                at["loss_sum"] += loss.detach() * len(labels)
                at["batch"] += 1
                at["step"] += 1
                session.save_if_due()
            treatment.after_pass()

            # ---------------------------------------------------------------------------------- record it
            last = epoch + 1 == phase.epochs or (phase, epoch) == schedule[-1]
            what = f"training loss in phase {phase.index} at step {at['step']}"
            row = {"train_loss": finite(float(at["loss_sum"]) / len(phase.indices), what, cfg)}
            session.timing(epoch=epoch + 1, train_seconds=session.seconds())
            measured = measure() if last or session.trigger.measures else {}
            if session.trigger.measures:
                measured["relative_gradient"] = relative_gradient(net, *probe(), cross_entropy)
            with treatment.evaluating():
                if last or (epoch + 1) % phase.own(cfg.eval_every) == 0:
                    row |= evaluate(net, images, phase, cfg, train=last)
            row |= measured
            results |= row
            session.log(epoch=epoch + 1, step=at["step"], **row)
            at |= {"epochs": at["epochs"] + 1, "batch": 0, "loss_sum": torch.zeros_like(at["loss_sum"])}
            bar.update()
            bar.set_postfix_str(f"phase {phase.index}, {brief(results)}")
            if last:
                session.say(f"phase {phase.index} ({phase.name}), epoch {epoch + 1}: {brief(results)}")
            if last and phase.index == 0:
                session.leave_trunk()
        with treatment.evaluating():
            session.finish({"net": net.state_dict()}, results, brief(results))


def set_learning_rate(
    optimizer: torch.optim.Optimizer, cfg: DictConfig, phase: PhaseData, epoch: int
) -> None:
    """Set the rate of an epoch: a linear rise over `warmup_share` of the phase, then constant; or the official one."""
    factor = min(1.0, (epoch + 1) / max(1, round(phase.own(cfg.warmup_share) * phase.epochs)))
    if cfg.schedule == "official":
        factor = switches.rate_factor(epoch, phase.epochs)
    for group in optimizer.param_groups:
        group["lr"] = cfg.learning_rate * factor * group.get("rate_factor", 1.0)


if __name__ == "__main__":
    train()
