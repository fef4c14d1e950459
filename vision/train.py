"""Image classification over phases of data, with a method that acts between them: one loop for every protocol.

    python vision/train.py experiment=fig2a_cifar10_resnet18 method=fire size=small seed=1

`step` counts optimizer steps over the whole run, `epoch` the epochs of a phase. Protocols are in vision/protocols.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere

from harness import stop

if __name__ == "__main__":
    stop.handle(stop.exit_at_once)  # on Ctrl-C while torch is imported

import torch
from omegaconf import DictConfig
from torch import nn
from torch.nn.functional import cross_entropy

from harness.device import autocast
from harness.launch import launch
from harness.runs.metrics import finite
from harness.session import Session
from vision.evaluate import brief, evaluate, measure
from vision.models import new_net
from vision.schedule import Curriculum, set_learning_rate
from vision.settings import DOMAIN


@launch(DOMAIN)
def train(cfg: DictConfig) -> None:
    """Train all phases of a run, with the method at each boundary or whenever its trigger fires."""
    session = Session(DOMAIN, cfg, model=cfg.model.name)
    if session.finished:
        return

    # ------------------------------------------------------------------------------------------ data and network
    # at: where the run stands, saved in checkpoints; it has phase and step
    at, device = session.at, session.device
    at |= {"epochs": 0, "batch": 0, "loss_sum": torch.zeros((), device=device), "results": {}}
    curriculum = Curriculum(cfg, device, at)
    images = curriculum.images  # which a checkpoint knows again
    at["data"] = [images.name, *images.mean.tolist(), int(images.train_labels.cumsum(0).sum())]
    net = new_net(cfg, curriculum.images, device)
    compiled = torch.compile(net, dynamic=False) if cfg.compile else net
    adam = torch.optim.Adam(net.parameters(), lr=cfg.learning_rate, fused=True)
    # the method at work on this network; some methods look at the loss, or draw batches of their own
    treatment = session.attach({"net": net}, {"net": adam}, loss=cross_entropy, batches=curriculum)
    session.say(f"{curriculum}; {sum(p.numel() for p in net.parameters()):,} parameters")

    def test() -> dict[str, float]:
        with treatment.evaluating():  # with averaged weights, if the method keeps any
            return evaluate(net, curriculum, boundary=True)

    # ------------------------------------------------------------------------------------------ training
    with session:  # loads the latest checkpoint, if there is one
        bar = session.progress(len(curriculum.schedule), at["epochs"], "epoch")
        for phase, epoch, last, tested in curriculum.schedule[at["epochs"] :]:
            net.train(cfg.mode_at_boundary == "train")  # for methods that use the net as they find it
            # nothing, unless a phase begins or the trigger has fired
            session.intervene(phase.index, measure=lambda: measure(net, curriculum), test=test)

            # ---------------------------------------------------------------------------------- one epoch
            optimizer = treatment.optimizer  # Adam, unless the method has put another in its place
            set_learning_rate(optimizer, cfg, phase, epoch)
            net.train()
            for inputs, labels in curriculum.batches(phase, epoch, at["batch"]):
                model = compiled if len(labels) == cfg.batch_size else net  # one shape, so one compiled graph
                with autocast(device, cfg.precision):
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
            what = f"training loss in phase {phase.index} at step {at['step']}"
            row = {"train_loss": finite(float(at["loss_sum"]) / len(phase), what, cfg)}
            session.timing(epoch=epoch + 1, step=at["step"])  # of training alone
            # the plasticity of the network, where the phase ends or the trigger looks at it
            measured = measure(net, curriculum, session.trigger, last=last)
            with treatment.evaluating():
                if tested:
                    row |= evaluate(net, curriculum, train=last)
            row |= measured
            at["results"] |= row
            session.log(epoch=epoch + 1, step=at["step"], **row)
            at |= {"epochs": at["epochs"] + 1, "batch": 0, "loss_sum": torch.zeros_like(at["loss_sum"])}
            bar.update()
            bar.set_postfix_str(f"phase {phase.index}, {brief(at['results'])}")
            if last:
                session.say(f"{phase}, epoch {epoch + 1}: {brief(at['results'])}")
            if last and phase.index == 0:
                session.leave_trunk()  # which runs with other methods start from
        session.finish({"net": net}, at["results"], brief(at["results"]))


if __name__ == "__main__":
    train()
