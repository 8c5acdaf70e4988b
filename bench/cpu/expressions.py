"""Terms of the score, dropout and expressions on this machine's processor cores, as a share of our own rate without any of them.

    python3 bench/cpu/expressions.py                all rows
    python3 bench/cpu/expressions.py --json auto    and writes bench/results/expressions/cpu_<machine>.json
    python3 bench/cpu/expressions.py --rows bfloat16_fwd_alibi,mask   only some
    python3 bench/cpu/expressions.py --before OLD/libfovea.so   an earlier build of ours in the place of the plain problem

Needs PyTorch and libfovea.so, which it finds as compare.py does. Each row is timed in turns with the same problem without the term.
A share is the time of the plain problem over that of the row. A row is right, or the run ends.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from compare import (
    QUIET,
    ROOT,
    SOURCES,
    TOLERANCE,
    Others,
    compiler_of,
    default_json,
    find,
    machine,
    quietest,
    seconds_in_turns,
    summary,
    write,
)
from fovea_ctypes import BACKWARD, FORWARD, Library, Plan, View
from sources import sources_hash

HEADS, TOKENS, SIZE = 8, 2048, 64
DOCUMENTS, DROPOUT = 12, 0.1
Tensors = dict[str, Any]


def bias(dtype: Any, generator: Any) -> Tensors:
    return {"bias": torch.randn((1, HEADS, TOKENS, TOKENS), generator=generator).to(dtype)}


def mask(dtype: Any, generator: Any) -> Tensors:
    return {"mask": torch.rand((1, 1, TOKENS, TOKENS), generator=generator) < 0.5}


def slopes(dtype: Any, generator: Any) -> Tensors:
    return {"alibi": 2.0 ** -torch.arange(1, HEADS + 1, dtype=torch.float32)}


def documents(dtype: Any, generator: Any) -> Tensors:
    """Documents of about the same length, which leave 8 % of the pairs."""
    rng = random.Random(1)
    ends = [round(TOKENS / DOCUMENTS * (n + rng.uniform(-0.2, 0.2))) for n in range(1, DOCUMENTS)]
    return {"doc": torch.bucketize(torch.arange(TOKENS), torch.tensor(ends), right=True).int()}


def table(dtype: Any, generator: Any) -> Tensors:
    return {"table": torch.randn((HEADS, 256), generator=generator)}


def nothing(dtype: Any, generator: Any) -> Tensors:
    return {}


@dataclass(frozen=True)
class Term:
    #: Least share of the plain rate, and the share that is aimed at; by pass. 0: not said.
    must: dict[str, float]
    aim: dict[str, float]
    tensors: Callable[[Any, Any], Tensors] = nothing
    #: What is added to the score of head h, query i (a column) and key j (a row); or a bool, which pairs are seen.
    value: Callable[[Tensors, int, Any, Any], Any] | None = None
    #: Whether the tensors are arguments of the problem; else the texts name them.
    fields: bool = False
    score: str = ""
    sees: str = ""
    dropout: float = 0
    gradients: dict[str, str] = field(default_factory=dict)


def only(fwd: float, bwd: float = 0) -> dict[str, float]:
    return {"fwd": fwd, "bwd": bwd}


TERMS = {
    "alibi": Term(only(0.88), only(0.93), slopes, lambda t, h, i, j: -t["alibi"][h].double() * (i - j).abs(), fields=True),
    "mask": Term(only(0.75), only(0.85), mask, lambda t, h, i, j: t["mask"][0, 0], fields=True),
    "bias": Term(only(0.7, 0.6), only(0.8), bias, lambda t, h, i, j: t["bias"][0, h].double(), fields=True, gradients={"bias": "dbias"}),
    "dropout": Term(only(0.45), only(0.6), dropout=DROPOUT),
    "documents": Term(only(5.0), only(8.0), documents, lambda t, h, i, j: t["doc"][i] == t["doc"][j], sees="doc[q] == doc[k]"),
    "ten": Term(
        only(0.6),
        only(0.75),
        value=lambda t, h, i, j: 0.25 * torch.tanh((j - i).abs() / 64 - 1) - (j - i) * (j - i) * 1e-6,
        score="s + 0.25 * tanh(abs(k - q) / 64.0 - 1.0) - (k - q) * float(k - q) * 1e-6",
    ),
    "alibi_text": Term(
        only(0.88), only(0.93), slopes, lambda t, h, i, j: -t["alibi"][h].double() * (i - j).abs(), score="s - alibi[h] * abs(q - k)"
    ),
    "table": Term(
        only(0),
        only(0),
        table,
        lambda t, h, i, j: t["table"][h].double()[(j - i).clamp(-128, 127).long() + 128],
        score="s + table[h, clamp(k - q, -128, 127) + 128]",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    dtype: str
    pass_: str
    term: str
    backend: str = ""

    @property
    def name(self) -> str:
        return f"{self.dtype}_{self.pass_}_{self.term}" + (f"_{self.backend}" if self.backend else "")

    @property
    def flops(self) -> float:
        return 4.0 * HEADS * TOKENS * TOKENS * SIZE * (2.5 if self.pass_ == "bwd" else 1.0)


def all_rows(backends: str) -> list[Row]:
    passes = [("fwd", term) for term in TERMS] + [("bwd", term) for term in TERMS]
    chosen = [Row(dtype, pass_, term) for dtype in ("float32", "bfloat16") for pass_, term in passes]
    also = [("bfloat16" if name.endswith("bf16") else "float32", name) for name in backends.split(",") if name]
    return chosen + [Row(dtype, "fwd", term, name) for dtype, name in also for term in TERMS]


class Case:
    """A problem, without the term and with it, on the same q, k and v."""

    def __init__(self, library: Library, row: Row, args: argparse.Namespace) -> None:
        self.row, self.term = row, TERMS[row.term]
        self.library, self.args = library, args
        self.generator = torch.Generator().manual_seed(1)
        dtype = getattr(torch, row.dtype)
        shape = (1, HEADS, TOKENS, SIZE)
        self.q, self.k, self.v, self.d_o = (torch.randn(shape, generator=self.generator).to(dtype) for _ in range(4))
        self.extra = self.term.tensors(dtype, self.generator)
        self.plain, self.plain_out = self.plan(library, None, HEADS)
        self.with_term, self.out = self.plan(library, self.term, HEADS)

    def plan(self, library: Library, term: Term | None, heads: int, backend: str | None = None) -> tuple[Plan, Tensors]:
        """The first `heads` heads, after a forward."""
        row = self.row
        inputs = {"q": self.q, "k": self.k, "v": self.v}
        inputs = {name: t[:, :heads].transpose(1, 2) for name, t in inputs.items()}
        out = {"o": torch.empty(1, heads, TOKENS, SIZE, dtype=self.q.dtype), "lse": torch.empty(1, heads, TOKENS)}
        tensors = inputs | {"o": out["o"].transpose(1, 2), "lse": out["lse"]}
        named: Tensors = {}
        options: dict[str, Any] = {
            "num_threads": self.args.threads,
            "backend": backend or row.backend or self.args.backend,
        }
        if term is not None:
            extra = {name: t if name in ("mask", "doc") else t[:, :heads] if t.ndim == 4 else t[:heads] for name, t in self.extra.items()}
            (tensors if term.fields else named).update(extra)
            options |= {"score": term.score, "sees": term.sees, "dropout": term.dropout}

        def views(of: Tensors) -> dict[str, View]:
            return {name: View(t.data_ptr(), str(t.dtype).removeprefix("torch."), tuple(t.shape), t.stride()) for name, t in of.items()}

        forward = library.plan(FORWARD, views(tensors), named=views(named), **options)
        forward.run()
        if row.pass_ == "fwd":
            return forward, tensors | out
        out |= {f"d{name}": torch.empty(1, heads, TOKENS, SIZE, dtype=self.q.dtype) for name in "qkv"}
        tensors |= {f"d{name}": out[f"d{name}"].transpose(1, 2) for name in "qkv"}
        tensors["d_o"] = self.d_o[:, :heads].transpose(1, 2)
        if term is not None:
            for name, gradient in term.gradients.items():
                out[gradient] = tensors[gradient] = torch.empty_like(tensors[name])
        return library.plan(BACKWARD, views(tensors), named=views(named), **options), tensors | named | out

    def error(self) -> float:
        """Largest difference over the largest value, on the first head."""
        self.with_term.run()
        expected = self.of_oracle() if self.term.dropout > 0 else self.of_torch()
        worst = 0.0
        for name, e in expected.items():
            got = self.out[name][0, 0].double()
            worst = max(worst, float((got - e.double()).abs().max() / e.double().abs().max()))
        return worst

    def of_oracle(self) -> Tensors:
        """Nobody outside knows which weights dropout keeps; the first head keeps the same ones alone."""
        plan, out = self.plan(self.library, self.term, 1, "reference")
        plan.run()
        names = ("o", "lse") if self.row.pass_ == "fwd" else ("dq", "dk", "dv")
        return {name: out[name][0, 0] for name in names}

    def of_torch(self) -> Tensors:
        q, k, v, d_o = (t[0, 0].double() for t in (self.q, self.k, self.v, self.d_o))
        scale = 1 / math.sqrt(SIZE)
        s = q @ k.T * scale
        i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None, :]
        assert self.term.value is not None
        value = self.term.value(self.extra, 0, i, j)
        s = s.masked_fill_(~value, -math.inf) if value.dtype == torch.bool else s.add_(value)
        lse = s.logsumexp(-1, keepdim=True)
        p = s.sub_(lse).exp_()
        o = p @ v
        if self.row.pass_ == "fwd":
            return {"o": o, "lse": lse[:, 0]}
        d_s = (d_o @ v.T).sub_((d_o * o).sum(-1, keepdim=True)).mul_(p)
        found = {"dq": d_s @ k * scale, "dk": d_s.T @ q * scale, "dv": p.T @ d_o}
        return found | {gradient: d_s for gradient in self.term.gradients.values()}


def measure(case: Case, before: Case | None, min_time: float) -> dict[str, Any]:
    """Alternates turns of the two problems, and who begins, until each has run for `min_time` seconds."""
    row = case.row
    error = case.error()
    if not error <= TOLERANCE[row.dtype]:
        sys.exit(f"expressions.py: {row.name}: differs from float64 by {error:.1e} of the largest value")
    sides = {"plain": before.with_term.run if before else case.plain.run, "term": case.with_term.run}
    others = Others()
    seconds = seconds_in_turns(sides, min_time)
    plain, term = summary(seconds["plain"], row.flops), summary(seconds["term"], row.flops)
    must, aim = case.term.must[row.pass_], case.term.aim[row.pass_]
    return {
        "name": row.name,
        "dtype": row.dtype,
        "pass": row.pass_,
        "term": row.term,
        "backend": case.with_term.backend,
        "plain": plain,
        "with_term": term,
        "share": round(plain["ms"] / term["ms"], 4),
        "must": must,
        "aim": aim,
        "rounds": len(seconds["term"]),
        "others": others.share(),
        "error": float(f"{error:.3g}"),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows whose name contains TEXT (or TEXT,TEXT)")
    parser.add_argument("--min-time", type=float, default=0.3, metavar="S", help="seconds a row and side (0.3)")
    parser.add_argument("--threads", type=int, default=0, help="threads (all cores)")
    parser.add_argument("--backend", help="this backend and not the first that can")
    parser.add_argument("--also", default="", metavar="NAME", help="forward rows of this backend, too (or NAME,NAME), in bfloat16 where its name ends in that")
    parser.add_argument("--json", metavar="PATH", help="write the results; 'auto' names a file in bench/results/expressions")
    parser.add_argument("--lib", type=Path, metavar="PATH", help="libfovea.so")
    parser.add_argument("--before", type=Path, metavar="PATH", help="another libfovea.so: its time of the row in the place of the plain one")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    path = find("libfovea.so", args.lib)
    if path is None:
        sys.exit("expressions.py: no libfovea.so; build the target fovea, or give --lib")
    library = Library(path)
    earlier = Library(find("libfovea.so", args.before)) if args.before else None  # type: ignore[arg-type]
    if earlier is not None and args.json:
        sys.exit("expressions.py: --before: the shares of a file are of the plain problem; leave out --json")
    args.threads = args.threads or library.default_threads
    rows = []
    for row in all_rows(args.also):
        if not any(text in row.name for text in args.rows.split(",")):
            continue
        case = Case(library, row, args)
        before = Case(earlier, row, args) if earlier else None
        result = quietest(lambda: measure(case, before, args.min_time))  # noqa: B023
        rows.append(result)
        below = "" if result["share"] >= result["must"] else f"  below {result['must']}"
        print(f"{row.name:44} {result['backend']:16} {result['with_term']['ms']:8.3f} ms, plain {result['plain']['ms']:8.3f}: "
              f"{result['share']:6.3f}  (others {result['others']:.0%}, error {result['error']:.0e}){below}", flush=True)  # fmt: skip
    if not args.json:
        return 0
    about = machine(library)
    results: dict[str, Any] = {
        "machine": about,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "software": {
            "fovea": library.version,
            "compiler": compiler_of(path),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "os": f"{platform.system()} {platform.release()}",
        },
        "sources_sha256": sources_hash(ROOT, SOURCES),
        "threads": args.threads,
        "problem": f"{TOKENS} tokens, {HEADS} heads of {SIZE}; mask: half kept; documents: {DOCUMENTS}; dropout {DROPOUT}",
        "share": "milliseconds of the problem without the term over those with it, medians of alternating turns",
        "quiet": QUIET,
        "rows": rows,
    }
    target = ROOT / "bench" / "results" / "expressions" / default_json(about).name if args.json == "auto" else Path(args.json)
    write(target, results)
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
