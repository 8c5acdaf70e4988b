"""Attention by the formula, in float64 PyTorch: what the tests compare with."""

import math

import torch


def visible(seqlen_q, seqlen_k, causal, window):
    """(seqlen_q, seqlen_k) bool: which keys each query sees; aligned at the last of both."""
    i = torch.arange(seqlen_q).unsqueeze(1) + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k).unsqueeze(0)
    left, right = window
    if causal:
        right = 0
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    return seen


def attention(
    q,
    k,
    v,
    *,
    scale=None,
    causal=False,
    window=(-1, -1),
    softcap=0.0,
    alibi=None,
    bias=None,
    mask=None,
    sink=None,
    seqlens_k=None,
    kept=None,
    dropout=0.0,
):
    """(o, lse) in float64 of (batch, seqlen, heads, size); kept: (batch, heads, seqlen_q, seqlen_k) of dropout."""
    device = q.device
    q, k, v = q.double(), k.double(), v.double()
    heads_q, heads_k = q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(heads_q // heads_k, 2) for x in (k, v))
    if seqlens_k is not None:
        parts = [
            attention(
                q[b : b + 1],
                k[b : b + 1, :n],
                v[b : b + 1, :n],
                scale=scale,
                causal=causal,
                window=window,
                softcap=softcap,
                alibi=None if alibi is None else (alibi if alibi.ndim == 1 else alibi[b : b + 1]),
            )
            for b, n in enumerate(seqlens_k)
        ]
        return tuple(torch.cat(x) for x in zip(*parts, strict=True))
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi is not None:
        distance = (torch.arange(seqlen_q).unsqueeze(1) + seqlen_k - seqlen_q - torch.arange(seqlen_k)).abs().to(device)
        slopes = alibi.double()
        slopes = slopes.view(1, -1, 1, 1) if slopes.ndim == 1 else slopes[:, :, None, None]
        s = s - slopes * distance
    if bias is not None:
        s = s + bias.double()
    seen = visible(seqlen_q, seqlen_k, causal, window).to(device)
    if mask is not None:
        seen = seen & (mask != 0)
    s = s.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(s, -1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.double().view(1, -1, 1).expand_as(lse))
    p = torch.exp(s - lse.masked_fill(torch.isneginf(lse), 0.0).unsqueeze(-1))
    p = torch.where(torch.isneginf(s), 0.0, p)
    if kept is not None:
        p = p * kept / (1 - dropout)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


TOLERANCE = {torch.float64: 2e-6, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def assert_close(got, expected, dtype=None, factor=1.0):
    """Element-wise, relative to the largest element of what is expected."""
    dtype = dtype or got.dtype
    got, expected = got.detach(), expected.detach().to(got.device)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    finite = torch.isfinite(expected)
    assert torch.equal(finite, torch.isfinite(got)), "finite elements differ"
    if not finite.any():
        return
    size = max(1.0, float(expected[finite].abs().max()))
    error = float((got.double() - expected.double())[finite].abs().max())
    assert error <= factor * TOLERANCE[dtype] * size, f"error {error:.3g} at {dtype}, largest element {size:.3g}"
