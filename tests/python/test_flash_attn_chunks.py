"""attention_chunk of fovea.flash_attn_interface, in every form that its functions take, against a mask of the chunks."""

import itertools

import pytest

torch = pytest.importorskip("torch")

import fovea.flash_attn_interface as fa3  # noqa: E402
import plain  # noqa: E402

CHUNK = 7


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def starts(lengths, device):
    return ints([0, *itertools.accumulate(lengths)], device)


def rows(*shape, device, dtype=torch.float32):
    return torch.randn(shape, device=device).to(dtype)


def chunks(seqlen_q, seqlen_k, chunk, device):
    """(seqlen_q, seqlen_k) bool, pair by pair: whether the query's position, counted from the last key, lies in the key's chunk."""
    pairs = [[(i + seqlen_k - seqlen_q) // chunk == j // chunk for j in range(seqlen_k)] for i in range(seqlen_q)]
    return torch.tensor(pairs, dtype=torch.bool, device=device).reshape(seqlen_q, seqlen_k)


def expected(q, k, v, chunk=CHUNK, **settings):
    return plain.attention(q, k, v, mask=chunks(q.shape[1], k.shape[1], chunk, q.device), **settings)


def expected_of_each(q, sequences, **settings):
    """(o, lse) packed; q: queries of each sequence, sequences: (k, v) of each."""
    found = [expected(one[None], k[None], v[None], **settings) for one, (k, v) in zip(q, sequences, strict=True)]
    return torch.cat([o[0] for o, _ in found]), torch.cat([lse[0] for _, lse in found], 1)


def check_gradients(outputs, wanted, inputs, dtype=torch.float32):
    weights = [torch.randn_like(x) for x in outputs]
    finite = [torch.where(torch.isfinite(x), x, 0.0) for x in wanted]
    ours = torch.autograd.grad(outputs, inputs, weights)
    theirs = torch.autograd.grad(finite, inputs, [w.double() for w in weights])
    for a, b in zip(ours, theirs, strict=True):
        plain.assert_close(a, b, dtype, factor=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(20, 20), (9, 33), (33, 9), (1, 22), (1, 21)])
@pytest.mark.parametrize(
    "settings",
    [{}, {"causal": True}, {"window": (3, 2)}, {"window": (-1, 2)}, {"window": (11, 90)}, {"causal": True, "window": (3, 9)}],
    ids=str,
)
def test_dense(settings, lengths, dtype, device):
    """More queries than keys, too: those in front of the first key see none."""
    q = rows(2, lengths[0], 4, 32, device=device, dtype=dtype).requires_grad_()
    k, v = (rows(2, lengths[1], 2, 32, device=device, dtype=dtype).requires_grad_() for _ in range(2))
    given = {"causal": settings.get("causal", False), "window_size": settings.get("window", (-1, -1))}
    out, lse = fa3.flash_attn_func(q, k, v, attention_chunk=CHUNK, return_attn_probs=True, **given)
    wanted = expected(q, k, v, **settings)
    plain.assert_close(out, wanted[0], dtype)
    plain.assert_close(lse, wanted[1], dtype)
    check_gradients((out, lse), wanted, (q, k, v), dtype)
    with torch.no_grad():
        plain.assert_close(fa3.flash_attn_func(q, k, v, attention_chunk=CHUNK, **given), wanted[0], dtype)


@pytest.mark.parametrize("chunk", [1, 2, 64, 100, 128, 1000])
def test_sizes_of_chunks(chunk, device):
    q, k, v = (rows(1, 300, 2, 64, device=device).requires_grad_() for _ in range(3))
    out = fa3.flash_attn_func(q, k, v, causal=True, attention_chunk=chunk)
    wanted = expected(q, k, v, chunk, causal=True)
    plain.assert_close(out, wanted[0])
    check_gradients((out,), wanted[:1], (q, k, v))
    if chunk == 1:
        plain.assert_close(out, v)


def test_qkvpacked(device):
    qkv = rows(2, 19, 3, 2, 16, device=device).requires_grad_()
    out = fa3.flash_attn_qkvpacked_func(qkv, attention_chunk=CHUNK)
    wanted = expected(*qkv.unbind(2))
    plain.assert_close(out, wanted[0])
    check_gradients((out,), wanted[:1], (qkv,))


def test_beside_other_terms(device):
    q, k, v = (rows(2, 17, heads, 16, device=device) for heads in (4, 2, 2))
    sinks = rows(4, device=device)
    out, lse = fa3.flash_attn_func(q, k, v, attention_chunk=CHUNK, causal=True, softcap=5.0, s_aux=sinks, return_attn_probs=True)
    wanted = expected(q, k, v, causal=True, softcap=5.0, sink=sinks)
    plain.assert_close(out, wanted[0])
    plain.assert_close(lse, wanted[1])
    qv = rows(2, 17, 4, 16, device=device)
    out = fa3.flash_attn_func(q, k, v, attention_chunk=CHUNK, qv=qv)
    joined = expected(torch.cat((q, qv), -1), torch.cat((k, v), -1), v)
    plain.assert_close(out, joined[0])
    slopes = torch.rand(4, device=device)
    cu = starts([17, 17], device)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    out = fa3.flash_attn_varlen_func(*flat, cu, cu, 17, 17, attention_chunk=CHUNK, alibi_slopes=slopes)
    plain.assert_close(out.view_as(q), expected(q, k, v, alibi=slopes)[0])


@pytest.mark.parametrize("causal", [False, True])
def test_packed(causal, device):
    of_q, of_k = [9, 0, 15, 3], [30, 4, 15, 1]
    q = rows(sum(of_q), 4, 16, device=device).requires_grad_()
    k, v = (rows(sum(of_k), 2, 16, device=device).requires_grad_() for _ in range(2))
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, starts(of_q, device), starts(of_k, device), 15, 30, causal=causal, attention_chunk=CHUNK, return_attn_probs=True
    )
    sequences = list(zip(k.split(of_k), v.split(of_k), strict=True))
    wanted = expected_of_each(q.split(of_q), sequences, causal=causal)
    plain.assert_close(out, wanted[0])
    plain.assert_close(lse, wanted[1])
    check_gradients((out, lse), wanted, (q, k, v))


def test_partly_used_sequences(device):
    """Positions count from the last key in use."""
    q, k, v = (rows(24, 2, 16, device=device) for _ in range(3))
    cu = starts([12, 12], device)
    out = fa3.flash_attn_varlen_func(
        q, k, v, cu, cu, 12, 12, ints([5, 12], device), ints([12, 8], device), causal=True, attention_chunk=4
    )
    for first, used_q, used_k in ((0, 5, 12), (12, 12, 8)):
        wanted = expected(
            q[None, first : first + used_q], k[None, first : first + used_k], v[None, first : first + used_k], 4, causal=True
        )
        plain.assert_close(out[first : first + used_q], wanted[0][0])
    assert not out[5:12].any()


class Pages:
    """Three sequences in pages of 8, with packed queries."""

    def __init__(self, device, dtype=torch.float32):
        self.device, self.of_q, self.of_k = device, [3, 1, 6], [21, 16, 6]
        self.table = ints([[4, 1, 8], [0, 5, 3], [2, 6, 7]], device)
        self.pools = [rows(9, 8, 2, 32, device=device).to(dtype) for _ in range(2)]
        self.q = rows(sum(self.of_q), 4, 32, device=device)
        self.settings = {"cu_seqlens_q": starts(self.of_q, device), "max_seqlen_q": 6, "causal": True, "attention_chunk": CHUNK}

    def check(self, o, lse=None):
        sequences = [
            [pool[self.table[b].long()].flatten(0, 1)[:n].to(self.q.dtype) for pool in self.pools] for b, n in enumerate(self.of_k)
        ]
        wanted = expected_of_each(self.q.split(self.of_q), sequences, causal=True)
        plain.assert_close(o, wanted[0], o.dtype)
        if lse is not None:
            plain.assert_close(lse, wanted[1], o.dtype)


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_pages(num_splits, device):
    x = Pages(device)
    used = ints(x.of_k, device)
    out = torch.empty_like(x.q)
    made = fa3.flash_attn_varlen_func(
        x.q, *x.pools, seqused_k=used, block_table=x.table, max_seqlen_k=24, out=out, num_splits=num_splits, **x.settings
    )
    assert made is out
    x.check(out)
    x.check(
        *fa3.flash_attn_with_kvcache(
            x.q, *x.pools, cache_seqlens=used, page_table=x.table, return_softmax_lse=True, num_splits=num_splits, **x.settings
        )
    )
    # Converted first: lengths of 64 bits.
    x.check(fa3.flash_attn_with_kvcache(x.q, *x.pools, cache_seqlens=used.long(), page_table=x.table, **x.settings))


def test_keys_of_8_bits(device):
    x = Pages(device, torch.float8_e4m3fn)
    x.q = x.q.bfloat16()
    x.check(fa3.flash_attn_with_kvcache(x.q, *x.pools, cache_seqlens=ints(x.of_k, device), page_table=x.table, **x.settings))


@pytest.mark.parametrize("compiled", [False, True])
def test_new_rows(compiled, device):
    """A cache with rows in front, of chosen sequences, that grows; rotated as under a window. Under torch.compile it runs outside of the
    graph."""
    q, k, v = (rows(2, 3, heads, 16, device=device) for heads in (4, 2, 2))
    cache = [rows(4, 40, 2, 16, device=device) for _ in range(2)]
    used, pad, picked = [25, 6], [4, 0], [3, 1]
    angle = torch.rand(64, 8, device=device)
    given = {
        "cache_seqlens": ints(used, device),
        "cache_leftpad": ints(pad, device),
        "cache_batch_idx": ints(picked, device),
        "rotary_cos": angle.cos(),
        "rotary_sin": angle.sin(),
    }
    other = [x.clone() for x in cache]
    fa3.flash_attn_with_kvcache(q, *other, k, v, window_size=(5, 5), **given)

    def step(q, k, v):
        return fa3.flash_attn_with_kvcache(q, *cache, k, v, attention_chunk=CHUNK, **given)

    out = (torch.compile(step, backend="eager") if compiled else step)(q, k, v)
    for got, wanted in zip(cache, other, strict=True):
        assert torch.equal(got, wanted)
    for b in range(2):
        turned = q[b : b + 1].double()
        a = angle[used[b] : used[b] + 3, None].double()
        z = torch.complex(turned[..., ::2], turned[..., 1::2]) * torch.polar(torch.ones_like(a), a)
        turned = torch.view_as_real(z).flatten(-2)
        keys, values = (x[None, picked[b], pad[b] : used[b] + 3] for x in cache)
        plain.assert_close(out[b], expected(turned, keys, values)[0][0], torch.float32)


def test_compiled(device):
    """The call runs outside of the graph, forward and backward."""
    q, k, v = (rows(1, 16, 2, 16, device=device).requires_grad_() for _ in range(3))
    run = torch.compile(lambda q: fa3.flash_attn_func(2 * q, k, v, attention_chunk=CHUNK) + 1, backend="eager")
    out = run(q)
    wanted = expected(2 * q, k, v)[0] + 1
    plain.assert_close(out, wanted)
    check_gradients((out,), (wanted,), (q, k, v))


def test_what_is_refused():
    q = torch.randn(1, 4, 2, 8)
    for call in (fa3.flash_attn_func, fa3.flash_attn_with_kvcache):
        with pytest.raises(ValueError, match="attention_chunk: got -4; expected how many keys"):
            call(q, q, q, attention_chunk=-4)
        with pytest.raises(TypeError, match="attention_chunk: got 2.5; expected an integer"):
            call(q, q, q, attention_chunk=2.5)
        with pytest.raises(NotImplementedError, match="attention_chunk: got it under torch.func"):
            torch.func.vmap(lambda x: call(x, x, x, attention_chunk=4))(q[None])
    assert torch.equal(fa3.flash_attn_func(q, q, q, attention_chunk=0), fa3.flash_attn_func(q, q, q))
