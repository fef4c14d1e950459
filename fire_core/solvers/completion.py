"""The deterministic rule for the polar factor of a matrix that has lost rank.

A matrix W that has lost rank has more than one nearest matrix with orthonormal columns: every isometry between its
two null spaces gives one, and all are equally near. The rule takes the one that is nearest to the rectangular
identity. The result depends on W alone, not on the basis that a library chooses for the null spaces. In directions
where the identity has no component between the null spaces, a fixed dense matrix replaces it.
"""

import torch
from torch import Tensor


def complete(left: Tensor, right: Tensor) -> Tensor:
    """Extend `left @ right^T` to orthonormal columns by the rule of this module.

    left (m, r) and right (n, r), with r < n <= m, must have orthonormal columns. Returns (m, n) in their type.
    """
    columns = len(right)
    null = torch.linalg.qr(right, mode="complete").Q[:, right.shape[1] :]
    for reference in (_identity, _dense):
        moved = reference(left, null)
        for _ in range(2):  # the second pass removes what rounding left of the first
            moved = moved - left @ (left.mT @ moved)
        new_left, singular, turn = torch.linalg.svd(moved, full_matrices=False)
        # the last reference has a component in every direction, however small, so all singular vectors are kept
        keep = len(singular) if reference is _dense else int((singular > 1e-8).sum())
        null = null @ turn.mT
        left = torch.cat([left, new_left[:, :keep]], dim=1)
        right = torch.cat([right, null[:, :keep]], dim=1)
        null = null[:, keep:]
        if right.shape[1] == columns:
            break
    return left @ right.mT


def _identity(left: Tensor, null: Tensor) -> Tensor:
    """Return the rectangular identity (m, n) times `null` (n, k)."""
    return torch.cat([null, null.new_zeros(len(left) - len(null), null.shape[1])])


def _dense(left: Tensor, null: Tensor) -> Tensor:
    """Return a fixed dense matrix (m, n) times `null` (n, k)."""
    row = torch.arange(1, len(left) + 1, dtype=null.dtype, device=null.device).view(-1, 1)
    column = torch.arange(1, len(null) + 1, dtype=null.dtype, device=null.device)
    return torch.cos(row * column.sqrt() + column) @ null
