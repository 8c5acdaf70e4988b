"""Every function of fovea.flash_attn and fovea.flash_attn_interface over random arguments, against the formula."""

import functools
import inspect
import random

import pytest

torch = pytest.importorskip("torch")

import fovea  # noqa: E402
import fovea.flash_attn as fa2  # noqa: E402
import fovea.flash_attn_interface as fa3  # noqa: E402
import plain  # noqa: E402
from fovea.flash_attn import flash_attn_interface as interface  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class Draw:
    """Random arguments, the same for the same seed."""

    def __init__(self, seed, device, packed=False):
        self.r = random.Random(seed)
        self.device = device
        self.dtype = self.r.choice(DTYPES)
        self.batch = self.r.randint(1, 3)
        self.heads_k = self.r.choice([1, 2, 3])
        self.heads = self.heads_k * self.r.choice([1, 2, 4])
        self.size = self.r.choice([8, 16, 33, 64, 128])
        self.seqlen_q, self.seqlen_k = self.r.randint(1, 70), self.r.randint(1, 90)
        self.settings = {
            "softmax_scale": self.r.choice([None, 0.3]),
            "causal": self.r.random() < 0.5,
            "window_size": self.r.choice([(-1, -1), (7, 3), (20, -1), (-1, 5)]),
            "softcap": self.r.choice([0.0, 0.0, 5.0]),
            "deterministic": self.r.random() < 0.3,
        }
        self.alibi = None
        if self.r.random() < 0.3:
            shape = self.r.choice([(self.heads,), (self.batch, self.heads)])
            self.alibi = torch.rand(shape, device=device)

    def tensor(self, *shape):
        return torch.randn(shape, device=self.device).to(self.dtype).requires_grad_()

    def plain_settings(self):
        s = self.settings
        return {
            "scale": s["softmax_scale"],
            "causal": s["causal"],
            "window": s["window_size"],
            "softcap": s["softcap"],
        }


def check_gradients(got, expected, inputs, dtype):
    """got, expected: (o, lse) of both. The gradient of lse takes part."""
    d_o = torch.randn_like(got[0])
    outputs, weights = [got[0]], [d_o]
    expected_outputs, expected_weights = [expected[0]], [d_o.double()]
    if len(got) > 1:
        d_lse = torch.randn_like(got[1])
        outputs.append(got[1])
        weights.append(d_lse)
        finite = torch.isfinite(expected[1])
        expected_outputs.append(torch.where(finite, expected[1], 0.0))
        expected_weights.append(d_lse.double())
    ours = torch.autograd.grad(outputs, inputs, weights)
    theirs = torch.autograd.grad(expected_outputs, inputs, expected_weights, retain_graph=True)
    for a, b in zip(ours, theirs, strict=True):
        plain.assert_close(a, b, dtype, factor=4)


@pytest.mark.parametrize("seed", range(24))
def test_dense(seed, device):
    d = Draw(seed, device)
    q = d.tensor(d.batch, d.seqlen_q, d.heads, d.size)
    form = d.r.choice(["func", "kvpacked", "qkvpacked"])
    if form == "func":
        k, v = (d.tensor(d.batch, d.seqlen_k, d.heads_k, d.size) for _ in range(2))
        inputs, call = (q, k, v), fa2.flash_attn_func
    elif form == "kvpacked":
        kv = d.tensor(d.batch, d.seqlen_k, 2, d.heads_k, d.size)
        k, v = kv.unbind(2)
        inputs, call = (q, kv), fa2.flash_attn_kvpacked_func
    else:
        qkv = d.tensor(d.batch, d.seqlen_q, 3, d.heads, d.size)
        q, k, v = qkv.unbind(2)
        inputs, call = (qkv,), fa2.flash_attn_qkvpacked_func
    out, lse, mask = call(*inputs, **d.settings, alibi_slopes=d.alibi, return_attn_probs=True)
    assert mask.numel() == 0
    expected = plain.attention(q, k, v, alibi=d.alibi, **d.plain_settings())
    plain.assert_close(out, expected[0], d.dtype)
    plain.assert_close(lse, expected[1], d.dtype)
    assert lse.dtype == torch.float32 and out.dtype == d.dtype
    check_gradients((out, lse), expected, inputs, d.dtype)
    with torch.no_grad():
        # Without lse another kernel may run: o differs by rounding only, and equal calls give equal bits.
        alone = call(*inputs, **d.settings, alibi_slopes=d.alibi)
        plain.assert_close(alone, expected[0], d.dtype)
        assert torch.equal(call(*inputs, **d.settings, alibi_slopes=d.alibi), alone)
    check_gradients((call(*inputs, **d.settings, alibi_slopes=d.alibi),), expected, inputs, d.dtype)


def lengths(r, batch):
    found = [r.randint(0, 40) for _ in range(batch)]
    found[r.randrange(batch)] = 40
    return found


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def starts(found, device):
    return torch.tensor([0, *found], device=device).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("seed", range(18))
def test_packed(seed, device):
    d = Draw(100 + seed, device)
    used_q, used_k = lengths(d.r, d.batch), lengths(d.r, d.batch)
    form = d.r.choice(["func", "kvpacked", "qkvpacked"])
    if form == "qkvpacked":
        used_k = used_q
        qkv = d.tensor(sum(used_q), 3, d.heads, d.size)
        q, k, v = qkv.unbind(1)
        inputs, call = (qkv, starts(used_q, device), 40), fa2.flash_attn_varlen_qkvpacked_func
    else:
        q = d.tensor(sum(used_q), d.heads, d.size)
        cu = (starts(used_q, device), starts(used_k, device), 40, 40)
        if form == "func":
            k, v = (d.tensor(sum(used_k), d.heads_k, d.size) for _ in range(2))
            inputs, call = (q, k, v, *cu), fa2.flash_attn_varlen_func
        else:
            kv = d.tensor(sum(used_k), 2, d.heads_k, d.size)
            k, v = kv.unbind(1)
            inputs, call = (q, kv, *cu), fa2.flash_attn_varlen_kvpacked_func
    out, lse, mask = call(*inputs, **d.settings, alibi_slopes=d.alibi, return_attn_probs=True)
    assert mask.numel() == 0 and lse.shape == (d.heads, sum(used_q))
    outs, lses = [], []
    at_q = at_k = 0
    for b, (n, m) in enumerate(zip(used_q, used_k, strict=True)):
        o, one_lse = plain.attention(
            q[None, at_q : at_q + n],
            k[None, at_k : at_k + m],
            v[None, at_k : at_k + m],
            alibi=None if d.alibi is None else (d.alibi if d.alibi.ndim == 1 else d.alibi[b : b + 1]),
            **d.plain_settings(),
        )
        outs.append(o[0])
        lses.append(one_lse[0])
        at_q, at_k = at_q + n, at_k + m
    expected = torch.cat(outs), torch.cat(lses, 1)
    plain.assert_close(out, expected[0], d.dtype)
    plain.assert_close(lse, expected[1], d.dtype)
    check_gradients((out, lse), expected, [x for x in inputs if getattr(x, "requires_grad", False)], d.dtype)


@pytest.mark.parametrize("seed", range(6))
def test_dropout_and_its_mask(seed, device):
    d = Draw(200 + seed, device)
    q = d.tensor(d.batch, d.seqlen_q, d.heads, d.size)
    k, v = (d.tensor(d.batch, d.seqlen_k, d.heads_k, d.size) for _ in range(2))
    torch.manual_seed(seed)
    out, lse, mask = fa2.flash_attn_func(q, k, v, 0.4, return_attn_probs=True, **d.settings)
    assert mask.shape == (d.batch, d.heads, d.seqlen_q, d.seqlen_k)
    kept = (mask >= 0).double()
    expected = plain.attention(q, k, v, kept=kept, dropout=0.4, **d.plain_settings())
    plain.assert_close(out, expected[0], d.dtype, factor=2)
    plain.assert_close(lse, expected[1], d.dtype)
    check_gradients((out,), (expected[0],), (q, k, v), d.dtype)
    torch.manual_seed(seed)
    again = fa2.flash_attn_func(q, k, v, 0.4, **d.settings)
    assert torch.equal(out, again)


def test_mask_of_packed_sequences_and_many_keys(device):
    used_q, used_k = [3, 0, 5], [700, 4, 2]
    q = torch.randn(8, 2, 16, device=device)
    k, v = (torch.randn(706, 1, 16, device=device) for _ in range(2))
    cu_q, cu_k = starts(used_q, device), starts(used_k, device)
    out, _, mask = fa2.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 700, 0.5, return_attn_probs=True)
    assert mask.shape == (3, 2, 5, 700)
    for b in (0, 2):
        rows = slice(cu_q[b], cu_q[b + 1])
        keys = slice(cu_k[b], cu_k[b + 1])
        kept = (mask[b, :, : used_q[b], : used_k[b]] >= 0).double()[None]
        o, _ = plain.attention(q[None, rows], k[None, keys], v[None, keys], kept=kept, dropout=0.5)
        plain.assert_close(out[rows], o[0])
    assert 0.4 < (mask[0, :, :3] < 0).double().mean() < 0.6


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("module", [fa2, fa3])
def test_kvcache(module, seed, device):
    d = Draw(300 + seed, device)
    r = d.r
    rows, size, added = 4, 96, r.choice([0, 1, 5])
    q = d.tensor(d.batch, r.choice([1, added or 1, 3]), d.heads, d.size).detach()
    cache = [torch.randn(rows, size, d.heads_k, d.size, device=device).to(d.dtype) for _ in range(2)]
    used = torch.tensor([r.randint(1, 80) for _ in range(d.batch)], dtype=torch.int32, device=device)
    index = torch.tensor(r.sample(range(rows), d.batch), dtype=torch.int32, device=device) if r.random() < 0.6 else None
    picked = index.long() if index is not None else torch.arange(d.batch, device=device)
    new = [d.tensor(d.batch, added, d.heads_k, d.size).detach() for _ in range(2)] if added else [None, None]
    if index is None:
        cache = [c[: d.batch].clone() for c in cache]
    expected_cache = [c.clone() for c in cache]
    settings = {name: d.settings[name] for name in ("softmax_scale", "causal", "window_size", "softcap")}
    local = settings["causal"] or settings["window_size"] != (-1, -1)
    extra = {}
    rotated_q, rotated_k = q, new[0]
    if added and d.size % 16 == 0 and r.random() < 0.7:
        interleaved = r.random() < 0.5
        angle = torch.rand(128, d.size // 4, device=device)
        extra = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "rotary_interleaved": interleaved}

        def turn(x, first, step):
            """Row by row and pair by pair, by complex numbers."""
            y = x.double().clone()
            half = d.size // 4
            for b in range(x.shape[0]):
                for i in range(x.shape[1]):
                    a = angle[int(first[b]) + i * step].double()
                    left = slice(0, 2 * half, 2) if interleaved else slice(0, half)
                    right = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
                    z = torch.complex(x[b, i, :, left].double(), x[b, i, :, right].double())
                    z = z * torch.polar(torch.ones_like(a), a)
                    y[b, i, :, left], y[b, i, :, right] = z.real, z.imag
            return y.to(x.dtype)

        rotated_k, rotated_q = turn(new[0], used, 1), turn(q, used, int(local))
    if added:
        for b in range(d.batch):
            at = slice(int(used[b]), int(used[b]) + added)
            expected_cache[0][picked[b], at] = rotated_k[b]
            expected_cache[1][picked[b], at] = new[1][b]
    out, lse = module.flash_attn_with_kvcache(
        q,
        *cache,
        k=new[0],
        v=new[1],
        cache_seqlens=used,
        cache_batch_idx=index,
        return_softmax_lse=True,
        **settings,
        **extra,
    )
    for got, wanted in zip(cache, expected_cache, strict=True):
        plain.assert_close(got, wanted, d.dtype, factor=0.5)
    k, v = (c[picked] for c in expected_cache)
    expected = plain.attention(rotated_q, k, v, seqlens_k=[int(n) + added for n in used], **d.plain_settings())
    plain.assert_close(out, expected[0], d.dtype, factor=2)
    plain.assert_close(lse, expected[1], d.dtype, factor=2)


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("module", [fa2, fa3])
def test_kvcache_in_pages(module, seed, device):
    """Pages of any size, padding in front, new keys; with flash-attn 3 also packed queries, packed new keys and positions."""
    d = Draw(700 + seed, device)
    r = d.r
    page = r.choice([1, 5, 16])
    columns = 80 // page
    pages = r.sample(range(d.batch * columns + 3), d.batch * columns)
    table = torch.tensor(pages, dtype=torch.int32, device=device).reshape(d.batch, columns)
    pools = [torch.randn(d.batch * columns + 3, page, d.heads_k, d.size, device=device).to(d.dtype) for _ in range(2)]
    used = torch.tensor([r.randint(1, 70) for _ in range(d.batch)], dtype=torch.int32, device=device)
    padding = [r.randint(0, int(n)) for n in used]
    pad = torch.tensor(padding, dtype=torch.int32, device=device) if r.random() < 0.5 else None
    packed = module is fa3 and r.random() < 0.6
    lengths = [r.randint(0 if packed else 1, 5) for _ in range(d.batch)] if packed else [r.randint(1, 5)] * d.batch
    added = [r.randint(0, 4) for _ in range(d.batch)] if packed else [r.choice([0, 3])] * d.batch
    q, k, v = (
        [torch.randn(n, heads, d.size, device=device).to(d.dtype) for n in counts]
        for heads, counts in ((d.heads, lengths), (d.heads_k, added), (d.heads_k, added))
    )
    expected_pools = [x.clone() for x in pools]
    for pool, new in zip(expected_pools, (k, v), strict=True):
        for b in range(d.batch):
            for i in range(added[b]):
                row = int(used[b]) + i
                pool[int(table[b, row // page]), row % page] = new[b][i]
    settings = {name: d.settings[name] for name in ("softmax_scale", "causal", "window_size", "softcap")}
    join = torch.cat if packed else torch.stack
    extra = {}
    if packed:
        extra = {"cu_seqlens_q": starts(lengths, device), "cu_seqlens_k_new": starts(added, device), "max_seqlen_q": 5}
    if any(added):
        extra |= {"k": join(k), "v": join(v)}
    else:
        extra.pop("cu_seqlens_k_new", None)
    extra["page_table" if module is fa3 else "block_table"] = table
    out, lse = module.flash_attn_with_kvcache(
        join(q), *pools, cache_seqlens=used, cache_leftpad=pad, return_softmax_lse=True, **settings, **extra
    )
    for got, wanted in zip(pools, expected_pools, strict=True):
        assert torch.equal(got, wanted)
    at = 0
    for b in range(d.batch):
        rows = slice(0 if pad is None else int(pad[b]), int(used[b]) + added[b])
        keys, values = (x[table[b].long()].flatten(0, 1)[None, rows] for x in expected_pools)
        expected = plain.attention(q[b][None], keys, values, **d.plain_settings())
        got = (out[at : at + lengths[b]], lse[:, at : at + lengths[b]]) if packed else (out[b], lse[b])
        plain.assert_close(got[0], expected[0][0], d.dtype, factor=2)
        plain.assert_close(got[1], expected[1][0], d.dtype, factor=2)
        at += lengths[b]


def test_positions_of_packed_new_keys(device):
    """rotary_seqlens in place of cache_seqlens, packed, against one sequence at a time."""
    angle = torch.rand(64, 4, device=device)
    tables = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}
    q, k, v = (torch.randn(5, 2, 16, device=device) for _ in range(3))
    first, used = ints([40, 3], device), ints([7, 0], device)
    cu = starts([2, 3], device)
    pools = [torch.randn(2, 20, 2, 16, device=device) for _ in range(2)]
    alone = [x.clone() for x in pools]
    packed = fa3.flash_attn_with_kvcache(
        q, *pools, k, v, cache_seqlens=used, cu_seqlens_q=cu, cu_seqlens_k_new=cu, rotary_seqlens=first, causal=True, **tables
    )
    for b in range(2):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        one = [x[b : b + 1] for x in alone]
        out = fa3.flash_attn_with_kvcache(
            *(x[rows][None] for x in (q,)),
            *one,
            *(x[rows][None] for x in (k, v)),
            cache_seqlens=used[b : b + 1],
            rotary_seqlens=first[b : b + 1],
            causal=True,
            **tables,
        )
        plain.assert_close(packed[rows], out[0])
    for got, wanted in zip(pools, alone, strict=True):
        assert torch.equal(got, wanted)


def test_packed_queries_over_pages(device):
    """As vLLM calls it."""
    q = torch.randn(9, 4, 16, device=device)
    k, v = (torch.randn(6, 8, 2, 16, device=device) for _ in range(2))
    table, used = ints([[4, 1], [0, 5]], device), ints([13, 6], device)
    sink, cu = torch.randn(4, device=device), starts([3, 6], device)
    out = torch.empty_like(q)
    settings = {"cu_seqlens_q": cu, "max_seqlen_q": 6, "max_seqlen_k": 16, "causal": True, "block_table": table}
    made = fa3.flash_attn_varlen_func(
        q, k, v, seqused_k=used, out=out, s_aux=sink, num_splits=0, scheduler_metadata=None, fa_version=3, **settings
    )
    assert made is out
    second = torch.empty_like(q)
    by_starts = starts([13, 6], device)
    assert fa2.flash_attn_varlen_func(q, k, v, cu_seqlens_k=by_starts, out=second, s_aux=sink, **settings) is second
    assert torch.equal(out, second)
    for b in range(2):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        keys, values = (x[table[b].long()].flatten(0, 1)[None, : int(used[b])] for x in (k, v))
        plain.assert_close(out[rows], plain.attention(q[None, rows], keys, values, causal=True, sink=sink)[0][0])
    dense = fa3.flash_attn_varlen_func(q, k[:2], v[:2], cu, max_seqlen_q=6, max_seqlen_k=8, seqused_k=ints([8, 2], device))
    plain.assert_close(dense[3:], plain.attention(q[None, 3:], k[1:2, :2], v[1:2, :2])[0][0])


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_splits_are_those_of_attend(num_splits, device):
    q = torch.randn(2, 1, 4, 32, device=device)
    k, v = (torch.randn(2, 3000, 2, 32, device=device) for _ in range(2))
    expected = fovea.attend(q, k, v, num_splits=num_splits)
    assert torch.equal(fa3.flash_attn_func(q, k, v, num_splits=num_splits), expected)
    used = ints([3000, 3000], device)
    expected = fovea.attend(q, k, v, seqused_k=used, num_splits=num_splits)
    for package in (fa2, fa3):
        assert torch.equal(package.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, num_splits=num_splits), expected)
    cu, settings = starts([1, 1], device), {"max_seqlen_q": 1, "num_splits": num_splits}
    packed = fovea.attend(q[:, 0], k, v, seqused_k=used, cu_seqlens_q=cu, **settings)
    assert torch.equal(fa3.flash_attn_varlen_func(q[:, 0], k, v, cu, seqused_k=used, max_seqlen_k=3000, **settings), packed)


@pytest.mark.parametrize("seed", range(10))
def test_third_interface(seed, device):
    d = Draw(400 + seed, device)
    d.alibi = None
    form = d.r.choice(["func", "qkvpacked", "grouped"])
    if form == "func":
        q = d.tensor(d.batch, d.seqlen_q, d.heads, d.size)
        k = d.tensor(d.batch, d.seqlen_k, d.heads_k, d.size)
        v = d.tensor(d.batch, d.seqlen_k, d.heads_k, d.size + 8)
        inputs, call, more = (q, k, v), fa3.flash_attn_func, {"num_splits": 0, "pack_gqa": True}
    elif form == "qkvpacked":
        qkv = d.tensor(d.batch, d.seqlen_q, 3, d.heads, d.size)
        q, k, v = qkv.unbind(2)
        inputs, call, more = (qkv,), fa3.flash_attn_qkvpacked_func, {}
    else:
        qkv = d.tensor(d.batch, d.seqlen_q, d.heads + 2 * d.heads_k, d.size)
        q, k, v = qkv.split([d.heads, d.heads_k, d.heads_k], 2)
        inputs, call, more = (qkv,), fa3.flash_attn_qkvpacked_func, {"num_heads_q": d.heads}
    out, lse = call(*inputs, **d.settings, **more, return_attn_probs=True)
    expected = plain.attention(q, k, v, **d.plain_settings())
    plain.assert_close(out, expected[0], d.dtype)
    plain.assert_close(lse, expected[1], d.dtype)
    check_gradients((out, lse), expected, inputs, d.dtype)


def test_third_interface_packed_and_partly_used(device):
    q = torch.randn(10, 2, 16, device=device)
    k, v = (torch.randn(12, 2, 16, device=device) for _ in range(2))
    cu_q, cu_k = starts([4, 6], device), starts([5, 7], device)
    used_q = torch.tensor([3, 6], dtype=torch.int32, device=device)
    used_k = torch.tensor([5, 2], dtype=torch.int32, device=device)
    out = fa3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 6, 7, used_q, used_k)
    first, _ = plain.attention(q[None, :3], k[None, :5], v[None, :5])
    second, _ = plain.attention(q[None, 4:], k[None, 5:7], v[None, 5:7])
    plain.assert_close(out[:3], first[0])
    plain.assert_close(out[4:], second[0])
    assert not out[3].any()


def test_combine(device):
    q, k, v = (torch.randn(2, 9, 3, 16, device=device) for _ in range(3))
    whole, lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    parts = [fa3.flash_attn_func(q, k[:, a:b], v[:, a:b], return_attn_probs=True) for a, b in ((0, 4), (4, 9))]
    o_parts = torch.stack([p[0] for p in parts])
    lse_parts = torch.stack([p[1].transpose(1, 2) for p in parts])
    out, merged = fa3.flash_attn_combine(o_parts, lse_parts)
    plain.assert_close(out, whole)
    plain.assert_close(merged, lse.transpose(1, 2))
    assert fa3.flash_attn_combine(o_parts, lse_parts, out_dtype=torch.bfloat16)[0].dtype == torch.bfloat16


def test_transposed_inputs_and_rows_that_are_not_contiguous(device):
    q, k, v = (torch.randn(2, 4, 16, 9, device=device).permute(0, 3, 1, 2) for _ in range(3))
    turned = [torch.randn(2, 4, 9, 16, device=device).transpose(1, 2) for _ in range(3)]
    for args in ((q, k, v), turned):
        inputs = [x.detach().requires_grad_() for x in args]
        out = fa2.flash_attn_func(*inputs, causal=True)
        expected = plain.attention(*inputs, causal=True)
        plain.assert_close(out, expected[0])
        check_gradients((out,), (expected[0],), inputs, torch.float32)


def test_signatures_are_those_of_the_packages():
    """Names, order and defaults, as documented by flash-attn 2.8.4 and flash-attn 3, and what vLLM calls behind them."""
    packed = "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    packed += "deterministic=False, return_attn_probs=False"
    starts_of_both = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
    expected = {
        "flash_attn_func": f"q, k, v, {packed}",
        "flash_attn_kvpacked_func": f"q, kv, {packed}",
        "flash_attn_qkvpacked_func": f"qkv, {packed}",
        "flash_attn_varlen_func": f"q, k, v, {starts_of_both}, {packed}, block_table=None, "
        "seqused_k=None, out=None, s_aux=None",
        "flash_attn_varlen_kvpacked_func": f"q, kv, {starts_of_both}, {packed}",
        "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {packed}",
        "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
        "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False",
    }
    scales = "q_descale=None, k_descale=None, v_descale=None"
    third = f"softmax_scale=None, causal=False, qv=None, {scales}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
    third += "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
    expected_third = {
        "flash_attn_func": f"q, k, v, {third}, s_aux=None",
        "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
        f"seqused_q=None, seqused_k=None, {third}, block_table=None, out=None, s_aux=None, sinks=None, alibi_slopes=None, "
        "return_softmax_lse=False, scheduler_metadata=None, fa_version=None, ver=None, q_v=None, cp_world_size=1, cp_rank=0, "
        "cp_tot_seqused_k=None",
        "flash_attn_qkvpacked_func": f"qkv, softmax_scale=None, causal=False, {scales}, window_size=(-1, -1), "
        "attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False",
        "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    }
    for module, signatures in ((fa2, expected), (fa3, expected_third)):
        for name, wanted in signatures.items():
            parameters = inspect.signature(getattr(module, name)).parameters.values()
            text = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
            assert text == wanted, name


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("packed", [False, True])
def test_the_two_passes_one_by_one(packed, dropout, device):
    q, k, v = (torch.randn(2, 9, 2, 16, device=device) for _ in range(3))
    cu = (starts([9, 9], device), starts([9, 9], device), 9, 9) if packed else ()
    if packed:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    alibi = torch.rand(2, device=device)
    settings = (dropout, 0.3, True, 5, 0, 2.0, alibi)
    forward, backward = (
        (interface._flash_attn_varlen_forward, interface._flash_attn_varlen_backward)
        if packed
        else (interface._flash_attn_forward, interface._flash_attn_backward)
    )
    call = fa2.flash_attn_varlen_func if packed else fa2.flash_attn_func
    torch.manual_seed(5)
    out, lse, mask, rng_state = forward(q, k, v, *cu, *settings, True)
    torch.manual_seed(5)
    trained = [x.clone().requires_grad_() for x in (q, k, v)]
    named = {"softmax_scale": 0.3, "causal": True, "window_size": (5, 0), "softcap": 2.0, "alibi_slopes": alibi}
    expected = call(*trained, *cu, dropout_p=dropout, **named, return_attn_probs=True)
    for got, wanted in zip((out, lse, mask), expected, strict=True):
        assert torch.equal(got, wanted) and not got.requires_grad
    d_o = torch.randn_like(out)
    gradients = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    assert backward(d_o, q, k, v, out, lse, *gradients, *cu, *settings, False, rng_state).numel() == 0
    for got, wanted in zip(gradients, torch.autograd.grad(expected[0], trained, d_o), strict=True):
        plain.assert_close(got, wanted)
    if dropout:
        with pytest.raises(ValueError, match="rng_state: got None"):
            backward(d_o, q, k, v, out, lse, *gradients, *cu, *settings, False)


def calls_with_a_window(device):
    """name -> call(window_size=...), for every function of both modules that takes one and computes."""
    q = torch.randn(2, 9, 2, 16, device=device)
    rows, cu = q.flatten(0, 1), starts([9, 9], device)
    third = torch.stack((q, q, q), 2)
    for name, module in (("fa2", fa2), ("fa3", fa3)):
        arguments = {
            "flash_attn_func": (q, q, q),
            "flash_attn_qkvpacked_func": (third,),
            "flash_attn_kvpacked_func": (q, third[:, :, 1:]),
            "flash_attn_varlen_func": (rows, rows, rows, cu, cu, 9, 9),
            "flash_attn_varlen_qkvpacked_func": (third.flatten(0, 1), cu, 9),
            "flash_attn_varlen_kvpacked_func": (rows, third[:, :, 1:].flatten(0, 1), cu, cu, 9, 9),
            "flash_attn_with_kvcache": (q, q, q),
        }
        for function, given in arguments.items():
            if hasattr(module, function):
                yield f"{name}.{function}", functools.partial(getattr(module, function), *given)


def test_a_window_of_any_kind(device):
    np = pytest.importorskip("numpy")
    found = 0
    for name, call in calls_with_a_window(device):
        expected = call(window_size=(3, 2))
        assert not torch.equal(expected, call()), name
        forms = ([3, 2], torch.tensor([3, 2]), torch.Size([3, 2]), np.array([3, 2]), (np.int64(3), torch.tensor(2)))
        for window in (*forms, torch.tensor([3, 2], device=device, dtype=torch.int32)):
            assert torch.equal(call(window_size=window), expected), (name, window)
        assert torch.equal(call(window_size=None), call()), name
        for wrong in ((3,), 3, [3, 2, 1], torch.tensor([3, 2, 1]), torch.tensor(3)):
            with pytest.raises(ValueError, match="window_size: got "):
                call(window_size=wrong)
        with pytest.raises(TypeError, match="window"):
            call(window_size=(1.5, 0))
        found += 1
    assert found == 11
    q = torch.randn(1, 9, 2, 16, device=device, requires_grad=True)
    plain.assert_close(fa2.flash_attn_func(q, q, q, window_size=[3, 2]), fa2.flash_attn_func(q, q, q, window_size=(3, 2)))
    fa3.get_scheduler_metadata(1, 9, 9, 2, 2, 16, torch.tensor([9], device=device), window_size=[3, 2])


def test_what_is_refused():
    q = torch.randn(1, 4, 2, 8)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="page_table: got 1 at entry 0 of sequence 0"):
        fa2.flash_attn_with_kvcache(q, q, q, block_table=table + 1)
    with pytest.raises(ValueError, match="page_table: got -1 at entry 0 of sequence 0"):
        fa2.flash_attn_with_kvcache(q, q.clone(), q.clone(), q, q, block_table=table - 1, cache_seqlens=0)
    with pytest.raises(ValueError, match="cache_batch_idx"):
        fa2.flash_attn_with_kvcache(q, q, q, block_table=table, cache_batch_idx=table[0], cache_seqlens=0)
    with pytest.raises(ValueError, match="qv: got a tensor that needs gradients"):
        fa3.flash_attn_func(q, q, q, qv=q.clone().requires_grad_())
    with pytest.raises(ValueError, match="qv: got shape .2, 4, 2, 8., expected"):
        fa3.flash_attn_with_kvcache(q, q, q, qv=q.repeat(2, 1, 1, 1))
    with pytest.raises(ValueError, match="k: "):
        fa2.flash_attn_func(q, q[..., :4], q)
    with pytest.raises(ValueError, match="softmax_scale"):
        fa2.flash_attn_func(q, q, q, softmax_scale=0.0)
    with pytest.raises(ValueError, match="dropout_p"):
        fa2.flash_attn_func(q, q, q, 1.5)
    with pytest.raises(TypeError, match="q: got list"):
        fa2.flash_attn_func([1.0], q, q)
    with pytest.raises(ValueError, match="k_new: got 4 rows behind the 1 of sequence 0, expected at most 3"):
        fa2.flash_attn_with_kvcache(q, q.clone(), q.clone(), q, q, cache_seqlens=1)


def test_shim(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "flash_attn", fa2)
    from flash_attn import flash_attn_func
    from flash_attn.flash_attn_interface import flash_attn_varlen_func

    assert flash_attn_func is fa2.flash_attn_func
    assert flash_attn_varlen_func is not None
    monkeypatch.delitem(sys.modules, "flash_attn.flash_attn_interface")
