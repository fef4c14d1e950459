"""Target matrices of a checkpoint, from the model that it belongs to or from its names and shapes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fire_core.checkpoints.files import Checkpoint
from fire_core.errors import UserError, first_line
from fire_core.targets import TargetTable, choose, list_targets
from fire_core.targets.skeleton import skeleton
from fire_core.targets.table import shorten, split_rule

GUESS = "--guess reads them from names and shapes, --model names the model"


def targets_of(
    checkpoint: Checkpoint,
    targets: str | Sequence[str] = "all",
    model: str | None = None,
    *,
    guess: bool = False,
) -> tuple[TargetTable, str]:
    """Return the targets of a checkpoint, and one line that says where they were read from.

    They come from the model that `model` or the config.json of a folder describes. Without either, they are read from
    names and shapes, which do not show depthwise convolutions, fused layers, or weights that are stored transposed.

    Args:
        targets: as for `find_targets`. "head" and "no_head" need an output layer that is known by the model, or by its
            name (`fire_core.targets.walk.heads_by_name`).
        model: "package.module:callable", called without arguments, which returns the module, on the meta device.
        guess: also read targets from names and shapes if config.json cannot be used or does not describe all matrices.
    Raises: UserError if the model cannot be built or does not fit the file, and as `find_targets` does.
    """
    outline = checkpoint.outline()
    rows = list_targets(skeleton(outline))
    architecture, source = None, "names and shapes"
    if model is not None:
        architecture, source = build(model), model
    elif checkpoint.config is not None:
        try:
            architecture = _from_config(checkpoint, len(outline))
            source = f"config.json ({type(architecture).__name__})"
        except Exception as error:
            why = f"{checkpoint.config} cannot be used ({type(error).__name__}: {first_line(error)})"
            if not guess:
                raise UserError(f"{why}, so the targets are not certain: {GUESS}") from error
            source = f"{source}, because {why}"
    if architecture is not None:
        rows, guessed = _merge(list_targets(architecture), rows, architecture, outline)
        if guessed and not guess:
            raise UserError(
                f"{source} does not describe {len(guessed)} of the matrices in {checkpoint.path} "
                f"({shorten(guessed, 3)}): {GUESS}"
            )
        source += f", {len(guessed)} matrices from names and shapes" if guessed else ""
    elif not any(target.role == "head" for target in rows) and "head" in {
        item.removeprefix("-").removeprefix("no_") for item in split_rule(targets)
    }:
        raise UserError(
            f"targets={targets!r}: no tensor of {checkpoint.path} is certainly the output layer; name it "
            "(--targets=-name excludes it, --targets=name chooses it), or the model with --model"
        )
    try:
        return choose(rows, targets, str(checkpoint.path)), f"targets from {source}"
    except UserError as error:
        raise UserError(f"{error} (targets from {source})") from None


def build(model: str) -> nn.Module:
    """Return the module that "package.module:callable" makes, on the meta device: names and shapes without memory."""
    where, _, name = model.partition(":")
    try:
        factory = getattr(importlib.import_module(where), name)
        with torch.device("meta"):
            module = factory()
    except Exception as error:
        raise UserError(
            f"model={model!r} cannot be built ({type(error).__name__}: {first_line(error)}): give "
            "package.module:callable, where the callable needs no arguments"
        ) from error
    if not isinstance(module, nn.Module):
        raise UserError(f"model={model!r} made a {type(module).__name__}, not a torch module")
    return module


def _from_config(checkpoint: Checkpoint, tensors: int) -> nn.Module:
    """Return the transformers model that config.json describes, on the meta device. No code of the folder is run."""
    assert checkpoint.config is not None
    try:
        importlib.import_module("torchvision")
    except (
        Exception
    ):  # absent or broken, as a CUDA build is beside a CPU build of torch: transformers works without it
        sys.modules["torchvision"] = None  # type: ignore[assignment]
    try:
        import transformers

        config = transformers.AutoConfig.from_pretrained(
            checkpoint.config.parent, local_files_only=True, trust_remote_code=False
        )
        name = (config.architectures or ["?"])[0]
        architecture = getattr(transformers, name, None)
        if not isinstance(architecture, type) or not issubclass(architecture, transformers.PreTrainedModel):
            raise ValueError(f"transformers {transformers.__version__} has no model {name!r}")
        if (layers := getattr(config, "num_hidden_layers", 0) or 0) > tensors:
            raise ValueError(f"it describes {layers} layers, and there are {tensors} tensors")
        with torch.device("meta"):
            return architecture(config)
    finally:
        if sys.modules.get("torchvision", True) is None:
            del sys.modules["torchvision"]


def _merge(
    described: TargetTable, rows: TargetTable, model: nn.Module, outline: dict[str, Tensor]
) -> tuple[TargetTable, list[str]]:
    """Return the described targets that are in the file, then the other rows of the file, and which of these are in.

    A described parameter is in the file if one of its names is, with the same shape. Files of transformers may leave
    out the name of the inner model (`base_model_prefix`).
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    known = TargetTable()
    for target in described:
        names = [target.parameter, *target.aliases]
        names += [name.removeprefix(prefix) for name in names]
        shape = model.get_parameter(target.parameter).shape
        found = [name for name in names if name in outline and outline[name].shape == shape]
        if found:
            known.append(replace(target, parameter=found[0], aliases=tuple(names)))
    named = {name for target in known for name in (target.parameter, *target.aliases)}
    others = [target for target in rows if target.parameter not in named]
    guessed = list(dict.fromkeys(target.parameter for target in others if target.included))
    return TargetTable([*known, *others]), guessed
