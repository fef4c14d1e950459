"""The settings of language/train.py, and what the harness must know about that script."""

from dataclasses import dataclass

from omegaconf import DictConfig

from fire_core.errors import UserError
from harness.settings import Domain, Keys, group, key
from harness.trial import TrialKeys
from language.model import Shape

SHORTEST_OF_QUESTIONS = 32  # tokens in the shortest window


@dataclass
class Text:
    name: str = key("corpus")
    folder: str | None = key("a prepared folder; null: below run.data_root")
    train_tokens: int | None = key("use only this many training tokens, the first ones; null: all", least=1)


@dataclass
class Corpus:
    name: str = key("name of the pair of corpora, for tables")
    tokenizer: str = key("tokenizer of text without a folder: small or gpt2")
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
    key_value_heads: int | None = key("heads of keys and values; null: as many as heads", least=1)
    qkv: str = key("one layer for queries, keys and values, or three", choices=("fused", "split"))
    activation: str = key("activation of the MLP", choices=("gelu", "squared_relu", "swiglu"))
    bias: bool = key("give linear layers a bias")
    tied: bool = key("use the token embedding as the head")
    dropout: float = key("share of activations that are dropped", least=0, most=1)
    residual_lambdas: bool | None = key("learned weights of residual stream and embedding", added=True)


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
class Language(Keys):
    corpus: Corpus = group(Corpus)
    model: LanguageModel = group(LanguageModel)
    boundary: LanguageBoundary = group(LanguageBoundary)
    trial: TrialKeys = group(TrialKeys)
    phase_1: TextPhase = group(TextPhase)
    phase_2: TextPhase = group(TextPhase)
    accumulation: int = key("micro-batches per iteration, over all processes", least=1)
    final_learning_rate: float = key("learning rate at the end of a phase", least=0)
    warmup_share: float = key("share of a phase in which the learning rate rises", least=0, most=1)
    warmup_limit: int = key("largest number of warm-up iterations", least=0)
    betas: list[float] = key("decay rates of Adam's two averages", least=0)
    weight_decay: float = key("weight decay of matrices", least=0)
    clip_norm: float = key("largest norm of the gradient; inf does not clip", above=0)
    eval_windows: int = key("validation windows per corpus", least=1)
    eval_batch_size: int = key("windows per evaluation batch", least=1, numbers=False)
    precision: str = key("precision of training; fp16 scales the loss", choices=("fp32", "bf16", "fp16"))
    tf32: bool = key("on GPUs, compute float32 products in TF32")


def check_settings(cfg: DictConfig) -> Shape:
    """Return the shape of the model. Raises UserError for settings that do not fit together."""
    if len(cfg.betas) != 2 or not all(beta < 1 for beta in cfg.betas):
        raise UserError(f"betas={cfg.betas}: give two numbers from 0 to below 1, as in betas=[0.9,0.95]")
    for phase in ("phase_1", "phase_2"):
        passes, iterations = cfg[phase].passes, cfg[phase].iterations
        if (passes is None) == (iterations is None):
            both = f"{phase}.passes={passes or 'null'} and {phase}.iterations={iterations or 'null'}"
            raise UserError(f"{both}: give one of them, and null for the other")
        if (cfg[phase].block or 0) > cfg.model.block:
            wrong = f"{phase}.block={cfg[phase].block}: the model has {cfg.model.block} positions"
            raise UserError(f"{wrong}; set model.block to the longest window of both phases")
    shortest = min(cfg[phase].block or cfg.model.block for phase in ("phase_1", "phase_2"))
    if "questions" in (cfg.corpus.a.name, cfg.corpus.b.name) and shortest < SHORTEST_OF_QUESTIONS:
        wrong = f"windows of {shortest} tokens with the corpus questions may hold no answer, all that its loss counts"
        raise UserError(f"{wrong}: use a block of {SHORTEST_OF_QUESTIONS} or more")
    return Shape(**{k: v for k, v in cfg.model.items() if k != "name" and v is not None})


DOMAIN = Domain(
    name="language",
    script="language/train.py",
    keys=Language,
    shown=("corpus.name", "model.name"),
    at_boundary=("boundary", "trial"),
    refuses={
        "fire_all": "fire does the same here",
        "plasticity_injection": "it needs an encoder and a head, as in DQN and SAC",
    },
    check=check_settings,
    needs=("tokenizers",),
    watched=("train_loss", "val_loss_a", "val_loss_b", "val_loss_mix"),
    extras=("language", "language-data"),
    results=("val_loss_a", "val_loss_b", "val_loss_mix"),
)
