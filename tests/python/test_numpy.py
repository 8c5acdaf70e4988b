"""fovea.attend and its kin on arrays of numpy: nothing here needs PyTorch."""

import gc
import math
import subprocess
import sys
import threading
import time

import pytest

np = pytest.importorskip("numpy")

import fovea  # noqa: E402
from fovea import _core  # noqa: E402


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def formula(q, k, v, causal=False, bias=None, sink=None):
    """(o, lse) in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    s = np.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    if bias is not None:
        s = s + bias
    if causal:
        i, j = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])[None]
        s = np.where(j <= i + k.shape[1] - q.shape[1], s, -np.inf)
    total = np.exp(s).sum(-1)
    if sink is not None:
        total = total + np.exp(sink.astype(np.float64))[None, :, None]
    o = np.einsum("bhij,bjhd->bihd", np.exp(s) / np.maximum(total, 1e-300)[..., None], v)
    with np.errstate(divide="ignore"):
        return o, np.log(total)


def largest(x):
    return float(np.abs(np.asarray(x, np.float64)).max())


@pytest.mark.parametrize("dtype, tolerance", [(np.float64, 1e-12), (np.float32, 2e-6), (np.float16, 2e-3)])
def test_forward(dtype, tolerance):
    q, k, v = normal(0, 2, 9, 4, 16, dtype=dtype), normal(1, 2, 13, 2, 16, dtype=dtype), normal(2, 2, 13, 2, 24, dtype=dtype)
    o, lse = fovea.attend(q, k, v, causal=True, return_lse=True)
    expected, expected_lse = formula(q, k, v, causal=True)
    assert type(o) is np.ndarray and o.dtype == dtype and o.shape == (2, 9, 4, 24)
    assert lse.dtype == np.float32 and lse.shape == (2, 4, 9)
    assert largest(o - expected) < tolerance
    assert largest(lse - expected_lse) < max(tolerance, 1e-6)
    assert np.array_equal(fovea.attend(q, k, v, causal=True), o)


def test_8_bits_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v = (normal(i, 1, 8, 2, 16, dtype=ml_dtypes.float8_e4m3fn) for i in range(3))
    factor = np.full((1, 1), 0.5, np.float32)
    o = fovea.attend(q, k, v, q_descale=factor)
    assert o.dtype == ml_dtypes.bfloat16
    wide = [x.astype(np.float32) for x in (q, k, v)]
    expected = fovea.attend(0.5 * wide[0], *wide[1:])
    np.testing.assert_allclose(o.astype(np.float32), expected, rtol=2e-2, atol=2e-2)
    assert fovea.plan(q, k, v, q_descale=factor).backend


def test_bfloat16_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v = (normal(i, 1, 8, 2, 16, dtype=ml_dtypes.bfloat16) for i in range(3))
    o = fovea.attend(q, k, v)
    assert o.dtype == ml_dtypes.bfloat16
    assert largest(o.astype(np.float64) - formula(q, k, v)[0]) < 0.03


def test_strided_and_read_only_arrays_are_taken_as_they_are():
    packed = normal(3, 2, 7, 3, 4, 16)
    q, k, v = packed[:, :, 0], packed[:, :, 1], packed[:, :, 2]
    packed.flags.writeable = False
    assert largest(fovea.attend(q, k, v) - formula(q, k, v)[0]) < 2e-6
    turned = [np.swapaxes(normal(i, 2, 4, 7, 16), 1, 2) for i in range(3)]
    assert largest(fovea.attend(*turned) - formula(*turned)[0]) < 2e-6


def test_backward_against_differences():
    q, k, v = (normal(i, 1, 4, 2, 8, dtype=np.float64) for i in range(3))
    bias, sink = normal(3, 1, 2, 4, 4, dtype=np.float64), normal(4, 2)
    d_o = normal(5, 1, 4, 2, 8, dtype=np.float64)
    dlse = normal(6, 1, 2, 4)
    settings = {"bias": bias, "sink": sink, "causal": True}
    o, lse = fovea.attend(q, k, v, return_lse=True, **settings)
    gradients = fovea.attend_backward(d_o, q, k, v, o, lse, dlse=dlse, **settings)

    def value():
        # By the formula: lse of the library is float32, too coarse for differences.
        o, lse = formula(q, k, v, causal=True, bias=bias, sink=sink.astype(np.float64))
        return (o * d_o).sum() + (lse * dlse).sum()

    for x, gradient in zip((q, k, v, bias), gradients[:4], strict=True):
        assert gradient.shape == x.shape and gradient.dtype == x.dtype
        for at in np.ndindex(x.shape):
            kept = x[at]
            x[at] = kept + 1e-5
            above = value()
            x[at] = kept - 1e-5
            below = value()
            x[at] = kept
            assert abs((above - below) / 2e-5 - gradient[at]) < 2e-6
    assert gradients.dsink.shape == (2,) and gradients.dsink.dtype == np.float32


def test_packed_sequences():
    q, k, v = normal(0, 9, 2, 16), normal(1, 11, 2, 16), normal(2, 11, 2, 16)
    cu_q, cu_k = np.array([0, 4, 9], np.int32), np.array([0, 6, 11], np.int32)
    o, lse = fovea.attend(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True)
    assert lse.shape == (2, 9)
    for b in range(2):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        assert largest(o[rows] - formula(q[None, rows], k[None, keys], v[None, keys])[0][0]) < 2e-6
    # Other lengths of the same packed arrays must not run by the plan that is kept for the first.
    cu_q[1], cu_k[1] = 1, 11
    o = fovea.attend(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    assert largest(o[:1] - formula(q[None, :1], k[None], v[None])[0][0]) < 2e-6
    assert not o[1:].any()


def test_key_value_caches():
    pool_k, pool_v = normal(1, 7, 4, 2, 16), normal(2, 7, 4, 2, 16)  # seven pages of four rows
    table = np.array([[5, 0, 3], [3, 6, -1]], np.int32)
    used, pad = np.array([11, 7], np.int32), np.array([2, 0], np.int32)
    rows_k, rows_v = (np.stack([x[np.maximum(row, 0)].reshape(12, 2, 16) for row in table]) for x in (pool_k, pool_v))

    def expected(b, q):
        keys = slice(pad[b], used[b])
        return formula(q[None], rows_k[b : b + 1, keys], rows_v[b : b + 1, keys], causal=True)[0][0]

    q = normal(0, 2, 3, 4, 16)
    settings = {"seqused_k": used, "leftpad_k": pad, "causal": True}
    paged = fovea.attend(q, pool_k, pool_v, page_table=table, **settings)
    padded = fovea.attend(q, rows_k, rows_v, **settings)
    chosen = fovea.attend(q, rows_k[::-1].copy(), rows_v[::-1].copy(), cache_batch=np.array([1, 0], np.int32), **settings)
    packed, lse = fovea.attend(
        q.reshape(6, 4, 16),
        pool_k,
        pool_v,
        page_table=table,
        cu_seqlens_q=np.array([0, 2, 6], np.int32),
        return_lse=True,
        **settings,
    )
    assert lse.shape == (4, 6)
    for b in range(2):
        for o in (paged, padded, chosen):
            assert largest(o[b] - expected(b, q[b])) < 2e-6
        rows = slice(0, 2) if b == 0 else slice(2, 6)
        assert largest(packed[rows] - expected(b, q.reshape(6, 4, 16)[rows])) < 2e-6
    # The table may change behind a plan that is kept.
    table[0, 1] = 7
    with pytest.raises(ValueError, match="page_table: got 7 at entry 1 of sequence 0"):
        fovea.attend(q, pool_k, pool_v, page_table=table, **settings)


def test_lists_of_keys():
    q, k, v = normal(0, 2, 9, 4, 16), normal(1, 2, 30, 2, 16), normal(2, 2, 30, 2, 16)
    d_o = normal(3, 2, 9, 4, 16)
    order = np.argsort(normal(4, 2, 2, 9, 30), axis=-1).astype(np.int32)
    keys = np.where(np.arange(12) < 10, order[..., :12], -1).astype(np.int32)
    mask = np.zeros((2, 4, 9, 30), np.uint8)
    np.put_along_axis(mask, np.repeat(order[..., :10], 2, axis=1), 1, axis=-1)
    o, lse = fovea.attend(q, k, v, keys=keys, return_lse=True)
    expected = fovea.attend(q, k, v, mask=mask, return_lse=True)
    assert largest(o - expected[0]) < 2e-6 and largest(lse - expected[1]) < 2e-6
    gradients = fovea.attend_backward(d_o, q, k, v, o, lse, keys=keys)
    for got, wanted in zip(gradients[:3], fovea.attend_backward(d_o, q, k, v, *expected, mask=mask)[:3], strict=True):
        assert largest(got - wanted) < 1e-5
    keys[1, 0, 3, 2] = 30
    with pytest.raises(ValueError, match="keys: got 30 at entry 2 of query 3, key head 0 of sequence 1"):
        fovea.attend(q, k, v, keys=keys)
    with pytest.raises(ValueError, match="keys: got int64"):
        fovea.attend(q, k, v, keys=keys.astype(np.int64))


def test_dropout_repeats_with_its_seed():
    q, k, v = (normal(i, 1, 40, 2, 16) for i in range(3))
    first = fovea.attend(q, k, v, dropout=0.5, seed=7)
    assert np.array_equal(first, fovea.attend(q, k, v, dropout=0.5, seed=7))
    assert not np.array_equal(first, fovea.attend(q, k, v, dropout=0.5, seed=8))
    assert not np.array_equal(first, fovea.attend(q, k, v, dropout=0.5, seed=7, offset=1))


def test_merge_of_parts_is_the_whole():
    q, k, v = normal(0, 2, 5, 4, 16), normal(1, 2, 12, 2, 16), normal(2, 2, 12, 2, 16)
    whole, lse = fovea.attend(q, k, v, return_lse=True)
    parts = [fovea.attend(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 3), (3, 12))]
    o, merged = fovea.merge([p[0] for p in parts], [p[1] for p in parts])
    assert largest(o - whole) < 2e-6 and largest(merged - lse) < 2e-6


def test_plan_and_explain():
    q, k, v = (normal(i, 1, 64, 2, 32) for i in range(3))
    plan = fovea.plan(q, k, v, causal=True, backend="cpu_generic")
    assert plan.backend == "cpu_generic" and plan.flops > 0 and "cpu_generic: chosen" in plan.reason
    assert fovea.plan(q, k, v, backward=True).flops > fovea.plan(q, k, v).flops
    assert "reference: chosen" in fovea.explain(*(x.astype(np.float64) for x in (q, k, v)))


def test_info_and_command_line():
    info = fovea.info()
    assert info["version"] == fovea.__version__ and info["threads"] >= 1
    assert info["backends"]["reference"] == ""
    if not hasattr(_core, "main"):
        pytest.skip("built without the command line")
    run = subprocess.run([sys.executable, "-m", "fovea", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == f"fovea {fovea.__version__}"
    wrong = subprocess.run([sys.executable, "-m", "fovea", "explain", "--seqlen", "x"], capture_output=True, text=True)
    assert wrong.returncode != 0 and "seqlen" in wrong.stderr


def test_nothing_but_numpy_is_imported():
    code = "import sys, fovea, numpy as np; x = np.ones((1, 2, 1, 8), np.float32); fovea.attend(x, x, x); "
    code += "print([m for m in ('torch', 'jax', 'cupy', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


Q = normal(0, 1, 4, 2, 8)
ERRORS = [
    (ValueError, r"k: .*shape", {"k": normal(1, 1, 4, 2, 4)}),
    (ValueError, r"k: ", {"k": Q.astype(np.float16)}),
    (ValueError, r"q: got shape \(4, 2, 8\); expected \(batch, seqlen, heads, size\)", {"q": Q[0]}),
    (ValueError, r"heads", {"k": normal(1, 1, 4, 3, 8), "v": normal(1, 1, 4, 3, 8)}),
    (TypeError, r"q: got list", {"q": [[1.0]]}),
    (TypeError, r"k: got str", {"k": "keys"}),
    (ValueError, r"scale: got 0", {"scale": 0}),
    (ValueError, r"scale", {"scale": float("nan")}),
    (ValueError, r"window", {"window": (1,)}),
    (ValueError, r"window", {"window": (-5, 0)}),
    (TypeError, r"window: got \(1.5, 0\)", {"window": (1.5, 0)}),
    (ValueError, r"dropout", {"dropout": 1.5}),
    (TypeError, r"dropout: got 'a'", {"dropout": "a"}),
    (ValueError, r"backend: .*nothing.*cpu_generic", {"backend": "nothing"}),
    (ValueError, r"num_threads", {"num_threads": -1}),
    (ValueError, r"num_splits: got -1", {"num_splits": -1}),
    (TypeError, r"num_splits: got 1.5", {"num_splits": 1.5}),
    (ValueError, r"sm_margin: got -1; expected 0 to", {"sm_margin": -1}),
    (
        ValueError,
        r"max_seqlen_q: got 0.*batch_invariant",
        {"q": Q[0], "k": Q[0], "v": Q[0], "batch_invariant": True}
        | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), np.array([0, 4], np.int32)),
    ),
    (ValueError, r"mask", {"mask": np.ones((1, 1, 4, 4), np.float32)}),
    (ValueError, r"bias", {"bias": np.ones((3, 1, 4, 4), np.float32)}),
    (ValueError, r"cu_seqlens_k", {"q": Q[0], "k": Q[0], "v": Q[0], "cu_seqlens_q": np.array([0, 4], np.int32)}),
    (ValueError, r"q: .*contiguous", {"q": np.asarray(normal(1, 1, 4, 2, 16)[..., ::2])}),
    (ValueError, r"q: ", {"q": Q.astype(np.int32), "k": Q.astype(np.int32), "v": Q.astype(np.int32)}),
    (ValueError, r"q: ", {"q": Q.astype(np.complex64)}),
]


@pytest.mark.parametrize("error, message, change", ERRORS)
def test_errors(error, message, change):
    with pytest.raises(error, match=message):
        fovea.attend(**({"q": Q, "k": Q, "v": Q} | change))


def test_splits_change_the_last_bits_alone():
    q, k, v = normal(0, 1, 1, 2, 32), normal(1, 1, 5000, 2, 32), normal(2, 1, 5000, 2, 32)
    whole, parts = (fovea.attend(q, k, v, num_splits=n, return_lse=True) for n in (1, 3))
    for x, y in zip(whole, parts, strict=True):
        assert largest(x - y) < 1e-5
    assert not np.array_equal(whole[0], parts[0])
    assert "keys split in 3" in fovea.explain(q, k, v, num_splits=3, backend="cpu_generic")
    gradients = fovea.attend_backward(np.ones_like(q), q, k, v, *parts, num_splits=3, batch_invariant=True)
    assert gradients.dq.shape == q.shape


def test_the_same_bits_in_any_batch():
    q, k, v = normal(0, 40, 2, 4, 32), normal(1, 40, 3000, 2, 32), normal(2, 40, 3000, 2, 32)
    alone = fovea.attend(q[7:8], k[7:8], v[7:8], batch_invariant=True, return_lse=True)
    among = fovea.attend(q, k, v, batch_invariant=True, return_lse=True)
    for x, y in zip(alone, among, strict=True):
        assert np.array_equal(x[0], y[7])
    starts_q, starts_k = (np.array([0, n, 2 * n], np.int32) for n in (2, 3000))
    packed = fovea.attend(
        q[7:9].reshape(4, 4, 32),
        k[7:9].reshape(6000, 2, 32),
        v[7:9].reshape(6000, 2, 32),
        cu_seqlens_q=starts_q,
        cu_seqlens_k=starts_k,
        max_seqlen_q=2,
        max_seqlen_k=3000,
        batch_invariant=True,
    )
    assert np.array_equal(packed[:2], alone[0][0])


def test_lengths_outside_of_the_arrays_are_refused_by_each_run():
    rows = normal(0, 9, 1, 8)
    good, bad = np.array([0, 4, 9], np.int32), np.array([0, 4, 90], np.int32)
    fovea.attend(rows, rows, rows, cu_seqlens_q=good, cu_seqlens_k=good, max_seqlen_q=9, max_seqlen_k=9)
    with pytest.raises(ValueError, match="cu_seqlens"):
        fovea.attend(rows, rows, rows, cu_seqlens_q=bad, cu_seqlens_k=good, max_seqlen_q=9, max_seqlen_k=9)


def test_backward_does_not_write_into_read_only_memory():
    o, lse = fovea.attend(Q, Q, Q, return_lse=True)
    frozen = Q.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="dq: got a read-only array"):
        _core.backward(q=Q, k=Q, v=Q, o=o, lse=lse, d_o=o, dq=frozen, dk=Q.copy(), dv=Q.copy())


class Foreign:
    """An array of an unknown library that has DLPack."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, **options):
        if options:
            raise TypeError("an old library")
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return (1, 0)


def test_any_array_with_dlpack():
    q, k, v = (normal(i, 1, 5, 2, 8) for i in range(3))
    o = fovea.attend(Foreign(q), Foreign(k), Foreign(v))
    assert np.array_equal(o, fovea.attend(q, k, v))


def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_no_leak_over_many_calls():
    q, k, v = (normal(i, 1, 1, 1, 8) for i in range(3))
    counts = [sys.getrefcount(x) for x in (q, k, v)]

    def calls(n):
        for _ in range(n):
            fovea.attend(q, k, v)
        for _ in range(n // 100):
            with pytest.raises(ValueError):
                fovea.attend(q, k[..., :4], v)
        gc.collect()

    calls(5_000)
    before = resident()
    calls(100_000)
    assert resident() - before < 8 << 20  # 84 bytes a call
    assert [sys.getrefcount(x) for x in (q, k, v)] == counts


def test_plans_are_kept_and_limited():
    _core.clear_plans()
    fovea.attend(Q, Q, Q)
    fovea.attend(Q, Q, Q)
    assert _core.plan_count() == 1
    for n in range(1, 1500):
        x = np.ones((1, 1, 1, 1 + n % 500), np.float32)
        fovea.attend(x, x, x, window=(n, 0))
    assert _core.plan_count() <= 1024


def test_threads_run_while_a_call_computes():
    """Another thread goes on while the library works: the GIL is not held."""
    x = normal(0, 1, 3000, 8, 64)
    progress = []
    stop = threading.Event()

    def count():
        while not stop.is_set():
            progress.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        begin = time.perf_counter()
        fovea.attend(x, x, x, num_threads=1, backend="cpu_generic")
        end = time.perf_counter()
    finally:
        stop.set()
        thread.join()
    inside = [t for t in progress if begin < t < end]
    assert len(inside) >= 2, f"{len(inside)} steps in {end - begin:.3f} s"


def test_many_threads_share_plans():
    arrays = [(normal(i, 1, 33, 2, 16), normal(i + 1, 1, 40, 2, 16), normal(i + 2, 1, 40, 2, 16)) for i in range(4)]
    expected = [fovea.attend(*a, causal=True) for a in arrays]
    wrong = []

    def work(i):
        for n in range(200):
            at = (i + n) % 4
            if n % 50 == 0:
                _core.clear_plans()
            if not np.array_equal(fovea.attend(*arrays[at], causal=True, num_threads=1 + n % 2), expected[at]):
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
