"""fovea.torch.distributed: every case runs on processes, all of them in one start: three on the CPU over gloo, and two on GPUs over
NCCL where there are two. Each process compares its rows with the whole problem in float64.

This file is also the program of a process: test_distributed.py RANK SIZE DEVICE PORT FOLDER.
"""

import contextlib
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import fovea
import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("a PyTorch without torch.distributed", allow_module_level=True)

import fovea.torch.distributed as fd  # noqa: E402
from plain import assert_close, attention  # noqa: E402
from torch.nn import functional as F  # noqa: E402

RANKS = {"cpu": 3, "gpu": max(2, min(4, torch.cuda.device_count()))}
DEADLINE = 30
CASES = {}


def case(function):
    """A function of Here that all processes call."""
    CASES[function.__name__] = function
    return function


class Here:
    """What a case knows: this process, and its device."""

    def __init__(self, rank, size, device):
        self.rank, self.size = rank, size
        self.device = torch.device("cuda", rank) if device == "gpu" else torch.device("cpu")
        self.dtype = torch.bfloat16 if device == "gpu" else torch.float32
        self.ranks = fd.Ranks(deadline=DEADLINE)

    def random(self, *shape, seed=0, dtype=None):
        """The same on all ranks."""
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
        return x.to(self.device, dtype or self.dtype)

    def compare(self, pieces, *, key_pieces=None, sizes=(2, 4, 2, 16), dtype=None, attend=None, **options):
        """attend and its gradients against the whole problem."""
        batch, heads_q, heads_k, size = sizes
        keys = pieces if key_pieces is None else key_pieces
        rows = [max(end for _, _, end in each) for each in (pieces, keys)]
        whole = [
            self.random(batch, n, h, size, seed=i, dtype=dtype)
            for i, (n, h) in enumerate([(rows[0], heads_q), (rows[1], heads_k), (rows[1], heads_k)])
        ]
        sink, bias = options.get("sink"), options.get("bias")
        d_o = self.random(batch, rows[0], heads_q, size, seed=7, dtype=dtype)
        dlse = self.random(batch, heads_q, rows[0], dtype=torch.float32)
        exact = [x.double().requires_grad_() for x in (*whole, *([] if sink is None else [sink]))]
        formula = {name: x for name, x in options.items() if name not in ("sink", "heads_ranks", "stages")}
        if bias is not None:
            formula["bias"] = exact_bias = bias.double().requires_grad_()
            options["bias"] = bias = bias.clone().requires_grad_()
        o, lse = attention(*exact[:3], **formula, sink=None if sink is None else exact[3])
        ((o * d_o.double()).sum() + (lse * dlse.double()).masked_fill(torch.isneginf(lse), 0).sum()).backward()

        local = [fd.shard(x, 1, each, self.rank).clone().requires_grad_() for x, each in zip(whole, (pieces, keys, keys))]
        if sink is not None:
            options["sink"] = sink = sink.clone().requires_grad_()
        where = {"pieces": pieces, "key_pieces": key_pieces}
        got_o, got_lse = (attend or fd.attend)(*local, group=self.ranks, return_lse=True, **where, **options)
        d_o, dlse = fd.shard(d_o, 1, pieces, self.rank), fd.shard(dlse, 2, pieces, self.rank)
        ((got_o * d_o).float().sum() + (got_lse * dlse).masked_fill(torch.isneginf(got_lse), 0).sum()).backward()
        assert_close(got_o, fd.shard(o, 1, pieces, self.rank))
        assert_close(got_lse, fd.shard(lse, 2, pieces, self.rank), local[0].dtype)
        for got, expected, each in zip(local, exact, (pieces, keys, keys)):
            assert got.grad.dtype == got.dtype
            assert_close(got.grad, fd.shard(expected.grad, 1, each, self.rank), factor=3)
        if bias is not None:
            dist.all_reduce(bias.grad)
            assert_close(bias.grad, exact_bias.grad, factor=3)
        if sink is not None:
            dist.all_reduce(sink.grad)
            assert_close(sink.grad, exact[3].grad, local[0].dtype, factor=3)


def error_of(function, kind):
    """The text of what `function` raises."""
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


# ---- results and gradients


@case
def rows_as_chunk_gives_them(here):
    """Without pieces, for a length that divides by nothing."""
    whole = [here.random(1, 37, 2, 8, seed=i) for i in range(3)]
    expected, _ = attention(*whole, causal=True)
    local = [x.chunk(here.size, 1)[here.rank] for x in whole]
    o = fd.attend(*local, group=here.ranks, causal=True)
    assert_close(o, expected.chunk(here.size, 1)[here.rank])
    with torch.no_grad():
        again, lse = fd.attend(*local, group=here.ranks, causal=True, return_lse=True)
    assert torch.equal(o, again) and lse.shape == (1, 2, local[0].shape[1])


@case
def zigzag_causal_grouped_heads(here):
    here.compare(fd.zigzag(41, here.size), causal=True)
    here.compare(fd.contiguous(41, here.size), causal=True, sizes=(1, 6, 6, 8))


@case
def windows_softcap_scale(here):
    here.compare(fd.zigzag(50, here.size), window=(9, 3), softcap=20.0, scale=0.2)


@case
def sinks_and_their_gradient(here):
    sink = here.random(4, dtype=torch.float32)
    here.compare(fd.zigzag(33, here.size), causal=True, sink=sink)


@case
def terms_of_whole_positions(here):
    """ALiBi, a bias with its gradient, a mask, expressions: as on one device, wherever rows lie."""
    n, heads = 37, 4
    pieces = fd.zigzag(n, here.size)
    slopes = here.random(heads, dtype=torch.float32).abs()
    here.compare(pieces, causal=True, alibi=slopes)
    mask = here.random(1, 1, n, n, dtype=torch.float32) > -0.5
    here.compare(pieces, mask=mask)
    here.compare(pieces, bias=here.random(1, heads, n, n, seed=3))
    whole = [here.random(1, n, heads, 16, seed=i) for i in range(3)]
    local = [fd.shard(x, 1, pieces, here.rank) for x in whole]
    o = fd.attend(*local, group=here.ranks, pieces=pieces, sees="k <= q && q - k < 9", score="s - 0.1 * (q - k)")
    distance = torch.arange(n)[:, None] - torch.arange(n)
    bias = (-0.1 * distance).to(here.device)[None, None].double()
    expected, _ = attention(*whole, bias=bias, mask=((distance >= 0) & (distance < 9)).to(here.device)[None, None])
    assert_close(o, fd.shard(expected, 1, pieces, here.rank))


@case
def tensors_of_expressions(here):
    """Read by positions of the whole problem, as texts and as functions; gradients are shares of the whole one."""
    n, heads = 37, 4
    pieces = fd.zigzag(n, here.size)
    whole = [here.random(2, n, heads, 16, seed=i) for i in range(3)]
    d_o = here.random(2, n, heads, 16, seed=7)
    factor, table = here.random(heads, dtype=torch.float32), here.random(heads, 15, seed=5, dtype=torch.float32)
    documents = (torch.arange(n, device=here.device) // 9).int().expand(2, n)
    row = torch.arange(n, device=here.device)
    distance = (row - row[:, None]).clamp(-7, 7) + 7
    for again in range(3):  # the second has the plan of the first, and other values
        exact = [x.double().requires_grad_() for x in (*whole, factor, table)]
        q, k, v = exact[:3]
        expected, _ = attention(
            q * exact[3][:, None], k, v, bias=exact[4][:, distance][None], mask=(documents[0] == documents[0][:, None])[None, None]
        )
        (expected * d_o.double()).sum().backward()
        local = [fd.shard(x, 1, pieces, here.rank).clone().requires_grad_() for x in whole]
        learned = [x.clone().requires_grad_() for x in (factor, table)]
        named = [fovea.named(x) for x in learned]

        def score(s, b, h, q, k):
            return s * named[0][h] + named[1][h, fovea.expressions.clamp(k - q, -7, 7) + 7]  # noqa: B023

        text = "s * factor[h] + table[h, clamp(k - q, -7, 7) + 7]"
        tensors = {"documents": documents} | ({} if again == 2 else dict(zip(("factor", "table"), learned)))
        o = fd.attend(*local, group=here.ranks, pieces=pieces, score=score if again == 2 else text,
                      sees="documents[b, q] == documents[b, k]", tensors=tensors)  # fmt: skip
        (o * fd.shard(d_o, 1, pieces, here.rank)).float().sum().backward()
        assert_close(o, fd.shard(expected, 1, pieces, here.rank))
        for got, x in zip(local, exact):
            assert_close(got.grad, fd.shard(x.grad, 1, pieces, here.rank), factor=3)
        for got, x in zip(learned, exact[3:]):
            dist.all_reduce(got.grad)
            assert_close(got.grad, x.grad, here.dtype, factor=3)
        factor, table = factor * 0.5, table + 0.25
    q = here.random(1, 4, 2, 8)
    pieces = fd.contiguous(4 * here.size, here.size)
    wrong = {"tensors": {"t": [1.0]}, "score": "s + t[h]"}
    others = fd.Ranks(deadline=DEADLINE)
    assert "tensors['t']: got list" in error_of(lambda: fd.attend(q, q, q, group=others, pieces=pieces, **wrong), TypeError)
    wrong = {"tensors": {"t": torch.zeros(3, device=here.device)}, "score": "s + t[h, q]"}
    assert "score" in error_of(lambda: fd.attend(q, q, q, group=here.ranks, pieces=pieces, **wrong), ValueError)
    local = [x[:, :4].clone().requires_grad_() for x in whole]
    frozen = torch.ones(4, device=here.device)
    o = fd.attend(*local, group=fd.Ranks(deadline=DEADLINE), score="s + t[h]", tensors={"t": frozen})
    o.float().sum().backward()
    assert frozen.grad is None


@case
def every_method(here):
    heads = 6
    for heads_ranks, stages in [(1, 1), (1, here.size), (here.size, 1), (here.size, 2)]:
        here.compare(fd.zigzag(29, here.size), causal=True, sizes=(1, heads, heads, 8), heads_ranks=heads_ranks, stages=stages)


@case
def sixteen_bits(here):
    here.compare(fd.zigzag(45, here.size), causal=True, dtype=torch.bfloat16)
    here.compare(fd.zigzag(45, here.size), causal=True, dtype=torch.float16)


@case
def keys_that_lie_elsewhere(here):
    """Other lengths, in pieces of any size and order; a rank has no queries."""
    pieces = [(here.size - 1, 5, 19), (0, 0, 5)]
    keys = [(0, 30, 31), (here.size - 1, 0, 9), (1, 9, 30)]
    here.compare(pieces, key_pieces=keys, causal=True)


@case
def packed_sequences(here):
    starts = [0, 5, 5, 30, 47]
    pieces = fd.zigzag(starts[-1], here.size)
    whole = [here.random(starts[-1], h, 16, seed=i) for i, h in enumerate((4, 2, 2))]
    exact = [x.double().requires_grad_() for x in whole]
    parts = [attention(*(x[None, a:b] for x in exact), causal=True)[0][0] for a, b in zip(starts, starts[1:]) if b > a]
    expected = torch.cat(parts)
    d_o = here.random(*expected.shape, seed=9)
    (expected * d_o.double()).sum().backward()
    local = [fd.shard(x, 0, pieces, here.rank).clone().requires_grad_() for x in whole]
    for cu_seqlens in (starts, torch.tensor(starts, dtype=torch.int32)):
        o, lse = fd.attend(*local, group=here.ranks, pieces=pieces, cu_seqlens_q=cu_seqlens, causal=True, return_lse=True)
    assert_close(o, fd.shard(expected, 0, pieces, here.rank))
    assert lse.shape == (4, len(o))
    (o * fd.shard(d_o, 0, pieces, here.rank)).sum().backward()
    for got, each in zip(local, exact):
        assert_close(got.grad, fd.shard(each.grad, 0, pieces, here.rank), factor=3)


@case
def dropout(here):
    """The weights that one device drops, forward and backward; the plan serves all seeds."""
    rows = 40 * here.size + 3
    whole = [here.random(2, rows, h, 16, seed=i) for i, h in enumerate((4, 2, 2))]
    d_o = here.random(2, rows, 4, 16, seed=9)
    here.ranks.plans.clear()
    for pieces in (fd.contiguous(rows, here.size), fd.zigzag(rows, here.size)):
        for seed in (0, 7):
            options = {"causal": True, "dropout": 0.4, "seed": seed, "offset": 5}
            alone = [x.clone().requires_grad_() for x in whole]
            expected = fovea.torch.attend(*alone, **options)
            (expected * d_o).sum().backward()
            local = [fd.shard(x, 1, pieces, here.rank).clone().requires_grad_() for x in whole]
            o = fd.attend(*local, group=here.ranks, pieces=pieces, **options)
            (o * fd.shard(d_o, 1, pieces, here.rank)).sum().backward()
            assert_close(o, fd.shard(expected, 1, pieces, here.rank))
            for got, each in zip(local, alone):
                assert_close(got.grad, fd.shard(each.grad, 1, pieces, here.rank), factor=3)
    assert len(here.ranks.plans) == 4


@case
def seeds_from_generators(here):
    """Without a seed all ranks draw the same from generators in the same state, as one device does."""
    pieces = fd.zigzag(50, here.size)
    whole = [here.random(1, 50, 2, 8, seed=i) for i in range(3)]
    local = [fd.shard(x, 1, pieces, here.rank) for x in whole]
    found = []
    for seed in (4, 4, 5):
        torch.manual_seed(seed)
        expected = fovea.torch.attend(*whole, causal=True, dropout=0.4)
        torch.manual_seed(seed)
        found.append(fd.attend(*local, group=here.ranks, pieces=pieces, causal=True, dropout=0.4))
        assert_close(found[-1], fd.shard(expected, 1, pieces, here.rank))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@case
def states_of_dropout(here):
    """What the forward returns, as flash_attn has it and as PyTorch has it, drops the same weights in the backward."""
    pieces = fd.zigzag(50, here.size)
    whole = [here.random(1, 50, 2, 8, seed=i).requires_grad_() for i in range(3)]
    d_o, dlse = here.random(1, 50, 2, 8, seed=9), here.random(1, 2, 50, dtype=torch.float32)
    given = {"group": here.ranks, "pieces": pieces, "causal": True, "dropout": 0.4}
    local = [fd.shard(x.detach(), 1, pieces, here.rank) for x in whole]
    torch.manual_seed(11)
    o, lse, state = fd.attend(*local, **given, return_lse=True, return_rng_state=True)
    assert state.dtype == torch.int64 and state.shape == (2,) and state[1] == 0
    torch.manual_seed(11)
    expected, expected_lse = fovea.torch.attend(*whole, causal=True, dropout=0.4, return_lse=True)
    ((expected * d_o).float().sum() + (expected_lse * dlse).sum()).backward()
    assert_close(o, fd.shard(expected, 1, pieces, here.rank))
    upstream = fd.shard(d_o, 1, pieces, here.rank), *local, o, lse
    stream = {"seed": int(state[0]), "offset": 0}
    for how in ({"rng_state": state}, {"rng_state": state.view(torch.uint64)}, stream):
        found = fd.attend_backward(*upstream, dlse=fd.shard(dlse, 2, pieces, here.rank), **given, **how)
        assert found.dbias is None and found.dtensors is None
        for got, x in zip(found[:3], whole):
            assert_close(got, fd.shard(x.grad, 1, pieces, here.rank), factor=3)
    assert fd.attend(*local, **given | {"dropout": 0.0}, return_rng_state=True)[1].tolist() == [0, 0]
    for text, wrong in {
        "rng_state: got one beside seed": {"rng_state": state, "seed": 3},
        "rng_state: got torch.float32": {"rng_state": state.float()},
        "rng_state: got None beside dropout": {},
        "pieces: got 'everywhere'": {"pieces": fd.EVERYWHERE, "rng_state": state},
    }.items():
        others = fd.Ranks(deadline=DEADLINE)
        given["group"] = others
        assert text in error_of(lambda: fd.attend_backward(*upstream, **given | wrong), ValueError)  # noqa: B023


@case
def gradients_without_autograd(here):
    """Those that autograd gives, of sinks, a bias and the tensors of a score as well."""
    n, heads = 33, 4
    pieces = fd.zigzag(n, here.size)
    local = [fd.shard(here.random(1, n, heads, 16, seed=i), 1, pieces, here.rank).requires_grad_() for i in range(3)]
    learned = [here.random(heads, dtype=torch.float32), here.random(1, heads, n, n, seed=3), here.random(heads, seed=5)]
    sink, bias, factor = (x.requires_grad_() for x in learned)
    given = {"group": here.ranks, "pieces": pieces, "sink": sink, "bias": bias}
    given |= {"score": "s * factor[h]", "tensors": {"factor": factor}}
    o, lse = fd.attend(*local, **given, return_lse=True)
    d_o = fd.shard(here.random(1, n, heads, 16, seed=9), 1, pieces, here.rank)
    expected = torch.autograd.grad(o, [*local, bias, sink, factor], d_o)
    found = fd.attend_backward(d_o, *local, o, lse, **given)
    for got, x in zip((*found[:5], found.dtensors["factor"]), expected):
        assert torch.equal(got, x)


@case
def queries_everywhere(here):
    """Decoding over a cache that is divided."""
    q = here.random(2, 3, 4, 16)
    k, v = (here.random(2, 40, 2, 16, seed=i) for i in (1, 2))
    expected, _ = attention(q, k, v, causal=True)
    local = [fd.shard(x, 1, fd.contiguous(40, here.size), here.rank) for x in (k, v)]
    for key_pieces in (None, fd.contiguous(40, here.size)):
        for first in (0, 1):  # other numbers of queries are other plans
            last = q[:, first:]
            o = fd.attend(last, *local, group=here.ranks, pieces=fd.EVERYWHERE, key_pieces=key_pieces, causal=True)
            assert_close(o, expected[:, first:])
    grad = q.clone().requires_grad_()
    text = error_of(lambda: fd.attend(grad, *local, pieces=fd.EVERYWHERE, key_pieces=key_pieces), ValueError)
    assert "EVERYWHERE" in text and "no_grad" in text


@case
def strides_and_kept_plans(here):
    """Whatever strides come later, the plan of the first call serves, and the bits are the same."""
    pieces = fd.zigzag(24, here.size)
    together = fd.shard(here.random(1, 24, 3, 4, 16), 1, pieces, here.rank)
    q, k, v = (x.clone() for x in together.unbind(2))
    here.ranks.plans.clear()

    def compute(*tensors):
        tensors = [x.detach().requires_grad_() for x in tensors]
        o = fd.attend(*tensors, group=here.ranks, pieces=pieces, causal=True, deterministic=True)
        return o, *torch.autograd.grad(o.sum(), tensors)

    first = compute(*together.unbind(2))
    others = [(q, k, v), (q.transpose(1, 2).contiguous().transpose(1, 2), k, v)]
    for tensors in others if here.rank == 0 else [others[0]] * 2:
        assert all(torch.equal(got, expected) for got, expected in zip(compute(*tensors), first))
    assert len(here.ranks.plans) == 2 == len(here.ranks.reasons())
    fd.attend(q, k, v, deterministic=True, causal=True, pieces=pieces, group=here.ranks)  # arguments in another order
    assert len(here.ranks.plans) == 2
    assert here.ranks.reasons()[0].startswith("chosen: ")
    here.ranks.plans.clear()
    one_key_head = k[:, :, :1].expand_as(k)
    first = compute(q, one_key_head, v)
    assert all(torch.equal(got, expected) for got, expected in zip(compute(q, one_key_head.contiguous(), v), first))


@case
def autocast_and_compile(here):
    q, pieces = here.random(1, 6 * here.size, 2, 8, dtype=torch.float32), fd.contiguous(6 * here.size, here.size)
    expected, _ = attention(q, q, q)
    x = fd.shard(q, 1, pieces, here.rank)
    with torch.autocast(here.device.type, torch.bfloat16):
        o = fd.attend(x, x, x, group=here.ranks, pieces=pieces)
    assert o.dtype == torch.bfloat16
    assert_close(o, fd.shard(expected, 1, pieces, here.rank))
    one = dist.new_group([0])
    if here.rank == 0:  # alone, as Dynamo takes seconds to start
        compiled = torch.compile(lambda x: 2 * fd.attend(x, x, x, group=one), backend="eager")
        assert_close(compiled(q.to(here.dtype)) / 2, expected, torch.bfloat16)


# ---- groups


@case
def meshes_and_groups(here):
    from torch.distributed.device_mesh import init_device_mesh

    q = here.random(1, 12, 2, 8)
    expected, _ = attention(q, q, q)
    mesh = init_device_mesh(here.device.type, (here.size,), mesh_dim_names=("cp",))
    for group in (None, mesh, mesh["cp"].get_group()):
        pieces = fd.contiguous(12, here.size)
        x = fd.shard(q, 1, pieces, here.rank)
        assert_close(fd.attend(x, x, x, group=group, pieces=pieces), fd.shard(expected, 1, pieces, here.rank))
    two = dist.new_group([0, here.size - 1])
    if here.rank in (0, here.size - 1):
        pieces = fd.zigzag(12, 2)
        x = fd.shard(q, 1, pieces, dist.get_rank(two))
        o = fd.attend(x, x, x, group=two, pieces=pieces)
        assert_close(fd.unshard(o, 1, pieces, two), expected)
    else:
        assert "this process belongs to" in error_of(lambda: fd.attend(q, q, q, group=two), ValueError)
    one = dist.new_group([0])
    if here.rank == 0:
        assert_close(fd.attend(q, q, q, group=one), expected)


@case
def shard_and_unshard(here):
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        x = (10 * here.random(3, 23, dtype=torch.float32)).to(dtype)
        for pieces in (fd.zigzag(23, here.size), fd.contiguous(23, here.size), [(1, 3, 23), (0, 0, 3)]):
            assert torch.equal(fd.unshard(fd.shard(x, 1, pieces, here.rank), 1, pieces, here.ranks), x)
    assert "expected 22" in error_of(lambda: fd.shard(x, 1, fd.zigzag(22, here.size), here.rank), ValueError)


# ---- context_parallel


@case
def context_parallel_is_pytorchs(here):
    total = 13
    x, steps = here.random(2, total, 32, dtype=torch.float32), torch.arange(total, device=here.device)
    kept_cut = steps.clone()
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True, device=here.device)
    with torch.no_grad():
        for i, weight in enumerate(layer.parameters()):
            weight.copy_(here.random(*weight.shape, seed=i, dtype=torch.float32) / 6)
    mask = torch.ones(total, total, dtype=torch.bool, device=here.device).triu(1)
    expected, _ = layer(x, x, x, attn_mask=mask, need_weights=False)
    expected.square().sum().backward()
    gradients = [weight.grad for weight in layer.parameters()]
    layer.zero_grad()
    whole = x.clone()
    pieces = fd.zigzag(total, here.size)
    with fd.context_parallel(here.ranks, buffers=[x, steps, kept_cut], buffer_seq_dims=[1, 0, 0], no_restore_buffers={kept_cut}):
        assert torch.equal(x, fd.shard(whole, 1, pieces, here.rank)) and len(steps) == x.shape[1]
        o, _ = layer(x, x, x, attn_mask=mask[: len(steps), : len(steps)], is_causal=True, need_weights=False)
        o.square().sum().backward()
    assert torch.equal(x, whole) and torch.equal(steps, torch.arange(total, device=here.device))
    assert len(kept_cut) == len(o[0])
    assert_close(o, fd.shard(expected, 1, pieces, here.rank), here.dtype)
    for weight, gradient in zip(layer.parameters(), gradients):
        dist.all_reduce(weight.grad)
        assert_close(weight.grad, gradient.double(), here.dtype, factor=4)
    (restored,) = fd.context_parallel_unshard(here.ranks, [o], [1])
    assert torch.equal(fd.shard(restored, 1, pieces, here.rank), o)


@case
def context_parallel_calls(here):
    """Grouped heads, a scale, without a batch, without buffers, and what autograd recomputes."""
    from torch.utils.checkpoint import checkpoint

    pieces = fd.zigzag(26, here.size)
    whole = [here.random(1, h, 26, 16, seed=i).requires_grad_() for i, h in enumerate((4, 2, 2))]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True, scale=0.3, enable_gqa=True)
    expected.sum().backward()
    local = [fd.shard(x, 2, pieces, here.rank).detach().requires_grad_() for x in whole]
    with fd.context_parallel(here.ranks):
        attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)  # noqa: E731
        with torch.no_grad():
            o = attend(*(x[0] for x in local))
        checkpoint(attend, *local, use_reentrant=False).sum().backward()
    assert_close(o, fd.shard(expected, 2, pieces, here.rank)[0])
    for got, each in zip(local, whole):
        assert_close(got.grad, fd.shard(each.grad, 2, pieces, here.rank), factor=3)
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


@case
def context_parallel_drops(here):
    """The weights that one device drops, and those again that a checkpoint recomputes."""
    from torch.utils.checkpoint import checkpoint

    pieces = fd.zigzag(26, here.size)
    whole = [here.random(1, 2, 26, 16, seed=i).requires_grad_() for i in range(3)]
    torch.manual_seed(3)
    expected = fovea.torch.scaled_dot_product_attention(*whole, is_causal=True, dropout_p=0.3)
    expected.sum().backward()
    local = [fd.shard(x, 2, pieces, here.rank).detach().requires_grad_() for x in whole]
    attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.3)  # noqa: E731
    with fd.context_parallel(here.ranks):
        torch.manual_seed(3)
        o = checkpoint(attend, *local, use_reentrant=False)
        o.sum().backward()
        torch.manual_seed(here.rank)
        text = error_of(lambda: attend(*local), ValueError)
        assert "dropout_p: got the seeds " in text and "on rank 0 and " in text and "call torch.manual_seed" in text, text
        torch.manual_seed(3)
        assert torch.equal(attend(*local), o)  # the connections are open
    assert_close(o, fd.shard(expected, 2, pieces, here.rank))
    for got, each in zip(local, whole):
        assert_close(got.grad, fd.shard(each.grad, 2, pieces, here.rank), factor=3)


@case
def context_parallel_refuses(here):
    ranks = fd.Ranks(deadline=DEADLINE)
    q = here.random(1, 2, 4, 8)
    with fd.context_parallel(ranks):
        text = error_of(lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=q[0, 0]), ValueError)
    assert "attn_mask: got one" in text and "outside of the block" in text
    buffers = [here.random(4, 3), here.random(5, 3)]
    with pytest.raises(ValueError, match=r"buffers: got sequences of \[4, 5\]"):
        with fd.context_parallel(here.ranks, buffers=buffers, buffer_seq_dims=[0, 0]):
            pass
    x = buffers[0].clone()
    with pytest.raises(ArithmeticError):
        with fd.context_parallel(here.ranks, buffers=[x], buffer_seq_dims=[0]):
            raise ArithmeticError
    assert torch.equal(x, buffers[0])


@case
def the_page_runs(here):
    if here.device.type == "cpu":
        page = Path(__file__).resolve().parents[2] / "docs/distributed.md"
        blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        scope = {}
        exec("\n".join(blocks), scope)
        assert scope["whole"].shape == (2, 1001, 8, 64) and scope["y"].shape == (2, 1001, 64)


# ---- a training


@case
def a_training_has_the_losses_of_one_rank(here):
    program = train_gpt()
    options, _ = program.parse("--layers 2 --heads 2 --width 32 --context 51 --batch 4 --steps 6".split())
    options.device = here.device.type
    text = torch.frombuffer(bytearray(program.ROOT.joinpath("data/sample_text.txt").read_bytes()), dtype=torch.uint8)
    one = program.Training(options, text.to(here.device), program.ATTENTIONS["fovea"])
    several = program.Training(options, text.to(here.device), **program.over_ranks(options, dist.group.WORLD))
    program.train({"one": one, "several": several})
    apart = (one.losses - several.losses).abs().max()
    assert apart < (1e-2 if here.device.type == "cuda" else 1e-5), apart
    assert one.losses[-1] < one.losses[0]
    for mine, whole in zip(several.model.parameters(), one.model.parameters()):
        assert torch.allclose(mine, whole, atol=1e-2 if here.device.type == "cuda" else 1e-4)


def train_gpt():
    path = Path(__file__).resolve().parents[2] / "examples/train_gpt/train_gpt.py"
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- what goes wrong


@case
def what_all_pass_wrongly(here):
    """Errors of all ranks leave the connections open."""
    q = here.random(1, 4, 2, 8)
    pieces = fd.contiguous(4 * here.size, here.size)
    for named, wrong in {
        "pieces: got row 2 in two pieces": {"pieces": [(0, 0, 4), (1, 2, 6)]},
        "pieces[0]: got rank 9": {"pieces": [(9, 0, 4)]},
        "q: got shape": {"pieces": [(0, 0, 3)]},
        "key_pieces: got no piece with row 0": {"pieces": pieces, "key_pieces": [(0, 1, 5)]},
        "dropout: got 1": {"dropout": 1.0, "seed": 0, "pieces": pieces},
        "heads_ranks": {"heads_ranks": 5, "pieces": pieces},
        "cu_seqlens_q": {"cu_seqlens_q": [0, 3], "pieces": pieces},
    }.items():
        x = q[0] if "cu_seqlens_q" in wrong else q
        assert named in error_of(lambda: fd.attend(x, x, x, group=here.ranks, **wrong), ValueError)
    here.ranks.check()
    fd.attend(q, q, q, group=here.ranks, pieces=pieces)


@case
def one_rank_that_cannot_plan(here):
    """All get the error with its rank, and go on."""
    q = here.random(1, 5, 2, 8)
    x = q[:, :3] if here.rank == 1 else q
    pieces = fd.contiguous(5 * here.size, here.size)
    text = error_of(lambda: fd.attend(x, x, x, group=here.ranks, pieces=pieces), ValueError)
    assert text.startswith("q: got shape (1, 3, 2, 8)") if here.rank == 1 else ("rank 1 could not plan" in text), text
    fd.attend(q, q, q, group=here.ranks, pieces=pieces)


@case
def one_rank_with_another_problem(here):
    """All are told the argument and what each rank has, and go on."""
    here.ranks.plans.clear()  # a plan that one rank has kept is another case
    q, mine = here.random(1, 6, 2, 8), here.rank == 1
    others = "rank 0" if here.size == 2 else "ranks 0, 2"
    pieces, other_pieces = fd.contiguous(6 * here.size, here.size), fd.zigzag(6 * here.size, here.size)
    for text, wrong in {
        f"softcap: got 0 on {others} and 2 on rank 1, expected": {"softcap": 2.0},
        f"scale: got 0.25 on {others} and 0.5 on rank 1, expected": {"scale": 0.5},
        f"window: got (-1, -1) on {others} and (-1, 0), which is causal on rank 1": {"causal": True},
        "window: got (-1, -1) on ": {"window": (3, 0)},
        f"pieces: got {6 * here.size} rows, [0, 6) on rank 0, ": {"pieces": other_pieces},
        f"dropout: got 0 on {others} and 0.5 on rank 1": {"dropout": 0.5, "seed": 1},
        f"cu_seqlens_q: got 0, {6 * here.size} on ": {"cu_seqlens_q": [0, 2, 6 * here.size]},
        f"terms: got none on {others} and score s * 2": {"score": "s * 2"},
        f"tensors and their types: got q {'bfloat16' if here.device.type == 'cuda' else 'float32'}": {"sink": torch.zeros(2)},
        f"heads_ranks, stages, ranks_per_host: got 0, 0, 0 on {others} and 1, 1, 0 on rank 1": {"heads_ranks": 1, "stages": 1},
    }.items():
        right = {"pieces": pieces} | ({"scale": 0.25} if "scale" in wrong else {})
        right |= {"cu_seqlens_q": [0, 6 * here.size]} if "cu_seqlens_q" in wrong else {}
        wrong = {name: x.to(here.device) if isinstance(x, torch.Tensor) else x for name, x in wrong.items()}
        x = q[0] if "cu_seqlens_q" in wrong else q
        call = lambda: fd.attend(x, x, x, group=here.ranks, **(right | wrong if mine else right))  # noqa: B023, E731
        found = error_of(call, ValueError)
        assert text in found and "pass one value on every rank" in found, found


@case
def one_rank_with_another_seed(here):
    """By seeds, by offsets, by generators: each rank has the error, and all go on."""
    q, pieces = here.random(1, 6, 2, 8), fd.contiguous(6 * here.size, here.size)
    call = lambda **options: fd.attend(q, q, q, group=here.ranks, pieces=pieces, dropout=0.5, **options)  # noqa: E731
    text = error_of(lambda: call(seed=3 if here.rank else 8), ValueError)
    assert text.startswith("seed: got 8 on rank 0 and 3 on rank") and "pass one seed on every rank" in text, text
    assert "offset: got 0 on " in error_of(lambda: call(seed=3, offset=here.rank // (here.size - 1)), ValueError)
    torch.manual_seed(here.rank)
    text = error_of(call, ValueError)
    assert text.startswith("seed: got ") and "the same torch.manual_seed" in text, text
    torch.manual_seed(0)
    assert "seed: got " in error_of(lambda: call(**{"seed": 5} if here.rank else {}), ValueError)
    here.ranks.check()
    expected = call(seed=3)
    assert torch.equal(call(seed=3 + 2**64), expected)
    o, lse = fd.attend(q, q, q, group=here.ranks, pieces=pieces, return_lse=True)
    wrong = {"rng_state": torch.tensor([here.rank, 0]), "dropout": 0.5, "group": here.ranks, "pieces": pieces}
    assert "seed: got 0 on rank 0 and 1 on rank 1" in error_of(lambda: fd.attend_backward(q, q, q, q, o, lse, **wrong), ValueError)


@case
def one_rank_with_another_known_problem(here):
    """All ranks have plans for both, whose messages are of the same sizes."""
    if here.device.type == "cuda":
        return  # NCCL compares nothing
    q, pieces = here.random(1, 6, 2, 8), fd.contiguous(6 * here.size, here.size)
    for name, one, other in (("scale", 0.5, 0.25), ("causal", False, True), ("pieces", pieces, pieces[::-1])):
        ranks = fd.Ranks(deadline=DEADLINE)
        call = lambda value: fd.attend(q, q, q, **{"group": ranks, "pieces": pieces} | {name: value})  # noqa: B023, E731
        call(one), call(other)
        text = error_of(lambda: call(one if here.rank == 0 else other), RuntimeError)  # noqa: B023
        assert "different calls" in text and f"{name}: got " in text and "on rank 0" in text, text


@case
def one_rank_with_a_new_problem(here):
    """The others have a plan for theirs, and are in its run. On GPUs, whose calls have returned by then, the deadline ends it."""
    on_gpus = here.device.type == "cuda"
    ranks = fd.Ranks(deadline=5 if on_gpus else DEADLINE)
    q = here.random(1, 5, 2, 8)
    pieces = fd.contiguous(5 * here.size, here.size)
    fd.attend(q, q, q, group=ranks, pieces=pieces)
    begin = time.monotonic()

    def wrong():
        fd.attend(q, q, q, group=ranks, pieces=pieces, causal=here.rank == 0)
        if on_gpus:
            torch.cuda.synchronize()
            ranks.check()

    assert ("did not arrive" if on_gpus else "different calls") in error_of(wrong, RuntimeError)
    assert time.monotonic() - begin < DEADLINE / 2


@case
def one_rank_with_other_rows_than_planned(here):
    """Found before it runs; the others are told."""
    ranks = fd.Ranks(deadline=DEADLINE)
    q = here.random(1, 6, 2, 8)
    pieces = fd.contiguous(6 * here.size, here.size)
    fd.attend(q, q, q, group=ranks, pieces=pieces)
    if here.device.type == "cuda":
        return  # the others learn of it by the deadline
    x = q[:, :4] if here.rank == 1 else q
    text = error_of(lambda: fd.attend(x, x, x, group=ranks, pieces=pieces), ValueError if here.rank == 1 else RuntimeError)
    assert "q: got another shape" in text and (here.rank == 1 or "rank 1: " in text), text
    assert "rank 1: " in error_of(ranks.check, RuntimeError)


@case
def one_rank_that_raises_before_the_call(here):
    ranks = fd.Ranks(deadline=DEADLINE)
    q = "nothing" if here.rank == 0 else here.random(1, 6, 2, 8)
    begin = time.monotonic()
    text = error_of(lambda: fd.attend(q, q, q, group=ranks), TypeError if here.rank == 0 else RuntimeError)
    assert "q: got str" in text and (here.rank == 0 or "rank 0: " in text), text
    assert time.monotonic() - begin < DEADLINE / 2


@case
def ranks_of_one_host_with_a_gpu_each_copy(here):
    """Forward and backward; the other cases say that results are right."""
    q = here.random(1, 8, 2, 8).requires_grad_()
    ranks = fd.Ranks(deadline=DEADLINE)
    fd.attend(q, q, q, group=ranks).float().sum().backward()
    copies = ["copied between the memories of ranks" in reason for reason in ranks.reasons()]
    assert copies == [here.device.type == "cuda"] * 2, ranks.reasons()


@case
def one_rank_that_is_late(here):
    ranks = fd.Ranks(deadline=2)
    q = here.random(1, 6, 2, 8)
    if here.rank == 1:
        time.sleep(4)
    text = error_of(lambda: fd.attend(q, q, q, group=ranks), RuntimeError)
    assert "rank 1" in text and (here.rank == 1 or "Timed out" in text), text


@case
def one_gpu_that_is_late(here):
    """The call has returned before: check tells."""
    if here.device.type == "cpu":
        return
    ranks = fd.Ranks(deadline=10)
    q = here.random(1, 6, 2, 8)
    pieces = fd.contiguous(6 * here.size, here.size)
    fd.attend(q, q, q, group=ranks, pieces=pieces)
    torch.cuda.synchronize()
    ranks.check()
    if here.rank == 1:
        time.sleep(15)

    def call():
        fd.attend(q, q, q, group=ranks, pieces=pieces)
        torch.cuda.synchronize()
        ranks.check()

    if here.rank == 1:  # small messages may have waited for it in its own memory, so it may have a whole result
        with contextlib.suppress(RuntimeError):
            call()
        return
    text = error_of(call, RuntimeError)
    assert "did not arrive" in text or "NCCL" in text, text


@case
def new_ranks_after_a_failure(here):
    """A group that failed is opened again by the next call."""
    q = here.random(1, 6, 2, 8)
    expected = fd.attend(q, q, q)
    error_of(lambda: fd.attend(None if here.rank == 0 else q, q, q), (TypeError, RuntimeError))
    dist.barrier()
    assert torch.equal(fd.attend(q, q, q), expected)


@case
def ranks_that_are_closed(here):
    ranks = fd.Ranks(deadline=DEADLINE)
    q = here.random(1, 6, 2, 8)
    fd.attend(q, q, q, group=ranks)
    ranks.close()
    if here.size > 1:
        assert "closed" in error_of(lambda: fd.attend(q, q, q, group=ranks), RuntimeError)
    assert "deadline: got 0" in error_of(lambda: fd.Ranks(deadline=0), ValueError)


@case
def one_rank_that_dies(here):
    """The last case, as that process ends."""
    if here.device.type == "cuda":
        return
    ranks = fd.Ranks(deadline=DEADLINE)
    q = here.random(1, 6, 2, 8)
    fd.attend(q, q, q, group=ranks)
    if here.rank == here.size - 1:
        return  # and main() ends the process without a word
    begin = time.monotonic()
    text = error_of(lambda: fd.attend(q, q, q, group=ranks), RuntimeError)
    assert f"rank {here.size - 1}" in text and time.monotonic() - begin < DEADLINE / 2, text


# ---- processes


def main(rank, size, device, port, folder):
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(size)}
    if device == "gpu":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "gpu" else "gloo")
    here = Here(rank, size, device)
    found = {}
    for name, function in CASES.items():
        begin = time.monotonic()
        try:
            function(here)
            found[name] = ["", time.monotonic() - begin]
        except BaseException:
            found[name] = [traceback.format_exc(), time.monotonic() - begin]
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
    Path(folder, f"{rank}.done").touch()
    end = time.monotonic() + DEADLINE
    while rank == 0 and len(list(Path(folder).glob("*.done"))) < size and time.monotonic() < end:
        time.sleep(0.05)  # the store, where reasons are, is in this process
    os._exit(0)


def start(device, folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), "NCCL_NVLS_ENABLE": "0"}
    size = RANKS[device]
    logs = [open(folder / f"{rank}.log", "w") for rank in range(size)]  # noqa: SIM115
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(size), device, port, str(folder)], env=environment, stdout=log, stderr=log
        )
        for rank, log in enumerate(logs)
    ]
    for process, log in zip(processes, logs):
        try:
            process.wait(300)
        except subprocess.TimeoutExpired:
            process.kill()
        log.close()
    return [
        json.loads((folder / f"{rank}.json").read_text()) if (folder / f"{rank}.json").exists() else {} for rank in range(size)
    ]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """device -> what each process found; a start for each device, at its first test."""
    known = {}

    def of(device):
        if device not in known:
            folder = tmp_path_factory.mktemp(device)
            known[device] = folder, start(device, folder)
        return known[device]

    return of


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("where", RANKS)
def test_over_ranks(where, name, outcomes):
    if where == "gpu" and (torch.cuda.device_count() < 2 or not fovea.info()["gpus"]):
        pytest.skip("fewer than two GPUs, or a library without CUDA: " + fovea.info()["cuda"])
    folder, found = outcomes(where)
    for rank, each in enumerate(found):
        log = (folder / f"{rank}.log").read_text()[-2000:]
        assert name in each, f"rank {rank} did not get to it: {log}"
        assert each[name][0] == "", f"rank {rank}: {each[name][0]}\n{log}"


# ---- one process


@pytest.mark.parametrize("total", [0, 1, 5, 24, 41])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_pieces_hold_each_row_once(total, ranks):
    for make in (fd.contiguous, fd.zigzag):
        pieces = make(total, ranks)
        rows = [row for piece in pieces for row in range(piece.begin, piece.end)]
        assert sorted(rows) == list(range(total))
        x = torch.arange(total)
        cut = [fd.shard(x, 0, pieces, rank) for rank in range(ranks)]
        assert max(map(len, cut)) - min(map(len, cut)) <= (1 if make is fd.contiguous else 2)
    parts = x.tensor_split(ranks)
    assert all(torch.equal(fd.shard(x, 0, fd.contiguous(total, ranks), rank), parts[rank]) for rank in range(ranks))


def test_zigzag_is_that_of_pytorch():
    balancer = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
    order = balancer._HeadTailLoadBalancer(24, 3, "cpu")._generate_indices()[0].tolist()
    pieces = fd.zigzag(24, 3)
    assert order == [row for rank in range(3) for row in fd.shard(torch.arange(24), 0, pieces, rank).tolist()]


def test_the_signature_is_that_of_pytorch():
    import inspect

    theirs = pytest.importorskip("torch.distributed.tensor.experimental").context_parallel
    for name, parameter in inspect.signature(theirs).parameters.items():
        own = inspect.signature(fd.context_parallel).parameters[name]
        assert (own.kind, own.default) == (parameter.kind, parameter.default)


def test_errors_without_processes():
    x = torch.zeros(1, 2, 1, 8)
    with pytest.raises(RuntimeError, match=r"group: .* call torch.distributed.init_process_group"):
        fd.attend(x, x, x)
    with pytest.raises(ValueError, match="total: got -1; expected 0 or more"):
        fd.zigzag(-1, 2)
    with pytest.raises(ValueError, match="ranks: got 0; expected 1 or more"):
        fd.contiguous(4, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
