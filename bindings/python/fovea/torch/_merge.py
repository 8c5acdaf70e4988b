"""Merging of results over disjoint keys, for tensors of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import _ops  # noqa: F401  (registers fovea::merge)


def merge(
    o_parts: Sequence[torch.Tensor], lse_parts: Sequence[torch.Tensor], dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """fovea.merge with o of `dtype` (None: that of the first part). By PyTorch's operations where gradients are wanted."""
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in (*o_parts, *lse_parts)):
        o, lse = torch.ops.fovea.merge(list(o_parts), list(lse_parts), dtype)
        return o, lse
    all_lse = torch.stack(tuple(lse_parts))
    lse = torch.logsumexp(all_lse, 0)
    # Where no part has a key, all weights are 0 and not NaN.
    weights = torch.exp(all_lse - lse.masked_fill(torch.isneginf(lse), 0.0)).transpose(2, 3).unsqueeze(-1)
    parts = torch.stack(tuple(o_parts)).float()
    o = torch.where(weights > 0, weights * parts, 0.0).sum(0)
    return o.to(dtype or o_parts[0].dtype), lse
