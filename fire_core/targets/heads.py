"""The output layers of a model: declared, named by the model, tied to an embedding, or shown by an example."""

from __future__ import annotations

from torch import nn

from fire_core.targets.rows import Traced


def find_heads(model: nn.Module, modules: dict[str, nn.Module], traced: Traced | None) -> set[str] | None:
    """Return the paths of the output layers, or None where they are not known.

    Those are the layers that are declared (`is_head`), else the Linear layers that the model itself names, else the
    Linear tied to an embedding, else those that an example shows, else the end of a plain nn.Sequential, which runs in
    the order of its layers.
    """
    declared = {path for path, module in modules.items() if getattr(module, "is_head", False)}
    if declared:
        return declared
    for question in ("get_output_embeddings", "get_classifier"):
        answers = _ask(model, question)
        if answers and all(isinstance(layer, nn.Linear) for layer in answers):
            return {path for path, module in modules.items() if any(module is layer for layer in answers)}
        if answers and not any(isinstance(part, nn.Linear) for layer in answers for part in layer.modules()):
            return set()  # the model has no output layer, such as timm with num_classes=0
    # not m.weight: where spectral_norm computes it, reading it changes the state of the computation
    weights = {path: m._parameters.get("weight") for path, m in modules.items()}
    tables = {id(weights[p]) for p, m in modules.items() if isinstance(m, nn.Embedding)} - {id(None)}
    layers = [p for p, m in modules.items() if isinstance(m, nn.Linear)]
    tied = [p for p in layers if id(weights[p]) in tables]
    if tied:
        return {tied[-1]}
    if traced is not None and traced.heads:
        return {p for p, m in modules.items() if any(id(w) in traced.heads for w in m._parameters.values())}
    last = _last(model)
    return None if last is None else {path for path, module in modules.items() if module is last}


def _last(module: nn.Module) -> nn.Module | None:
    """Return the Linear that runs last in a plain nn.Sequential, compiled or not, or None."""
    if isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
        return _last(inner)
    if type(module).forward is nn.Sequential.forward:
        layers = [child for child in module if any(p.dim() > 1 for p in child.parameters())]  # type: ignore[attr-defined]
        return _last(layers[-1]) if layers else None
    return module if isinstance(module, nn.Linear) else None


def _ask(model: nn.Module, question: str) -> list[nn.Module]:
    """Return the layers that the model's method `question` names: one, several (distilled models of timm), or none."""
    answer = getattr(model, question, None)
    try:
        layers = answer() if callable(answer) else None
    except (NotImplementedError, AttributeError, TypeError):
        return []
    several = layers if isinstance(layers, tuple | list) else [layers]
    return [layer for layer in several if isinstance(layer, nn.Module)]
