"""fovea.torch: gradients, torch.compile, transforms, AMP, PyTorch's own signature, and routing of its calls."""

import _thread
import random
import sys
import threading

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

import fovea  # noqa: E402
import fovea.flash_attn  # noqa: E402
import fovea.torch as ft  # noqa: E402
import plain  # noqa: E402
from fovea import _arguments, _core  # noqa: E402


def normal(*shape, device="cpu", dtype=torch.float32, grad=False):
    return torch.randn(shape, device=device).to(dtype).requires_grad_(grad)


@pytest.mark.parametrize("seed", range(16))
def test_random_problems(seed, device):
    r = random.Random(seed)
    dtype = r.choice([torch.float32, torch.bfloat16, torch.float16])
    b, hk, group, d = r.randint(1, 3), r.randint(1, 3), r.choice([1, 2]), r.choice([8, 40, 64])
    n, m = r.randint(1, 60), r.randint(1, 60)
    q = normal(b, n, hk * group, d, device=device, dtype=dtype, grad=True)
    k, v = (normal(b, m, hk, d, device=device, dtype=dtype, grad=True) for _ in range(2))
    terms = {"causal": r.random() < 0.5, "window": r.choice([(-1, -1), (5, 5)]), "softcap": r.choice([0.0, 3.0])}
    inputs = [q, k, v]
    if r.random() < 0.5:
        shape = [r.choice([1, x]) for x in (b, hk * group, n, m)]
        terms["bias"] = normal(*shape, device=device, grad=True)
        inputs.append(terms["bias"])
    if r.random() < 0.5:
        terms["sink"] = normal(hk * group, device=device, grad=True)
        inputs.append(terms["sink"])
    if r.random() < 0.4:
        terms["mask"] = torch.rand(1, 1, n, m, device=device) < 0.8
    o, lse = ft.attend(q, k, v, **terms, return_lse=True)
    expected, expected_lse = plain.attention(q, k, v, **terms)
    plain.assert_close(o, expected, dtype)
    plain.assert_close(lse, expected_lse, dtype)
    d_o, d_lse = torch.randn_like(o), torch.randn_like(lse)
    ours = torch.autograd.grad((o, lse), inputs, (d_o, d_lse))
    finite = torch.where(torch.isfinite(expected_lse), expected_lse, 0.0)
    theirs = torch.autograd.grad((expected, finite), inputs, (d_o.double(), d_lse.double()))
    for a, b in zip(ours, theirs, strict=True):
        plain.assert_close(a, b, dtype, factor=4)


def test_gradcheck(device):
    if device == "cuda":
        pytest.skip("float64 is computed by the reference, on the CPU only")
    q, k, v = (normal(2, n, h, 4, dtype=torch.float64, grad=True) for n, h in ((3, 4), (5, 2), (5, 2)))
    bias = normal(2, 1, 3, 5, dtype=torch.float64, grad=True)

    def call(q, k, v, bias):
        return ft.attend(q, k, v, causal=True, softcap=2.0, bias=bias)

    assert torch.autograd.gradcheck(call, (q, k, v, bias))
    # The operator that torch.compile sees has a formula of its own.
    assert torch.autograd.gradcheck(lambda *x: _through_operator(*x), (q, k, v))


def _through_operator(q, k, v):
    from fovea.torch import _attend

    return _attend.through_operator(q, k, v, False, {"causal": True})[0]


def test_lists_of_keys(device):
    q = normal(2, 7, 4, 16, device=device, grad=True)
    k, v = (normal(2, 40, 2, 16, device=device, grad=True) for _ in range(2))
    keys = torch.rand(2, 2, 7, 40, device=device).topk(9).indices.int()
    mask = torch.zeros(2, 2, 7, 40, dtype=torch.bool, device=device).scatter(3, keys.long(), True).repeat_interleave(2, 1)
    o, lse = ft.attend(q, k, v, keys=keys, causal=True, return_lse=True)
    expected, expected_lse = plain.attention(q, k, v, mask=mask, causal=True)
    plain.assert_close(o, expected)
    plain.assert_close(lse, expected_lse)
    d_o = torch.randn_like(o)
    ours = torch.autograd.grad(o, (q, k, v), d_o)
    for a, b in zip(ours, torch.autograd.grad(expected, (q, k, v), d_o.double()), strict=True):
        plain.assert_close(a, b, factor=4)
    compiled = torch.compile(lambda q, k, v: ft.attend(q, k, v, keys=keys, causal=True), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), o)
    mapped = torch.vmap(lambda q, k, v, keys: ft.attend(q[None], k[None], v[None], keys=keys[None], causal=True)[0])
    plain.assert_close(mapped(q, k, v, keys), o)


def test_operator_is_sound(device):
    q, k, v = (normal(2, n, 2, 8, device=device, grad=True) for n in (3, 5, 5))
    common = _arguments.complete({"causal": True}).values()
    torch.library.opcheck(torch.ops.fovea.forward.default, (q, k, v, False, *common))


def test_second_derivatives_are_refused():
    q = normal(1, 3, 1, 4, grad=True)
    (gradient,) = torch.autograd.grad(ft.attend(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives"):
        gradient.sum().backward()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(device, dynamic):
    torch._dynamo.reset()

    def model(q, k, v, bias):
        o, lse = ft.attend(q * 2, k, v, causal=True, bias=bias, return_lse=True)
        return o.sin(), lse

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (17, 23):
        inputs = [normal(2, n, 2, 16, device=device, grad=True) for _ in range(3)]
        inputs.append(normal(1, 2, n, n, device=device, grad=True))
        got, expected = compiled(*inputs), model(*inputs)
        for a, b in zip(got, expected, strict=True):
            plain.assert_close(a, b)
        weights = [torch.randn_like(x) for x in got]
        ours = torch.autograd.grad(got, inputs, weights)
        theirs = torch.autograd.grad(expected, inputs, weights)
        for a, b in zip(ours, theirs, strict=True):
            plain.assert_close(a, b)


@pytest.mark.parametrize("compiled", [False, True])
def test_backward_drops_what_the_forward_dropped(device, compiled):
    torch._dynamo.reset()
    import fovea.flash_attn as fa

    def call(q, k, v):
        return fa.flash_attn_func(q, k, v, dropout_p=0.5)

    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    q, k, v = (normal(1, 50, 2, 16, device=device, grad=True) for _ in range(3))
    o = run(q, k, v)
    d_o = torch.randn_like(o)
    (dv,) = torch.autograd.grad(o, v, d_o)
    # With the mask fixed, o is linear in v, so both numbers agree when the backward has the same mask.
    with torch.no_grad():
        forward, backward = (o * d_o).sum(), (dv * v).sum()
        assert abs(float(forward - backward)) < 1e-3 * float((o * d_o).abs().sum())
    assert not torch.equal(o, run(q, k, v))


def test_compile_of_the_drop_in(device):
    import fovea.flash_attn as fa

    torch._dynamo.reset()
    q, k, v = (normal(2, 12, 2, 16, device=device) for _ in range(3))
    compiled = torch.compile(lambda *x: fa.flash_attn_func(*x, causal=True) + 1, fullgraph=True, backend="aot_eager")
    plain.assert_close(compiled(q, k, v), fa.flash_attn_func(q, k, v, causal=True) + 1)


def test_compile_of_the_front_end(device):
    torch._dynamo.reset()
    q, k, v = (normal(2, 12, 2, 16, device=device) for _ in range(3))
    call = lambda *x: fovea.attend(*x, causal=True, window=[4, 0]) + 1  # noqa: E731
    plain.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), call(q, k, v))


def test_options_that_need_gradients_are_not_computed_without(device):
    q, k, v = (normal(1, 6, 2, 8, device=device) for _ in range(3))
    bias, sink = normal(1, 2, 6, 6, device=device, grad=True), normal(2, device=device, grad=True)
    for call in (ft.attend, fovea.attend):
        assert call(q, k, v, bias=bias).requires_grad and call(q, k, v, sink=sink).requires_grad
        assert not call(q, k, v, bias=bias.detach(), sink=sink.detach()).requires_grad
        with torch.no_grad():
            assert not call(q, k, v, bias=bias, sink=sink).requires_grad
        with pytest.raises(TypeError, match="bias: got ndarray"):
            call(q, k, v, bias=bias.detach().cpu().numpy())


def test_vmap(device):
    q, k, v = normal(3, 2, 5, 4, 8, device=device), normal(3, 2, 6, 2, 8, device=device), normal(2, 6, 2, 8, device=device)
    bias = normal(3, 2, 4, 5, 6, device=device)
    got = torch.func.vmap(lambda q, k, b: ft.attend(q, k, v, bias=b))(q, k, bias)
    for i in range(3):
        plain.assert_close(got[i], ft.attend(q[i], k[i], v, bias=bias[i]))
    loss = lambda q, k: ft.attend(q, k, v, causal=True).square().sum()  # noqa: E731
    ours = torch.func.vmap(torch.func.grad(loss))(q, k)
    for i in range(3):
        plain.assert_close(ours[i], torch.func.grad(loss)(q[i], k[i]), factor=4)
    with pytest.raises(NotImplementedError, match="packed"):
        cu = torch.tensor([0, 5], dtype=torch.int32, device=device)
        rows = normal(3, 5, 2, 8, device=device)
        torch.func.vmap(lambda x: ft.attend(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu))(rows)


def test_autocast(device):
    q, k, v = (normal(2, 9, 2, 16, device=device, grad=True) for _ in range(3))
    with torch.autocast(device, dtype=torch.bfloat16):
        o = ft.attend(q, k, v)
    assert o.dtype == torch.bfloat16
    o.float().sum().backward()
    assert q.grad.dtype == torch.float32
    plain.assert_close(o, plain.attention(q, k, v)[0], torch.bfloat16)


def test_dropout_follows_the_generator(device):
    q, k, v = (normal(1, 40, 2, 16, device=device, grad=True) for _ in range(3))
    torch.manual_seed(3)
    first = ft.attend(q, k, v, dropout=0.5)
    torch.manual_seed(3)
    assert torch.equal(first, ft.attend(q, k, v, dropout=0.5))
    assert not torch.equal(first, ft.attend(q, k, v, dropout=0.5))
    assert torch.equal(ft.attend(q, k, v, dropout=0.5, seed=5), fovea.attend(q, k, v, dropout=0.5, seed=5))


def test_deterministic_backward(device):
    q, k, v = (normal(2, 200, 4, 64, device=device, dtype=torch.bfloat16, grad=True) for _ in range(3))
    torch.use_deterministic_algorithms(True)
    try:
        o = ft.attend(q, k, v, causal=True)
        d_o = torch.randn_like(o)
        first = torch.autograd.grad(o, (q, k, v), d_o, retain_graph=True)
        for _ in range(3):
            again = torch.autograd.grad(o, (q, k, v), d_o, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


SDPA_CASES = [
    {},
    {"is_causal": True},
    {"is_causal": True, "lengths": (9, 14)},
    {"is_causal": True, "lengths": (14, 9)},
    {"scale": 0.2, "lengths": (9, 14)},
    {"mask": "bool"},
    {"mask": "float", "lengths": (9, 14)},
    {"mask": "2d"},
    {"mask": "row"},
    {"batch": ()},
    {"batch": (2, 3), "mask": "bool"},
    {"batch": (2, 3), "is_causal": True},
    {"batch": None},
    {"enable_gqa": True, "is_causal": True},
]


@pytest.mark.parametrize("case", SDPA_CASES, ids=str)
def test_sdpa_means_what_pytorch_means(case, device):
    case = dict(case)
    n, m = case.pop("lengths", (11, 11))
    batch = case.pop("batch", (2,))
    kind = case.pop("mask", None)
    heads = (4, 2 if case.get("enable_gqa") else 4)
    leading = [() if batch is None else (*batch, h) for h in heads]
    q = normal(*leading[0], n, 16, device=device, grad=True)
    k, v = (normal(*leading[1], m, 16, device=device, grad=True) for _ in range(2))
    inputs = [q, k, v]
    if kind == "bool":
        case["attn_mask"] = torch.rand(*leading[0], n, m, device=device) < 0.8
    elif kind == "2d":
        case["attn_mask"] = torch.rand(n, m, device=device) < 0.8
    elif kind == "row":
        case["attn_mask"] = torch.rand(leading[0][0], 1, 1, m, device=device) < 0.8
    elif kind == "float":
        case["attn_mask"] = normal(*leading[0], n, m, device=device, grad=True)
        inputs.append(case["attn_mask"])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        theirs = dict(case)
        repeats = 2 if theirs.pop("enable_gqa", False) else 1  # PyTorch 2.4 has no enable_gqa
        wide = [x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (k, v)]
        expected = F.scaled_dot_product_attention(q, *wide, **theirs)
    got = ft.scaled_dot_product_attention(q, k, v, **case)
    plain.assert_close(got, expected)
    d_o = torch.randn_like(got)
    for a, b in zip(torch.autograd.grad(got, inputs, d_o), torch.autograd.grad(expected, inputs, d_o), strict=True):
        plain.assert_close(a, b, factor=4)


def test_replace_sdpa_takes_calls_of_modules(device):
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, device=device)  # in training, the general way
    layer.self_attn.dropout = layer.dropout.p = layer.dropout1.p = layer.dropout2.p = 0.0
    x = normal(2, 9, 32, device=device)
    expected = layer(x)
    _core.clear_plans()
    with ft.replace_sdpa():
        got = layer(x)
    assert _core.plan_count() == 1
    plain.assert_close(got, expected)


def in_a_thread_of_autograd(function):
    """The result, or error, of a call in a thread that Python has not started through threading."""
    ended, found = threading.Event(), []

    def run():
        try:
            found.append(function())
        except RuntimeError as error:
            found.append(error)
        ended.set()

    _thread.start_new_thread(run, ())
    assert ended.wait(60)
    return found[0]


def test_replace_sdpa_reaches_what_autograd_recomputes():
    q = normal(1, 2, 5, 8)
    call = lambda: F.scaled_dot_product_attention(q, q, q)  # noqa: E731
    _core.clear_plans()
    with ft.replace_sdpa():
        plain.assert_close(in_a_thread_of_autograd(call), call())
        assert _core.plan_count() == 1
        other = threading.Thread(target=lambda: second.append(with_another_block()))
        second = []

        def with_another_block():
            with ft.replace_sdpa():
                return in_a_thread_of_autograd(call)

        other.start()
        other.join()
        assert "2 threads are in blocks" in str(second[0])
    _core.clear_plans()
    in_a_thread_of_autograd(call)
    assert _core.plan_count() == 0


def test_replace_sdpa_under_checkpoints(device):
    from torch.utils.checkpoint import checkpoint

    q, k, v = (normal(1, 2, 7, 8, device=device, grad=True) for _ in range(3))
    attend = lambda *x: F.scaled_dot_product_attention(*x, is_causal=True)  # noqa: E731
    expected = torch.autograd.grad(attend(q, k, v).sum(), (q, k, v))
    with ft.replace_sdpa():
        checkpoint(attend, q, k, v, use_reentrant=False).sum().backward()
    for x, wanted in zip((q, k, v), expected, strict=True):
        plain.assert_close(x.grad, wanted, factor=4)


def test_flash_attention_registry(device):
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        with pytest.raises(RuntimeError, match="registry"):
            ft.register_flash_attention_impl()
        return
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (normal(2, 4, 11, 16, device=device, dtype=dtype, grad=True) for _ in range(3))
    cases = [{}, {"is_causal": True}]
    if device == "cpu":
        cases += [{"attn_mask": torch.rand(2, 1, 11, 11) < 0.8}, {"attn_mask": torch.randn(11, 11)}]

    def run(case):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            o = F.scaled_dot_product_attention(q, k, v, **case)
        return (o, *torch.autograd.grad(o, (q, k, v), torch.ones_like(o)))

    expected = [run(case) for case in cases]
    ft.register_flash_attention_impl()
    torch.nn.attention.activate_flash_attention_impl("fovea")
    try:
        _core.clear_plans()
        for case, wanted in zip(cases, expected, strict=True):
            for a, b in zip(run(case), wanted, strict=True):
                plain.assert_close(a, b, dtype, factor=4)
        assert _core.plan_count() == 2 * len(cases)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    _core.clear_plans()
    run({})
    assert _core.plan_count() == 0


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 4)])
def test_varlen_attn_through_the_registry(window, device):
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        pytest.skip(f"PyTorch {torch.__version__} has no registry")
    from torch.nn.attention import varlen

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (normal(n, 4, 16, device=device, dtype=dtype, grad=True) for n in (9, 12, 12))
    starts_q, starts_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 2, 9], [0, 5, 12]))
    ft.register_flash_attention_impl()
    torch.nn.attention.activate_flash_attention_impl("fovea")
    try:
        _core.clear_plans()
        aux = varlen.AuxRequest(lse=True)
        o, lse = varlen.varlen_attn(q, k, v, starts_q, starts_k, 7, 7, scale=0.3, window_size=window, return_aux=aux)
        d_o = torch.randn_like(o)
        gradients = torch.autograd.grad(o, (q, k, v), d_o)
        assert _core.plan_count() == 2
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    settings = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "max_seqlen_q": 7, "max_seqlen_k": 7, "scale": 0.3}
    expected, expected_lse = ft.attend(q, k, v, window=window, return_lse=True, **settings)
    for a, b in zip((o, lse, *gradients), (expected, expected_lse, *torch.autograd.grad(expected, (q, k, v), d_o)), strict=True):
        plain.assert_close(a, b, dtype, factor=2)


def test_the_registry_over_pages(device):
    """Arguments that PyTorch has had since 2.12: block_table with seqused_k, and a result that goes into `out`."""
    from fovea.torch import _routing

    q = normal(3, 4, 16, device=device)
    k, v = (normal(5, 8, 2, 16, device=device) for _ in range(2))
    starts, used = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1, 3], [11, 6]))
    table = torch.tensor([[3, 1], [0, -1]], dtype=torch.int32, device=device)
    out = torch.empty_like(q)
    lse = _routing._flash_forward_into(
        out, q, k, v, starts, None, 2, 16, 0.0, True, False, seqused_k=used, block_table=table, num_splits=None
    )
    where = {"cu_seqlens_q": starts, "max_seqlen_q": 2, "seqused_k": used, "page_table": table}
    expected = ft.attend(q, k, v, causal=True, return_lse=True, **where)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_errors():
    q = normal(1, 4, 2, 8)
    with pytest.raises(TypeError, match="k: got ndarray"):
        ft.attend(q, q.numpy(), q)
    with pytest.raises(ValueError, match="k: "):
        ft.attend(q, q.half(), q)
    with pytest.raises(ValueError, match="query: got shape"):
        ft.scaled_dot_product_attention(q[0, 0, 0], q, q)
    with pytest.raises(ValueError, match="is_causal"):
        ft.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(2, 2, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match="enable_gqa"):
        ft.scaled_dot_product_attention(q.expand(1, 4, 2, 8), normal(1, 2, 2, 8), normal(1, 2, 2, 8))
    with pytest.raises(TypeError, match="meta"):
        ft.attend(q.to("meta"), q, q)


def test_meta_and_fake_tensors_give_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(2, 5, 4, 8)
        o, lse = ft.attend(q, q, q, return_lse=True)
    assert o.shape == (2, 5, 4, 8) and lse.shape == (2, 4, 5)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_no_leak_over_many_calls():
    import fovea.flash_attn as fa
    from test_numpy import resident

    q = normal(1, 1, 1, 8)
    trained = normal(1, 1, 1, 8, grad=True)

    def calls(n):
        for i in range(n):
            fa.flash_attn_func(q, q, q)
            if i % 10 == 0:
                fa.flash_attn_func(trained, q, q).sum().backward()

    calls(5_000)
    before = resident()
    calls(100_000)
    assert resident() - before < 16 << 20


def test_cuda_stream_and_graph(device):
    if device == "cpu":
        pytest.skip("streams and graphs are of GPUs")
    q, k, v = (normal(2, 64, 4, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    expected = ft.attend(q, k, v)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        slow = torch.ones(1 << 26, device=device).cumsum(0).sum() * 0
        got = ft.attend(q + slow.to(q.dtype), k, v)
    side.synchronize()
    assert torch.equal(got, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ft.attend(q, k, v)
    q.mul_(0.5)
    graph.replay()
    plain.assert_close(captured, ft.attend(q, k, v))


def test_second_gpu(device):
    if device == "cpu" or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q = normal(1, 8, 2, 16, device="cuda:1")
    plain.assert_close(ft.attend(q, q, q), plain.attention(q, q, q)[0])
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("call", [ft.attend, ft.scaled_dot_product_attention, fovea.flash_attn.flash_attn_func])
@pytest.mark.parametrize("form", ["dense", "transposed", "gaps", "columns", "narrow values"])
def test_results_without_gradients_are_the_same(call, form, device):
    """Calls without gradients take a shorter path, with the same values, strides and shapes."""
    q, k, v = (torch.randn(2, 6, 6, 32, device=device, requires_grad=True) for _ in range(3))
    change = {
        "dense": lambda x: x,
        "transposed": lambda x: x.transpose(1, 2),
        "gaps": lambda x: x[..., :16],
        "columns": lambda x: x.transpose(2, 3),
        "narrow values": lambda x: x[..., :16] if x is v else x,
    }[form]
    long = call(*(change(x) for x in (q, k, v)))
    with torch.no_grad():
        short = call(*(change(x) for x in (q, k, v)))
    assert long.requires_grad and not short.requires_grad
    plain.assert_close(short, long)
    if form in ("dense", "transposed"):
        assert short.stride() == long.stride() == change(q).stride()


def test_ranks_that_do_not_fit(device):
    q, k = torch.randn(2, 5, 4, 32, device=device), torch.randn(5, 4, 32, device=device)
    for grad in (False, True):
        for arguments in ((q, k, k), (q, q, k), (q, k, q), (k, k, k), (k, q, q)):
            given = [x.clone().requires_grad_(grad) for x in arguments]
            for call in (ft.attend, fovea.flash_attn.flash_attn_func):
                with pytest.raises(ValueError, match=r"^[qkv]\b"):
                    call(*given)


@pytest.mark.parametrize(
    "argument",
    [
        {"max_seqlen_q": 5},
        {"block_size": (3, 3)},
        {"block_size": 5},
        {"window": 5},
        {"window": (1,)},
        {"dropout": -1.0},
        {"softcap": -1.0},
        {"backend": "none"},
        {"scale": 0},
    ],
    ids=str,
)
def test_the_shorter_way_refuses_what_the_longer_does(argument, device):
    q = torch.randn(1, 4, 1, 8, device=device)
    messages = []
    for grad in (False, True):
        with pytest.raises(ValueError) as error:
            ft.attend(q.clone().requires_grad_(grad), q, q, **argument)
        messages.append(str(error.value))
    assert messages[0] == messages[1] and next(iter(argument)).split("_")[0] in messages[0]
