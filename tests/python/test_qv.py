"""Queries that meet the values (qv): attention over rows [k | v], which need not lie in memory."""

import numpy
import pytest
import torch

import fovea
import fovea.flash_attn_interface as fa3
import fovea.torch


def tensors(device, *shapes, dtype=torch.float32):
    torch.manual_seed(4)
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


def latent(device, queries=3, keys=40, dtype=torch.float32):
    """q, qv, k, v: four query heads over one key head."""
    return tensors(device, (2, queries, 4, 16), (2, queries, 4, 32), (2, keys, 1, 16), (2, keys, 1, 32), dtype=dtype)


def joined(q, qv, k, v, **options):
    return fovea.attend(torch.cat([q, qv], -1), torch.cat([k, v], -1), v, **options)


@pytest.mark.parametrize("queries", [1, 3, 60])
def test_is_attention_over_joined_rows(device, queries):
    q, qv, k, v = latent(device, queries)
    got, lse = fovea.attend(q, k, v, qv=qv, causal=True, return_lse=True)
    expected, expected_lse = joined(q, qv, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-5)


def test_rows_that_are_not_contiguous(device):
    q, qv, k, v = latent(device)
    strided = torch.stack([qv, qv], -1)[..., 0]
    torch.testing.assert_close(fovea.attend(q, k, v, qv=strided), fovea.attend(q, k, v, qv=qv))


def test_arrays_of_numpy():
    q, qv, k, v = latent("cpu")
    got = fovea.attend(q.numpy(), k.numpy(), v.numpy(), qv=qv.numpy())
    numpy.testing.assert_allclose(got, joined(q, qv, k, v).numpy(), rtol=1e-4, atol=1e-5)


def test_under_torch_compile_and_vmap(device):
    q, qv, k, v = latent(device)
    expected = fovea.attend(q, k, v, qv=qv)
    compiled = torch.compile(lambda q, qv, k, v: fovea.attend(q, k, v, qv=qv), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, qv, k, v), expected)
    each = torch.vmap(lambda q, qv, k, v: fovea.attend(q[None], k[None], v[None], qv=qv[None])[0])
    torch.testing.assert_close(each(q, qv, k, v), expected)


def test_under_autocast(device):
    q, qv, k, v = latent(device)
    with torch.autocast(q.device.type, dtype=torch.bfloat16):
        got = fovea.attend(q, k, v, qv=qv)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), joined(q, qv, k, v), rtol=5e-2, atol=5e-2)


def test_has_no_gradients(device):
    q, qv, k, v = latent(device)
    for needs_gradients in (q, qv, k, v):
        needs_gradients.requires_grad_()
    with pytest.raises(ValueError, match="qv: got a tensor that needs gradients"):
        fovea.attend(q, k, v, qv=qv)
    o = fovea.attend(q, k, v, qv=qv.detach())
    with pytest.raises(ValueError, match="qv: got a tensor, expected none in a backward problem"):
        o.sum().backward()
    with torch.no_grad():
        fovea.attend(q, k, v, qv=qv)


@pytest.mark.parametrize("page", [1, 7, 64])
def test_over_pages_through_flash_attn_3(device, page):
    columns = -(-60 // page)
    q, qv, k, v = tensors(
        device, (2, 1, 16, 64), (2, 1, 16, 512), (2 * columns + 1, page, 1, 64), (2 * columns + 1, page, 1, 512),
        dtype=torch.bfloat16,
    )  # fmt: skip
    table = torch.randperm(2 * columns).view(2, columns).int().to(device)
    used = torch.tensor([50, 9], dtype=torch.int32, device=device)
    got, lse = fa3.flash_attn_with_kvcache(
        q, k, v, qv=qv, cache_seqlens=used, page_table=table, causal=True, return_softmax_lse=True
    )
    for b in range(2):
        rows = [pool[table[b].long()].flatten(0, 1)[None, : int(used[b])].float() for pool in (k, v)]
        expected, expected_lse = joined(q[b : b + 1].float(), qv[b : b + 1].float(), *rows, return_lse=True)
        torch.testing.assert_close(got[b : b + 1].float(), expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse[b : b + 1], expected_lse, rtol=1e-2, atol=1e-2)


def test_behind_new_rows_which_are_rotated(device):
    q, qv, k, v = latent(device, queries=2)
    new_k, new_v, cos, sin = tensors(device, (2, 2, 1, 16), (2, 2, 1, 32), (64, 8), (64, 8))
    used = torch.tensor([30, 5], dtype=torch.int32, device=device)
    cache = fovea.Cache(k, v, used)
    got = fovea.attend(q, new_k, new_v, cache=cache, rotary=fovea.Rotary(cos, sin), qv=qv, causal=True)
    turned = fovea.Cache(torch.zeros_like(k), torch.zeros_like(v), used)
    fovea.attend(q, new_k, new_v, cache=turned, rotary=fovea.Rotary(cos, sin))
    for b in range(2):
        at = slice(int(used[b]), int(used[b]) + 2)
        torch.testing.assert_close(k[b, at], turned.k[b, at])
        positions = torch.arange(int(used[b]), int(used[b]) + 2)
        x, y = q[b, ..., :8], q[b, ..., 8:]
        c, s = cos[positions][:, None], sin[positions][:, None]
        turned_q = torch.cat([x * c - y * s, x * s + y * c], -1)[None]
        rows = [pool[b : b + 1, : at.stop].contiguous() for pool in (k, v)]
        expected = joined(turned_q, qv[b : b + 1], *rows, causal=True)
        torch.testing.assert_close(got[b : b + 1], expected, rtol=1e-4, atol=1e-5)


def test_packed_through_flash_attn_3(device):
    q, qv, k, v = tensors(device, (11, 4, 16), (11, 4, 32), (20, 1, 16), (20, 1, 32), dtype=torch.bfloat16)
    starts_q = torch.tensor([0, 4, 11], dtype=torch.int32, device=device)
    starts_k = torch.tensor([0, 9, 20], dtype=torch.int32, device=device)
    got = fa3.flash_attn_varlen_func(q, k, v, starts_q, starts_k, 7, 11, causal=True, qv=qv)
    same = fovea.torch.attend(q, k, v, qv=qv, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, causal=True)
    torch.testing.assert_close(got, same)
    dense = fa3.flash_attn_func(q[None, :4], k[None, :9], v[None, :9], causal=True, qv=qv[None, :4])
    torch.testing.assert_close(got[:4], dense[0], rtol=2e-2, atol=2e-2)
