"""fovea.jax: jit, gradients, vmap and errors, against the formula in JAX."""

import math
import os

import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other programs test on the same GPU
jax = pytest.importorskip("jax")
import fovea  # noqa: E402
import fovea.jax as fj  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402


@pytest.fixture
def place(device):
    """The device of JAX on which arrays are made."""
    try:
        found = jax.devices("cpu" if device == "cpu" else "cuda")[0]
    except RuntimeError:
        pytest.skip("this JAX sees no GPU")
    with jax.default_device(found):
        yield found


@pytest.fixture
def on_cpu():
    """Where the numbers are those of numpy, and the host reads cu_seqlens."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def formula(q, k, v, bias=None, sink=None, causal=False):
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") / math.sqrt(q.shape[-1])
    if bias is not None:
        s = s + bias
    if causal:
        i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
        s = jnp.where(j <= i + k.shape[1] - q.shape[1], s, -jnp.inf)
    if sink is not None:
        s = jnp.concatenate([s, jnp.broadcast_to(sink[None, :, None, None], (*s.shape[:3], 1))], -1)
    lse = jax.nn.logsumexp(s, -1)
    p = jnp.exp(s - lse[..., None])[..., : k.shape[1]]
    return jnp.einsum("bhij,bjhd->bihd", p, v, precision="highest"), lse


def largest(a, b):
    return float(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max())


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 5e-6), (jnp.bfloat16, 3e-2), (jnp.float16, 4e-3)])
def test_forward_with_and_without_jit(dtype, tolerance, place):
    q, k, v = normal(0, 2, 9, 4, 16, dtype=dtype), normal(1, 2, 13, 2, 16, dtype=dtype), normal(2, 2, 13, 2, 24, dtype=dtype)
    expected, expected_lse = formula(*(x.astype(jnp.float32) for x in (q, k, v)), causal=True)
    call = lambda q, k, v: fj.attend(q, k, v, causal=True, return_lse=True)  # noqa: E731
    for run in (call, jax.jit(call)):
        o, lse = run(q, k, v)
        assert isinstance(o, jax.Array) and o.dtype == dtype and lse.dtype == jnp.float32
        assert o.devices() == {place}
        assert largest(o, expected) < tolerance and largest(lse, expected_lse) < tolerance
    assert largest(fovea.attend(q, k, v, causal=True), o) == 0


def test_8_bits(place):
    q, k, v = (normal(seed, 2, 9, heads, 16).astype(jnp.float8_e4m3fn) for seed, heads in ((0, 4), (1, 2), (2, 2)))
    factor = jnp.full((2, 1), 0.5)
    expected, _ = formula(0.5 * q.astype(jnp.float32), k.astype(jnp.float32), 0.5 * v.astype(jnp.float32))
    call = lambda q, k, v: fj.attend(q, k, v, q_descale=factor, v_descale=factor)  # noqa: E731
    for run in (call, jax.jit(call)):
        o = run(q, k, v)
        assert o.dtype == jnp.bfloat16 and largest(o, expected) < 3e-2


def test_gradients(place):
    q, k, v = normal(0, 2, 5, 4, 8), normal(1, 2, 7, 2, 8), normal(2, 2, 7, 2, 8)
    bias, sink = normal(3, 1, 4, 5, 7), normal(4, 4)
    weight, weight_lse = normal(5, 2, 5, 4, 8), normal(6, 2, 4, 5)

    def loss(attend):
        def value(q, k, v, bias, sink):
            o, lse = attend(q, k, v, bias=bias, sink=sink, causal=True)
            return (o * weight).sum() + (lse * weight_lse).sum()

        return value

    arguments = (q, k, v, bias, sink)
    theirs = jax.grad(loss(formula), range(5))(*arguments)
    ours = loss(lambda *a, **s: fj.attend(*a, **s, return_lse=True))
    for run in (jax.grad(ours, range(5)), jax.jit(jax.grad(ours, range(5)))):
        for a, b in zip(run(*arguments), theirs, strict=True):
            assert largest(a, b) < 2e-5
    (only_q,) = jax.grad(lambda q: fj.attend(q, k, v).sum(), (0,))(q)
    assert largest(only_q, jax.grad(lambda q: formula(q, k, v)[0].sum())(q)) < 2e-5


def test_masks_and_packed_sequences(place):
    q, k, v = (normal(i, 2, 6, 2, 8) for i in range(3))
    mask = jax.random.bernoulli(jax.random.key(9), 0.7, (2, 1, 6, 6)).at[..., 0].set(True)
    expected, _ = formula(q, k, v, bias=jnp.where(mask, 0.0, -jnp.inf))
    assert largest(fj.attend(q, k, v, mask=mask), expected) < 5e-6
    rows = [x.reshape(12, 2, 8) for x in (q, k, v)]
    starts = jnp.array([0, 6, 12], jnp.int32)
    packed = jax.jit(lambda *r: fj.attend(*r, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=6, max_seqlen_k=6))
    assert largest(packed(*rows).reshape(q.shape), formula(q, k, v)[0]) < 5e-6
    assert jax.grad(lambda r: packed(r, *rows[1:]).sum())(rows[0]).shape == (12, 2, 8)


def test_vmap(place):
    q, k, v = (normal(i, 3, 2, 5, 2, 8) for i in range(3))
    got = jax.vmap(lambda q, k: fj.attend(q, k, v[0]))(q, k)
    for i in range(3):
        assert largest(got[i], fj.attend(q[i], k[i], v[0])) < 1e-6


def test_dropout_is_that_of_numpy(on_cpu):
    q, k, v = (normal(i, 1, 30, 2, 8) for i in range(3))
    seed = 2**64 - 5
    ours = jax.jit(lambda *x: fj.attend(*x, dropout=0.5, seed=seed))(q, k, v)
    assert np.array_equal(np.asarray(ours), fovea.attend(*map(np.asarray, (q, k, v)), dropout=0.5, seed=seed))


def test_errors(on_cpu):
    q = normal(0, 1, 4, 2, 8)
    with pytest.raises(ValueError, match="k: "):
        jax.jit(fj.attend)(q, q[..., :4], q)
    with pytest.raises(TypeError, match="k: got list"):
        fj.attend(q, [1.0], q)
    with pytest.raises(TypeError, match="scale: got a traced value"):
        jax.jit(lambda q, s: fj.attend(q, q, q, scale=s))(q, 0.5)
    with pytest.raises(TypeError, match="jax.grad"):
        fovea.attend_backward(q, q, q, q, q, q)
    bad = jnp.array([0, 9], jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="cu_seqlens"):
        fj.attend(q[0], q[0], q[0], cu_seqlens_q=bad, cu_seqlens_k=bad, max_seqlen_q=4, max_seqlen_k=4).block_until_ready()
    with pytest.raises(jax.errors.JaxRuntimeError, match="backend"):
        fj.attend(q, q, q, backend="nothing").block_until_ready()
