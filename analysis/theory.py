"""The theorems of the FIRE paper compared with measurements: python -m analysis.theory RUNS

RUNS holds finished runs of `none` on random labels (an MLP, to which the theorems apply). The shared first phases of
other networks in RUNS are used for the premise DfI < 1 alone. Writes theory.csv and theory_premise.csv, and draws the
figure.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from analysis.plot import Figure, look, plt
from analysis.results_file import merge
from analysis.runs import RESULTS
from fire_core import Phase, State, UserError, find_targets
from fire_core.errors import print_error
from fire_core.measure.bounds import (
    activity_bound,
    covariance_bounds,
    curvature_bound,
    deviation_up_to_scale,
    rank_bound,
)
from fire_core.measure.metrics import covariance_shift, deviation_from_isometry, feature_rank, hessian_norm
from fire_core.methods import create
from harness.runs import generator, seeded
from harness.runs.folders import find_folders, read_config
from language.model import Decoder, Shape
from vision.data import load
from vision.models import build
from vision.protocols import make_batch, make_phases

METHODS = ("none", "fire", "fire_exact", "shrink_perturb", "full_reset")
SAMPLES = 512
THEOREMS = {
    "1": "Theorem 1: shift of the\nfeatures' covariance, squared",
    "2": "Theorem 2: norm of the Hessian",
    "3": "Theorem 3: effective rank\nof a layer's output",
    "4": "Theorem 4: activity of a unit,\nlargest factor from the mean",
}


# ------------------------------------------------------------------------------------------------ one network
def weights_and_features(net: nn.Module, inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights of an MLP's layers and the outputs of the layers without biases, as in the theorems. ReLU
    follows all layers but the last."""
    weights = [module.weight.detach() for module in net.modules() if isinstance(module, nn.Linear)]
    features, last = [], inputs
    for place, weight in enumerate(weights):
        last = linear(last, weight)
        last = last.relu() if place + 1 < len(weights) else last
        features.append(last)
    return weights, features


def rows_of(net: nn.Module, trained: nn.Module, inputs: Tensor, labels: Tensor) -> Iterator[dict[str, Any]]:
    """Yield a row with the measured value and the bound for each theorem and layer of `net`, a treated copy of
    `trained`; Theorem 2 has one row for the network."""
    weights, features = weights_and_features(net, inputs)
    old_weights, old_features = weights_and_features(trained, inputs)
    stored = [float(deviation_from_isometry(w)) for w in weights]
    scaled = [float(deviation_up_to_scale(w.double())) for w in weights]
    bounds = covariance_bounds(old_weights, weights, inputs, old_features, features)
    reads = [inputs, *features[:-1]]
    for place, (weight, output, bound) in enumerate(zip(weights, features, bounds, strict=True)):
        shared = {"layer": place + 1, "dfi": stored[place], "dfi_scaled": scaled[place]}
        shift = float(covariance_shift(old_features[place], output))
        yield shared | {"theorem": "1", "measured": shift, "bound": bound, "holds": shift <= bound}
        spectrum = torch.linalg.eigvalsh(_read_covariance(reads[place], weight))
        seen = spectrum[spectrum > 1e-6 * spectrum.max()]
        rank = int(feature_rank(linear(reads[place], weight)))
        least = rank_bound(scaled[place], seen)
        yield shared | {
            "theorem": "3",
            "measured": rank,
            "bound": least,
            "holds": None if least is None else rank >= least,
        }
        if weight.shape[0] <= weight.shape[1]:  # more units than inputs cannot be orthogonal
            activity = weight.norm(dim=1)
            share = activity / activity.mean()
            factor = float(torch.maximum(share.max(), 1 / share.min()))
            most = activity_bound(scaled[place])
            yield shared | {
                "theorem": "4",
                "measured": factor,
                "bound": most,
                "holds": None if most is None else factor <= most * (1 + 1e-5),
            }
    yield {"theorem": "2", "layer": 0} | _curvature(weights, stored, inputs, labels)


def _read_covariance(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return Q^T Sigma Q in float64: the covariance of the inputs along the right singular vectors of the weight."""
    _, _, right = torch.linalg.svd(weight.double(), full_matrices=False)
    seen = inputs.double() @ right.mT
    return seen.mT @ seen / len(inputs)


def _curvature(
    weights: list[Tensor], deviations: list[float], inputs: Tensor, labels: Tensor
) -> dict[str, Any]:
    leaves = [weight.clone().requires_grad_() for weight in weights]

    def output() -> Tensor:
        last = inputs
        for place, weight in enumerate(leaves):
            last = linear(last, weight)
            last = last.relu() if place + 1 < len(leaves) else last
        return last

    measured = float(
        hessian_norm(lambda: cross_entropy(output(), labels), leaves, generator=generator(1, "hessian"))
    )
    shares = output().detach().softmax(dim=1)
    of_output = torch.diag_embed(shares) - shares.unsqueeze(2) * shares.unsqueeze(1)
    slope = shares - nn.functional.one_hot(labels, shares.shape[1])
    variance = float(torch.linalg.eigvalsh(inputs.mT @ inputs / len(inputs)).max())
    hessian, gradient = float(torch.linalg.matrix_norm(of_output, 2).max()), float(slope.norm(dim=1).max())
    bound = curvature_bound(deviations, hessian, gradient, variance)
    return {"measured": measured, "bound": bound, "holds": measured <= bound}


# ------------------------------------------------------------------------------------------------ runs
def treated(net: nn.Module, initial: dict[str, Tensor], method: str, seed: int, **settings: Any) -> nn.Module:
    """Apply the method's boundary to `net` in place and return `net`."""
    state = State({"net": net}, initial={"net": initial}, generator=generator(seed, "method"))
    create(method, **settings).at_boundary(state, Phase(1))
    return net


def theorems(root: Path, experiment: str) -> list[dict[str, Any]]:
    """Return the rows of theory.csv: final networks of `none`, treated by each method, on images of their last task."""
    found = []
    for folder in find_folders(root, [experiment]):
        cfg = OmegaConf.create(read_config(folder))
        if cfg.method.name != "none" or not (folder / "DONE").exists() or folder.parent.name != "none":
            continue
        images = load(**cfg.data, root="data", device=torch.device("cpu"))
        phase = make_phases(**cfg.protocol, images=images, seed=cfg.seed)[-1]
        inputs, labels = make_batch(images, phase, phase.indices[:SAMPLES], phase.labels[:SAMPLES])

        def fresh(cfg: Any = cfg, images: Any = images) -> nn.Module:
            with seeded(cfg.seed, "init"):
                return build(
                    **cfg.model,
                    classes=images.classes,
                    channels=images.channels,
                    image_size=images.image_size,
                )

        saved = torch.load(folder / "checkpoint" / "final.pt", weights_only=True)["net"]
        initial = {name: value.clone() for name, value in fresh().state_dict().items()}
        trained = fresh()
        trained.load_state_dict(saved)
        for method in METHODS:
            net = fresh()
            net.load_state_dict(saved)
            net = treated(net, initial, method, cfg.seed)
            setting = {"network": "MLP, random labels", "method": method, "seed": cfg.seed}
            found += [setting | row for row in rows_of(net, trained, inputs.flatten(1), labels)]
    return found


def _vision(cfg: Any) -> nn.Module:
    return build(**cfg.model, classes=10, channels=3, image_size=cfg.data.image_size)


def _gpt(cfg: Any) -> nn.Module:
    return Decoder(Shape(**{key: value for key, value in cfg.model.items() if key != "name"}))


# network -> (settings that its shared first phases have, function that builds it, iterations of FIRE in the paper)
NETWORKS: dict[str, tuple[dict[str, str], Callable[[Any], nn.Module], int]] = {
    "ResNet-18, warm start": (
        {"data.name": "cifar10", "protocol.name": "warm_start", "model.name": "resnet18"}, _vision, 10,
    ),
    "GPT, language": ({"corpus.a.name": "encyclopaedic", "model.name": "gpt_tiny"}, _gpt, 5),
}  # fmt: skip


def premise(root: Path) -> list[dict[str, Any]]:
    """Return the rows of theory_premise.csv: how many target matrices have DfI < 1, before and after FIRE."""
    found = []
    for path in sorted((root / "trunks").glob("*/checkpoint/end.pt")):
        cfg = OmegaConf.create(read_config(path.parents[1]))
        for network, (wanted, make, iterations) in NETWORKS.items():
            if all(OmegaConf.select(cfg, key) == value for key, value in wanted.items()):
                net, content = make(cfg), torch.load(path, weights_only=True)
                saved = content.get("net") or content["model"]
                for name, method, settings in (
                    ("none", "none", {}),
                    ("fire", "fire", {"iterations": iterations}),
                    ("fire_exact", "fire_exact", {}),
                ):
                    net.load_state_dict(saved)
                    treated(net, {}, method, cfg.seed, **settings)
                    found.append({"network": network, "method": name, "seed": cfg.seed} | _share(net))
    return found


def _share(net: nn.Module) -> dict[str, Any]:
    parameters = dict(net.named_parameters())
    matrices = [t.matrix(parameters).detach() for t in find_targets(net).included]
    stored = torch.tensor([float(deviation_from_isometry(m)) for m in matrices])
    scaled = torch.tensor([float(deviation_up_to_scale(m.double())) for m in matrices])
    return {
        "matrices": len(matrices),
        "below_1": int((stored < 1).sum()),
        "below_1_scaled": int((scaled < 1).sum()),
        "median": float(stored.median()),
        "median_scaled": float(scaled.median()),
    }


# ------------------------------------------------------------------------------------------------ figure and tables
def draw(rows: pd.DataFrame) -> Figure:
    """Return the figure of measured values against bounds, one panel per theorem. Layers without a bound are hollow
    marks at the bottom."""
    figure, grid = plt.subplots(1, 4, figsize=(12.6, 3.4))
    for axis, (theorem, title) in zip(grid, THEOREMS.items()):
        part = rows[(rows["theorem"].astype(str) == theorem) & (rows["measured"] > 0)]
        told = part["bound"].dropna()
        low, high = min(part["measured"].min(), told.min()), max(part["measured"].max(), told.max())
        logarithmic = theorem in "12"
        low, high = (
            (low / 2, high * 2) if logarithmic else (low - 0.05 * (high - low), high + 0.05 * (high - low))
        )
        below = low - 0.12 * (high - low)
        for method in METHODS:
            points, style = part[part["method"] == method], look(method)
            name = "trained" if method == "none" else style.name
            shared = {"edgecolors": style.colour, "marker": style.marker, "s": 18, "linewidths": 0.8}
            axis.scatter(points["measured"], points["bound"], color=style.colour, label=name, **shared)
            without = points[points["bound"].isna()]
            axis.scatter(without["measured"], [below] * len(without), facecolors="none", **shared)
        axis.plot([low, high], [low, high], color="#222222", linewidth=0.8)
        if logarithmic:
            axis.set_xscale("log")
            axis.set_xlim(part["measured"].min() / 3, part["measured"].max() * 30)
            axis.set_yscale("log")
        else:
            axis.axhline(low, color="#BBBBBB", linewidth=0.6)
            axis.annotate("no bound:", (high, low), ha="right", va="bottom", fontsize=7)
        if theorem == "1":
            axis.axhspan(2, high, color="#EFEFEF", zorder=0)  # a shift is never above 2
        axis.set_title(title)
        axis.set_xlabel("measured")
    grid[0].set_ylabel("bound")
    handles, names = grid[1].get_legend_handles_labels()
    figure.legend(
        handles, names, loc="lower center", ncols=len(names), frameon=False, bbox_to_anchor=(0.5, -0.06)
    )
    figure.tight_layout()
    return figure


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row per theorem and method: how many layers have a bound, in how many it holds, and how far it is
    from the measured value."""
    lines = []
    for theorem, title in THEOREMS.items():
        for method in METHODS:
            part = rows[(rows["theorem"].astype(str) == theorem) & (rows["method"] == method)]
            if part.empty or (theorem == "1" and method == "none"):
                continue
            told = part[part["bound"].notna()]
            held = told["holds"].astype(str).eq("True").sum()
            distance = (told["bound"] / told["measured"]).median()
            lines.append(
                {
                    "theorem": title.replace("\n", " ").removeprefix("Theorem "),
                    "weights": "trained" if method == "none" else look(method).name,
                    "layers with a bound": f"{len(told)} of {len(part)}",
                    "bound holds in": str(held) if len(told) else "-",
                    "measured, median": f"{(told if len(told) else part)['measured'].median():.3g}",
                    "bound, median": f"{told['bound'].median():.3g}" if len(told) else "-",
                    "bound / measured": f"{distance:.2g}" if len(told) and math.isfinite(distance) else "-",
                }
            )
    return pd.DataFrame(lines)


def premise_table(rows: pd.DataFrame, layers: pd.DataFrame) -> pd.DataFrame:
    """Return the share of matrices with DfI < 1, as stored and up to a scale: trained, after FIRE as published, and
    after the exact projection."""
    mlp = layers[(layers["theorem"].astype(str) == "3")]
    counted = [
        {"network": network, "method": method, "matrices": len(part)}
        | {"below_1": (part["dfi"] < 1).sum(), "below_1_scaled": (part["dfi_scaled"] < 1).sum()}
        for (network, method), part in mlp.groupby(["network", "method"], sort=False)
    ]
    everything = pd.concat([pd.DataFrame(counted), rows], ignore_index=True)
    lines = []
    for network, part in everything.groupby("network", sort=False):
        line = {"network": network}
        for method, name in (
            ("none", "trained"),
            ("fire", "FIRE as published"),
            ("fire_exact", "FIRE exact"),
        ):
            found = part[part["method"] == method][["matrices", "below_1", "below_1_scaled"]].sum()
            if found["matrices"]:
                line[f"{name}: as stored"] = f"{found['below_1'] / found['matrices']:.0%}"
                line[f"{name}: up to a scale"] = f"{found['below_1_scaled'] / found['matrices']:.0%}"
        lines.append(line)
    return pd.DataFrame(lines)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.theory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("root", help="folder of runs, as in runs")
    parser.add_argument("--experiment", default="settings_random_label", help="default settings_random_label")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    try:
        root = Path(options.root)
        rows = theorems(root, options.experiment)
        if not rows:
            raise UserError(f"no finished run of method=none of {options.experiment} below {root}")
        print(merge("theory", rows, ["network", "method", "seed", "theorem", "layer"]))
        print(merge("theory_premise", premise(root), ["network", "method", "seed"]))
    except UserError as error:
        print_error(error)
        return 2
    picture = RESULTS / "figures" / "theory.png"
    draw(pd.read_csv(RESULTS / "theory.csv")).savefig(picture)
    print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
