"""The passes of several agents at once, for runs that one process trains as a stack (`harness.runs.stack`).

The two passes of an update, which take most of its time, are computed for all agents together: their weights lie in stacks,
of which an agent's own are views. Numbers differ from those of a single run by rounding. Agents of one shape form a stack.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from harness.runs.stack import meet, member
from rl.replay import Batch
from rl.sac.network import StackedLayerNorm, StackedLinear
from rl.sac.update import Learner, Pass, frozen

STACKS: "dict[Hashable, Stack]" = {}  # of this process, by what its learners have in common


def shared_passes(learner: Learner) -> list[Callable[..., Pass]]:
    """Return the passes of a learner; in a stack of runs, passes that wait for those of the other runs."""
    if member() is None:
        return learner.passes
    return [partial(meet, stage, partial(compute, stage), own) for stage, own in enumerate(learner.passes)]


def compute(stage: int, requests: Sequence[tuple[Any, ...]]) -> list[Pass]:
    """Return what pass number `stage` returns to each of (its own pass, learner, batch, noise)."""
    groups: dict[Hashable, list[int]] = {}
    for place, (_, learner, _, _) in enumerate(requests):
        shapes = [parameter.shape for parameter in weights(learner)]
        groups.setdefault((learner.compile, *shapes), []).append(place)
    answers: dict[int, Pass] = {}
    for key, places in groups.items():
        passes, learners, batches, noises = zip(*(requests[place] for place in places))
        if len(places) == 1:
            found = [passes[0](learners[0], batches[0], noises[0])]
        else:
            if key not in STACKS or not STACKS[key].holds(learners):
                STACKS[key] = Stack(learners)
            found = STACKS[key].passes(stage, batches, noises)
        if len(groups) > 1:  # on a GPU, the graph of the next group may overwrite it
            found = tree_map_only(Tensor, Tensor.clone, found)
        answers |= zip(places, found)
    return [answers[place] for place in range(len(requests))]


class Stack:
    """Learners of one shape as one, `whole`, whose weights have a dimension more. Theirs are views of it from now on."""

    def __init__(self, learners: Sequence[Learner]):
        self.learners = learners
        trained = {id(p) for parameters in learners[0].trained.values() for p in parameters}
        nets = {name: [each.nets()[name] for each in learners] for name in learners[0].nets()}
        self.whole = replace(learners[0], **{name: joined(each, trained) for name, each in nets.items()})
        self.addresses = addresses(learners)

    def holds(self, learners: Sequence[Learner]) -> bool:
        """Return whether these are the learners of this stack, and none has got other weights since."""
        return [*map(id, learners)] == [*map(id, self.learners)] and addresses(learners) == self.addresses

    def passes(self, stage: int, batches: Sequence[Batch], noises: Sequence[Tensor]) -> list[Pass]:
        """Return (measurements, gradients) of each learner for its batch and noise; views of those of all."""
        batch = Batch(*(torch.stack(each) for each in zip(*batches) if each[0] is not None))
        with frozen(self.whole.trained["critics"] if stage == 0 else []):
            figures, gradients = self.whole.passes[stage](self.whole, batch, torch.stack(noises))
        parts: dict[str, list[tuple[Tensor, ...]]] = {}
        for name, found in gradients.items():
            pairs = zip(found, self.learners[0].trained[name], strict=True)
            parts[name] = list(zip(*(each.view(len(batches), *one.shape) for each, one in pairs)))
        return [
            tuple({name: each[i] for name, each in results.items()} for results in (figures, parts))
            for i in range(len(batches))
        ]


def joined(modules: Sequence[nn.Module], trained: set[int]) -> nn.Module:
    """Return a module that maps (members, batch, size) as each of `modules` maps its (batch, size).

    It holds their weights, of which theirs are views from now on. `trained`: ids of those of the first that train.
    """
    first, count = modules[0], len(modules)
    own = dict(first.named_parameters(recurse=False))
    made = copy(first)
    if isinstance(first, nn.Linear | StackedLinear):
        *stack, outputs, inputs = first.weight.shape
        made = StackedLinear(count * math.prod(stack), inputs, outputs)
        made.full_precision = getattr(first, "full_precision", False)
    elif isinstance(first, nn.LayerNorm | StackedLayerNorm):
        *stack, width = first.weight.shape
        made = StackedLayerNorm(count * math.prod(stack), width)
    else:
        stacked = {name: nn.Parameter(p.new_zeros(count, *p.shape)) for name, p in own.items()}
        parts = {name: [each.get_submodule(name) for each in modules] for name, _ in first.named_children()}
        inner = {name: joined(part, trained) for name, part in parts.items()}
        made.__dict__.update(_parameters=stacked, _modules=inner)
    for name, parameter in made.named_parameters(recurse=False):
        parameter.data = parameter.data.to(own[name])
        for module, part in zip(modules, parameter.data.chunk(count)):
            mine = module.get_parameter(name)
            mine.data = part.view(mine.shape).copy_(mine.data)
        parameter.requires_grad_(id(own[name]) in trained)
    return made


def weights(learner: Learner) -> list[nn.Parameter]:
    return [parameter for net in learner.nets().values() for parameter in net.parameters()]


def addresses(learners: Sequence[Learner]) -> list[int]:
    """Return where the weights of learners lie."""
    return [parameter.data_ptr() for learner in learners for parameter in weights(learner)]
