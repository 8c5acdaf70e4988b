"""The rows of the benchmark: the one list that compare.py reads here and `fovea bench --rows` has compiled in."""

from __future__ import annotations

from dataclasses import dataclass

# One line per group of rows: batch, sequence length, heads, head size, masks, types, passes. cli/CMakeLists.txt takes the
# lines of this form out of this file: keep them at the left margin, with one blank between fields.
ATTENTION = """
1 512 16 64 full,causal float32,bfloat16 fwd,bwd
1 2048 16 64 full,causal float32,bfloat16 fwd,bwd
1 4096 8 64 full,causal float32,bfloat16 fwd,bwd
1 512 8 128 full,causal float32,bfloat16 fwd,bwd
1 2048 8 128 full,causal float32,bfloat16 fwd,bwd
1 4096 8 128 full,causal float32,bfloat16 fwd,bwd
8 128 12 32 full,causal float32,bfloat16 fwd,bwd
100 4096 1 32 full float32 fwd
"""

# One query of 16 heads against 65,536 keys: bound by memory, not by arithmetic. Same fields.
DECODE = """
1 65536 16 128 decode float32,bfloat16 fwd
"""


@dataclass(frozen=True)
class Row:
    dtype: str  # float32 or bfloat16
    pass_: str  # fwd or bwd
    b: int
    s: int  # keys; and queries, but for decode (one)
    h: int
    d: int
    mask: str  # full, causal or decode

    @property
    def name(self) -> str:
        return f"{self.dtype}_{self.pass_}_b{self.b}_s{self.s}_h{self.h}_d{self.d}_{self.mask}"

    @property
    def causal(self) -> bool:
        return self.mask == "causal"

    @property
    def seqlen_q(self) -> int:
        return 1 if self.mask == "decode" else self.s

    @property
    def flops(self) -> float:
        """4 b h sq sk d, half of it when causal, 2.5 times that for the backward."""
        forward = 4.0 * self.b * self.h * self.seqlen_q * self.s * self.d * (0.5 if self.causal else 1.0)
        return forward * (2.5 if self.pass_ == "bwd" else 1.0)


def expand(table: str) -> list[Row]:
    """All rows, grouped by type and pass as they are reported."""
    rows: list[Row] = []
    for line in table.split("\n"):
        fields = line.split()
        if not fields:
            continue
        b, s, h, d = (int(field) for field in fields[:4])
        masks, dtypes, passes = (field.split(",") for field in fields[4:])
        rows += [Row(t, p, b, s, h, d, m) for t in dtypes for p in passes for m in masks]
    return sorted(rows, key=lambda row: (row.dtype != "float32", row.pass_ != "fwd"))
