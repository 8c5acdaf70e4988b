"""The problems that compare.py times: the grid of the field, rows of special interest, and any shape written as text."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

# The grid on which attention kernels are compared: batches of 16,384 tokens, hidden size 2,048.
GRID_TOKENS, GRID_HIDDEN = 16384, 2048
GRID_HEAD_DIMS = (64, 128, 256)
GRID_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# The names of the terms of terms.py, which needs PyTorch.
TERMS = ("bias", "mask", "documents", "prefix", "seenwindow", "table", "ten")
# fwd_lse: the forward as training runs it, which also writes lse. bwd_det: the backward that gives the same bits each time.
PASSES = ("fwd", "fwd_lse", "bwd", "bwd_det")
DROPOUT = 0.1  # the probability of shapes with dropout


@dataclass(frozen=True)
class Shape:
    dtype: str
    pass_: str
    b: int
    s_q: int
    s_k: int
    h_q: int
    h_kv: int
    d: int
    d_v: int
    causal: bool = False
    window: int = -1  # keys seen to the left of the diagonal; -1: all
    softcap: int = 0  # 0: none
    alibi: bool = False  # with the slopes of its paper for a power of two heads
    dropout: bool = False
    term: str = ""  # one of terms.py
    lengths: tuple[int, ...] = ()  # packed sequences; then b = 1 and s_q = s_k is their sum
    page: int = 0  # keys of a page of the cache, whose pages lie in random order; 0: no pages
    used: tuple[int, ...] = ()  # keys of each sequence of a cache, in a tensor; none: s_k, which the host knows
    append: bool = False  # the last s_q keys come with the call: rotated, as the queries are, and written to the cache first
    e4m3: bool = False  # k and v are float8_e4m3fn with factors; peers get what these stand for in `dtype`
    e4m3_q: bool = False  # q, too
    latent: bool = False  # v is the first d_v columns of k, in the same memory
    group: str = "other"  # grid, special, wide, terms, decode, latent, fp8 or other

    @property
    def backward(self) -> bool:
        return self.pass_.startswith("bwd")

    @property
    def lse(self) -> bool:
        """The forward writes lse, which a backward needs."""
        return self.pass_ != "fwd"

    @property
    def deterministic(self) -> bool:
        return self.pass_ == "bwd_det"

    @property
    def name(self) -> str:
        parts = [self.dtype, self.pass_]
        parts.append(f"packed{len(self.lengths)}" if self.lengths else f"b{self.b}")
        parts.append(f"s{self.s_q}" + (f"k{self.s_k}" if self.s_k != self.s_q else ""))
        parts.append(f"h{self.h_q}" + (f"kv{self.h_kv}" if self.h_kv != self.h_q else ""))
        parts.append(f"d{self.d}" + (f"v{self.d_v}" if self.d_v != self.d else ""))
        if self.causal:
            parts.append("causal")
        if self.window >= 0:
            parts.append(f"w{self.window}")
        if self.softcap:
            parts.append(f"softcap{self.softcap}")
        if self.alibi:
            parts.append("alibi")
        if self.dropout:
            parts.append("dropout")
        if self.term:
            parts.append(self.term)
        if self.used:
            alike = len(set(self.used)) == 1
            parts.append("mixed" if not alike else "lengths" if self.used[0] == self.s_k else f"used{self.used[0]}")
        if self.page:
            parts.append(f"page{self.page}")
        if self.append:
            parts.append("append")
        if self.e4m3:
            parts.append("fp8" if self.e4m3_q else "e4m3")
        if self.latent:
            parts.append("latent")
        return "_".join(parts)

    @property
    def pairs(self) -> float:
        """Queries times keys that count, of one head: by the field's convention half of them when causal; exact where
        a window or unequal lengths leave that convention without a meaning."""
        if self.lengths:
            return sum(n * n for n in self.lengths) * (0.5 if self.causal else 1.0)
        if self.used:
            return float(self.s_q * sum(self.used))
        if self.window < 0 and (not self.causal or self.s_q == self.s_k):
            return self.b * self.s_q * self.s_k * (0.5 if self.causal else 1.0)
        kept = 0
        for i in range(self.s_q):
            diagonal = i + self.s_k - self.s_q
            last = min(self.s_k, diagonal + 1) if self.causal else self.s_k
            first = max(0, diagonal - self.window) if self.window >= 0 else 0
            kept += max(0, last - first)
        return float(self.b * kept)

    @property
    def flops(self) -> float:
        """Two products in the forward, five in the backward (2.5 times as many when d = d_v)."""
        d, d_v = self.d, self.d_v
        return self.pairs * self.h_q * (6 * d + 4 * d_v if self.backward else 2 * d + 2 * d_v)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of q, k, v and o, and in the backward of their gradients too: what a run has to move at least once."""
        keys = sum(self.used) if self.used else self.b * min(self.s_k, self.s_q + self.window if self.window >= 0 else self.s_k)
        size = ELEMENT_BYTES[self.dtype]
        of_key = self.d if self.latent else self.d + self.d_v
        bytes_ = self.b * self.s_q * self.h_q * size * (self.d + self.d_v) + keys * self.h_kv * (1 if self.e4m3 else size) * of_key
        return bytes_ * (2 if self.backward else 1)

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Half-open row ranges of the packed sequences."""
        ends = list(itertools.accumulate(self.lengths))
        return list(zip([0, *ends[:-1]], ends, strict=True))


def grid(
    passes: Iterable[str] = ("fwd", "bwd"),
    dtypes: Iterable[str] = ("bf16",),
    head_dims: Iterable[int] = GRID_HEAD_DIMS,
    causal: Iterable[bool] = (False, True),
    lengths: Iterable[int] = GRID_LENGTHS,
) -> list[Shape]:
    passes, dtypes, head_dims, causal, lengths = map(tuple, (passes, dtypes, head_dims, causal, lengths))
    for d in head_dims:
        if GRID_HIDDEN % d:
            raise ValueError(f"d: got {d}, expected a divisor of the hidden size, {GRID_HIDDEN}")
    for s in lengths:
        if GRID_TOKENS % s:
            raise ValueError(f"s: got {s}, expected a divisor of the tokens of a batch, {GRID_TOKENS}")
    return [
        Shape(t, p, GRID_TOKENS // s, s, s, GRID_HIDDEN // d, GRID_HIDDEN // d, d, d, c, group="grid")
        for p, t, d, c, s in itertools.product(passes, dtypes, head_dims, causal, lengths)
    ]


def packed_lengths(total: int, shortest: int, longest: int, seed: int = 1) -> tuple[int, ...]:
    """Random lengths that add up to `total`; the last takes the rest."""
    rng = random.Random(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        n = rng.randint(shortest, longest)
        lengths.append(left if left - n < shortest else n)
    return tuple(lengths)


def special(passes: Iterable[str] = ("fwd", "bwd")) -> list[Shape]:
    """What the grid leaves out: float32, other head sizes, grouped heads, a window, packed sequences, few tokens, many keys,
    softcap, ALiBi, dropout."""
    forward = ("fwd", "fwd_lse")

    def rows(allowed: Sequence[str], dtype: str, *sizes: int, d_v: int = 0, **more: object) -> list[Shape]:
        b, s_q, s_k, h_q, h_kv, d = sizes
        return [
            Shape(dtype, p, b, s_q, s_k, h_q, h_kv, d, d_v or d, group="special", **more)  # type: ignore[arg-type]
            for p in passes
            if p in allowed
        ]

    packed = packed_lengths(GRID_TOKENS, 64, 4096)
    found = [
        *rows(PASSES, "fp32", 4, 4096, 4096, 32, 32, 64),
        *rows(forward, "fp32", 100, 4096, 4096, 1, 1, 32),
        *rows(PASSES, "fp16", 4, 4096, 4096, 16, 16, 128, causal=True),
        *rows(PASSES, "bf16", 4, 4096, 4096, 32, 32, 128, causal=True),
        *rows(PASSES, "bf16", 4, 4096, 4096, 32, 8, 128, causal=True),
        *rows(PASSES, "bf16", 1, GRID_TOKENS, GRID_TOKENS, 16, 16, 128, causal=True, window=1023),
        *rows(PASSES, "bf16", 1, sum(packed), sum(packed), 16, 16, 128, causal=True, lengths=packed),
        *rows(("fwd",), "bf16", 1, 1, 65536, 32, 8, 128),
        *rows(PASSES, "bf16", 4, 4096, 4096, 16, 16, 128, softcap=30),
    ]
    for s in (512, 4096, 16384):
        found += rows(PASSES, "bf16", GRID_TOKENS // s, s, s, 16, 16, 128, alibi=True)
    found += rows(PASSES, "bf16", 4, 4096, 4096, 16, 16, 128, alibi=True, causal=True)
    for d in (64, 128, 256):
        found += rows(("fwd", "fwd_lse", "bwd"), "bf16", 4, 4096, 4096, GRID_HIDDEN // d, GRID_HIDDEN // d, d, dropout=True)
    for term in TERMS:
        found += rows(("fwd", "fwd_lse", "bwd"), "bf16", 4, 4096, 4096, 16, 16, 128, term=term)
    for causal in (False, True):
        for s in (128, 512, 1024, 2048):
            found += rows(PASSES, "bf16", 1, s, s, 16, 16, 128, causal=causal)
        found += rows(PASSES, "bf16", 16, 128, 128, 12, 12, 64, causal=causal)
        for h, d, d_v in ((20, 96, 96), (10, 192, 192), (16, 192, 128)):
            for s in (1024, 4096, 16384):
                found += rows(PASSES, "bf16", GRID_TOKENS // s, s, s, h, h, d, d_v=d_v, causal=causal)
    return sorted(found, key=lambda shape: PASSES.index(shape.pass_))


def terms(passes: Iterable[str] = ("fwd", "bwd"), dtypes: Iterable[str] = ("bf16",)) -> list[Shape]:
    """Terms of the score at the shortest and the longest length of the grid; the special rows have them at 4,096, and ALiBi at all
    three."""
    passes, dtypes = tuple(passes), tuple(dtypes)
    each: list[dict[str, object]] = [{"term": term} for term in TERMS] + [{"softcap": 30}, {"dropout": True}]
    return [
        Shape(t, p, GRID_TOKENS // s, s, s, 16, 16, 128, 128, group="terms", **term)  # type: ignore[arg-type]
        for p, t, s, term in itertools.product(passes, dtypes, (min(GRID_LENGTHS), max(GRID_LENGTHS)), each)
    ]


def wide(passes: Iterable[str] = ("fwd", "bwd"), dtypes: Iterable[str] = ("bf16",)) -> list[Shape]:
    """Head sizes above 256: 512 with and without a mask, values narrower than keys, sizes between, and decoding with one key
    head."""
    passes, dtypes = tuple(passes), tuple(dtypes)
    sizes = [(4, 4096, 4096, 16, 16, d, d_v) for d, d_v in ((512, 512), (576, 512), (320, 320), (384, 384))]
    sizes += [(1, 16384, 16384, 16, 16, 512, 512), (16, 1024, 1024, 16, 16, 512, 512)]
    found = [
        Shape(t, p, *size, causal, group="wide")
        for p, t, size, causal in itertools.product(passes, dtypes, sizes, (False, True))
    ]
    return found + [
        Shape(t, "fwd", 16, 1, 8192, heads, 1, 576, 512, group="wide")
        for t, heads in itertools.product(dtypes, (16, 64, 128)) if "fwd" in passes
    ]  # fmt: skip


def decode(dtypes: Iterable[str] = ("bf16",)) -> list[Shape]:
    """Few queries over a cache: one and four of them, few and many sequences; pages; sequences of many lengths; a part of a prompt;
    a window; a token that is rotated and appended first; keys and values of 8 bits; batches of 12 to 40 sequences."""

    def row(t: str, b: int, s_q: int, s_k: int, heads: tuple[int, int, int], **more: object) -> Shape:
        h_q, h_kv, d = heads
        return Shape(t, "fwd", b, s_q, s_k, h_q, h_kv, d, d, group="decode", **more)  # type: ignore[arg-type]

    found: list[Shape] = []
    for t in dtypes:
        for heads in ((32, 8, 128), (64, 8, 128), (16, 16, 128), (32, 8, 64), (8, 1, 256)):
            sizes = [(1, 512 * 4**n) for n in range(5)] + [(8, 2048), (8, 8192), (64, 512), (64, 2048), (64, 8192)]
            found += [row(t, b, 1, s_k, heads) for b, s_k in sizes]
            found += [row(t, b, 4, s_k, heads, causal=True) for b, s_k in ((8, 8192), (64, 4096))]
            found += [row(t, b, 1, s_k, heads, e4m3=True) for b, s_k in ((1, 2048), (1, 8192), (1, 131072), (8, 8192), (64, 2048), (64, 8192))]
            found += [row(t, 8, 4, 8192, heads, causal=True, e4m3=True)]
        found += [row(t, 8, 4, 8192, heads, causal=True, page=64, e4m3=True) for heads in ((32, 8, 128), (64, 8, 128))]
        heads = (32, 8, 128)
        found.append(row(t, 1, 1, 8192, heads, used=(8192,)))
        for page in (256, 64, 16, 1):
            found.append(row(t, 64, 1, 8192, heads, page=page, e4m3=True))
            found += [row(t, b, 1, s_k, heads, page=page) for b, s_k in ((1, 8192), (8, 8192), (64, 8192))]
        rng = random.Random(1)
        mixed = tuple(rng.randint(100, 32768) for _ in range(64))
        found += [row(t, 64, 1, 32768, heads, used=mixed, page=page) for page in (0, 64, 16)]
        found += [row(t, 1, 512, 16384, (16, 16, 128), causal=True, page=page) for page in (0, 64)]
        found += [row(t, 1, 512, 16384, (16, 16, 128), causal=True, page=page, e4m3=True) for page in (0, 64)]
        found.append(row(t, 1, 1, 131072, heads, causal=True, window=1023))
        found += [row(t, 32, 1, 8192, heads, causal=True, page=64, append=append) for append in (False, True)]
        found.append(row(t, 32, 1, 8192, heads, causal=True, append=True))
        # Batches whose tiles are more than the SMs' half, or less than many turns; groups of 7, which no box of TMA holds; room for more keys than there are.
        for heads in ((32, 8, 128), (28, 4, 128), (32, 8, 64)):
            for b in (12, 20, 24, 40):
                mixed = tuple(rng.randint(100, 16384) for _ in range(b))
                found += [row(t, b, 1, 4096, heads), row(t, b, 1, 8192, heads, page=64)]
                found += [row(t, b, 1, 16384, heads, used=used, page=64) for used in (mixed, (1000,) * b)]
    return found


def latent(passes: Iterable[str] = ("fwd",), dtypes: Iterable[str] = ("bf16",)) -> list[Shape]:
    """Multi-head latent attention, absorbed: one key head of 576 columns, of which values are the first 512. Decoding, in one piece and in
    pages, two queries at a time; values in memory of their own; a prompt."""

    def row(t: str, b: int, s_q: int, s_k: int, h: int, **more: object) -> Shape:
        return Shape(t, "fwd", b, s_q, s_k, h, 1, 576, 512, group="latent", **{"latent": True, **more})  # type: ignore[arg-type]

    found: list[Shape] = []
    for t in dtypes if "fwd" in passes else ():
        for h in (16, 64, 128):
            found += [row(t, b, 1, 8192, h) for b in (1, 16, 64)]
        found += [row(t, 64, 1, s_k, 128) for s_k in (2048, 32768)]
        found += [row(t, 64, 1, 8192, h, page=64) for h in (16, 128)]
        found.append(row(t, 64, 2, 8192, 128, causal=True))
        found += [row(t, 64, 1, 8192, h, latent=False) for h in (16, 128)]
        found.append(row(t, 1, 4096, 4096, 16, causal=True))
    return found


def fp8(passes: Iterable[str] = ("fwd",), dtypes: Iterable[str] = ("bf16",)) -> list[Shape]:
    """q, k and v of 8 bits: the grid's head sizes that have kernels for them, grouped heads, packed sequences, a part of a prompt
    over pages."""
    found: list[Shape] = []
    packed = packed_lengths(GRID_TOKENS, 64, 4096)
    for p, t in itertools.product([p for p in passes if not p.startswith("bwd")], dtypes):

        def row(b: int, s_q: int, s_k: int, h_q: int, h_kv: int, d: int, p: str = p, t: str = t, **more: object) -> Shape:
            return Shape(t, p, b, s_q, s_k, h_q, h_kv, d, d, e4m3=True, e4m3_q=True, group="fp8", **more)  # type: ignore[arg-type]

        for d, causal, s in itertools.product((64, 128), (False, True), (512, 2048, 8192, 16384)):
            found.append(row(GRID_TOKENS // s, s, s, GRID_HIDDEN // d, GRID_HIDDEN // d, d, causal=causal))
        found.append(row(4, 4096, 4096, 32, 8, 128, causal=True))
        found.append(row(1, sum(packed), sum(packed), 16, 16, 128, causal=True, lengths=packed))
        found += [row(1, 512, 16384, 16, 16, 128, causal=True, page=page) for page in (0, 64)]
    return found


_NUMBER = re.compile(r"(b|softcap|sk|s|hkv|h|dv|d|w|page)(\d+)$")


def parse(text: str) -> Shape:
    """A shape from words such as `bf16,bwd,b4,s4096,h32,hkv8,d128,causal,w1023`; s and d are required."""
    words: dict[str, int] = {}
    dtype, pass_, causal, alibi, dropout, append, e4m3, fp8_, lengths, term = "bf16", "fwd", False, False, False, False, False, False, False, ""
    for word in filter(None, re.split(r"[,\s]+", text)):
        if word in DTYPES:
            dtype = word
        elif word in PASSES:
            pass_ = word
        elif word == "causal":
            causal = True
        elif word == "append":
            append = True
        elif word == "lengths":
            lengths = True
        elif word == "e4m3":
            e4m3 = True
        elif word == "fp8":
            e4m3 = fp8_ = True
        elif word == "alibi":
            alibi = True
        elif word == "dropout":
            dropout = True
        elif word in TERMS:
            term = word
        elif match := _NUMBER.match(word):
            words[match[1]] = int(match[2])
        else:
            raise ValueError(
                f"shape: got '{word}' in '{text}', expected one of {', '.join((*DTYPES, *PASSES))}, causal, append, lengths, e4m3, fp8, alibi, dropout, "
                f"{', '.join(TERMS)}, "
                "or a number after b, s, sk, h, hkv, d, dv, w, page or softcap"
            )
    for needed in ("s", "d"):
        if needed not in words:
            raise ValueError(f"shape: '{text}' lacks {needed}, as in {needed}64")
    s, h, d = words["s"], words.get("h", 16), words["d"]
    shape = Shape(
        dtype, pass_, words.get("b", 1), s, words.get("sk", s), h, words.get("hkv", h), d, words.get("dv", d), causal
    )
    if shape.h_q % shape.h_kv:
        raise ValueError(f"shape: h is {h} and hkv {shape.h_kv} in '{text}'; h has to be a multiple of hkv")
    return replace(
        shape, window=words.get("w", -1), softcap=words.get("softcap", 0), alibi=alibi, dropout=dropout, term=term, page=words.get("page", 0),
        append=append, e4m3=e4m3, e4m3_q=fp8_, used=(shape.s_k,) * shape.b if lengths else (),
    )
