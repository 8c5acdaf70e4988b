"""Cascades: keys in levels, against one call over all keys of each sequence."""

import numpy
import pytest
import torch

import fovea

HEADS, HEADS_KV, SIZE = 4, 2, 16


class Case:
    """Sequences whose keys lie in levels. groups: for each level how many sequences each group has."""

    def __init__(self, device, queries, groups, lengths, dtype=torch.float32):
        torch.manual_seed(7)
        self.device = device
        total = sum(queries)
        bounds = [0]
        for n in queries:
            bounds.append(bounds[-1] + n)
        self.bounds = bounds
        self.q = torch.randn(total, HEADS, SIZE, device=device, dtype=dtype)
        self.levels, self.keys = [], [[] for _ in queries]
        for counts, used in zip(groups, lengths, strict=True):
            longest = max(*used, 1) if len(used) > 1 else max(used[0], 1)
            k, v = (torch.randn(len(used), longest, HEADS_KV, SIZE, device=device, dtype=dtype) for _ in range(2))
            starts, sequence = [0], 0
            for group, count in enumerate(counts):
                for b in range(sequence, sequence + count):
                    self.keys[b].append((k[group, : used[group]], v[group, : used[group]]))
                sequence += count
                starts.append(bounds[sequence])
            cache = fovea.Cache(k, v, self.ints(used))
            self.levels.append(fovea.CascadeLevel(cache, self.ints(starts)))

    def ints(self, values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def expected(self, **options):
        found = []
        for b, keys in enumerate(self.keys):
            k, v = (torch.cat([pair[i] for pair in keys])[None].contiguous() for i in range(2))
            q = self.q[None, self.bounds[b] : self.bounds[b + 1]].contiguous()
            found.append(fovea.attend(q, k, v, return_lse=True, **options))
        return torch.cat([o[0] for o, _ in found]), torch.cat([lse[0] for _, lse in found], 1)


def two_levels(device, **options):
    return Case(device, [1, 1, 1, 1], [[4], [1, 1, 1, 1]], [[200], [3, 40, 1, 9]], **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_sink", [False, True])
def test_three_levels_and_several_groups(device, causal, with_sink):
    case = Case(device, [2, 1, 3, 1, 1], [[5], [2, 3], [1] * 5], [[200], [50, 33], [9, 20, 3, 1, 64]])
    sink = torch.randn(HEADS, device=device) if with_sink else None
    o, lse = fovea.cascade(case.q, case.levels, causal=causal, sink=sink, return_lse=True)
    expected, expected_lse = case.expected(causal=causal, sink=sink)
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-5)


def test_empty_prefixes_and_suffixes(device):
    case = Case(device, [1, 1, 1, 1], [[2, 2], [1, 1, 1, 1]], [[0, 100], [0, 5, 0, 30]])
    o, lse = fovea.cascade(case.q, case.levels, causal=True, return_lse=True)
    expected, expected_lse = case.expected()
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-5)
    assert torch.isneginf(lse[:, 0]).all() and (o[0] == 0).all()


def test_many_queries_over_pages(device):
    case = Case(device, [70, 3, 40], [[3], [1, 1, 1]], [[130], [80, 30, 40]])
    own = case.levels[-1]
    pages = torch.randperm(15).view(3, 5).int().to(device)
    pools = [torch.zeros(15, 16, HEADS_KV, SIZE, device=device) for _ in range(2)]
    for pool, rows in zip(pools, (own.cache.k, own.cache.v), strict=True):
        pool[pages.long()] = rows.unflatten(1, (5, 16))
    level = own._replace(cache=fovea.Cache(*pools, own.cache.seqused, pages), longest=70)
    o = fovea.cascade(case.q, [case.levels[0], level], causal=True)
    torch.testing.assert_close(o, case.expected(causal=True)[0], rtol=1e-4, atol=1e-5)


def test_results_of_16_bits_are_rounded_once(device):
    case = two_levels(device, dtype=torch.bfloat16)
    o = fovea.cascade(case.q, case.levels, scale=0.2, softcap=5.0)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o, case.expected(scale=0.2, softcap=5.0)[0], rtol=2e-2, atol=1e-2)


def test_arrays_of_numpy():
    case = two_levels("cpu")
    levels = [
        fovea.CascadeLevel(fovea.Cache(level.cache.k.numpy(), level.cache.v.numpy(), level.cache.seqused.numpy()), level.starts.numpy())
        for level in case.levels
    ]
    o = fovea.cascade(case.q.numpy(), levels)
    assert isinstance(o, numpy.ndarray)
    numpy.testing.assert_allclose(o, case.expected()[0].numpy(), rtol=1e-4, atol=1e-5)


def test_compiled_by_torch(device):
    case = two_levels(device)
    compiled = torch.compile(lambda q, levels: fovea.cascade(q, levels, causal=True), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(case.q, case.levels), case.expected(causal=True)[0], rtol=1e-4, atol=1e-5)


def test_what_is_refused():
    case = two_levels("cpu")
    with pytest.raises(ValueError, match="levels: got none"):
        fovea.cascade(case.q, [])
    with pytest.raises(TypeError, match=r"levels\[1\]: got tuple; expected fovea.CascadeLevel"):
        fovea.cascade(case.q, [case.levels[0], (case.levels[1].cache, case.levels[1].starts)])
    with pytest.raises(ValueError, match="q: got shape"):
        fovea.cascade(case.q[None], case.levels)
    with pytest.raises(ValueError, match="cu_seqlens_q: got last element 5, expected at most 4"):
        fovea.cascade(case.q, [case.levels[0]._replace(starts=torch.tensor([0, 5], dtype=torch.int32)), case.levels[1]])
    case.q.requires_grad_()
    with pytest.raises(ValueError, match="levels: got tensors that need gradients"):
        fovea.cascade(case.q, case.levels)
    with torch.no_grad():
        fovea.cascade(case.q, case.levels)
