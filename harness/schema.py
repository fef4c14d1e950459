"""Every key of every training script: its type, its range and what it means. The values are in `conf/`.

A dataclass per script, one per group of keys. `checks.check` holds a composed config against them, `--help` prints them, and
the keys marked `numbers=False` are those that cannot change a run's numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from fire_core.optim_state import POLICIES


def key(
    meaning: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float = math.inf,
    choices: tuple[Any, ...] = (),
    each: type | None = None,
    form: str = "",
    numbers: bool = True,
    added: bool = False,
) -> Any:
    """One key. Of type Any: one value of type `each`, or a list of them. `form`: what a value must be, where type and range
    do not say it; `numbers`: whether it can change the numbers of a run; `added`: whether there were runs before it, which
    keep their folders because null is left out of what identifies a run."""
    metadata = {"meaning": meaning, "least": least, "above": above, "most": most, "choices": choices}
    metadata |= {"each": each, "form": form, "numbers": numbers, "added": added}
    return field(default=MISSING, metadata=metadata)


def group(cls: type) -> Any:
    """A group of keys."""
    return field(default_factory=cls)


@dataclass
class RunKeys:
    root: str = key("folder of all runs", form="give the folder that all runs go to", numbers=False)
    trunk: bool = key("share phase 0 between methods that do nothing in it", numbers=False)
    checkpoint_seconds: float = key("seconds between checkpoints", least=0, numbers=False)
    checkpoint_steps: int = key("steps between checkpoints; 0: by time only", least=0, numbers=False)
    checkpoint_share: float = key(
        "share of the time that saving may take: the interval is longer where it takes more",
        above=0,
        most=1,
        numbers=False,
    )
    keep: int = key("checkpoints that are kept", least=1, numbers=False)
    progress: bool = key("show a progress bar in a terminal", numbers=False)
    tracker: str = key(
        "mirror of metrics.jsonl", choices=("none", "tensorboard", "trackio", "wandb"), numbers=False
    )
    data_root: str = key("folder of downloaded and prepared data", numbers=False)


@dataclass
class TriggerKeys:
    """The settings that a trigger does not have stay null."""

    name: str = key("when the method acts, one of conf/trigger")
    metric: str | None = key("plateau: the logged metric")
    mode: str | None = key(
        "plateau: min where smaller is better, max where larger is", choices=(None, "min", "max")
    )
    patience: int | None = key("plateau: records without an improvement", least=1)
    min_change: float | None = key("plateau: what counts as an improvement", least=0)
    level: float | None = key("dormancy, dfi: acts above it", least=0)
    share: float | None = key("rank, gradient: acts below this share of the highest value", above=0, most=1)
    steps: int | None = key("every: steps between two acts", least=1)
    cooldown: int | None = key("least steps between two acts", least=0)


@dataclass
class Keys:
    """What every script has."""

    experiment: str = key("file of conf/experiment")
    size: str = key("a size that the experiment has")
    seed: int = key(
        "of everything random", least=0, most=2**63 - 1, form="give a whole number, 0 or more and below 2**63"
    )
    method: dict[str, Any] = key("what happens between phases; settings as in conf/method")
    trigger: TriggerKeys = group(TriggerKeys)
    optimizer_state: str = key("optimizer state at a boundary", choices=POLICIES)
    batch_size: int = key("of a step", least=1)
    learning_rate: float = key("peak learning rate", above=0)
    device: str = key("auto, cpu, cuda or cuda:<n>", numbers=False)
    compile: bool = key("train through torch.compile")
    threads: int = key("CPU threads", least=1, numbers=False)
    minutes: float | None = key("expected duration of a run on a CPU", numbers=False)
    run: RunKeys = group(RunKeys)


# ------------------------------------------------------------------------------------------------ vision
@dataclass
class Protocol:
    """The settings that a protocol does not have stay null."""

    name: str = key("warm_start, continual, class_incremental, random_label, label_noise or permuted")
    epochs: Any = key(
        "epochs of a phase",
        each=int,
        least=1,
        form="give a whole number, 1 or more, or one for each phase as in [20,2]",
    )
    share: float | None = key("share of the data in the first phase", above=0, most=1)
    stages: int | None = key("number of phases", least=1)
    replay: float | None = key(
        "share of the images of earlier phases that stays; null: all, as in the paper", least=0, most=1
    )
    tasks: int | None = key("number of phases", least=1)
    count: int | None = key("images of a task", least=1)
    noisy: int | None = key("images with random labels", least=1)
    clean: int | None = key("images with true labels", least=1)


@dataclass
class Pictures:
    name: str = key("data set, one of conf/data")
    folder: str | None = key("where the files are; null: below run.data_root", numbers=False)
    image_size: int | None = key("pixels of a side; null: the data set's own", least=1)
    fit: str = key("how images are enlarged", choices=("pad", "resize"))
    channels: int | None = key("3 colours or 1 grey; null: the data set's own", choices=(None, 1, 3))
    classes: int | None = key("the first so many classes; null: all", least=2)
    train_per_class: int | None = key("training images of a class; null: all", least=1)
    test_per_class: int | None = key("test images of a class; null: all", least=1)


@dataclass
class VisionModel:
    name: str = key("net, one of conf/model")
    width: int | None = key("channels or features; null: the net's own", least=1)
    depth: int | None = key("layers or blocks; null: the net's own", least=1)
    heads: int | None = key("attention heads; null: the net's own", least=1)
    patch: int | None = key("pixels of a patch; null: the net's own", least=1)


@dataclass
class VisionRun(RunKeys):
    curvature: bool = key("log the Hessian's norm after each boundary (slow)", numbers=False)


WHOSE = ("official", "ours")


@dataclass
class Vision(Keys):
    protocol: Protocol = group(Protocol)
    data: Pictures = group(Pictures)
    model: VisionModel = group(VisionModel)
    warmup_share: Any = key(
        "share of a phase in which the learning rate rises",
        each=float,
        least=0,
        most=1,
        form="give a number from 0 to 1, or one for each phase as in [0.1,0]",
    )
    clip_norm: float = key("largest norm of the gradient; inf does not clip", above=0)
    compat: str = key("value of the four switches that follow, see DEVIATIONS.md", choices=WHOSE)
    schedule: str = key("learning rate of each epoch", choices=WHOSE)
    splits: str = key("which images or classes come when", choices=WHOSE)
    batch_norm_start: str = key("running statistics before the first step", choices=WHOSE)
    normalisation: str = key("mean and deviation by which images are normalised", choices=WHOSE)
    mode_at_boundary: str = key("the net's mode when a method is called there", choices=("train", "eval"))
    eval_every: int = key("epochs between evaluations", least=1)
    metrics_samples: int = key("training images on which plasticity is measured", least=1)
    eval_batch_size: int = key("images of an evaluation batch", least=1, numbers=False)
    precision: str = key(
        "of training; fp32: as PyTorch does by default, on GPUs with TF32 in convolutions alone; tf32: in all products",
        choices=("fp32", "tf32", "bf16"),
    )
    channels_last: bool = key("memory order of images")
    run: VisionRun = group(VisionRun)


# ------------------------------------------------------------------------------------------------ language
@dataclass
class Text:
    name: str = key("corpus")
    folder: str | None = key("a prepared folder; null: below run.data_root")
    train_tokens: int | None = key("use the first so many training tokens; null: all", least=1)


@dataclass
class Corpus:
    name: str = key("of the pair, for tables")
    tokenizer: str = key("small or gpt2")
    documents: int | None = key("documents of each part of shipped text; null: all", least=1)
    a: Text = group(Text)
    b: Text = group(Text)


@dataclass
class LanguageModel:
    name: str = key("name of this shape")
    layers: int = key("blocks", least=1)
    heads: int = key("attention heads", least=1)
    width: int = key("features", least=1)
    block: int = key("tokens of a window", least=1)
    vocabulary: int = key("tokens there are", least=1)
    key_value_heads: int | None = key("fewer than heads: grouped-query attention", least=1)
    qkv: str = key("one layer for queries, keys and values, or three", choices=("fused", "split"))
    activation: str = key("of the MLP", choices=("gelu", "squared_relu", "swiglu"))
    bias: bool = key("linear layers with a bias")
    tied: bool = key("the head is the token embedding")
    dropout: float = key("share of activations dropped", least=0, most=1)
    residual_lambdas: bool | None = key(
        "blocks read a learned weighting of the residual stream and the embedding; null: false", added=True
    )


@dataclass
class TextPhase:
    passes: float | None = key("length in passes over its tokens", above=0)
    iterations: int | None = key("length in iterations", least=1)
    stop_at: int | None = key("iteration at which it ends before its schedule does", least=1)
    share_a: float = key("share of corpus A", least=0, most=1)
    block: int | None = key("tokens of a window; null: model.block", least=1, added=True)
    eval_every: int | None = key("iterations; null: min(2000, iterations // 20)", least=1)
    save_at: list[int] = key("iterations whose checkpoint is kept by name", least=1)


@dataclass
class LanguageBoundary:
    fork: str = key("checkpoint that phase 2 starts from: best, last or an iteration of save_at")
    batches: int = key("batches of the coming phase that a method may look at", least=1)


@dataclass
class LanguageRun(RunKeys):
    peak_tflops: float | None = key(
        "of one device, for MFU; null: the vendor's figure", above=0, numbers=False
    )


@dataclass
class Language(Keys):
    corpus: Corpus = group(Corpus)
    model: LanguageModel = group(LanguageModel)
    boundary: LanguageBoundary = group(LanguageBoundary)
    phase_1: TextPhase = group(TextPhase)
    phase_2: TextPhase = group(TextPhase)
    accumulation: int = key("micro-batches of an iteration, all processes together", least=1)
    final_learning_rate: float = key("at the end of a phase", least=0)
    warmup_share: float = key("share of a phase in which the learning rate rises", least=0, most=1)
    warmup_limit: int = key("iterations of warm-up at most", least=0)
    betas: list[float] = key(
        "Adam's two averages", least=0, most=1, form="give two numbers from 0 to below 1"
    )
    weight_decay: float = key("of matrices", least=0)
    clip_norm: float = key("largest norm of the gradient; inf does not clip", above=0)
    eval_windows: int = key("validation windows of each corpus", least=1)
    eval_batch_size: int = key("windows of an evaluation batch", least=1, numbers=False)
    precision: str = key("fp16 scales the loss", choices=("fp32", "bf16", "fp16"))
    tf32: bool = key("on GPUs: float32 products in TF32")
    parallel: str = key(
        "several processes (torchrun): each with the whole net, or with a part of it",
        choices=("ddp", "fsdp"),
        numbers=False,
    )
    run: LanguageRun = group(LanguageRun)


# ------------------------------------------------------------------------------------------------ dqn
@dataclass
class Game:
    game: str = key("asterix, breakout, any other of ale-py, or catch")
    frame_size: int = key("pixels of a side", least=1)
    environments: int = key("games played side by side", least=1)
    sticky: float = key("chance that the last action is repeated", least=0, most=1)


@dataclass
class Network:
    convolutions: list[list[int]] = key(
        "of each layer", least=1, form="give [channels, kernel, stride] for each, whole numbers above 0"
    )
    hidden: int = key("features of the hidden layer", least=1)


@dataclass
class DqnRun(RunKeys):
    video: bool = key("write policy.gif at the end", numbers=False)
    emulator_threads: int = key("threads of the emulators", least=1, numbers=False)


@dataclass
class Dqn(Keys):
    env: Game = group(Game)
    network: Network = group(Network)
    compat: str = key("protocol, see rl/dqn/README.md", choices=("official", "corrected"))
    total_steps: int = key("transitions over all environments", least=1)
    midpoint: int = key("transitions before the boundary", least=1)
    replay_capacity: int = key("transitions", least=1)
    learning_starts: int = key("transitions before the first update", least=0)
    updates_per_transition: float = key("gradient steps", above=0, most=1000)
    epsilon_steps: int = key("transitions in which exploration falls", least=1)
    epsilon_final: float = key("share of random actions from then on", least=0, most=1)
    discount: float = key("of later rewards", least=0, most=1)
    adam_epsilon: float = key("Adam's denominator", least=0, most=1)
    target_every: int = key("transitions between copies into the target network", least=1)
    eval_every: int = key("transitions between evaluations", least=1)
    eval_epsilon: float = key("share of random actions in evaluation", least=0, most=1)
    eval_steps: int = key("compat=official: steps of an evaluation", least=1)
    eval_episodes: int = key("compat=corrected: episodes of an evaluation", least=1)
    eval_max_steps: int = key("steps of an evaluation episode at most", least=1)
    random_episodes: int = key("episodes of random actions at the start", least=1)
    log_every: int = key("transitions between lines of metrics", least=1)
    metrics_samples: int = key("stacks on which plasticity is measured", least=1)
    precision: str = key("of the updates; last layer and loss stay fp32", choices=("fp32", "bf16"))
    channels_last: bool = key("memory order of frames and convolutions; the same numbers up to rounding")
    run: DqnRun = group(DqnRun)


# ------------------------------------------------------------------------------------------------ sac
@dataclass
class ControlTask:
    name: str = key("task: h1-walk-v0, Hopper-v5, any continuous one of the backend")
    backend: str = key("package that it is from", choices=("gymnasium", "dm_control", "humanoid_bench"))
    action_repeat: int = key("environment steps of an agent step", least=1)


@dataclass
class ActorKeys:
    width: int = key("features", least=1)
    blocks: int = key("residual blocks", least=0)


@dataclass
class CriticKeys(ActorKeys):
    count: int = key("critics", least=1)


@dataclass
class SacBoundary:
    temperature: str = key("entropy temperature at the boundary", choices=("renew", "keep"))
    normaliser: str = key("observation statistics at the boundary", choices=("renew", "keep"))


@dataclass
class Sac(Keys):
    env: ControlTask = group(ControlTask)
    actor: ActorKeys = group(ActorKeys)
    critic: CriticKeys = group(CriticKeys)
    boundary: SacBoundary = group(SacBoundary)
    compat: str = key("fair: none gets the boundary's renewal too", choices=("fair", "official"))
    steps: int = key("agent steps: environment steps divided by env.action_repeat", least=1)
    midpoint: int = key("agent steps before the boundary", least=1)
    learning_starts: int = key("agent steps of random actions before the first update", least=0)
    eval_every: int = key("agent steps between evaluations", least=1)
    eval_episodes: int = key("episodes of an evaluation", least=1)
    eval_limit: int = key("agent steps of an evaluation episode at most", least=1)
    random_episodes: int = key("episodes of random actions at the start", least=1)
    updates_per_step: int = key("gradient steps of an agent step", least=1)
    replay: int = key("transitions that are kept", least=1)
    weight_decay: float = key("of actor and critics", least=0, most=1e6)
    discount: float = key("of later rewards", least=0, most=1)
    tau: float = key("share of the critics that moves into the target", least=0, most=1)
    temperature: float = key("initial entropy temperature", above=0, most=1e6)
    target_entropy: float = key("minus this, times the number of actions", least=0, most=1e6)
    precision: str = key("of the updates; output layers and losses stay fp32", choices=("fp32", "bf16"))


SCHEMAS: dict[str, type] = {"vision": Vision, "language": Language, "dqn": Dqn, "sac": Sac}
