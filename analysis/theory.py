"""The theorems of the FIRE paper compared with measurements: python -m analysis.theory RUNS

RUNS holds finished runs of `none` on random labels (an MLP, to which the theorems apply). The shared first phases of
other networks in RUNS are used for the premise DfI < 1 alone. Writes theory.csv and theory_premise.csv.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from analysis.results_file import merge
from analysis.runs import RESULTS
from fire_core import State, UserError, find_targets
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
    "1": "1: shift of the features' covariance, squared",
    "2": "2: norm of the Hessian",
    "3": "3: effective rank of a layer's output, from below",
    "4": "4: activity of a unit, largest factor from the mean",
}


# ------------------------------------------------------------------------------------------------ one network
def weights_of(net: nn.Module) -> list[Tensor]:
    """Return the weights of an MLP's layers. Their biases are left out, as in the theorems."""
    return [module.weight.detach() for module in net.modules() if isinstance(module, nn.Linear)]


def features_of(weights: Sequence[Tensor], inputs: Tensor) -> list[Tensor]:
    """Return the outputs of all layers; ReLU follows each but the last."""
    features, last = [], inputs
    for place, weight in enumerate(weights):
        last = linear(last, weight)
        last = last.relu() if place + 1 < len(weights) else last
        features.append(last)
    return features


def rows_of(net: nn.Module, trained: nn.Module, inputs: Tensor, labels: Tensor) -> Iterator[dict[str, Any]]:
    """Yield a row with the measured value and the bound for each theorem and layer of `net`, a treated copy of
    `trained`; Theorem 2 has one row for the network."""
    weights, old_weights = weights_of(net), weights_of(trained)
    features, old_features = features_of(weights, inputs), features_of(old_weights, inputs)
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
        found = {"theorem": "3", "measured": rank, "bound": least}
        yield shared | found | {"holds": None if least is None else rank >= least}
        if weight.shape[0] <= weight.shape[1]:  # more units than inputs cannot be orthogonal
            activity = weight.norm(dim=1)
            share = activity / activity.mean()
            factor = float(torch.maximum(share.max(), 1 / share.min()))
            most = activity_bound(scaled[place])
            found = {"theorem": "4", "measured": factor, "bound": most}
            yield shared | found | {"holds": None if most is None else factor <= most * (1 + 1e-5)}
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
    measured = float(
        hessian_norm(
            lambda: cross_entropy(features_of(leaves, inputs)[-1], labels),
            leaves,
            generator=generator(1, "hessian"),
        )
    )
    shares = features_of(weights, inputs)[-1].softmax(dim=1)
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
    create(method, **settings).boundary(state)
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

        shape = {"classes": images.classes, "channels": images.channels, "image_size": images.image_size}
        with seeded(cfg.seed, "init"):
            trained = build(**cfg.model, **shape)
        initial = {name: value.clone() for name, value in trained.state_dict().items()}
        trained.load_state_dict(torch.load(folder / "checkpoint" / "final.pt", weights_only=True)["net"])
        for method in METHODS:
            net = treated(copy.deepcopy(trained), initial, method, cfg.seed)
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
                methods = {"none": {}, "fire": {"iterations": iterations}, "fire_exact": {}}
                for method, settings in methods.items():
                    net.load_state_dict(saved)
                    treated(net, {}, method, cfg.seed, **settings)
                    found.append({"network": network, "method": method, "seed": cfg.seed} | _share(net))
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


# ------------------------------------------------------------------------------------------------ tables
def measured() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return theory.csv and theory_premise.csv; empty where nothing was measured."""
    paths = (RESULTS / "theory.csv", RESULTS / "theory_premise.csv")
    layers, nets = (pd.read_csv(path) if path.exists() else pd.DataFrame() for path in paths)
    return layers, nets


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row per theorem: how many layers have a bound, in how many it holds, and how far it is from the measured
    value. Theorem 1 compares a layer with itself before the method, so that `none` has no row there."""
    rows = rows.assign(theorem=rows["theorem"].astype(str))
    rows = rows[(rows["theorem"] != "1") | (rows["method"] != "none")]
    lines = []
    for theorem, title in THEOREMS.items():
        part = rows[rows["theorem"] == theorem]
        told = part[part["bound"].notna()]
        line = {
            "theorem": title,
            "layers with a bound": f"{len(told)} of {len(part)}",
            "bound holds in": told["holds"].astype(str).eq("True").sum(),
            "measured, median": f"{told['measured'].median():.3g}",
            "bound, median": f"{told['bound'].median():.3g}",
            "bound / measured, median": f"{(told['bound'] / told['measured']).median():.2g}",
        }
        lines.append(line)
    return pd.DataFrame(lines)


def premise_counts(layers: pd.DataFrame, nets: pd.DataFrame) -> pd.DataFrame:
    """Return rows for each network and method, one per layer of the MLP and one per seed of the others: `total`
    matrices, those with DfI < 1 (`below`), and those with DfI < 1 up to a scale (`scaled`)."""
    mlp = layers[layers["theorem"].astype(str) == "3"]
    columns = {"total": 1, "below": mlp["dfi"] < 1, "scaled": mlp["dfi_scaled"] < 1}
    named = nets.rename(columns={"matrices": "total", "below_1": "below", "below_1_scaled": "scaled"})
    both = pd.concat([mlp[["network", "method"]].assign(**columns), named], ignore_index=True)
    return both[["network", "method", *columns]].astype(dict.fromkeys(columns, int))


def premise_table(layers: pd.DataFrame, nets: pd.DataFrame) -> pd.DataFrame:
    """Return the share of matrices with DfI < 1, as stored and up to a scale: trained, after FIRE as published, and
    after the exact projection."""
    names = {"none": "trained", "fire": "FIRE as published", "fire_exact": "FIRE exact"}
    sums = premise_counts(layers, nets).groupby(["network", "method"], sort=False).sum()
    table = pd.DataFrame({"network": sums.index.unique("network")}).set_index("network")
    for method, name in names.items():
        if method in sums.index.unique("method"):
            part = sums.xs(method, level="method")
            table[f"{name}: as stored"] = (part["below"] / part["total"]).map("{:.0%}".format)
            table[f"{name}: up to a scale"] = (part["scaled"] / part["total"]).map("{:.0%}".format)
    return table.reset_index()


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
    return 0


if __name__ == "__main__":
    sys.exit(main())
