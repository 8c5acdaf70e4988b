"""The contenders of compare.py: ours through the C ABI, PyTorch's backends and FlexAttention, FlashAttention-3 and -4 where installed.

A contender prepares a call from inputs on the GPU. A call is put into the current stream by `run`, allocates what its
interface allocates, and afterwards holds its outputs, in Fovea's layout: (batch, seqlen, heads, size), packed (total,
heads, size).
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fa3_library as fa3
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from fovea_ctypes import BACKWARD, CUDA, FORWARD, Library, View
from shapes import DROPOUT, DTYPES, Shape
from terms import TERMS
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Tensor = Any
Outputs = dict[str, Tensor]


# Of those that have dropout: what cannot be verified is not timed.
UNKNOWN_WEIGHTS = "nobody outside knows which weights its dropout keeps, so its outputs cannot be verified"


class NotSupported(RuntimeError):
    """The contender cannot run this shape; the text says why."""


class Inputs:
    """Normal random q, k, v and, for a backward, d_o."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        generator = torch.Generator("cuda").manual_seed(seed)
        dtype = getattr(torch, DTYPES[shape.dtype])

        def normal(rows: int, heads: int, size: int) -> Tensor:
            sizes = (rows, heads, size) if shape.lengths else (shape.b, rows, heads, size)
            return torch.randn(sizes, generator=generator, device="cuda", dtype=torch.float32).to(dtype)

        self.q = normal(shape.s_q, shape.h_q, shape.d)
        self.k = normal(shape.s_k, shape.h_kv, shape.d)
        self.v = self.k[..., : shape.d_v] if shape.latent else normal(shape.s_k, shape.h_kv, shape.d_v)
        self.d_o = normal(shape.s_q, shape.h_q, shape.d_v) if shape.backward else None
        self.cu_seqlens = None
        if shape.lengths:
            ends = [0, *(end for _, end in shape.sequences)]
            self.cu_seqlens = torch.tensor(ends, dtype=torch.int32, device="cuda")
        self.used = torch.tensor(shape.used, dtype=torch.int32, device="cuda") if shape.used else None
        self.new: dict[str, Tensor] = {}  # what OurCall is told of new rows, and the q that it rotates
        self.pools, self.page_table = (self.k, self.v), None
        self.queries = self.q  # as our calls get them
        self.descales: dict[str, Tensor] = {}
        if shape.e4m3:
            self._take_8_bits()
        if shape.append:
            self._take_new_rows()
        if shape.page:
            self._make_pages(generator)
        # 2^(-8 h / heads), h from 1 on (Press et al. 2021, "Train short, test long", section 3).
        heads = torch.arange(1, shape.h_q + 1, device="cuda", dtype=torch.float32)
        self.slopes = torch.exp2(-8 * heads / shape.h_q) if shape.alibi else None
        self.term = TERMS[shape.term] if shape.term else None
        self.term_tensors: dict[str, Tensor] = {}
        if self.term:
            self.term_tensors = self.term.tensors(shape.b, shape.h_q, shape.s_q, shape.s_k, generator)

    def _take_new_rows(self) -> None:
        """The last rows go to `new`, and are NaN in the pools; k and q are what they are once rotated."""
        shape = self.shape
        rows, half = shape.s_q, shape.d // 2
        self.used = torch.full((shape.b,), shape.s_k - rows, dtype=torch.int32, device="cuda")
        theta = 10000.0 ** (-torch.arange(half, device="cuda", dtype=torch.float64) / half)
        angles = torch.arange(shape.s_k, device="cuda", dtype=torch.float64)[:, None] * theta
        cos, sin = angles.cos().to(self.q.dtype), angles.sin().to(self.q.dtype)
        self.new = {
            "q": self.q,
            "k_new": self.k[:, -rows:].clone(),
            "v_new": self.v[:, -rows:].clone(),
            "rotary_cos": cos,
            "rotary_sin": sin,
        }

        def turned(x: Tensor) -> Tensor:
            (a, b), c, s = x.float().split(half, -1), cos[-rows:, None].float(), sin[-rows:, None].float()
            return torch.cat((a * c - b * s, a * s + b * c), -1).to(x.dtype)

        self.k[:, -rows:] = turned(self.new["k_new"])
        self.q = turned(self.q)
        self.pools = self.k.clone(), self.v.clone()
        for pool in self.pools:
            pool[:, -rows:] = float("nan")

    def _take_8_bits(self) -> None:
        """The pools are of 8 bits, with powers of two as factors; k and v are what they stand for, and so q may be."""
        shape, dtype = self.shape, self.q.dtype
        self.pools = self.k.to(torch.float8_e4m3fn), self.v.to(torch.float8_e4m3fn)
        for name, factor in (("k_descale", 0.5), ("v_descale", 2.0)):
            self.descales[name] = torch.full((shape.b, shape.h_kv), factor, device="cuda")
        self.k, self.v = self.pools[0].to(dtype) * 0.5, self.pools[1].to(dtype) * 2.0
        if shape.e4m3_q:
            self.queries = self.q.to(torch.float8_e4m3fn)
            self.descales["q_descale"] = torch.full((shape.b, shape.h_kv), 2.0, device="cuda")
            self.q = self.queries.to(dtype) * 2.0

    def _make_pages(self, generator: Any) -> None:
        """The keys and values once more, in pages in random order."""
        shape = self.shape
        self._pools_in_one_piece, self._used_in_one_piece = self.pools, self.used
        columns = -(-shape.s_k // shape.page)
        order = torch.randperm(shape.b * columns, generator=generator, device="cuda")
        self.page_table = order.to(torch.int32).view(shape.b, columns)
        if self.used is None:
            self.used = torch.full((shape.b,), shape.s_k, dtype=torch.int32, device="cuda")

        def pool(t: Tensor) -> Tensor:
            dtype = t.dtype
            t = t.view(torch.uint8) if shape.e4m3 else t  # of which PyTorch has all operations
            pages = torch.zeros((shape.b * columns, shape.page, *t.shape[2:]), dtype=t.dtype, device="cuda")
            rows = torch.nn.functional.pad(t, (0, 0, 0, 0, 0, columns * shape.page - shape.s_k))
            pages[order] = rows.view(shape.b * columns, shape.page, *t.shape[2:])
            return pages.view(dtype)

        keys = pool(self.pools[0])
        self.pools = keys, keys[..., : shape.d_v] if shape.latent else pool(self.pools[1])


    def in_one_piece(self) -> Inputs:
        """The same sequences out of their pages, with lengths in a tensor only where they differ."""
        other = self.in_one_piece_with_lengths()
        other.used = self._used_in_one_piece
        return other

    def in_one_piece_with_lengths(self) -> Inputs:
        """The same sequences out of their pages, with lengths in a tensor, as pages have."""
        other = copy.copy(self)
        other.pools, other.page_table = self._pools_in_one_piece, None
        return other

    def in_16_bits(self) -> Inputs:
        """The same numbers, in the type of q."""
        other = copy.copy(self)
        other.queries, other.pools, other.descales = self.q, (self.k, self.v), {}
        return other


class Call:
    """One run of a contender on one set of inputs."""

    backend = ""

    def run(self) -> None:
        raise NotImplementedError

    def outputs(self) -> Outputs:
        raise NotImplementedError

    def poison(self) -> None:
        """Fills the caller's outputs with NaN, so that an element that nobody writes shows."""


# ---- ours


class OurCall(Call):
    def __init__(
        self, library: Library, backend: str | None, deterministic: bool, inputs: Inputs, pattern: str = ""
    ) -> None:
        """`pattern` selects by name the kernels that the measured pass may use."""
        shape = inputs.shape
        self._keep: list[Tensor] = [inputs]
        device = (CUDA, torch.cuda.current_device())

        def view(t: Tensor) -> View:
            return View(t.data_ptr(), str(t.dtype).removeprefix("torch."), tuple(t.shape), t.stride())

        def allocate(size: int) -> int:
            self._keep.append(torch.empty(max(size, 1), dtype=torch.uint8, device="cuda"))
            return int(self._keep[-1].data_ptr())

        rows = (shape.h_q, shape.s_q) if shape.lengths else (shape.b, shape.h_q, shape.s_q)
        o = torch.empty((*inputs.q.shape[:-1], shape.d_v), dtype=inputs.q.dtype, device="cuda")
        lse = torch.empty(rows, dtype=torch.float32, device="cuda")
        self._outputs = {"o": o, "lse": lse}
        tensors = {name: view(t) for name, t in zip("qkvo", (inputs.queries, *inputs.pools, o), strict=True)}
        tensors |= {name: view(t) for name, t in inputs.new.items()}
        if inputs.used is not None:
            tensors["seqused_k"] = view(inputs.used)
        tensors |= {name: view(t) for name, t in inputs.descales.items()}
        if inputs.page_table is not None:
            tensors["page_table"] = view(inputs.page_table)
        if shape.lse:
            tensors["lse"] = view(lse)
        else:
            del self._outputs["lse"]
        if inputs.cu_seqlens is not None:
            tensors["cu_seqlens_q"] = tensors["cu_seqlens_k"] = view(inputs.cu_seqlens)
        if inputs.slopes is not None:
            tensors["alibi"] = view(inputs.slopes)
        told: dict[str, Any] = {}
        if inputs.term:
            tensors |= {name: view(inputs.term_tensors[name]) for name in inputs.term.fields}
            told = {"score": inputs.term.score, "sees": inputs.term.sees}
            told["named"] = {n: view(t) for n, t in inputs.term_tensors.items() if n not in inputs.term.fields}
        options: dict[str, Any] = {
            **told,
            "causal": shape.causal,
            "window_left": shape.window,
            "softcap": shape.softcap,
            "dropout": DROPOUT if shape.dropout else 0.0,
            "max_seqlen": max(shape.lengths, default=0),
            "backend": backend,
            "device": device,
            "allocate": allocate,
        }
        with kernels("" if shape.backward else pattern):
            plan = library.plan(FORWARD, tensors, **options)
        if shape.backward:
            plan.run(torch.cuda.current_stream().cuda_stream)
            self._keep += [o, lse]
            gradients = {
                f"d{name}": torch.empty_like(t) for name, t in zip("qkv", (inputs.q, inputs.k, inputs.v), strict=True)
            }
            if inputs.term:
                for name in inputs.term.gradients:
                    gradients[f"d{name}"] = torch.empty_like(inputs.term_tensors[name])
            tensors["d_o"] = view(inputs.d_o)
            tensors |= {name: view(t) for name, t in gradients.items()}
            self._outputs = gradients
            with kernels(pattern):
                plan = library.plan(BACKWARD, tensors, deterministic=deterministic, **options)
        self._plan = plan
        self.backend = plan.backend
        self.workspace_size = plan.workspace_size

    def run(self) -> None:
        self._plan.run(torch.cuda.current_stream().cuda_stream)

    def outputs(self) -> Outputs:
        return self._outputs

    def poison(self) -> None:
        for t in self._outputs.values():
            t.fill_(float("nan"))


# ---- theirs


class TheirCall(Call):
    """A function of q, k, v; its backward is torch.autograd.grad on a kept graph. Inputs that ask for gradients make a
    forward write lse."""

    def __init__(self, inputs: Inputs, forward: Callable[..., Tensor], backend: str) -> None:
        self.backend = backend
        self._forward, self._inputs = forward, (inputs.q, inputs.k, inputs.v)
        self._d_o, self._outputs = inputs.d_o, {}
        self._names = ("dq", "dk", "dv")
        if inputs.shape.lse:
            self._inputs = tuple(t.detach().requires_grad_() for t in self._inputs)
        self._wanted = self._inputs
        if inputs.shape.backward and inputs.term and inputs.term.gradients:
            self._wanted += tuple(inputs.term_tensors[name].requires_grad_() for name in inputs.term.gradients)
            self._names += tuple(f"d{name}" for name in inputs.term.gradients)
        if inputs.shape.backward:
            self._o = forward(*self._inputs)

    def run(self) -> None:
        if self._d_o is None:
            self._outputs = {"o": self._forward(*self._inputs).detach()}
            return
        gradients = torch.autograd.grad(self._o, self._wanted, self._d_o, retain_graph=True)
        self._outputs = dict(zip(self._names, gradients, strict=True))

    def outputs(self) -> Outputs:
        return self._outputs


def sdpa_call(backend: SDPBackend, inputs: Inputs) -> Call:
    """scaled_dot_product_attention with one backend."""
    shape = inputs.shape
    if shape.lengths:
        raise NotSupported("scaled_dot_product_attention takes no cu_seqlens")
    if shape.page or shape.used:
        raise NotSupported("scaled_dot_product_attention takes no pages and no lengths")
    if shape.softcap or shape.alibi:
        raise NotSupported("scaled_dot_product_attention takes no softcap and no slopes")
    if shape.dropout:
        raise NotSupported(UNKNOWN_WEIGHTS)
    if shape.causal and shape.s_q != shape.s_k:
        raise NotSupported("its causal mask is aligned top-left, not bottom-right")
    options: dict[str, Any] = {"is_causal": shape.causal, "enable_gqa": shape.h_q != shape.h_kv}
    if inputs.term:
        if not inputs.term.attn_mask or shape.causal:
            raise NotSupported("scaled_dot_product_attention takes one full tensor, and no function")
        options["attn_mask"] = inputs.term_tensors[inputs.term.attn_mask]
    if shape.window >= 0:
        if backend != SDPBackend.EFFICIENT_ATTENTION:
            raise NotSupported(
                "scaled_dot_product_attention takes no window, and this backend no mask with the speed of one"
            )
        i = torch.arange(shape.s_q, device="cuda")[:, None] + shape.s_k - shape.s_q
        j = torch.arange(shape.s_k, device="cuda")[None]
        seen = j >= i - shape.window
        if shape.causal:
            seen &= j <= i
        mask = torch.zeros(seen.shape, dtype=inputs.q.dtype, device="cuda").masked_fill_(~seen, float("-inf"))
        options |= {"attn_mask": mask[None, None], "is_causal": False}

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            o = scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)
        return o.transpose(1, 2)

    return TheirCall(inputs, forward, f"SDPBackend.{backend.name}")


class AtenFlashCall(Call):
    """FlashAttention-2 inside of PyTorch by the operator under scaled_dot_product_attention, which takes windows and
    packed sequences."""

    backend = "aten::_flash_attention_forward"

    def __init__(self, inputs: Inputs) -> None:
        shape = inputs.shape
        if shape.dropout:
            raise NotSupported(UNKNOWN_WEIGHTS)
        if shape.softcap or shape.alibi or shape.term or shape.page or shape.used:
            raise NotSupported("the operator takes no softcap, no slopes, no masks and no cache")
        self._inputs, self._outputs = inputs, {}
        longest_q, longest_k = (max(shape.lengths),) * 2 if shape.lengths else (shape.s_q, shape.s_k)
        self._lengths = (inputs.cu_seqlens, inputs.cu_seqlens, longest_q, longest_k)
        self._window = (
            {"window_size_left": shape.window, "window_size_right": 0 if shape.causal else -1}
            if shape.window >= 0
            else {}
        )
        # With a window the operator takes the mask from it alone.
        self._causal = shape.causal and shape.window < 0
        if shape.backward:
            self._kept = self._forward()

    def _forward(self) -> tuple[Tensor, ...]:
        i = self._inputs
        return tuple(
            torch.ops.aten._flash_attention_forward(
                i.q, i.k, i.v, *self._lengths, 0.0, self._causal, False, **self._window
            )
        )

    def run(self) -> None:
        i = self._inputs
        with torch.no_grad():
            if not i.shape.backward:
                self._outputs = {"o": self._forward()[0]}
                return
            o, lse, seed, offset = self._kept[:4]
            gradients = torch.ops.aten._flash_attention_backward(
                i.d_o, i.q, i.k, i.v, o, lse, *self._lengths, 0.0, self._causal, seed, offset, **self._window
            )
            self._outputs = dict(zip(("dq", "dk", "dv"), gradients, strict=True))

    def outputs(self) -> Outputs:
        return self._outputs


def fa2_call(inputs: Inputs) -> Call:
    if inputs.shape.lengths or inputs.shape.window >= 0:
        return AtenFlashCall(inputs)
    return sdpa_call(SDPBackend.FLASH_ATTENTION, inputs)


def flash_call(module: Any, inputs: Inputs) -> Call:
    """FlashAttention-3 (flash_attn_interface) or -4 (flash_attn.cute): the same functions."""
    shape = inputs.shape
    options: dict[str, Any] = {"causal": shape.causal}
    if shape.window >= 0:
        options["window_size"] = (shape.window, 0 if shape.causal else -1)
    if shape.softcap:
        options["softcap"] = float(shape.softcap)
    if shape.dropout:
        raise NotSupported(UNKNOWN_WEIGHTS)
    if shape.alibi or shape.term:
        raise NotSupported("FlashAttention-3 and -4 take no slopes and no masks")
    if shape.page or shape.used:
        raise NotSupported("caches of FlashAttention-3 and -4 are not written down here")
    if shape.backward:
        options["deterministic"] = shape.deterministic
    function = module.flash_attn_func
    if shape.lengths:
        function, longest = module.flash_attn_varlen_func, max(shape.lengths)
        options |= {"cu_seqlens_q": inputs.cu_seqlens, "cu_seqlens_k": inputs.cu_seqlens}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = function(q, k, v, **options)
        return found[0] if isinstance(found, tuple) else found

    return TheirCall(inputs, forward, f"{module.__name__}.{function.__name__}")


def flex_call(inputs: Inputs) -> Call:
    """FlexAttention, compiled for the shape and its score; blocks behind a causal mask are left out."""
    shape, slopes = inputs.shape, inputs.slopes
    if shape.lengths or shape.window >= 0 or shape.s_q != shape.s_k or shape.page or shape.used:
        raise NotSupported("only whole square problems are written down for FlexAttention here")
    if not (shape.softcap or shape.alibi or shape.term):
        raise NotSupported("without a score of its own the other peers are faster")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    term, tensors = inputs.term, inputs.term_tensors
    if any(tensor.numel() >= 2**31 for tensor in tensors.values()):
        raise NotSupported("PyTorch 2.11 counts elements of captured tensors in 32 bits: illegal accesses beyond")
    of_term = term.flex_score(tensors) if term and term.flex_score else None
    sees = term.flex_sees(tensors) if term and term.flex_sees else None

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if of_term:
            return of_term(s, b, h, i, j)
        if shape.softcap:
            s = shape.softcap * torch.tanh(s / shape.softcap)
        return s if slopes is None else s - slopes[h] * (i - j).abs()

    seen = None
    if sees:
        # Its block mask is made before the measured call, once.
        seen = create_block_mask(sees, shape.b, None, shape.s_q, shape.s_k, device="cuda", _compile=True)
    elif shape.causal:
        seen = create_block_mask(lambda _b, _h, i, j: j <= i, None, None, shape.s_q, shape.s_k, device="cuda")
    torch.compiler.reset()  # beyond a few shapes of a process it would run uncompiled
    compiled = torch.compile(flex_attention, dynamic=False)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = compiled(
            *(t.transpose(1, 2) for t in (q, k, v)), score, block_mask=seen, enable_gqa=shape.h_q != shape.h_kv
        )
        return o.transpose(1, 2)

    return TheirCall(inputs, forward, "flex_attention")


# ---- the list


@contextlib.contextmanager
def deterministic_torch() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    # Otherwise PyTorch fills every torch.empty with NaN, within the time that is measured.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


Prepare = Callable[[Inputs], Call]


def peers(wanted: list[str], fa3_library: Path | None = None) -> dict[str, Prepare]:
    """The contenders in `wanted` that this machine has. `fa3_library`: where FlashAttention-3 is to be had without its package."""
    found: dict[str, Prepare] = {
        "fa2": fa2_call,
        "cudnn": lambda inputs: sdpa_call(SDPBackend.CUDNN_ATTENTION, inputs),
        "efficient": lambda inputs: sdpa_call(SDPBackend.EFFICIENT_ATTENTION, inputs),
        "flex": flex_call,
    }
    for name, module_name in (("fa3", "flash_attn_interface"), ("fa4", "flash_attn.cute")):
        if name not in wanted:
            continue
        with contextlib.suppress(ImportError):
            module = importlib.import_module(module_name)
            found[name] = lambda inputs, module=module: flash_call(module, inputs)  # type: ignore[misc]
    if fa3_library is not None:
        fa3.load(fa3_library)
        found["fa3"] = fa3.Fa3LibraryCall
    return {name: prepare for name, prepare in found.items() if name in wanted}


@contextlib.contextmanager
def kernels(pattern: str) -> Iterator[None]:
    """Plans made in this context use a main kernel whose name matches the pattern, unless it is empty."""
    if not pattern:
        yield
        return
    before = os.environ.get("FOVEA_KERNEL")
    os.environ["FOVEA_KERNEL"] = pattern
    try:
        yield
    finally:
        if before is None:
            del os.environ["FOVEA_KERNEL"]
        else:
            os.environ["FOVEA_KERNEL"] = before


def ours(library: Library, backends: list[str], shape: Shape, patterns: list[str]) -> dict[str, Prepare]:
    """One contender a backend and, after them, a pattern of kernels; "" lets the library choose. A deterministic
    backward is accompanied by the fast one."""
    found: dict[str, Prepare] = {}
    for number, backend in enumerate(backends):
        name = "ours" if number == 0 else f"ours:{backend}"

        def prepare(inputs: Inputs, backend: str = backend, deterministic: bool = shape.deterministic) -> Call:
            return OurCall(library, backend or None, deterministic, inputs)

        found[name] = prepare
        if number == 0:
            for pattern in patterns:

                def prepare_with(inputs: Inputs, pattern: str = pattern) -> Call:
                    return OurCall(library, None, shape.deterministic, inputs, pattern)

                found[f"ours:{pattern}"] = prepare_with
        if shape.deterministic:
            found[name + ("_fast" if ":" in name else ":fast")] = lambda inputs, prepare=prepare: prepare(  # type: ignore[misc]
                inputs, deterministic=False
            )
    return found


def ours_stored_otherwise(library: Library, shape: Shape) -> dict[str, Prepare]:
    """What pages, and keys of 8 bits, are measured against: the same row in one piece, or in 16 bits."""

    def prepare(change: Callable[[Inputs], Inputs]) -> Prepare:
        return lambda inputs: OurCall(library, None, False, change(inputs))

    found = {}
    if shape.page:
        found["ours:one_piece"] = prepare(Inputs.in_one_piece)
        found["ours:lengths"] = prepare(Inputs.in_one_piece_with_lengths)
    elif shape.e4m3 and not shape.e4m3_q:
        found["ours:16_bits"] = prepare(Inputs.in_16_bits)
    return found
