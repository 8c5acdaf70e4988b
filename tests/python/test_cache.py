"""fovea.attend over a cache that grows: new rows, rotation, pages, and what is refused."""

import numpy
import pytest
import torch

import fovea


def make_cache(device, dtype=torch.float32, page=0, rows=48):
    torch.manual_seed(rows + page)
    used = torch.tensor([20, 0, 31], dtype=torch.int32)
    table = None
    shape = (3, rows, 2, 16)
    if page:
        table = torch.randperm(3 * rows // page + 2)[: 3 * rows // page].view(3, -1).int().to(device)
        shape = (3 * rows // page + 2, page, 2, 16)
    k, v = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    return fovea.Cache(k, v, used.to(device), table)


def rows_of(cache, pool, b):
    """Rows of sequence b, one behind the other."""
    return pool[b] if cache.page_table is None else pool[cache.page_table[b].long()].flatten(0, 1)


def turned(x, cos, sin, interleaved):
    """x (rows, heads, size) with angles (rows, pairs)."""
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    a, b = (x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]) if interleaved else (x[..., :half], x[..., half : 2 * half])
    pairs = (a * cos - b * sin, a * sin + b * cos)
    both = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat([both, x[..., 2 * half :]], -1)


@pytest.mark.parametrize("page", [0, 1, 16])
@pytest.mark.parametrize("interleaved", [None, False, True])
def test_appends_then_attends(device, page, interleaved):
    cache = make_cache(device, page=page)
    before = fovea.Cache(cache.k.clone(), cache.v.clone(), cache.seqused.clone(), cache.page_table)
    q, k, v = (torch.randn(3, 5, heads, 16, device=device) for heads in (4, 2, 2))
    rotary = None
    angles = torch.randn(60, 6, device=device)
    if interleaved is not None:
        rotary = fovea.Rotary(angles.cos(), angles.sin(), interleaved)
    o, lse = fovea.attend(q, k, v, cache=cache, rotary=rotary, causal=True, return_lse=True)
    assert torch.equal(cache.seqused, before.seqused)
    for b in range(3):
        used = int(cache.seqused[b])
        at = slice(used, used + 5)
        new, turned_q = k[b], q[b]
        if rotary is not None:
            new, turned_q = (turned(x, rotary.cos[at], rotary.sin[at], interleaved) for x in (new, turned_q))
        expected_k, expected_v = rows_of(before, before.k, b).clone(), rows_of(before, before.v, b).clone()
        expected_k[at], expected_v[at] = new, v[b]
        torch.testing.assert_close(rows_of(cache, cache.k, b), expected_k)
        assert torch.equal(rows_of(cache, cache.v, b), expected_v)
        alone = fovea.attend(
            turned_q[None], expected_k[None, : used + 5].contiguous(), expected_v[None, : used + 5].contiguous(),
            causal=True, return_lse=True,
        )  # fmt: skip
        torch.testing.assert_close(o[b], alone[0][0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[b], alone[1][0], rtol=1e-4, atol=1e-5)


def test_packed_new_rows(device):
    cache, alike = make_cache(device), make_cache(device)
    lengths = [4, 0, 7]
    starts = torch.tensor([0, 4, 4, 11], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(11, heads, 16, device=device) for heads in (4, 2, 2))
    o = fovea.attend(q, k, v, cache=cache, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=7, causal=True)
    for b, length in enumerate(lengths):
        at = slice(int(starts[b]), int(starts[b + 1]))
        one = fovea.Cache(alike.k[b : b + 1], alike.v[b : b + 1], alike.seqused[b : b + 1])
        if length:
            expected = fovea.attend(q[None, at], k[None, at], v[None, at], cache=one, causal=True)[0]
            torch.testing.assert_close(o[at], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(cache.k, alike.k) and torch.equal(cache.v, alike.v)


def test_numpy_arrays_and_a_cache_that_is_only_read():
    made = make_cache("cpu")
    cache = fovea.Cache(made.k.numpy(), made.v.numpy(), made.seqused.numpy())
    q, k, v = (numpy.random.default_rng(1).standard_normal((3, 2, heads, 16), "float32") for heads in (4, 2, 2))
    first = fovea.attend(q, k, v, cache=cache, causal=True)
    again = fovea.attend(q, None, None, cache=cache._replace(seqused=cache.seqused + 2), causal=True)
    numpy.testing.assert_array_equal(first, again)


def test_compiled_by_torch(device):
    def step(cache, q, k, v):
        return fovea.attend(q, k, v, cache=cache, causal=True)

    q, k, v = (torch.randn(3, 1, heads, 16, device=device) for heads in (4, 2, 2))
    cache, alike = make_cache(device), make_cache(device)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(cache, q, k, v), step(alike, q, k, v))
    assert torch.equal(cache.k, alike.k) and torch.equal(cache.v, alike.v)


@pytest.mark.parametrize("order", ["pages of one, then of the other", "one of each in a page of both"])
def test_keys_and_values_in_one_pool(device, order):
    """As engines lay caches out: a page of keys, then one of values; as views of all pages, or side by side."""
    apart = make_cache(device, page=16)
    pages = apart.k.shape[0]
    pool = torch.stack([apart.k, apart.v], 1).contiguous()  # (pages, 2, page, heads, size)
    if order.startswith("one"):
        cache = fovea.Cache(pool[:, 0], pool[:, 1], apart.seqused, apart.page_table)
    else:
        flat = pool.flatten(0, 1)
        cache = fovea.Cache(flat[:-1], flat[1:], apart.seqused, 2 * apart.page_table)
    q, k, v = (torch.randn(3, 5, heads, 16, device=device) for heads in (4, 2, 2))
    o = fovea.attend(q, k, v, cache=cache, causal=True)
    assert torch.equal(o, fovea.attend(q, k, v, cache=apart, causal=True))
    assert torch.equal(pool.view(pages, 2, 16, 2, 16), torch.stack([apart.k, apart.v], 1))
    half_a_page = pool.flatten()[8 * 2 * 16 :]
    shifted = half_a_page[: half_a_page.numel() // 512 * 512].view(-1, 16, 2, 16)
    count = shifted.shape[0]
    with pytest.raises(ValueError, match="k: got memory that overlaps v"):
        fovea.attend(q, k, v, cache=fovea.Cache(pool.flatten(0, 1)[:count], shifted, apart.seqused, apart.page_table))


def test_what_is_refused():
    cache = make_cache("cpu")
    q, k, v = (torch.randn(3, 5, heads, 16) for heads in (4, 2, 2))
    angles = torch.ones(60, 4)
    with pytest.raises(ValueError, match="k, v: got one of the two"):
        fovea.attend(q, k, None, cache=cache)
    with pytest.raises(ValueError, match="rotary: got angles without cache"):
        fovea.attend(q, k, v, rotary=fovea.Rotary(angles, angles))
    with pytest.raises(ValueError, match="rotary: got angles without k and v"):
        fovea.attend(q, None, None, cache=cache, rotary=fovea.Rotary(angles, angles))
    with pytest.raises(ValueError, match="page_table: got an array beside cache"):
        table = torch.zeros(3, 1, dtype=torch.int32)
        fovea.attend(q, k, v, cache=cache._replace(page_table=table), page_table=table)
    with pytest.raises(ValueError, match="k_new: got 5 rows behind the 46 of sequence 1, expected at most 2"):
        before = cache.k.clone()
        fovea.attend(q, k, v, cache=cache._replace(seqused=torch.tensor([0, 46, 0], dtype=torch.int32)))
    assert torch.equal(cache.k, before)
    with pytest.raises(ValueError, match="cache: got tensors that need gradients"):
        fovea.attend(q, k.requires_grad_(), v, cache=cache)
    k.requires_grad_(False)
    with pytest.raises(ValueError, match="cache: got tensors that need gradients"):
        fovea.attend(q.requires_grad_(), k, v, cache=cache)
    with torch.no_grad():
        fovea.attend(q, k, v, cache=cache)
    read_only = cache.k.numpy().copy()
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="k: .*read-only"):
        fovea.attend(
            q.detach().numpy(), k.numpy(), v.numpy(),
            cache=fovea.Cache(read_only, cache.v.numpy(), cache.seqused.numpy()),
        )  # fmt: skip


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("group", [1, 4])
def test_keys_of_8_bits(device, page, group):
    torch.manual_seed(page + group)
    dtype = torch.bfloat16
    shape = (9, 16, 2, 64) if page else (2, 64, 2, 64)
    k, v = (torch.randn(shape, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    used = torch.tensor([50, 9], dtype=torch.int32, device=device)
    table = torch.randperm(8).view(2, 4).int().to(device) if page else None
    factors = [torch.rand(2, 2, device=device) + 0.5 for _ in range(2)]
    cache = fovea.Cache(k, v, used, table, k_descale=factors[0], v_descale=factors[1])
    q = torch.randn(2, 1, 2 * group, 64, device=device, dtype=dtype)
    o, lse = fovea.attend(q, None, None, cache=cache, causal=True, return_lse=True)
    for b in range(2):
        wide = [
            rows_of(cache, pool, b)[: int(used[b])].float() * factor[b, :, None]
            for pool, factor in ((k, factors[0]), (v, factors[1]))
        ]
        expected, expected_lse = fovea.attend(q[b : b + 1].float(), *(x[None].contiguous() for x in wide), return_lse=True)
        torch.testing.assert_close(o[b : b + 1].float(), expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse[b : b + 1], expected_lse, rtol=1e-3, atol=1e-3)


def test_queries_of_8_bits(device):
    torch.manual_seed(5)
    arrays = [torch.randn(2, rows, heads, 32, device=device).to(torch.float8_e4m3fn) for rows, heads in ((7, 4), (20, 2), (20, 2))]
    factors = [torch.rand(2, 2, device=device) + 0.5 for _ in range(3)]
    wide = [
        x.float() * factor.repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None]
        for x, factor in zip(arrays, factors, strict=True)
    ]
    expected, expected_lse = fovea.attend(*wide, causal=True, return_lse=True)
    names = dict(zip(("q_descale", "k_descale", "v_descale"), factors, strict=True))
    o, lse = fovea.attend(*arrays, causal=True, return_lse=True, **names)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o.float(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(fovea.attend(*arrays, causal=True, **names), o)
    compiled = torch.compile(lambda *x: fovea.attend(*x, causal=True, **names), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arrays), o)
    cache = fovea.Cache(*arrays[1:], k_descale=factors[1], v_descale=factors[2])
    assert torch.equal(fovea.attend(arrays[0], None, None, cache=cache, causal=True, q_descale=factors[0]), o)


def test_queries_of_8_bits_beside_new_rows(device):
    """k_new, v_new and the tables have the type of o, which is bfloat16."""
    torch.manual_seed(6)
    pools = [torch.randn(2, 16, 2, 32, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
    cache = fovea.Cache(*pools, torch.tensor([4, 0], dtype=torch.int32, device=device))
    q = torch.randn(2, 3, 4, 32, device=device).to(torch.float8_e4m3fn)
    new = [torch.randn(2, 3, 2, 32, device=device, dtype=torch.bfloat16) for _ in range(2)]
    factor = torch.full((1, 1), 0.5, device=device)
    angles = torch.rand(20, 8, device=device)
    rotary = fovea.Rotary(angles.cos(), angles.sin())
    o = fovea.attend(q, *new, cache=cache, rotary=rotary, causal=True, q_descale=factor)
    expected = fovea.attend((q.float() * 0.5).bfloat16(), *new, cache=cache, rotary=rotary, causal=True)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o.float(), expected.float(), rtol=2e-2, atol=2e-2)
    with pytest.raises(ValueError, match="k_new: got float32, expected bfloat16, the type of o"):
        fovea.attend(q, *(x.float() for x in new), cache=cache, causal=True)


def test_appends_to_keys_of_8_bits(device):
    torch.manual_seed(3)
    k, v = (torch.zeros(2, 32, 2, 16, dtype=torch.float8_e4m3fn, device=device) for _ in range(2))
    factors = [torch.full((2, 1), 0.5, device=device), torch.full((1, 2), 2.0, device=device)]
    cache = fovea.Cache(k, v, torch.tensor([4, 0], dtype=torch.int32, device=device), None, None, None, *factors)
    q, new_k, new_v = (torch.randn(2, 3, heads, 16, device=device, dtype=torch.float16) for heads in (4, 2, 2))
    fovea.attend(q, new_k, new_v, cache=cache)
    for pool, new, factor in ((k, new_k, 0.5), (v, new_v, 2.0)):
        for b, used in enumerate((4, 0)):
            assert torch.equal(pool[b, used : used + 3].float(), (new[b].float() / factor).to(torch.float8_e4m3fn).float())


def test_keys_of_8_bits_have_no_gradients(device):
    q = torch.randn(1, 3, 2, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(1, 5, 2, 16, device=device).to(torch.float8_e4m3fn)
    o = fovea.attend(q, k, k)
    with pytest.raises(ValueError, match="k: got float8_e4m3fn, expected the type of q in a backward problem"):
        o.sum().backward()


def test_factors_need_keys_of_8_bits(device):
    q = torch.randn(1, 3, 2, 16, device=device)
    for name in ("q_descale", "k_descale"):
        with pytest.raises(ValueError, match=f"{name}: got a tensor, expected none, as {name[0]} is float32"):
            fovea.attend(q, q, q, **{name: torch.ones(1, 2, device=device)})
