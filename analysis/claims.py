"""The paper's claims as orderings of two methods at the end of training, and whether our runs bear them
out."""

from __future__ import annotations

from dataclasses import dataclass

from analysis import curves, measures, paper, style
from analysis.load import Results
from analysis.stats import Estimate, estimate, paired_difference


@dataclass(frozen=True)
class Claim:
    """`better` ends better than `worse` in one panel. `source`: who says so."""

    figure: str
    panel: str
    better: str
    worse: str
    source: str = "paper's text"

    @property
    def experiment(self) -> str:
        return f"{self.figure}_{self.panel}" if self.figure else self.panel

    @property
    def text(self) -> str:
        return f"{style.look(self.better).name} > {style.look(self.worse).name}"


@dataclass(frozen=True)
class Verdict:
    """One claim at one size: ours, the difference that counts (positive = as claimed) and the word for it."""

    claim: Claim
    size: str
    data: str
    better: Estimate | None
    worse: Estimate | None
    gain: Estimate | None
    word: str


def _orderings(figure: str, panel: str, pairs: str, source: str = "paper's text") -> list[Claim]:
    return [Claim(figure, panel, *pair.split(">"), source) for pair in pairs.split()]


FIGURE = "read off the figure"
PICTURES = "the paper's cell, on a few CIFAR-10 pictures with a narrow net"
STAND_INS = (
    *("literature, not the paper", "stand-in game, not the paper", "stand-in task, not the paper"),
    PICTURES,
)
SAME_CELL = {"pictures_resnet18": ("fig2a", "cifar10_resnet18")}  # the paper's pair is shown beside ours
CLAIMS = [
    *_orderings("fig2a", "cifar10_resnet18", "fire>none fire>shrink_perturb fire>dash"),
    *_orderings("fig2a", "cifar10_resnet18", "full_reset>fire", FIGURE),
    *_orderings("fig2a", "cifar100_vit_tiny", "fire>none dash>fire"),
    *_orderings("fig2a", "tiny_imagenet_vgg16", "fire>none fire>shrink_perturb fire>dash"),
    *_orderings("fig2a", "tiny_imagenet_vgg16", "full_reset>fire", FIGURE),
    *_orderings("fig2b", "cifar10_resnet18", "fire>none fire>shrink_perturb"),
    *_orderings("fig2b", "cifar100_vit_tiny", "fire>none"),
    *_orderings("fig2b", "cifar100_vit_tiny", "full_reset>fire", FIGURE),
    *_orderings("fig2b", "tiny_imagenet_vgg16", "fire>none fire>shrink_perturb"),
    *_orderings("fig2b", "tiny_imagenet_vgg16", "full_reset>fire", FIGURE),
    *_orderings("fig2c", "cifar100_vit_tiny", "fire>none"),
    *_orderings("fig2c", "cifar100_vit_tiny", "shrink_perturb>fire", FIGURE),
    *_orderings("fig2c", "tiny_imagenet_vgg16", "fire>none fire>shrink_perturb"),
    *_orderings("fig2c", "tiny_imagenet_vgg16", "full_reset>fire", FIGURE),
    *[
        c
        for fork in ("best", "30k", "60k")
        for c in _orderings("fig3", fork, "fire>none fire>shrink_perturb")
    ],
    *[c for fork in ("best", "30k", "60k") for c in _orderings("fig3", fork, "fire>full_reset")],
    *_orderings(
        "fig4a", "asterix", "fire>none fire>full_reset fire>shrink_perturb fire>plasticity_injection"
    ),
    *_orderings("fig4a", "beam_rider", "fire>none fire>shrink_perturb fire>plasticity_injection"),
    *_orderings("fig4a", "demon_attack", "fire>full_reset fire>shrink_perturb fire>plasticity_injection"),
    *_orderings("fig4b", "walk", "fire>none fire>plasticity_injection"),
    *_orderings("fig4b", "walk", "shrink_perturb>fire", FIGURE),
    *_orderings("fig4b", "balance_simple", "fire>none fire>shrink_perturb fire>plasticity_injection"),
    *_orderings("fig4b", "run", "fire>none fire>shrink_perturb fire>plasticity_injection"),
    *[
        claim
        for probe in ("random_label", "label_noise", "permuted")
        for claim in _orderings(
            "", probe, "full_reset>none fire>none fire>shrink_perturb", "literature, not the paper"
        )
    ],
    *_orderings("", "pictures_resnet18", "fire>none fire>shrink_perturb fire>dash full_reset>fire", PICTURES),
    *_orderings("fig4a", "catch", "fire>none fire>full_reset fire>shrink_perturb", STAND_INS[1]),
    *_orderings(
        "fig4a", "breakout", "fire>none fire>full_reset fire>shrink_perturb", "stand-in game, not the paper"
    ),
    *_orderings(
        "fig4b", "hopper", "fire>none fire>full_reset fire>shrink_perturb", "stand-in task, not the paper"
    ),
]


def paper_values(claim: Claim) -> tuple[float | None, float | None]:
    """The paper's end values of the two methods, None where it has none."""
    ends = paper.end_values(*SAME_CELL.get(claim.experiment, (claim.figure, claim.panel)))
    return ends.get(claim.better), ends.get(claim.worse)


@dataclass(frozen=True)
class Setting:
    """One experiment, size and data set: {label: {seed: end value}} of its headline measure."""

    experiment: str
    size: str
    data: str
    higher_is_better: bool
    ends: dict[str, dict[int, float]]


def settings(results: Results) -> list[Setting]:
    """Every setting of `results` that a claim speaks of."""
    spoken = {claim.experiment for claim in CLAIMS}
    found = []
    for part in curves.settings(results, sorted(spoken & set(results.finished["experiment"]))):
        first = part.finished.iloc[0]
        logged = measures.measures_of(part, str(first["experiment"]))
        if logged:
            ends = measures.end_values(part.metrics, logged[0])
            by_label = {str(label): measures.by_seed(ends, label) for label in ends["label"].unique()}
            names = (str(first[key]) for key in ("experiment", "size", "data"))
            found.append(Setting(*names, logged[0].higher_is_better, by_label))
    return found


def judge(claim: Claim, known: list[Setting], size: str) -> list[Verdict]:
    """One verdict per data set on which both methods were run at this size; a single "not run" otherwise."""
    verdicts = []
    for setting in known:
        if (setting.experiment, setting.size) == (claim.experiment, size):
            better, worse = (setting.ends.get(label, {}) for label in (claim.better, claim.worse))
            sign = 1.0 if setting.higher_is_better else -1.0
            gain = paired_difference(
                *({seed: sign * v for seed, v in ends.items()} for ends in (better, worse))
            )
            if gain is not None:
                both = better.keys() & worse.keys()  # the values shown are those that the gain is made of
                values = (estimate([ends[seed] for seed in sorted(both)]) for ends in (better, worse))
                verdicts.append(Verdict(claim, size, setting.data, *values, gain, word(gain, size)))
    return verdicts or [Verdict(claim, size, "", None, None, None, "not run")]


def word(gain: Estimate, size: str) -> str:
    """The verdict in words. Only the paper's own size can reproduce a claim of the paper."""
    if gain.low is None:
        return f"one seed, {'as' if gain.value > 0 else 'not as'} claimed"
    if gain.low > 0:
        return "reproduced" if size == "paper" else "holds"
    if gain.high is not None and gain.high < 0:
        return "not reproduced" if size == "paper" else "the opposite holds"
    return "cannot be told apart"
