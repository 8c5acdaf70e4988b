"""Expressions from Python: functions of symbols and texts against formulas in numpy, gradients, and what is refused."""

import math

import numpy as np
import pytest

import fovea
from fovea.expressions import clamp, exp, floor, log, maximum, minimum, sqrt, tanh, to_float, traced, where

BATCH, SEQLEN, HEADS, SIZE = 2, 9, 4, 8
AT = np.arange(SEQLEN)
Q_MINUS_K = AT[:, None] - AT[None, :]


@pytest.fixture
def qkv():
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((BATCH, SEQLEN, HEADS, SIZE), np.float32) for _ in range(3))


def plain(qkv, score=lambda s: s, sees=True):
    """softmax(score(q k^T / sqrt(size))) v in float64."""
    q, k, v = (x.astype(np.float64) for x in qkv)
    s = score(np.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(SIZE))
    s = np.where(sees, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v)


def text_of(function, use="score", **tensors):
    return traced({use: function, "tensors": tensors})[use]


SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
ALIBI = -SLOPES[:, None, None] * abs(Q_MINUS_K)


@pytest.mark.parametrize("how", ["captured", "by name", "text"])
def test_alibi(qkv, how):
    slope = fovea.named(SLOPES)
    options = {
        "captured": {"score": lambda s, h, q, k: s - slope[h] * abs(q - k)},
        "by name": {"score": lambda s, h, q, k, slope: s - slope[h] * abs(q - k), "tensors": {"slope": SLOPES}},
        "text": {"score": "s - slope[h] * abs(q - k)", "tensors": {"slope": SLOPES}},
    }[how]
    assert abs(fovea.attend(*qkv, **options) - plain(qkv, lambda s: s + ALIBI)).max() < 1e-6


def test_documents_with_causal_and_a_mask_of_bools(qkv):
    documents = np.array([[0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 2, 2, 2]], np.int32)
    keep = np.arange(SEQLEN) % 4 != 3
    mine = fovea.attend(
        *qkv,
        causal=True,
        sees=lambda b, q, k, doc, keep: (doc[b, q] == doc[b, k]) & ((keep[k] != 0) | (q == k)),
        tensors={"doc": documents, "keep": keep},
    )
    seen = (documents[:, None, :, None] == documents[:, None, None, :]) & (Q_MINUS_K >= 0) & (keep | (Q_MINUS_K == 0))
    assert abs(mine - plain(qkv, sees=seen)).max() < 1e-6


def test_grammar():
    assert text_of(lambda s, q, k: s - (q - (k - 1)) * 2) == "s - (q - (k - 1)) * 2"
    assert text_of(lambda q, k: ~((q < k) | (q == 3)) & (k != 1), "sees") == "!(q < k || q == 3) && k != 1"
    assert text_of(lambda s, q, k: where(q > k, minimum(s, 1), maximum(s, -1.5))) == "where(q > k, min(s, 1), max(s, -1.5))"
    assert text_of(lambda s: exp(log(tanh(sqrt(floor(s)))))) == "exp(log(tanh(sqrt(floor(s)))))"
    assert text_of(lambda s, b, hk, nq, nk: clamp(s, b, hk) + to_float(nq % nk)) == "clamp(s, b, hk) + float(nq % nk)"


def test_division_is_that_of_python():
    assert text_of(lambda s, q: s * (q // 16)) == "s * (q / 16)"
    assert text_of(lambda s, q: s * (q / 16)) == "s * (float(q) / 16)"
    assert text_of(lambda s: s // 2) == "floor(s / 2)"


@pytest.mark.parametrize("number", [0.1, 1e300, 5e-324, -2.5, 1.0, 1e16, np.float32(0.1), math.pi, -0.0])
def test_numbers_read_back_exactly(number):
    text = text_of(lambda s: s * number).removeprefix("s * ")
    assert float(text) == float(number) and any(c in text for c in ".e")


def test_numbers_of_other_kinds(qkv):
    assert text_of(lambda s, q: s + np.int64(3) * q + np.float32(0.5)) == "s + 3 * q + 0.5"
    assert text_of(lambda s, q: np.float64(2) * s) == "2.0 * s"
    mine = fovea.attend(*qkv, score=lambda s, q, k: where(k <= q, s, -math.inf))
    assert abs(mine - plain(qkv, sees=Q_MINUS_K >= 0)).max() < 1e-6


def test_functions_of_numpy_and_math():
    assert text_of(lambda s, q: np.where(q > 1, np.tanh(s), np.maximum(s, 0))) == "where(q > 1, tanh(s), max(s, 0))"
    assert text_of(lambda s: np.clip(s, -1, 1) + math.floor(s)) == "clamp(s, -1, 1) + floor(s)"


def test_names_of_tensors():
    table, other = np.zeros((HEADS, 3), np.float32), np.zeros(HEADS, np.float32)
    one, two = fovea.named(table), fovea.named(other, "slope")
    done = traced({"score": lambda s, h: s + one[h, 0] + two[h] + fovea.named(table)[h, 1], "tensors": {"t0": other}})
    assert done["score"] == "s + t1[h, 0] + slope[h] + t1[h, 1]"
    assert list(done["tensors"]) == ["t0", "t1", "slope"] and done["tensors"]["t1"] is table
    both = traced({"score": lambda s, h: s * two[h], "sees": lambda h: two[h] > 0})
    assert both["sees"] == "slope[h] > 0" and list(both["tensors"]) == ["slope"]


def test_scalars_and_default_arguments(qkv):
    temperature, width = np.array(2.0, np.float32), 3
    mine = fovea.attend(*qkv, score=lambda s, t: s / t, tensors={"t": temperature}, sees=lambda q, k, width=width: abs(q - k) < width)
    assert abs(mine - plain(qkv, lambda s: s / 2, abs(Q_MINUS_K) < 3)).max() < 1e-6


REFUSED = [
    (lambda s, q, k: s if q < k else 0, "write & | ~"),
    (lambda s, q, k: s * (q < k and k < 3), "fovea.where"),
    (lambda s, q, k: min(q, k), "minimum"),
    (lambda s, q, k: where(q <= k & k, s, 0), "parentheses"),
    (lambda s, h: s - SLOPES[h], "fovea.named"),
    (lambda s, h: s - fovea.named(SLOPES), "without an index"),
    (lambda s, h: s - fovea.named(SLOPES)[h, h], "2 indices"),
    (lambda s, h: s - fovea.named(SLOPES)[s], "expected ints"),
    (lambda s: np.sin(s), "sin of an expression"),
    (lambda s: math.exp(s), "functions of fovea.expressions"),
    (lambda s: s**2, "no power"),
    (lambda s: s % 2, "expected ints"),
    (lambda s, z: s, "parameter 'z'"),
    (lambda s: "s", "got str in an expression"),
    (7, "expected text, or a function"),
]


@pytest.mark.parametrize(("score", "says"), REFUSED)
def test_refused(qkv, score, says):
    with pytest.raises(TypeError, match="score: ") as error:
        fovea.attend(*qkv, score=score)
    assert says in str(error.value)


def test_messages_of_the_library(qkv):
    with pytest.raises(ValueError, match="score, character 5: got 'foo'") as error:
        fovea.attend(*qkv, score="s + foo")
    assert str(error.value).endswith("  s + foo\n      ^")
    with pytest.raises(ValueError, match=r"named.slope: got shape \(3\), expected at least 4"):
        fovea.attend(*qkv, score="s * slope[h]", tensors={"slope": SLOPES[:3].copy()})
    with pytest.raises(TypeError, match="parameter 's'"):
        fovea.attend(*qkv, sees=lambda s: s > 0)
    with pytest.raises(TypeError, match="tensors: got .* expected a dict"):
        fovea.attend(*qkv, score=lambda s: s, tensors=[SLOPES])
    with pytest.raises(ValueError, match="tensors: got more than 8"):
        fovea.attend(*qkv, score="s", tensors={f"x{i}": SLOPES for i in range(9)})
    with pytest.raises(TypeError, match="outside of a score"):
        fovea.named(SLOPES)[0]


def test_explain_and_plan(qkv):
    slope = fovea.named(SLOPES, "slope")
    plan = fovea.plan(*qkv, score=lambda s, h, q, k: s - slope[h] * abs(q - k), sees="k <= q")
    lines = dict(line.split("\t") for line in plan.expressions.splitlines())
    assert lines == {
        "score": "s - slope[h] * abs(q - k)",
        "d score / d s": "1.0",
        "d score / d slope[h]": "-float(abs(q - k))",
        "sees": "k <= q",
    }
    assert fovea.plan(*qkv).expressions == ""


def test_plans_are_kept_by_text_and_tensors(qkv):
    fovea._core.clear_plans()
    for width in (3, 3, 4):
        fovea.attend(*qkv, sees=lambda q, k, w=width: abs(q - k) < w)
    for slopes in (SLOPES, 2 * SLOPES, SLOPES[:1].copy()):
        fovea.attend(*qkv, score=lambda s, h, x: s * x[h], tensors={"x": slopes})
    assert fovea._core.plan_count() == 4


def test_seen_blocks(qkv):
    def found(**options):
        return np.asarray(fovea.seen_blocks(*qkv, size=(3, 3), **options)).tolist()

    assert found(causal=True) == [[2, 0, 0], [1, 2, 0], [1, 1, 2]]
    assert found(causal=True, sees=lambda q, k: q - k < 5) == [[2, 0, 0], [2, 2, 0], [2, 2, 2]]
    documents = np.array([[0] * 9, [0, 0, 0, 1, 1, 1, 1, 1, 2]], np.int32)
    doc = fovea.named(documents)
    options = {"sees": lambda b, q, k: doc[b, q] == doc[b, k], "head": 3}
    assert found(**options) == [[1] * 3] * 3
    assert found(**options, batch_index=1) == [[1, 0, 0], [0, 1, 2], [0, 2, 2]]
    rows = [x.reshape(-1, HEADS, SIZE) for x in qkv]
    starts = np.array([0, 6, 18], np.int32)
    packed = fovea.seen_blocks(*rows, size=(6, 6), cu_seqlens_q=starts, cu_seqlens_k=starts)
    assert np.asarray(packed).tolist() == [[1, 0], [0, 0]]
    with pytest.raises(ValueError, match="head: got 4, expected 0 to 3"):
        found(head=4)


def difference_of(loss, x, step=1e-2):
    """The gradient of loss() by the elements of x, by central differences."""
    found = np.zeros(x.shape)
    for at in np.ndindex(x.shape):
        value = x[at]
        x[at] = value + step
        above = loss()
        x[at] = value - step
        found[at] = (above - loss()) / (2 * step)
        x[at] = value
    return found


def test_gradients_of_numpy(qkv):
    rng = np.random.default_rng(1)
    table, weight = rng.standard_normal((HEADS, 5)).astype(np.float32), rng.standard_normal(qkv[0].shape)
    options = {"score": lambda s, h, q, k, table: s + table[h, clamp(k - q, -2, 2) + 2], "tensors": {"table": table}}
    o, lse = fovea.attend(*qkv, return_lse=True, **options)
    found = fovea.attend_backward(weight.astype(np.float32), *qkv, o, lse, **options)
    expected = difference_of(lambda: (fovea.attend(*qkv, **options) * weight).sum(), table)
    assert list(found.dtensors) == ["table"] and found.dtensors["table"].dtype == np.float32
    assert abs(found.dtensors["table"] - expected).max() < 2e-3
    assert fovea.attend_backward(weight.astype(np.float32), *qkv, o, lse).dtensors is None
    half = {"score": "s * t", "tensors": {"t": np.array(1, np.float16), "unread": np.zeros(3, np.int32)}}
    assert fovea.attend_backward(weight.astype(np.float32), *qkv, o, lse, **half).dtensors["t"].dtype == np.float16


# ---- PyTorch and JAX


def test_autograd(qkv):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.tensor(x, requires_grad=True) for x in qkv)
    table = torch.randn(HEADS, 5, requires_grad=True)
    temperature = torch.nn.Parameter(torch.tensor([1.5, 0.5, 1.0, 2.0], dtype=torch.bfloat16))
    known, weight = torch.randn(HEADS), torch.randn(q.shape)
    t, by = fovea.named(table), fovea.named(temperature)

    def score(s, h, q, k, known):
        return s * by[h] + t[h, torch.clamp(k - q, -2, 2) + 2] + known[h]

    def gradients(o):
        for x in (q, k, v, table, temperature):
            x.grad = None
        (o * weight).sum().backward()
        return [x.grad.clone() for x in (q, k, v, table, temperature)]

    o, lse = fovea.attend(q, k, v, score=score, tensors={"known": known}, return_lse=True)
    mine = gradients(o)
    index = torch.clamp(torch.tensor(-Q_MINUS_K), -2, 2) + 2
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(SIZE) * temperature.float()[:, None, None] + table[:, index]
    o2 = torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)
    assert (o - o2).abs().max() < 1e-5
    for a, b in zip(mine, gradients(o2), strict=True):
        assert a.dtype == b.dtype and (a - b).abs().max() < (2e-2 if a.dtype == torch.bfloat16 else 1e-5) * (1 + b.abs().max())
    assert known.grad is None and lse.requires_grad


def test_only_a_tensor_needs_a_gradient(qkv):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.tensor(x) for x in qkv)
    bias = torch.zeros(SEQLEN, SEQLEN, requires_grad=True)
    o = fovea.torch.attend(q, k, v, score="s + bias[q, k]", tensors={"bias": bias})
    o.square().sum().backward()
    assert bias.grad.shape == bias.shape and bias.grad.abs().max() > 0
    with torch.no_grad():
        assert not fovea.torch.attend(q, k, v, score="s + bias[q, k]", tensors={"bias": bias}).requires_grad


def test_compile_leaves_the_graph_and_transforms_are_refused(qkv):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.tensor(x) for x in qkv)

    def call(q):
        return fovea.attend(q, k, v, score=lambda s: s * 2.0)

    assert (torch.compile(call, backend="eager")(q) - call(q)).abs().max() < 1e-6
    with pytest.raises(NotImplementedError, match="score: got an expression"):
        torch.func.vmap(call)(q[None])


def test_arrays_of_another_library_beside_tensors(qkv):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.tensor(x) for x in qkv)
    with pytest.raises(TypeError, match=r"tensors\['x'\]: got ndarray"):
        fovea.attend(q, k, v, score=lambda s, h, x: s * x[h], tensors={"x": SLOPES})


def test_jax_refuses(qkv):
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(NotImplementedError, match="score: got an expression"):
        fovea.attend(*(jnp.asarray(x) for x in qkv), score="s")
