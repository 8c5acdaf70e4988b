"""Calls of fovea.flash_attn_interface as vLLM, SGLang and transformers make them: the effect of every keyword, or a clear error."""

import pytest

torch = pytest.importorskip("torch")

import fovea  # noqa: E402
import fovea.flash_attn as fa2  # noqa: E402
import fovea.flash_attn_interface as fa3  # noqa: E402
import plain  # noqa: E402

HEADS, KEY_HEADS, SIZE, PAGE = 4, 2, 16, 8
QUERIES, KEYS = (3, 1, 5), (13, 9, 5)


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


class Batch:
    """Packed queries of three sequences over a cache in pages, whose spare rows and pages hold NaN."""

    def __init__(self, device, dtype=torch.float32):
        self.device = device
        self.q = torch.randn(sum(QUERIES) + 2, HEADS, SIZE, device=device).to(dtype)  # two rows that belong to nobody
        rows = [[torch.randn(n, KEY_HEADS, SIZE, device=device).to(dtype) for n in KEYS] for _ in range(2)]
        self.keys, self.values = rows
        self.table = ints([[4, 1], [0, 5], [2, -7]], device)
        self.pools = [torch.full((7, PAGE, KEY_HEADS, SIZE), float("nan"), device=device, dtype=dtype) for _ in range(2)]
        for pool, sequences in zip(self.pools, rows, strict=True):
            for b, sequence in enumerate(sequences):
                for i, row in enumerate(sequence):
                    pool[int(self.table[b, i // PAGE]), i % PAGE] = row
        self.starts = ints([0, 3, 4, 9], device)
        self.used = ints(KEYS, device)

    def varlen(self, **more):
        """As vLLM calls it, with all its keywords."""
        arguments = {
            "q": self.q,
            "k": self.pools[0],
            "v": self.pools[1],
            "out": torch.full_like(self.q, float("nan")),
            "cu_seqlens_q": self.starts,
            "max_seqlen_q": max(QUERIES),
            "seqused_k": self.used,
            "max_seqlen_k": max(KEYS),
            "softmax_scale": 0.3,
            "causal": True,
            "alibi_slopes": None,
            "window_size": [-1, -1],
            "block_table": self.table,
            "softcap": 0,
            "scheduler_metadata": None,
            "fa_version": 3,
            "q_descale": None,
            "k_descale": None,
            "v_descale": None,
            "num_splits": 0,
            "s_aux": None,
        }
        return fa3.flash_attn_varlen_func(**(arguments | more))

    def kvcache(self, **more):
        """As SGLang calls it, with all its keywords."""
        arguments = {
            "q": self.q,
            "k_cache": self.pools[0],
            "v_cache": self.pools[1],
            "page_table": self.table,
            "cache_seqlens": self.used,
            "cu_seqlens_q": self.starts,
            "cu_seqlens_k_new": ints([0, 13, 22, 27], self.device),  # without k and v it means nothing
            "max_seqlen_q": max(QUERIES),
            "softmax_scale": 0.3,
            "causal": True,
            "window_size": (-1, -1),
            "softcap": 0.0,
            "k_descale": None,
            "v_descale": None,
            "return_softmax_lse": False,
            "num_splits": 0,
            "ver": 3,
        }
        return fa3.flash_attn_with_kvcache(**(arguments | more))

    def expected(self, **settings):
        """(o, lse) of the rows that take part."""
        found = []
        for b, (first, n) in enumerate(zip((0, 3, 4), QUERIES, strict=True)):
            alone = {"scale": 0.3, "causal": True} | settings
            if "alibi" in alone and alone["alibi"].ndim == 2:
                alone["alibi"] = alone["alibi"][b]
            found.append(plain.attention(self.q[None, first : first + n], self.keys[b][None], self.values[b][None], **alone))
        return torch.cat([o[0] for o, _ in found]), torch.cat([lse[0] for _, lse in found], -1)

    def check(self, o, **settings):
        expected = self.expected(**settings)[0]
        plain.assert_close(o[: len(expected)], expected, self.q.dtype)
        assert not o[len(expected) :].any()


CALLS = pytest.mark.parametrize("call", ["varlen", "kvcache"])


@CALLS
@pytest.mark.parametrize(
    "keywords, settings",
    [
        ({}, {}),
        ({"softmax_scale": None}, {"scale": None}),
        ({"causal": False}, {"causal": False}),
        ({"window_size": [4, 0]}, {"window": (4, 0)}),
        ({"window_size": None}, {}),
        ({"softcap": 2.0}, {"softcap": 2.0}),
        ({"fa_version": 2}, {}),
        ({"ver": 4}, {}),
        ({"scheduler_metadata": torch.zeros(5, dtype=torch.int32)}, {}),
        ({"num_splits": 3}, {}),
    ],
    ids=str,
)
def test_numbers(call, keywords, settings, device):
    batch = Batch(device)
    if call == "kvcache" and "fa_version" in keywords:
        pytest.skip("an argument of the other function")
    batch.check(getattr(batch, call)(**keywords), **settings)


@CALLS
def test_out_gets_the_result(call, device):
    batch = Batch(device)
    out = torch.full_like(batch.q, float("nan"))
    assert getattr(batch, call)(out=out) is out
    batch.check(out)


@CALLS
@pytest.mark.parametrize("name", ["s_aux", "sinks"])
def test_sinks_by_both_names(call, name, device):
    batch = Batch(device, torch.bfloat16)
    sinks = torch.randn(HEADS, device=device, dtype=torch.bfloat16)
    batch.check(getattr(batch, call)(**{name: sinks}), sink=sinks)
    with pytest.raises(ValueError, match="s_aux, sinks: got both"):
        getattr(batch, call)(s_aux=sinks, sinks=sinks)


def test_slopes(device):
    batch = Batch(device)
    slopes = torch.rand(3, HEADS, device=device)
    batch.check(batch.varlen(alibi_slopes=slopes), alibi=slopes)
    batch.check(batch.varlen(alibi_slopes=slopes[0]), alibi=slopes[0])


@CALLS
def test_log_sum_exp(call, device):
    batch = Batch(device)
    o, lse = getattr(batch, call)(return_softmax_lse=True)
    batch.check(o)
    expected = batch.expected()[1]
    plain.assert_close(lse[:, : expected.shape[1]], expected)
    if call == "varlen":
        assert torch.equal(batch.varlen(return_attn_probs=True)[1], lse)


@CALLS
def test_factors_beside_16_bits_mean_nothing(call, device):
    """vLLM gives them with every cache."""
    batch = Batch(device, torch.float16)
    factors = torch.full((1, 1), 7.0, device=device).expand(3, KEY_HEADS)
    batch.check(getattr(batch, call)(q_descale=factors, k_descale=factors, v_descale=factors))


@CALLS
def test_factors_of_8_bits(call, device):
    batch = Batch(device, torch.bfloat16)
    factors = [torch.rand(3, KEY_HEADS, device=device) + 0.5 for _ in range(2)]
    for pool, sequences, factor in zip(batch.pools, (batch.keys, batch.values), factors, strict=True):
        pool.copy_(pool.to(torch.float8_e4m3fn))
        for b in range(3):
            sequences[b] = sequences[b].to(torch.float8_e4m3fn).double() * factor[b, :, None]
    batch.pools = [pool.to(torch.float8_e4m3fn) for pool in batch.pools]
    batch.check(getattr(batch, call)(k_descale=factors[0], v_descale=factors[1]))
    # Queries of 8 bits, and out of bfloat16.
    q, factor = batch.q.to(torch.float8_e4m3fn), torch.rand(3, KEY_HEADS, device=device) + 0.5
    out = torch.empty_like(batch.q)
    sequence = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 2, 0, 0])
    batch.q = q.double() * factor.repeat_interleave(HEADS // KEY_HEADS, 1)[sequence][..., None]
    o = getattr(batch, call)(q=q, out=out, q_descale=factor, k_descale=factors[0], v_descale=factors[1])
    assert o is out
    expected = batch.expected()[0]
    plain.assert_close(o[: len(expected)], expected, torch.bfloat16)


@pytest.mark.parametrize("packed", [False, True])
def test_new_rows_of_8_bits_are_written_as_they_are(packed, device):
    """flash-attn 3 takes q, k and v of one type, and divides nothing by the factors."""
    pools = [torch.zeros(2, 12, KEY_HEADS, SIZE, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
    q, k, v = (torch.randn(2, 3, heads, SIZE, device=device).to(torch.float8_e4m3fn) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    factors = {f"{name}_descale": torch.rand(2, KEY_HEADS, device=device) + 0.5 for name in "qkv"}
    starts = ints([0, 3, 6], device)
    shaped = [x.flatten(0, 1) if packed else x for x in (q, k, v)]
    more = {"cu_seqlens_q": starts, "cu_seqlens_k_new": starts, "max_seqlen_q": 3} if packed else {}
    o = fa3.flash_attn_with_kvcache(
        shaped[0], *pools, *shaped[1:], cache_seqlens=ints([5, 0], device), causal=True, **factors, **more
    )
    assert o.dtype == torch.bfloat16
    for pool, new in zip(pools, (k, v), strict=True):
        for b, used in enumerate((5, 0)):
            assert torch.equal(pool[b, used : used + 3].view(torch.uint8), new[b].view(torch.uint8))
    again = fa3.flash_attn_with_kvcache(q, *pools, cache_seqlens=ints([8, 3], device), causal=True, **factors)
    assert torch.equal(o.reshape(again.shape), again)


def test_all_of_8_bits_without_a_cache(device):
    q, k, v = (torch.randn(2, 6, heads, SIZE, device=device).to(torch.float8_e4m3fn) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    factors = {f"{name}_descale": torch.rand(2, KEY_HEADS, device=device) + 0.5 for name in "qkv"}
    wide = [
        x.double() * factor.repeat_interleave(x.shape[2] // KEY_HEADS, 1)[:, None, :, None]
        for x, factor in zip((q, k, v), factors.values(), strict=True)
    ]
    o, lse = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **factors)
    expected, expected_lse = plain.attention(*wide, causal=True)
    assert o.dtype == torch.bfloat16
    plain.assert_close(o, expected, torch.bfloat16)
    plain.assert_close(lse, expected_lse)
    sixteen = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(fa3.flash_attn_func(*sixteen, **factors), fa3.flash_attn_func(*sixteen)), "ignored beside other types"


def test_a_step_of_decoding_as_transformers_calls_it(device):
    """(tokens, 1, heads, size) with new rows, a table with -1, and sinks by the name that transformers looks for."""
    batch = Batch(device)
    q, k, v = (torch.randn(3, 1, heads, SIZE, device=device) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    table, used, sinks = ints([[4, 1], [0, 5], [2, 3]], device), ints([12, 8, 4], device), torch.randn(HEADS, device=device)
    o = fa3.flash_attn_with_kvcache(
        q, *batch.pools, k, v, causal=True, softmax_scale=0.3, page_table=table, cache_seqlens=used, s_aux=sinks
    )
    for b, n in enumerate(used.tolist()):
        keys, values = (torch.cat([x[b][:n], new[b]])[None] for x, new in ((batch.keys, k), (batch.values, v)))
        plain.assert_close(o[b], plain.attention(q[b][None], keys, values, scale=0.3, sink=sinks)[0][0])
        for pool, new in zip(batch.pools, (k, v), strict=True):
            assert torch.equal(pool[int(table[b, n // PAGE]), n % PAGE], new[b, 0])


def test_tables_and_lengths_of_other_types(device):
    """What the compiled part does not take is converted, with the same result."""
    batch = Batch(device)
    expected = batch.kvcache()
    assert torch.equal(batch.kvcache(cache_seqlens=batch.used.long(), page_table=batch.table.long()), expected)
    wide = torch.zeros(3, 5, dtype=torch.int32, device=device)[:, ::2][:, :2].copy_(batch.table)
    assert torch.equal(batch.kvcache(page_table=wide), expected)
    q = torch.randn(3, 1, HEADS, SIZE, device=device)
    with_tensor = fa2.flash_attn_with_kvcache(q, *batch.pools, cache_seqlens=ints([4, 4, 4], device), block_table=batch.table)
    assert torch.equal(fa2.flash_attn_with_kvcache(q, *batch.pools, cache_seqlens=4, block_table=batch.table), with_tensor)


def test_queries_of_values_as_vllm_calls_them(device):
    """Its backend of latent attention: keys of 16 columns and values of 32, side by side in one cache, on one rank."""
    batch = Batch(device, torch.bfloat16)
    cache = torch.randn(7, PAGE, 48, device=device).bfloat16()
    k, v = cache[..., :16].unsqueeze(-2), cache[..., 16:].unsqueeze(-2)
    q_v = torch.randn(len(batch.q), HEADS, 32, device=device).bfloat16()
    given = {"k": k, "v": v, "out": None, "return_softmax_lse": True, "block_table": batch.table.clamp(min=0)}
    total = batch.used.clone()
    o, lse = batch.varlen(q_v=q_v, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=total, **given)
    assert all(torch.equal(a, b) for a, b in zip((o, lse), batch.varlen(qv=q_v, **given), strict=True))
    for b, (first, n) in enumerate(zip((0, 3, 4), QUERIES, strict=True)):
        lines = cache[given["block_table"][b].long()].flatten(0, 1)[: KEYS[b]]
        q = torch.cat((batch.q, q_v), -1)[None, first : first + n]
        wanted = plain.attention(q, lines[None, :, None], lines[None, :, None, 16:], scale=0.3, causal=True)
        plain.assert_close(o[first : first + n], wanted[0][0], torch.bfloat16)
        plain.assert_close(lse[:, first : first + n], wanted[1][0], torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_splits_of_keys_of_8_bits(num_splits, dtype, device):
    """The bits are those of fovea.attend with the same number. GPUs divide such keys as it pays, whatever is given."""
    q = torch.randn(2, 1, HEADS, 32, device=device).to(dtype)
    k, v = (torch.randn(2, 3000, KEY_HEADS, 32, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    used, cu = ints([3000, 2500], device), ints([0, 1, 2], device)
    splits = {"num_splits": 0 if device == "cuda" else num_splits}
    wanted = fovea.attend(q, k, v, seqused_k=used, **splits)
    expected = plain.attention(q, k, v, seqlens_k=[3000, 2500])[0]
    plain.assert_close(wanted, expected, wanted.dtype)
    assert torch.equal(fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, num_splits=num_splits), wanted)
    assert torch.equal(fa3.flash_attn_func(q, k, v, num_splits=num_splits), fovea.attend(q, k, v, **splits))
    packed = fovea.attend(q[:, 0], k, v, seqused_k=used, cu_seqlens_q=cu, max_seqlen_q=1, **splits)
    more = {"max_seqlen_q": 1, "max_seqlen_k": 3000, "seqused_k": used}
    assert torch.equal(fa3.flash_attn_varlen_func(q[:, 0], k, v, cu, num_splits=num_splits, **more), packed)
    if device == "cpu":
        plan = fovea.explain(q, k, v, num_splits=num_splits)
        assert ("keys split in 3" in plan) == (num_splits == 3), plan


def test_multiprocessors_left_to_others(device):
    """sm_margin reaches the plan, forward and backward, and changes no result but by rounding."""
    q, k, v = (torch.randn(2, 90, heads, 64, device=device).requires_grad_() for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    weight = torch.randn_like(q)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    cu = ints([0, 90, 180], device)
    expected = plain.attention(q, k, v, causal=True)[0]
    wanted = torch.autograd.grad(expected, (q, k, v), weight.double())
    calls = (
        lambda **more: fa3.flash_attn_func(q, k, v, causal=True, **more),
        lambda **more: fa3.flash_attn_varlen_func(*flat, cu, cu, 90, 90, causal=True, **more).view_as(q),
        lambda **more: fa3.flash_attn_with_kvcache(q.detach(), k.detach(), v.detach(), causal=True, **more),
    )
    for call in calls:
        o = call(sm_margin=8)
        plain.assert_close(o, expected)
        for a, b in zip(torch.autograd.grad(o, (q, k, v), weight) if o.requires_grad else (), wanted, strict=False):
            plain.assert_close(a, b)
        with pytest.raises(ValueError, match="sm_margin: got -1"):
            call(sm_margin=-1)
    qkv = torch.randn(1, 9, 3, 2, 16, device=device)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(qkv, sm_margin=8), fa3.flash_attn_qkvpacked_func(qkv))
    with pytest.raises(ValueError, match="sm_margin: got -1"):
        fa3.flash_attn_qkvpacked_func(qkv, sm_margin=-1)


@CALLS
def test_what_is_not_there(call, device):
    batch = Batch(device)
    run = getattr(batch, call)
    if call == "varlen":
        for ranks in ({"cp_world_size": 2}, {"cp_world_size": 2, "cp_rank": 1}, {"cp_rank": 1}):
            with pytest.raises(NotImplementedError, match=r"cp_world_size, cp_rank: got . and .; expected 1 and 0"):
                run(**ranks)
        with pytest.raises(ValueError, match="qv, q_v: got both"):
            run(qv=batch.q, q_v=batch.q)
        with pytest.raises(ValueError, match="seqused_k: got None beside a table of pages"):
            run(seqused_k=None)
    with pytest.raises(ValueError, match="sink: got"):
        run(sinks=torch.zeros(HEADS + 1, device=device))


def test_sinks_of_dense_and_packed_keys_have_gradients(device):
    """flash_attn_func and flash_attn_varlen_func, in training."""
    q, k, v = (torch.randn(2, 6, heads, SIZE, device=device) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    sinks = torch.randn(HEADS, device=device, requires_grad=True)
    starts = ints([0, 6, 12], device)
    weight = torch.randn_like(q)
    dense = fa3.flash_attn_func(q, k, v, causal=True, s_aux=sinks)
    plain.assert_close(dense, plain.attention(q, k, v, causal=True, sink=sinks)[0])
    packed = fa3.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), starts, starts, 6, 6, causal=True, s_aux=sinks)
    plain.assert_close(packed.view_as(dense), dense)
    first, second = (torch.autograd.grad(o, sinks, weight.view_as(o))[0] for o in (dense, packed))
    plain.assert_close(first, second)
    assert bool(first.abs().min() > 0)
