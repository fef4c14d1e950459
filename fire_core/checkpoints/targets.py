"""Target matrices of a checkpoint, from the model that it belongs to or from its names and shapes."""

import importlib
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fire_core.checkpoints.files import Checkpoint
from fire_core.copies import ends, followers_among
from fire_core.errors import UserError, first_line
from fire_core.targets import Target, TargetTable, choose, list_targets
from fire_core.targets.model_targets import unwrapped
from fire_core.targets.skeleton import skeleton

OUT: Any = {"kind": "unclear", "included": False}


def targets_of(
    checkpoint: Checkpoint, targets: str | Sequence[str] = "all", model: str | None = None
) -> tuple[TargetTable, str]:
    """Return the targets of a checkpoint, and one line that says where they were read from.

    They come from `model`, else from config.json, else from names and shapes. What these do not tell stays out, with the
    reason: matrices that the model lacks, what may be a table, fused layers, and copies such as averages.

    Args:
        targets: as for `find_targets`. "head" and "no_head" need a model, or an output layer that is tied to an embedding.
        model: "package.module:callable", called without arguments, which returns the module, on the meta device.
    Raises: UserError if the model cannot be built or does not fit the file, and as `find_targets` does.
    """
    tensors, source = checkpoint.tensors, "names and shapes"
    copies, rows = followers_among(tensors), list_targets(skeleton(tensors))
    outside = sorted({t.parameter for t in rows if not t.included or t.parameter in copies})
    for i, target in enumerate(rows):
        weight = tensors[target.parameter]
        if target.parameter in copies:
            rows[i] = replace(target, **OUT, reason=f"looks like a copy of {copies[target.parameter]}")
        elif target.included and model is None:
            like = (n for n in outside if (t := tensors[n]).shape == weight.shape and t.dtype == weight.dtype)
            if twin := next((n for n in like if torch.equal(tensors[n], weight)), ""):
                reason = f"equals {twin}, which stays out: they may be tied, which --model tells"
                rows[i] = replace(target, **OUT, reason=reason)
    listed = rows
    if model is not None or checkpoint.config is not None:
        described = _described(checkpoint, model)
        source, listed = model or f"config.json ({type(described).__name__})", list_targets(described)
        known = _in_file(described, listed, checkpoint, copies)
        named, lacks = {name for t in known for name in t.aliases}, OUT | {"reason": f"not in {source}"}
        others = (replace(t, **lacks) if t.included else t for t in rows if t.parameter not in named)
        rows = TargetTable([*known, *others])
    rows.head_known = any(target.role == "head" for target in listed)
    source = f"targets from {source}{f', entry {checkpoint.entry!r}' if checkpoint.entry else ''}"
    return choose(rows, targets, f"{checkpoint.path} ({source})"), source


def _described(checkpoint: Checkpoint, model: str | None) -> nn.Module:
    """Return the module that `model` names, else what config.json describes, on the meta device: names without memory.

    No code of the folder is run.
    """
    try:
        if model is not None:
            where, _, name = model.partition(":")
            make = getattr(importlib.import_module(where), name)
            with torch.device("meta"):
                return make()
        try:
            importlib.import_module("torchvision")
        except Exception:  # absent, or made for another torch: transformers works without it
            sys.modules["torchvision"] = None  # type: ignore[assignment]
        import transformers

        safe = {"local_files_only": True, "trust_remote_code": False}
        config = transformers.AutoConfig.from_pretrained(checkpoint.config.parent, **safe)  # type: ignore[union-attr]
        architecture = getattr(transformers, (config.architectures or ["?"])[0])
        if not issubclass(architecture, transformers.PreTrainedModel):
            raise TypeError(f"{architecture} is not a model")
        if getattr(config, "num_hidden_layers", 0) > len(checkpoint.tensors):  # could take all memory
            raise ValueError("it describes more layers than there are tensors")
        with torch.device("meta"):
            return architecture(config)
    except Exception as error:
        why = f"{model or checkpoint.config} cannot be used ({type(error).__name__}: {first_line(error)})"
        raise UserError(f"{why}: give --model package.module:callable that needs no arguments") from error
    finally:
        if sys.modules.get("torchvision", True) is None:
            del sys.modules["torchvision"]


def _in_file(
    model: nn.Module, listed: list[Target], checkpoint: Checkpoint, copies: Mapping[str, str]
) -> list[Target]:
    """Return those of the model's listed targets that the file has, under its names.

    Names in a file may begin with a path ("model.", "module._orig_mod."), or lack that of the inner model (transformers'
    `base_model_prefix`). Where several fit equally, as for two critics, all count, but for copies.
    """
    tensors = {unwrapped(name): name for name in checkpoint.tensors}
    before: dict[str, set[str]] = defaultdict(set)  # end of a name -> what may stand before it
    for name in tensors:
        for end in ends(name):
            before[end].add(name.removesuffix(end))
    found: dict[str, list[Target]] = defaultdict(list)  # by what stands before them
    inner = f"{getattr(model, 'base_model_prefix', '')}."
    for target in listed:
        shape, names = model.get_parameter(target.parameter).shape, [target.parameter, *target.aliases]
        names += [name.removeprefix(inner) for name in names]
        also = [name for name in names if name not in checkpoint.tensors]  # for patterns
        for prefix in sorted({start for name in names for start in before.get(name, ())}):
            here = [tensors[prefix + name] for name in names if prefix + name in tensors]
            if here := [name for name in here if checkpoint.tensors[name].shape == shape]:
                named: Any = {"name": prefix + target.name, "parameter": here[0], "aliases": (*here, *also)}
                if not (kind := checkpoint.tensors[here[0]].dtype).is_floating_point or kind.itemsize < 2:
                    named |= OUT | {"reason": f"quantised: stored as {kind}"}
                found[prefix].append(replace(target, **named))
    if not found:
        raise UserError(f"{type(model).__name__} has no weight of {checkpoint.path}: name its own model")
    most = max(map(len, found.values()))
    tables = [found[prefix] for prefix in sorted(found, key=len, reverse=True) if len(found[prefix]) == most]
    tables = [table for table in tables if table[0].parameter not in copies] or tables
    # with and without the name of the inner model, the same parameters may fit
    return [target for table in {table[0].parameter: table for table in tables}.values() for target in table]
