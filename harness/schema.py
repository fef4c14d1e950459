"""The keys of all training scripts: type, range and meaning. Their values are in `conf/`.

There is one dataclass for each script and each group of keys. `checks.check` compares a composed config with them, and
`--help` prints them. Keys marked `numbers=False` cannot change a run's numbers.
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
    """Return the dataclass field of one key.

    Args:
        meaning: the phrase that `--help` prints.
        least, most: smallest and largest value allowed. above: values must be larger than this. choices: all values.
        each: for keys of type Any, which hold one value of this type or a list of them.
        form: what a value must be, if type and range do not say it.
        numbers: whether the key can change the numbers of a run.
        added: whether runs exist that are older than the key. The value null is then not part of a run's identity, so
            that these runs keep their folders.
    """
    metadata = {"meaning": meaning, "least": least, "above": above, "most": most, "choices": choices}
    metadata |= {"each": each, "form": form, "numbers": numbers, "added": added}
    return field(default=MISSING, metadata=metadata)


def group(cls: type) -> Any:
    """Return the dataclass field of a group of keys."""
    return field(default_factory=cls)


@dataclass
class RunKeys:
    root: str = key("folder of all runs", form="give the folder that all runs go to", numbers=False)
    trunk: bool = key("share phase 0 between methods that do nothing in it", numbers=False)
    checkpoint_seconds: float = key("seconds between checkpoints", least=0, numbers=False)
    checkpoint_steps: int = key("steps between checkpoints; 0: by time only", least=0, numbers=False)
    checkpoint_share: float = key(
        "largest share of the time spent on saving; if saving takes longer, checkpoints become rarer",
        above=0,
        most=1,
        numbers=False,
    )
    keep: int = key("number of checkpoints that are kept", least=1, numbers=False)
    progress: bool = key("show a progress bar in a terminal", numbers=False)
    tracker: str = key(
        "tracker that gets a copy of metrics.jsonl",
        choices=("none", "tensorboard", "trackio", "wandb"),
        numbers=False,
    )
    data_root: str = key("folder of downloaded and prepared data", numbers=False)


@dataclass
class TriggerKeys:
    """Settings of the trigger. Those that the chosen trigger does not have stay null."""

    name: str = key("when the method acts: one of conf/trigger; boundary: at boundaries")
    metric: str | None = key("plateau: the logged metric")
    mode: str | None = key(
        "plateau: min if smaller values are better, max if larger ones are", choices=(None, "min", "max")
    )
    patience: int | None = key("plateau: records to wait for an improvement", least=1)
    min_change: float | None = key("plateau: smallest change that counts as an improvement", least=0)
    level: float | None = key("dormancy, dfi: the method acts above this value", least=0)
    share: float | None = key(
        "rank, gradient: the method acts below this share of the highest value", above=0, most=1
    )
    steps: int | None = key("every: steps between two interventions", least=1)
    cooldown: int | None = key("smallest number of steps between two interventions", least=0)


@dataclass
class Keys:
    """The keys that all scripts share."""

    experiment: str = key("file of conf/experiment")
    size: str = key("a size that the experiment has")
    seed: int = key(
        "seed of all random numbers",
        least=0,
        most=2**63 - 1,
        form="give a whole number, 0 or more and below 2**63",
    )
    method: dict[str, Any] = key("what happens between phases; settings as in conf/method")
    trigger: TriggerKeys = group(TriggerKeys)
    optimizer_state: str = key("what happens to the optimizer state at a boundary", choices=POLICIES)
    batch_size: int = key("samples per step", least=1)
    learning_rate: float = key("peak learning rate", above=0)
    device: str = key("device to train on: auto, cpu, cuda or cuda:<n>", numbers=False)
    compile: bool = key("train through torch.compile")
    threads: int = key("CPU threads", least=1, numbers=False)
    minutes: float | None = key("expected duration of a run on a CPU", numbers=False)
    run: RunKeys = group(RunKeys)


# ------------------------------------------------------------------------------------------------ vision
@dataclass
class Protocol:
    """Settings of the protocol. Those that the chosen protocol does not have stay null."""

    name: str = key("warm_start, continual, class_incremental, random_label, label_noise or permuted")
    epochs: Any = key(
        "epochs per phase",
        each=int,
        least=1,
        form="give a whole number, 1 or more, or one for each phase as in [20,2]",
    )
    share: float | None = key("share of the data in the first phase", above=0, most=1)
    stages: int | None = key("continual, class_incremental: number of phases", least=1)
    replay: float | None = key(
        "share of the images of earlier phases that is kept; null: all, as in the paper", least=0, most=1
    )
    tasks: int | None = key("random_label, permuted: number of tasks, which are the phases", least=1)
    count: int | None = key("random_label, permuted: images per task", least=1)
    noisy: int | None = key("label_noise: images with random labels", least=1)
    clean: int | None = key("label_noise: images with true labels", least=1)


@dataclass
class Pictures:
    name: str = key("data set: one of conf/data")
    folder: str | None = key("where the files are; null: below run.data_root", numbers=False)
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
    compat: str = key("default of the next four keys, see DEVIATIONS.md", choices=WHOSE)
    schedule: str = key("learning rate in each epoch", choices=WHOSE)
    splits: str = key("which images or classes each phase holds", choices=WHOSE)
    batch_norm_start: str = key("running statistics before the first step", choices=WHOSE)
    normalisation: str = key("mean and deviation by which images are normalised", choices=WHOSE)
    mode_at_boundary: str = key("mode of the network while a method acts", choices=("train", "eval"))
    eval_every: int = key("epochs between evaluations", least=1)
    metrics_samples: int = key("training images on which plasticity is measured", least=1)
    eval_batch_size: int = key("images per evaluation batch", least=1, numbers=False)
    precision: str = key(
        "precision of training; fp32: PyTorch's default, with TF32 in convolutions on GPUs; tf32: TF32 in all products",
        choices=("fp32", "tf32", "bf16"),
    )
    channels_last: bool = key("use the channels-last memory format")
    run: VisionRun = group(VisionRun)


# ------------------------------------------------------------------------------------------------ language
@dataclass
class Text:
    name: str = key("corpus")
    folder: str | None = key("a prepared folder; null: below run.data_root")
    train_tokens: int | None = key("use only this many training tokens, the first ones; null: all", least=1)


@dataclass
class Corpus:
    name: str = key("name of the pair of corpora, for tables")
    tokenizer: str = key("tokenizer: small or gpt2")
    documents: int | None = key("documents from each part of the shipped text; null: all", least=1)
    a: Text = group(Text)
    b: Text = group(Text)


@dataclass
class LanguageModel:
    name: str = key("name of the network, for tables")
    layers: int = key("blocks", least=1)
    heads: int = key("attention heads", least=1)
    width: int = key("features of the residual stream", least=1)
    block: int = key("tokens per window", least=1)
    vocabulary: int = key("tokens in the vocabulary", least=1)
    key_value_heads: int | None = key(
        "heads of keys and values; fewer than heads: grouped-query attention", least=1
    )
    qkv: str = key("one layer for queries, keys and values, or three", choices=("fused", "split"))
    activation: str = key("activation of the MLP", choices=("gelu", "squared_relu", "swiglu"))
    bias: bool = key("give linear layers a bias")
    tied: bool = key("use the token embedding as the head")
    dropout: float = key("share of activations that are dropped", least=0, most=1)
    residual_lambdas: bool | None = key(
        "blocks read a learned weighting of the residual stream and the embedding; null: false", added=True
    )


@dataclass
class TextPhase:
    passes: float | None = key("length of the phase in passes over its tokens", above=0)
    iterations: int | None = key("length of the phase in iterations", least=1)
    stop_at: int | None = key("iteration at which the phase stops, before the end of its schedule", least=1)
    share_a: float = key("share of corpus A in the text", least=0, most=1)
    block: int | None = key("tokens per window; null: model.block", least=1, added=True)
    eval_every: int | None = key("iterations between evaluations; null: min(2000, iterations // 20)", least=1)
    save_at: list[int] = key("iterations whose checkpoints are kept", least=1)


@dataclass
class LanguageBoundary:
    fork: str = key("checkpoint that phase 2 starts from: best, last or an iteration of save_at")
    batches: int = key("batches of the coming phase that a method may look at", least=1)


@dataclass
class LanguageRun(RunKeys):
    peak_tflops: float | None = key(
        "peak TFLOP/s of one device, for MFU; null: the vendor's figure", above=0, numbers=False
    )


@dataclass
class Language(Keys):
    corpus: Corpus = group(Corpus)
    model: LanguageModel = group(LanguageModel)
    boundary: LanguageBoundary = group(LanguageBoundary)
    phase_1: TextPhase = group(TextPhase)
    phase_2: TextPhase = group(TextPhase)
    accumulation: int = key("micro-batches per iteration, over all processes", least=1)
    final_learning_rate: float = key("learning rate at the end of a phase", least=0)
    warmup_share: float = key("share of a phase in which the learning rate rises", least=0, most=1)
    warmup_limit: int = key("largest number of warm-up iterations", least=0)
    betas: list[float] = key(
        "decay rates of Adam's two averages", least=0, most=1, form="give two numbers from 0 to below 1"
    )
    weight_decay: float = key("weight decay of matrices", least=0)
    clip_norm: float = key("largest norm of the gradient; inf does not clip", above=0)
    eval_windows: int = key("validation windows per corpus", least=1)
    eval_batch_size: int = key("windows per evaluation batch", least=1, numbers=False)
    precision: str = key("precision of training; fp16 scales the loss", choices=("fp32", "bf16", "fp16"))
    tf32: bool = key("on GPUs, compute float32 products in TF32")
    run: LanguageRun = group(LanguageRun)


# ------------------------------------------------------------------------------------------------ dqn
@dataclass
class Game:
    game: str = key("asterix, breakout, any other of ale-py, or catch")
    frame_size: int = key("pixels per side", least=1)
    environments: int = key("games played side by side", least=1)
    sticky: float = key("chance that the last action is repeated", least=0, most=1)


@dataclass
class Network:
    convolutions: list[list[int]] = key(
        "shape of each convolution",
        least=1,
        form="give [channels, kernel, stride] for each, whole numbers above 0",
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
    replay_capacity: int = key("transitions that the replay holds", least=1)
    learning_starts: int = key("transitions before the first update", least=0)
    updates_per_transition: float = key("gradient steps per transition", above=0, most=1000)
    epsilon_steps: int = key("transitions over which exploration falls", least=1)
    epsilon_final: float = key("share of random actions after that", least=0, most=1)
    discount: float = key("discount of later rewards", least=0, most=1)
    adam_epsilon: float = key("epsilon in Adam's denominator", least=0, most=1)
    target_every: int = key("transitions between copies into the target network", least=1)
    target_ema: float | None = key(
        "share of itself that the target network keeps in each update; null: it is copied",
        least=0,
        most=1,
        added=True,
    )
    n_step: int | None = key("rewards that a target sums up; null: 1", least=1, added=True)
    double: bool | None = key("the trained network chooses the next action; null: false", added=True)
    terminal_on_life_loss: bool | None = key("targets end where a life is lost; null: false", added=True)
    priming: int | None = key(
        "updates on the first learning_starts transitions; null: 0", least=1, added=True
    )
    eval_every: int = key("transitions between evaluations", least=1)
    eval_epsilon: float = key("share of random actions in evaluation", least=0, most=1)
    eval_steps: int = key("compat=official: steps per evaluation", least=1)
    eval_episodes: int = key("compat=corrected: episodes per evaluation", least=1)
    eval_max_steps: int = key("largest number of steps in an evaluation episode", least=1)
    random_episodes: int = key("episodes of random actions at the start", least=1)
    log_every: int = key("transitions between lines of metrics", least=1)
    metrics_samples: int = key("stacks of frames on which plasticity is measured", least=1)
    precision: str = key("precision of the updates; last layer and loss stay fp32", choices=("fp32", "bf16"))
    channels_last: bool = key("use the channels-last memory format; changes numbers by rounding only")
    run: DqnRun = group(DqnRun)


# ------------------------------------------------------------------------------------------------ sac
@dataclass
class ControlTask:
    name: str = key("task: h1-walk-v0, Hopper-v5 or any other continuous task of the backend")
    backend: str = key("package that the task is from", choices=("gymnasium", "dm_control"))
    action_repeat: int = key("environment steps per agent step", least=1)


@dataclass
class ActorKeys:
    width: int = key("features", least=1)
    blocks: int = key("residual blocks", least=0)


@dataclass
class CriticKeys(ActorKeys):
    count: int = key("number of critics", least=1)


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
    compat: str = key(
        "fair: under method=none, too, the boundary renews what it renews for others",
        choices=("fair", "official"),
    )
    steps: int = key("agent steps: environment steps divided by env.action_repeat", least=1)
    midpoint: int = key("agent steps before the boundary", least=1)
    learning_starts: int = key("agent steps of random actions before the first update", least=0)
    eval_every: int = key("agent steps between evaluations", least=1)
    eval_episodes: int = key("episodes per evaluation", least=1)
    eval_limit: int = key("largest number of agent steps in an evaluation episode", least=1)
    random_episodes: int = key("episodes of random actions at the start", least=1)
    updates_per_step: int = key("gradient steps per agent step", least=1)
    replay: int = key("transitions that the replay holds", least=1)
    weight_decay: float = key("weight decay of actor and critics", least=0, most=1e6)
    discount: float = key("discount of later rewards", least=0, most=1)
    tau: float = key(
        "share of the critics that moves into the target critics in each update", least=0, most=1
    )
    temperature: float = key("initial entropy temperature", above=0, most=1e6)
    target_entropy: float = key(
        "the target entropy is minus this, times the number of actions", least=0, most=1e6
    )
    precision: str = key(
        "precision of the updates; output layers and losses stay fp32", choices=("fp32", "bf16")
    )


SCHEMAS: dict[str, type] = {"vision": Vision, "language": Language, "dqn": Dqn, "sac": Sac}
