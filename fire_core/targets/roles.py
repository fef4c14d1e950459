"""Roles of matrices in their network (q, k, v, o, mlp, ...), from the names that architectures use."""

from __future__ import annotations

import re

from torch import nn

WORDS = {
    "q": "q to_q q_proj query query_proj queries wq w_q q_lin linear_q q_linear q_attn q_proj_weight",
    "o": "o o_proj out_proj to_out proj c_proj wo w_o out_lin dense out",
    "mlp": "mlp ffn ff feed_forward feedforward experts expert moe block_sparse_moe intermediate",
    "mlp layers": "fc1 fc2 c_fc gate_proj up_proj down_proj gate_up_proj linear1 linear2 w1 w2 w3",
}
Q, O, MLP, MLP_LAYERS = (frozenset(words.split()) for words in WORDS.values())
K = {name.replace("queries", "keys").replace("query", "key").replace("q", "k") for name in Q}
V = {name.replace("queries", "values").replace("query", "value").replace("q", "v") for name in Q}
ATTENTION = ("q", "k", "v", "o", "attention")


def role_of(name: str, parents: tuple[nn.Module, ...]) -> str:
    """Return the role of the parameter `name`, or "" if unknown; `parents` are its modules, outermost first.

    Attention is recognised by "attn" or "attention" in a path component or in the name of a class other than the
    model's, or by a q and a k in one module. A "value" or "q" without a k is usually a head in reinforcement learning.
    A feed-forward block is recognised by the usual component and layer names.
    """
    path = re.sub(r"\[.*", "", name).split(".")
    leaf = path[-1] if path[-1] != "weight" else (path[-2] if len(path) > 1 else "")
    around = [part.lower() for part in path] + [type(parent).__name__.lower() for parent in parents[1:]]
    if any("attn" in word or "attention" in word for word in around) or _has_q_and_k(parents[-2:]):
        for role, words in (("q", Q), ("k", K), ("v", V)):
            if leaf.lower() in words:
                return role
        return "o" if leaf.lower() in O or "to_out" in path else "attention"
    if leaf.lower() in MLP_LAYERS or any(part.lower() in MLP for part in path):
        return "mlp"
    return ""


def _has_q_and_k(modules: tuple[nn.Module, ...]) -> bool:
    names = {name.lower() for module in modules for name in (*module._modules, *module._parameters)}
    return bool(names & Q and names & K)
