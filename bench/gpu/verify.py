"""Float64 attention of a few heads on the GPU, and the error of a contender's outputs against it."""

from __future__ import annotations

import math
from typing import Any

import torch
from contenders import Inputs, Outputs
from shapes import DROPOUT, Shape

Tensor = Any

# Largest ||got - expected|| / ||expected|| of a tensor. Sixteen-bit types: unit roundoff is 2^-8 (bf16) and 2^-11
# (fp16); the forward rounds P and O, the backward P, dS and the gradients, and reads a rounded O. float32: sums of
# thousands of terms at 2^-24 each; what TF32 products leave, 3e-4, does not pass.
TOLERANCE = {
    ("bf16", "fwd"): 2 * 2.0**-8,
    ("bf16", "bwd"): 4 * 2.0**-8,
    ("fp16", "fwd"): 2 * 2.0**-11,
    ("fp16", "bwd"): 4 * 2.0**-11,
    ("fp32", "fwd"): 1e-5,
    ("fp32", "bwd"): 2e-5,
}
# The worst row may be this many times as far away, over the larger of its own norm and the root mean square of all.
ROW_FACTOR = 8
MASK = 0xFFFFFFFF
LSE_TOLERANCE = {"bf16": 1e-3, "fp16": 1e-3, "fp32": 1e-5}
# Query rows at a time: four float64 matrices of 2,048 x 16,384 are 1 GiB.
ROWS = 2048


# Where tensor cores multiply weights of four bits: each is off by up to 2^-4, in the root mean square by 2.6e-2.
TOLERANCE_OF_8_BITS = 2.0**-5


def tolerance(shape: Shape) -> float:
    if shape.e4m3_q:
        return TOLERANCE_OF_8_BITS
    return TOLERANCE[shape.dtype, "bwd" if shape.backward else "fwd"]


def kept(shape: Shape, head: int, i: Tensor, j: Tensor) -> Tensor:
    """Which weights dropout keeps with seed and offset 0, from docs/semantics.md: of a column i and a row j. `head` counts over all
    sequences."""

    def philox(c: list[Tensor | int], rounds: int) -> list[Tensor | int]:
        for r in range(rounds):
            a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            keys = r * 0x9E3779B9 & MASK, r * 0xBB67AE85 & MASK
            c = [high(b) ^ c[1] ^ keys[0], b & MASK, high(a) ^ c[3] ^ keys[1], a & MASK]
        return c

    def high(product: Tensor | int) -> Tensor | int:
        return product >> 32 & MASK  # of int64 that wrapped around, too

    start = philox([0, 0, 0, 0], 10)
    column, row = 2 * (j // 16) + j % 8 // 4, 8 * (i // 16) + i % 8
    counter = [column, row, head, 0]
    words = philox([x ^ y for x, y in zip(counter, start, strict=True)], 7)
    far_i, far_j = (i // 8 % 2).bool(), (j // 8 % 2).bool()
    word = torch.where(far_j, torch.where(far_i, words[3], words[2]), torch.where(far_i, words[1], words[0]))
    place = (start[3] + 53685 * column + 43977 * row + 36025 * head) % 2**16
    whole, fraction = divmod(threshold(shape), 2**16)
    return (word >> 8 * (j % 4)) % 128 >= whole + (place < fraction).int()


def threshold(shape: Shape) -> int:
    """The probability of dropout, in multiples of 2^-23."""
    return math.floor(DROPOUT * 2**23 + 0.5) if shape.dropout else 0


class Slice:
    """One key head of one sequence with the query heads that share it: outputs in float64."""

    def __init__(self, inputs: Inputs, batch: int, head: int) -> None:
        shape = inputs.shape
        group = shape.h_q // shape.h_kv
        self._batch, self._begin, self._end = batch, 0, shape.used[batch] if shape.used else shape.s_k
        self._packed = bool(shape.lengths)
        if self._packed:
            self._begin, self._end = shape.sequences[batch]
        self._heads = {"q": range(head * group, (head + 1) * group), "k": range(head, head + 1)}
        k, v = (self._cut(t, "k")[0][: self._end - self._begin].double() for t in (inputs.k, inputs.v))
        self.expected: dict[str, Tensor] = {}
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        parts: dict[str, list[Tensor]] = {"o": [], "lse": [], "dq": []}
        queries, d_os = self._cut(inputs.q, "q"), None if inputs.d_o is None else self._cut(inputs.d_o, "q")
        length_q = queries.shape[1]
        scale = 1 / math.sqrt(shape.d)
        for h in range(group):
            for name in parts:
                parts[name].append([])  # type: ignore[arg-type]
            for begin in range(0, length_q, ROWS):
                q = queries[h, begin : begin + ROWS].double()
                s = q @ k.T * scale
                slope: Tensor | float = 1.0  # of the softcap
                if shape.softcap:
                    capped = (s / shape.softcap).tanh_()
                    s, slope = capped * shape.softcap, 1 - capped.square()
                i = torch.arange(begin, begin + len(q), device="cuda")[:, None] + len(k) - length_q
                j = torch.arange(len(k), device="cuda")[None]
                if inputs.slopes is not None:
                    s -= inputs.slopes[head * group + h].double() * (i - j).abs()
                if inputs.term:
                    value = inputs.term.value(inputs.term_tensors, batch, head * group + h, i, j)
                    s = s.masked_fill(~value, -math.inf) if value.dtype == torch.bool else s + value
                if shape.causal:
                    s.masked_fill_(j > i, -math.inf)
                if shape.window >= 0:
                    s.masked_fill_(j < i - shape.window, -math.inf)
                lse = s.logsumexp(-1, keepdim=True)
                p = s.sub_(lse).exp_()
                keep: Tensor | float = 1.0  # dropout's factor
                if shape.dropout:
                    keep = kept(shape, batch * shape.h_q + head * group + h, i - (len(k) - length_q), j).double()
                    keep /= 1 - threshold(shape) / 2**23
                o = (p * keep) @ v
                parts["o"][h].append(o)
                parts["lse"][h].append(lse[:, 0])
                if d_os is not None:
                    d_o = d_os[h, begin : begin + ROWS].double()
                    dv += (p * keep).T @ d_o
                    d_s = (d_o @ v.T).mul_(keep).sub_((d_o * o).sum(-1, keepdim=True)).mul_(p).mul_(slope).mul_(scale)
                    parts["dq"][h].append(d_s @ k)
                    dk += d_s.T @ q
        names = ("o", "lse") if d_os is None else ("dq",)
        for name in names:
            self.expected[name] = torch.stack([torch.cat(blocks) for blocks in parts[name]])
        if d_os is not None:
            self.expected |= {"dk": dk[None], "dv": dv[None]}

    def _cut(self, t: Tensor, side: str) -> Tensor:
        """(heads, rows, size) of a (batch, rows, heads, size) or packed tensor."""
        heads = self._heads[side]
        rows = t[self._begin : self._end] if self._packed else t[self._batch]
        return rows[:, heads.start : heads.stop].transpose(0, 1)

    def cut(self, name: str, t: Tensor) -> Tensor:
        if name == "lse":
            heads = self._heads["q"]
            rows = t[:, self._begin : self._end] if self._packed else t[self._batch]
            return rows[heads.start : heads.stop]
        return self._cut(t, "k" if name in ("dk", "dv") else "q")


def slices(inputs: Inputs) -> list[Slice]:
    """The first head of the first sequence and the last head of the last."""
    shape = inputs.shape
    places = [(0, 0), (max(len(shape.lengths), shape.b) - 1, shape.h_kv - 1)]
    return [Slice(inputs, batch, head) for batch, head in dict.fromkeys(places)]


def errors(expected: list[Slice], outputs: Outputs) -> dict[str, float]:
    """The largest error of each output over the slices, and of its worst row (`o_row`); NaN stays NaN."""
    found: dict[str, float] = {}

    def keep(name: str, value: float) -> None:
        if not found.get(name, 0.0) >= value or math.isnan(value):
            found[name] = float(f"{value:.3g}")

    for part in expected:
        for name, reference in part.expected.items():
            if name not in outputs:
                continue
            got = part.cut(name, outputs[name]).double()
            difference = got - reference
            if name == "lse":
                keep("lse", float(difference.abs().max()))
                continue
            keep(name, float(difference.norm() / reference.norm()))
            norms = reference.norm(dim=-1)
            floor = norms.square().mean().sqrt()
            keep(name + "_row", float((difference.norm(dim=-1) / norms.clamp_min(floor)).max()))
    return found


def wrong(shape: Shape, found: dict[str, float], outputs: Outputs) -> str:
    """Empty if every error is allowed, else names what is wrong."""
    for name, error in found.items():
        allowed = (
            LSE_TOLERANCE[shape.dtype] if name == "lse" else tolerance(shape) * (ROW_FACTOR if "row" in name else 1)
        )
        if not error <= allowed:
            return f"wrong: {name} is {error:.1e} from float64, allowed {allowed:.1e}"
    for name, t in outputs.items():
        if not bool(torch.isfinite(t).all()):
            return f"wrong: {name} has elements that are not finite"
    return ""
