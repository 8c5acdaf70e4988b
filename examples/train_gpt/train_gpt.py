#!/usr/bin/env python3
"""Trains one small GPT on the bytes of a text with each of several attentions, from the same seed, and compares them.

    python examples/train_gpt/train_gpt.py                       PyTorch's attention and Fovea's; on a GPU where there is one
    python examples/train_gpt/train_gpt.py --text BOOK.txt       any text
    python examples/train_gpt/train_gpt.py --draw RESULT.json    the picture of an earlier run
    torchrun --nproc-per-node 2 examples/train_gpt/train_gpt.py  Fovea's sequences divided among two ranks

Prints tokens a second and losses, and writes result.json and loss.png. README.md beside this file says how to read them.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fovea
import fovea.torch
import fovea.torch.distributed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 256  # one token a byte

# Usual for GPTs of a few million parameters.
LEARNING_RATE, LAST_LEARNING_RATE, WARM_UP = 1e-3, 1e-4, 0.1
BETAS, WEIGHT_DECAY, LONGEST_GRADIENT = (0.9, 0.95), 0.1, 1.0

HELD_OUT = 0.1  # of the text: its end, for the last column of the table
HELD_OUT_BATCHES = 8
STEPS_A_TURN = 10  # long beside the clock's tick and the wait for the GPU, short beside a change of its clock frequency


# ---- attention: causal, of q, k and v, each (batch, context, heads, size); returns the same shape

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend_pytorch(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None = None) -> Tensor:
    """By PyTorch: the kernel that it chooses, or a backend's."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if backend is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


ATTENTIONS: dict[str, Attention] = {
    "pytorch": attend_pytorch,
    "fovea": partial(fovea.torch.attend, causal=True),
    "pytorch-math": partial(attend_pytorch, backend=SDPBackend.MATH),
    "pytorch-flash": partial(attend_pytorch, backend=SDPBackend.FLASH_ATTENTION),
    "pytorch-cudnn": partial(attend_pytorch, backend=SDPBackend.CUDNN_ATTENTION),
    "pytorch-efficient": partial(attend_pytorch, backend=SDPBackend.EFFICIENT_ATTENTION),
}


# ---- the model


class Block(nn.Module):
    """One layer: x + attention, then x + perceptron, each after a LayerNorm. x: (batch, context, width)."""

    def __init__(self, width: int, heads: int, attend: Attention) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm_attention, self.norm_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(self.attend(q, k, v).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_perceptron(x))))


class GPT(nn.Module):
    """Bytes (batch, rows) at `places` (rows) of the context to logits of the next byte, (batch, rows, VOCABULARY)."""

    def __init__(self, layers: int, heads: int, width: int, context: int, attend: Attention) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attend) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:  # layers that add to x start smaller, so that x does not grow with their number
                adds = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(places)
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


# ---- training


class Training:
    """A model in training. Two with the same options start from the same weights and see the same batches.

    Arguments:
        options: layers, heads, width, context, batch, steps, seed, device.
        text: (bytes) uint8, on the device: more than `context` of them.
        attend: the attention of every layer.
        dtype: of weights and arithmetic; on a GPU float32 means matrix products in bfloat16 by autocast.
        places: those of the context that this rank computes; None is all of them.
        group: of the ranks that compute the others.

    losses: (steps) float64, of the steps that have been done; seconds: of one step, for each turn.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        text: Tensor,
        attend: Attention,
        dtype: torch.dtype = torch.float32,
        places: Tensor | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.options, self.text, self.group = options, text, group
        self.places = torch.arange(options.context, device=options.device) if places is None else places
        torch.manual_seed(options.seed)
        model = GPT(options.layers, options.heads, options.width, options.context, attend)
        self.model = model.to(options.device, dtype)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), LEARNING_RATE, BETAS, weight_decay=WEIGHT_DECAY, fused=options.device == "cuda"
        )
        mixed = options.device == "cuda" and dtype == torch.float32
        self.autocast = torch.autocast(options.device, torch.bfloat16, enabled=mixed)
        self.starts = self.draw(len(text), options.steps, options.seed)
        self.losses = torch.zeros(options.steps, dtype=torch.float64, device=options.device)
        self.done = 0
        self.seconds: list[float] = []

    def draw(self, length: int, batches: int, seed: int) -> Tensor:
        """(batches, batch) places in a text where windows start."""
        options = self.options
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(length - options.context, (batches, options.batch), generator=generator).to(options.device)

    def loss(self, text: Tensor, starts: Tensor) -> Tensor:
        """Mean cross-entropy of each next byte in the windows, in nats; this rank's part of that mean."""
        at = starts[:, None] + self.places
        with self.autocast:
            logits = self.model(text[at].long(), self.places)
            mean = F.cross_entropy(logits.flatten(0, 1), text[at + 1].long().flatten())
            return mean * (len(self.places) / self.options.context)

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def learning_rate(self, step: int) -> float:
        """Up in a line, then down along a cosine."""
        steps = self.options.steps
        up = min(1.0, (step + 1) / max(1.0, WARM_UP * steps))
        down = 0.5 + 0.5 * math.cos(math.pi * step / steps)
        return up * (LAST_LEARNING_RATE + down * (LEARNING_RATE - LAST_LEARNING_RATE))

    def step(self) -> None:
        loss = self.loss(self.text, self.starts[self.done])
        self.optimizer.zero_grad()
        loss.backward()
        for weight in self.model.parameters():
            self.sum_over_ranks(weight.grad)
        nn.utils.clip_grad_norm_(self.model.parameters(), LONGEST_GRADIENT)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.done)
        self.optimizer.step()
        self.losses[self.done] = self.sum_over_ranks(loss.detach())
        self.done += 1

    def take_turn(self) -> None:
        """A few steps by the clock; none once all are done."""
        begin, before = time.perf_counter(), self.done
        while self.done < min(before + STEPS_A_TURN, self.options.steps):
            self.step()
        if self.options.device == "cuda":
            torch.cuda.synchronize()
        self.seconds.append((time.perf_counter() - begin) / (self.done - before))

    def tokens_a_second(self) -> float:
        """In the median turn, but for the first, which has the start of every library in it."""
        return self.options.batch * self.options.context / statistics.median(self.seconds[1:] or self.seconds)

    @torch.no_grad()
    def held_out_loss(self, text: Tensor) -> float:
        starts = self.draw(len(text), HELD_OUT_BATCHES, 0)
        return statistics.fmean(self.sum_over_ranks(self.loss(text, batch)).item() for batch in starts)


def over_ranks(options: argparse.Namespace, group: dist.ProcessGroup) -> dict[str, Any]:
    """Arguments of a Training whose sequences are divided among the ranks of `group`, by zigzag, as the mask is causal."""
    pieces = fovea.torch.distributed.zigzag(options.context, group.size())
    places = fovea.torch.distributed.shard(torch.arange(options.context), 0, pieces, group.rank())
    attend = partial(fovea.torch.distributed.attend, causal=True, group=group, pieces=pieces)
    return {"attend": attend, "places": places.to(options.device), "group": group}


def train(trainings: dict[str, Training]) -> None:
    """All of them to their end, in turns, so that each meets the same state of the machine.

    Raises ArithmeticError where a loss is not a finite number.
    """
    first = next(iter(trainings.values()))
    steps, shown = first.options.steps, 0
    while first.done < steps:
        for name, training in trainings.items():
            training.take_turn()
            if not training.losses[: training.done].isfinite().all():
                raise ArithmeticError(f"{name}: the loss is not finite within the first {training.done} steps")
        if first.done >= min(steps, shown + steps / 10):
            shown = first.done
            losses = ", ".join(f"{t.losses[t.done - 1]:.4f} {name}" for name, t in trainings.items())
            print(f"step {first.done:5} of {steps}: loss {losses}", flush=True)


# ---- what came of it


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> tuple[float, int]:
    """(difference, step) of two curves, steps counted from 1."""
    return max((abs(a - b), step) for step, (a, b) in enumerate(zip(losses, reference, strict=True), 1))


def kernels(name: str, options: argparse.Namespace) -> str:
    """What computes the attention `name` for these options, in the words of its library."""
    if "-" in name:
        return name.partition("-")[2]
    shape = (options.batch, options.context, options.heads, options.width // options.heads)
    x = torch.empty(shape, device=options.device, dtype=torch.bfloat16 if options.device == "cuda" else torch.float32)
    if name == "fovea":
        passes = [fovea.plan(x, x, x, causal=True, return_lse=True), fovea.plan(x, x, x, causal=True, backward=True)]
        ranks = f"{dist.get_world_size()} ranks" if dist.is_initialized() else ""
        return ", ".join(filter(None, dict.fromkeys([*(each.backend for each in passes), ranks])))
    x = x.transpose(1, 2).requires_grad_()
    return SDPBackend(torch._fused_sdp_choice(x, x, x, is_causal=True)).name.lower()


def report(
    options: argparse.Namespace, text: dict[str, Any], trainings: dict[str, Training], held_out: Tensor
) -> dict[str, Any]:
    """What result.json holds. The first training is the one that others are compared with."""
    info = fovea.info()
    reference = next(iter(trainings.values()))
    found: dict[str, Any] = {
        "program": "examples/train_gpt/train_gpt.py",
        "date": time.strftime("%Y-%m-%d"),
        "machine": info["gpus"][0] if options.device == "cuda" else info["processor"],
        "pytorch": torch.__version__,
        "fovea": fovea.__version__,
        "arithmetic": "bfloat16 autocast" if options.device == "cuda" else "float32",
        "text": text,
        "parameters": sum(weight.numel() for weight in reference.model.parameters()),
    }
    found |= {name: getattr(options, name) for name in ("layers", "heads", "width", "context", "batch", "steps", "seed")}
    found["attention"] = {}
    for name, training in trainings.items():
        losses = training.losses.tolist()
        difference, step = largest_difference(losses, reference.losses.tolist())
        found["attention"][name] = {
            "kernels": kernels(name, options),
            "tokens_a_second": round(training.tokens_a_second()),
            "held_out_loss": round(training.held_out_loss(held_out), 6),
            "largest_difference": difference,
            "largest_difference_at_step": step,
            "losses": [float(f"{loss:.9g}") for loss in losses],  # nine digits tell any two float32 apart
        }
    return found


def table(found: dict[str, Any]) -> str:
    rows = [("attention", "kernels", "tokens/s", "times", "last loss", "held out", "largest difference")]
    first, reference = next(iter(found["attention"].items()))
    for name, each in found["attention"].items():
        difference = f"{each['largest_difference']:.2e} at step {each['largest_difference_at_step']}"
        rows.append((
            name,
            each["kernels"],
            f"{each['tokens_a_second']:,}",
            f"{each['tokens_a_second'] / reference['tokens_a_second']:.2f}",
            f"{each['losses'][-1]:.4f}",
            f"{each['held_out_loss']:.4f}",
            "-" if name == first else difference,
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{n}}" if i < 2 else f"{cell:>{n}}" for i, (cell, n) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )


def draw(found: dict[str, Any], path: Path) -> None:
    """The loss curves above, their differences from the first one below. Needs matplotlib."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    curves = list(found["attention"].items())
    reference = curves[0][1]["losses"]
    steps = range(1, len(reference) + 1)
    colors = ("#e69f00", "#2f7fd0", "#0b9a6d", "#cc79a7", "#d9622b", "#56b4e9")  # near Okabe and Ito's, as in bench/report
    for i, ((name, each), color) in enumerate(zip(curves, colors, strict=False)):
        # Curves that agree lie on each other: the first is broad and light, later ones are dashed with it in the gaps.
        style = {"linewidth": 4, "alpha": 0.5} if i == 0 else {"linewidth": 1.2, "linestyle": (2 * i, (4, 2))}
        above.plot(steps, each["losses"], color=color, label=f"{name}: {each['tokens_a_second']:,} tokens/s", **style)
        if i > 0:
            differences = [abs(a - b) or math.nan for a, b in zip(each["losses"], reference, strict=True)]
            below.plot(steps, differences, ".", color=color, markersize=4, label=f"{name} and {curves[0][0]}")
    above.set_ylabel("loss, nats a byte")
    above.set_title(
        f"{found['parameters'] / 1e6:.1f} M parameters, {found['layers']} layers, {found['heads']} heads of "
        f"{found['width'] // found['heads']}, context {found['context']:,}, {found['arithmetic']}\n{found['machine']}",
        fontsize=9,
    )
    below.set_ylabel("difference")
    below.set_xlabel("step")
    if len(curves) > 1:
        below.set_yscale("log")
        below.legend(frameon=False, fontsize=9)
    above.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=100)


# ---- the command line


def at_least_one(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a whole number, 1 or more")
    return value


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="default: cuda where PyTorch and Fovea have a GPU, else cpu")
    add("--text", type=Path, nargs="+", default=[], metavar="FILE", help="default: README.md, docs, ladder of this repository")
    for name, default, what in (
        ("layers", 4, ""),
        ("heads", 4, "; divides --width"),
        ("width", 256, ""),
        ("context", 256, ", bytes that a sequence has"),
        ("batch", 16, ", sequences in a step"),
        ("steps", 200, ""),
    ):
        add(f"--{name}", type=at_least_one, default=default, metavar="N", help=f"default: {default}{what}")
    add("--seed", type=int, default=0, metavar="N", help="of weights and batches; default: 0")
    add(
        "--attention", nargs="+", default=["pytorch", "fovea"], choices=ATTENTIONS, metavar="NAME",
        help=f"what to compare, with the first of them; default: pytorch fovea; of: {', '.join(ATTENTIONS)}",
    )  # fmt: skip
    add("--output", type=Path, default=ROOT / "build/train_gpt", metavar="FOLDER", help="default: build/train_gpt")
    add("--draw", type=Path, metavar="RESULT.json", help="trains nothing: draws the picture of that file into --output")
    return parser.parse_args(arguments), parser


def check(options: argparse.Namespace, fail: Callable[[str], Any]) -> None:
    """What argparse cannot see. Sets the device where none was given."""
    has_gpu = torch.cuda.is_available() and bool(fovea.info()["gpus"])
    options.device = options.device or ("cuda" if has_gpu else "cpu")
    if options.device == "cuda" and not has_gpu:
        fail(f"--device: got cuda, which PyTorch {torch.__version__} or Fovea ({fovea.info()['cuda']}) cannot use; try cpu")
    if options.width % options.heads != 0:
        fail(f"--heads: got {options.heads}; expected a divisor of --width, {options.width}; change one of them")
    if len(set(options.attention)) != len(options.attention):
        fail(f"--attention: got {' '.join(options.attention)}; expected each name once; leave out the second")


def read_text(options: argparse.Namespace, fail: Callable[[str], Any]) -> tuple[bytes, dict[str, Any]]:
    """(the files' bytes one after the other, what result.json says of them)."""
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("ladder/**/*.md"))]
    parts = []
    for path in options.text or pages:
        try:
            parts.append(path.read_bytes())
        except OSError as error:
            fail(f"--text: got {path}: {error.strerror}; expected a text file; name another")
    text = b"\n".join(parts)
    needed = math.ceil((options.context + 1) / HELD_OUT)
    if len(text) < needed:
        fail(
            f"--text: got {len(text):,} bytes; expected {needed:,} or more for --context {options.context}, since {HELD_OUT:.0%} "
            "are held out; name more files, or lower --context"
        )
    names = [path.name for path in options.text] or ["README.md", "docs/**/*.md", "ladder/**/*.md"]
    return text, {"files": names, "bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}


def read_result(path: Path, fail: Callable[[str], Any]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and str(found.get("program")).endswith("train_gpt.py"):
            return found
        problem = "not a result of this program"
    except (OSError, ValueError) as error:
        problem = str(error)
    return fail(f"--draw: got {path}: {problem}; expected a result.json; name another")


def join_ranks(options: argparse.Namespace) -> dist.ProcessGroup | None:
    """The group of all processes, where torchrun started this one."""
    if not dist.is_torchelastic_launched():
        return None
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    return dist.group.WORLD


def run(options: argparse.Namespace, fail: Callable[[str], Any]) -> dict[str, Any]:
    """Trains, prints, and returns what result.json holds."""
    check(options, fail)
    group = join_ranks(options)
    everything, described = read_text(options, fail)
    text = torch.frombuffer(bytearray(everything), dtype=torch.uint8).to(options.device)
    kept = len(text) - math.ceil(HELD_OUT * len(text))
    trainings = {}
    for name in options.attention:
        divided = group is not None and name == "fovea"
        arguments = over_ranks(options, group) if divided else {"attend": ATTENTIONS[name]}
        trainings[name] = Training(options, text[:kept], **arguments)
    parameters = sum(weight.numel() for weight in trainings[options.attention[0]].model.parameters())
    print(
        f"{parameters:,} parameters, {len(text):,} bytes of text, {options.batch * options.context:,} tokens a step, {options.device}",
        flush=True,
    )
    train(trainings)
    found = report(options, described, trainings, text[kept:])
    if group is not None:
        dist.destroy_process_group()
    print(f"\n{table(found)}\n")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    options, parser = parse(arguments)
    if int(os.environ.get("RANK", 0)) > 0:  # another process of torchrun's prints and writes
        with contextlib.redirect_stdout(None):
            run(options, parser.error)
        return
    can_draw = importlib.util.find_spec("matplotlib") is not None
    if not can_draw:
        missing = "matplotlib is not installed, so there is no picture; pip install matplotlib"
        if options.draw:
            parser.error(missing)
        print(f"train_gpt.py: {missing}, then --draw draws it from result.json", file=sys.stderr)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output: got {options.output}: {error.strerror}; expected a folder that can be made; name another")
    try:
        found = read_result(options.draw, parser.error) if options.draw else run(options, parser.error)
    except ArithmeticError as error:
        sys.exit(f"train_gpt.py: {error}")
    if not options.draw:
        (options.output / "result.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
        print(options.output / "result.json")
    if can_draw:
        draw(found, options.output / "loss.png")
        print(options.output / "loss.png")


if __name__ == "__main__":
    main()
