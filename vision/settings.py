"""The settings of vision/train.py, and what the harness must know about that script."""

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

import vision.official  # noqa: F401 (registers the official variants of methods)
from fire_core.errors import UserError
from harness.settings import Domain, Keys, RunKeys, group, key
from harness.trial import TrialKeys
from vision.models import own_settings
from vision.protocols import PROTOCOLS, phase_count

DATA_SETS = ("fashion_mnist", "fashion_mnist_full", "cifar10", "cifar100", "tiny_imagenet", "image_folder")
OFFICIAL_OR_OURS = ("official", "ours")


@dataclass
class Protocol:
    """Settings of the protocol. Those that the chosen protocol does not have stay null."""

    name: str = key("the data of each phase", choices=tuple(PROTOCOLS))
    epochs: Any = key("epochs per phase", each=int, least=1)
    share: float | None = key("share of the data in the first phase", above=0, most=1)
    stages: int | None = key("continual, class_incremental: number of phases", least=1)
    replay: float | None = key("share of earlier images that is kept; null: all", least=0, most=1)
    tasks: int | None = key("random_label, permuted: number of tasks, which are the phases", least=1)
    count: int | None = key("random_label, permuted: images per task", least=1)
    noisy: int | None = key("label_noise: images with random labels", least=1)
    clean: int | None = key("label_noise: images with true labels", least=1)


@dataclass
class Pictures:
    name: str = key("data set: one of conf/data", choices=DATA_SETS)
    folder: str | None = key(  # differs between machines, but is the only name of a user's own images
        "where the files are; null: below run.data_root",
        numbers=lambda config: config["data"]["name"] == "image_folder",
    )
    image_size: int | None = key("pixels per side; null: the data set's own", least=1)
    fit: str = key("how smaller images are enlarged", choices=("pad", "resize"))
    channels: int | None = key("3 colours or 1 grey; null: the data set's own", choices=(None, 1, 3))
    classes: int | None = key("use only this many classes, the first ones; null: all", least=2)
    train_per_class: int | None = key("training images per class; null: all", least=1)
    test_per_class: int | None = key("test images per class; null: all", least=1)


@dataclass
class VisionModel:
    name: str = key("network: one of conf/model")
    width: int | None = key("channels or features; null: the network's own", least=1)
    depth: int | None = key("layers or blocks; null: the network's own", least=1)
    heads: int | None = key("attention heads; null: the network's own", least=1)
    patch: int | None = key("pixels per side of a patch; null: the network's own", least=1)
    norm: str | None = key("mlp, cnn: norm before each ReLU; null: none", choices=(None, "layer"), added=True)


@dataclass
class VisionRun(RunKeys):
    curvature: bool = key("log the Hessian's norm after boundaries still to come (slow)", numbers=False)


@dataclass
class Vision(Keys):
    protocol: Protocol = group(Protocol, without_nulls=True)
    data: Pictures = group(Pictures)
    model: VisionModel = group(VisionModel)
    warmup_share: Any = key("share of a phase in which the rate rises", each=float, least=0, most=1)
    clip_norm: float = key("largest norm of the gradient; inf does not clip", above=0)
    compat: str = key("default of the next four keys, see docs/DEVIATIONS.md", choices=OFFICIAL_OR_OURS)
    schedule: str = key("learning rate in each epoch", choices=OFFICIAL_OR_OURS)
    splits: str = key("which images or classes each phase holds", choices=OFFICIAL_OR_OURS)
    batch_norm_start: str = key("running statistics before the first step", choices=OFFICIAL_OR_OURS)
    normalisation: str = key("mean and deviation by which images are normalised", choices=OFFICIAL_OR_OURS)
    mode_at_boundary: str = key("mode of the network while a method acts", choices=("train", "eval"))
    gradual: float | None = key("share of a phase that mixes in the one before", above=0, most=1, added=True)
    eval_every: Any = key("epochs between evaluations", each=int, least=1)
    metrics_samples: int = key("training images on which plasticity is measured", least=1)
    eval_batch_size: int = key("images per evaluation batch", least=1, numbers=False)
    precision: str = key("fp32 has TF32 in convolutions on GPUs", choices=("fp32", "tf32", "bf16"))
    channels_last: bool = key("use the channels-last memory format")
    trial: TrialKeys = group(TrialKeys)
    run: VisionRun = group(VisionRun)


def check(cfg: DictConfig) -> None:
    """Raise UserError for a list with other than one value for each phase, and a setting that the network lacks."""
    own_settings(**cfg.model)
    phases = phase_count(**OmegaConf.to_container(cfg.protocol))
    if cfg.schedule == "official" and cfg.warmup_share != 0.1:
        raise UserError(f"warmup_share={cfg.warmup_share} needs schedule=ours, which reads it")
    if cfg.gradual and cfg.protocol.name == "permuted":
        raise UserError(f"gradual={cfg.gradual} has no effect: protocol=permuted mixes no pixel orders")
    for name in ("protocol.epochs", "warmup_share", "eval_every"):
        value = OmegaConf.select(cfg, name)
        if OmegaConf.is_list(value) and len(value) != phases:
            raise UserError(f"{name}={value}: give one number, or {phases} of them, one per phase")


DOMAIN = Domain(
    name="vision",
    script="vision/train.py",
    keys=Vision,
    check=check,
    shown=("data.name", "model.name"),
    at_boundary=("mode_at_boundary", "gradual", "trial"),
    refuses={
        "fire_all": "fire does the same here",
        "plasticity_injection": "it needs an encoder and a head, as in DQN and SAC",
    },
    watched=("train_loss", "train_accuracy", "test_accuracy", "seen_accuracy"),
    extras=("vision",),
    results=("train_accuracy", "test_accuracy"),
)
