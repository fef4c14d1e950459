"""Target matrices of a checkpoint, from its names and shapes or from the model that it belongs to."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from fire_core.checkpoints.files import Checkpoint
from fire_core.errors import UserError
from fire_core.targets import TargetTable, choose, list_targets
from fire_core.targets.skeleton import skeleton


def plan(
    checkpoint: Checkpoint, targets: str | Sequence[str] = "all", model: str = "auto"
) -> tuple[TargetTable, str]:
    """Return the targets of a checkpoint, and one line that says where they were read from.

    model: "auto" (a folder's config.json, if transformers can build that architecture), "none" (names and shapes only),
    or "package.module:callable", which is called without arguments and returns the module, on the meta device. Raises
    UserError if that fails, if its parameters do not fit the file, and as `find_targets` does.
    """
    outline = checkpoint.outline()
    rows = list_targets(skeleton(outline))
    architecture, source = _architecture(checkpoint, model)
    if architecture is not None:
        known = _renamed(list_targets(architecture), architecture, outline)
        named = {name for target in known for name in (target.parameter, *target.aliases)}
        if model != "auto" and not known:
            raise UserError(f"no parameter of {model} has the name and shape of one in {checkpoint.path}")
        found, total = (len({t.parameter for t in targets}) for targets in (known, rows))
        source = f"targets from {source} for {found} of {total} parameters"
        source += ", the others from names and shapes" if found < total else ""
        rows = TargetTable([*known, *(target for target in rows if target.parameter not in named)])
    try:
        return choose(rows, targets, str(checkpoint.path)), source
    except UserError as error:
        raise UserError(f"{error} ({source})") from None


def build(model: str) -> nn.Module:
    """Return the module that "package.module:callable" makes, on the meta device: names and shapes without memory."""
    where, _, name = model.partition(":")
    try:
        factory = getattr(importlib.import_module(where), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"model={model!r} cannot be imported ({error}): give package.module:callable"
        ) from error
    try:
        with torch.device("meta"):
            module = factory()
    except TypeError as error:
        raise UserError(
            f"model={model!r} cannot be called without arguments ({error}): name a function that can"
        ) from error
    if not isinstance(module, nn.Module):
        raise UserError(f"model={model!r} made a {type(module).__name__}, not a torch module")
    return module


def _architecture(checkpoint: Checkpoint, model: str) -> tuple[nn.Module | None, str]:
    by_name = "targets from names and shapes"
    if model == "none" or (model == "auto" and not (checkpoint.path / "config.json").is_file()):
        return None, by_name
    if model != "auto":
        return build(model), model
    try:
        import transformers

        config = transformers.AutoConfig.from_pretrained(
            checkpoint.path, local_files_only=True, trust_remote_code=False
        )
        name = (config.architectures or ["?"])[0]
        with torch.device("meta"):
            return getattr(transformers, name)(config), name
    except Exception as error:
        why = str(error).strip().splitlines() or [""]
        return None, f"{by_name} (its config.json could not be built: {type(error).__name__}: {why[0][:120]})"


def _renamed(table: TargetTable, model: nn.Module, outline: dict[str, torch.Tensor]) -> TargetTable:
    """Return the rows whose parameter is in the file with the same shape, with the name that it has there."""
    rows = TargetTable()
    for target in table:
        shape = model.get_parameter(target.parameter).shape
        found = [n for n in (target.parameter, *target.aliases) if n in outline and outline[n].shape == shape]
        if found:
            rows.append(replace(target, parameter=found[0], aliases=(target.parameter, *target.aliases)))
    return rows
