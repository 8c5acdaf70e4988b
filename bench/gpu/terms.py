"""Terms of a score that shapes may have beyond causal, window, softcap and slopes: their tensors, how each contender is told of
them, and what they are in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Tensor = Any
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Term:
    #: The tensors of (b, h, s_q, s_k), on the GPU.
    tensors: Callable[[int, int, int, int, Any], dict[str, Tensor]]
    #: What is added to the score of (b, h, i, j), whose i and j are a column and a row; or a bool, which pairs are seen.
    value: Callable[[Tensors, int, int, Tensor, Tensor], Tensor]
    #: How Fovea is told: fields of the problem, or expressions that name the tensors.
    fields: tuple[str, ...] = ()
    score: str = ""
    sees: str = ""
    #: The same for FlexAttention: functions of the tensors that give its score_mod, or mask_mod.
    flex_score: Callable[..., Any] | None = None
    flex_sees: Callable[..., Any] | None = None
    #: The tensor that scaled_dot_product_attention takes as attn_mask.
    attn_mask: str = ""
    #: Tensors whose gradient a backward gives as well.
    gradients: tuple[str, ...] = field(default=())


def _bias(b: int, h: int, s_q: int, s_k: int, generator: Any) -> dict[str, Tensor]:
    bias = torch.randn((1, h, s_q, s_k), generator=generator, device="cuda", dtype=torch.float32)
    return {"bias": bias.to(torch.bfloat16)}


def _mask(b: int, h: int, s_q: int, s_k: int, generator: Any) -> dict[str, Tensor]:
    return {"mask": torch.rand((1, 1, s_q, s_k), generator=generator, device="cuda") < 0.5}


def _documents(b: int, h: int, s_q: int, s_k: int, generator: Any) -> dict[str, Tensor]:
    """Twelve documents of about the same length in each row, which leave 8 % of the pairs."""
    rng, rows = random.Random(1), []
    for _ in range(b):
        cuts = sorted(min(s_k - 1, max(1, round(s_k / 12 * (n + rng.uniform(-0.2, 0.2))))) for n in range(1, 12))
        ends = torch.tensor(cuts, device="cuda")
        rows.append(torch.bucketize(torch.arange(s_k, device="cuda"), ends, right=True).int())
    return {"doc": torch.stack(rows)}


def _prefix(b: int, h: int, s_q: int, s_k: int, generator: Any) -> dict[str, Tensor]:
    return {"prefix": torch.full((b,), s_k // 4, device="cuda", dtype=torch.int32)}


def _table(b: int, h: int, s_q: int, s_k: int, generator: Any) -> dict[str, Tensor]:
    return {"table": torch.randn((h, 256), generator=generator, device="cuda", dtype=torch.float32)}


def _nothing(b: int, h: int, s_q: int, s_k: int, generator: Any) -> dict[str, Tensor]:
    return {}


TERMS = {
    "bias": Term(
        _bias,
        lambda t, b, h, i, j: t["bias"][0, h, i, j].double(),
        fields=("bias",),
        flex_score=lambda t: lambda s, b, h, i, j: s + t["bias"][0, h, i, j],
        attn_mask="bias",
        gradients=("bias",),
    ),
    "mask": Term(
        _mask,
        lambda t, b, h, i, j: t["mask"][0, 0, i, j],
        fields=("mask",),
        flex_sees=lambda t: lambda b, h, i, j: t["mask"][0, 0, i, j],
        attn_mask="mask",
    ),
    "documents": Term(
        _documents,
        lambda t, b, h, i, j: t["doc"][b, i] == t["doc"][b, j],
        sees="doc[b, q] == doc[b, k]",
        flex_sees=lambda t: lambda b, h, i, j: t["doc"][b, i] == t["doc"][b, j],
    ),
    "prefix": Term(
        _prefix,
        lambda t, b, h, i, j: (j < t["prefix"][b]) | (j <= i),
        sees="k < prefix[b] || k <= q",
        flex_sees=lambda t: lambda b, h, i, j: (j < t["prefix"][b]) | (j <= i),
    ),
    "seenwindow": Term(
        _nothing,
        lambda t, b, h, i, j: (j <= i) & (i - j <= 1023),
        sees="k <= q && q - k <= 1023",
        flex_sees=lambda t: lambda b, h, i, j: (j <= i) & (i - j <= 1023),
    ),
    "table": Term(
        _table,
        lambda t, b, h, i, j: t["table"][h].double()[(j - i).clamp(-128, 127) + 128],
        score="s + table[h, clamp(k - q, -128, 127) + 128]",
        flex_score=lambda t: lambda s, b, h, i, j: s + t["table"][h, (j - i).clamp(-128, 127) + 128],
    ),
    "ten": Term(
        _nothing,
        lambda t, b, h, i, j: (0.25 * torch.tanh((j - i).double().abs() / 64 - 1) - (j - i).double().square() * 1e-6),
        score="s + 0.25 * tanh(abs(k - q) / 64.0 - 1.0) - (k - q) * float(k - q) * 1e-6",
        flex_score=lambda t: lambda s, b, h, i, j: s
        + 0.25 * torch.tanh((j - i).abs() / 64 - 1)
        - (j - i).float() * (j - i).float() * 1e-6,
    ),
}
