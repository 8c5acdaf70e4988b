"""What only CUDA has: streams, graphs, workspaces that are given back before the work is done, several devices, CuPy. All are
skipped without a GPU."""

import threading
import time

import pytest

torch = pytest.importorskip("torch")

import fovea  # noqa: E402
import fovea.flash_attn as fa  # noqa: E402
import fovea.torch as ft  # noqa: E402
import plain  # noqa: E402
from fovea import _core  # noqa: E402

pytestmark = pytest.mark.skipif(
    not fovea.info()["gpus"] or not torch.cuda.is_available(), reason="no GPU, or no CUDA: " + fovea.info()["cuda"]
)
BF16 = torch.bfloat16


def normal(*shape, dtype=BF16, grad=False, device="cuda"):
    return torch.randn(shape, device=device).to(dtype).requires_grad_(grad)


def decode():
    """A problem whose keys are split, so that it takes a workspace."""
    q, k, v = normal(1, 1, 8, 64), normal(1, 20_000, 2, 64), normal(1, 20_000, 2, 64)
    assert fovea.plan(q, k, v).workspace_size > 0
    return q, k, v


def busy(size=1 << 27):
    """Keeps the current stream at work for a while; 0 in the end."""
    return (torch.ones(size, device="cuda").cumsum(0).sum() * 0).to(BF16)


def test_work_goes_to_the_current_stream():
    q, k, v = decode()
    expected = ft.attend(q, k, v)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = ft.attend(q + busy(), k, v)
    side.synchronize()
    assert torch.equal(got, expected)


def test_workspaces_of_streams_do_not_meet():
    problems = [decode() for _ in range(4)]
    expected = [ft.attend(*p) for p in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results = [[] for _ in problems]
    for _ in range(50):
        for stream, problem, found in zip(streams, problems, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(ft.attend(*problem))
    torch.cuda.synchronize()
    for wanted, found in zip(expected, results, strict=True):
        assert all(torch.equal(x, wanted) for x in found)


def test_a_workspace_is_given_back_in_the_order_of_the_stream():
    """Memory that the allocator hands out again is written only after the run that had it before."""
    q, k, v = decode()
    expected = ft.attend(q, k, v)
    size = fovea.plan(q, k, v).workspace_size
    for _ in range(20):
        got = ft.attend(q + busy(1 << 24), k, v)
        others = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for _ in range(4)]
        assert torch.equal(got, expected)
        del others


def test_threads_with_streams_of_their_own():
    problems = [decode() for _ in range(4)]
    expected = [ft.attend(*p) for p in problems]
    torch.cuda.synchronize()
    wrong = []

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for n in range(100):
                if not torch.equal(ft.attend(*problems[(i + n) % 4]), expected[(i + n) % 4]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_backward_runs_on_the_stream_of_its_forward():
    q, k, v = (normal(2, 300, 4, 64, grad=True) for _ in range(3))
    d_o = normal(2, 300, 4, 64)
    expected = torch.autograd.grad(ft.attend(q, k, v, causal=True, deterministic=True), (q, k, v), d_o)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        o = ft.attend(q + busy(), k, v, causal=True, deterministic=True)
        late = d_o + busy()
        got = torch.autograd.grad(o, (q, k, v), late)
    side.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("split", [False, True])
def test_a_graph_replays_on_new_values(split):
    q, k, v = decode() if split else [normal(2, 64, 4, 64) for _ in range(3)]
    ft.attend(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ft.attend(q, k, v)
    for _ in range(3):
        q.copy_(normal(*q.shape))
        graph.replay()
        plain.assert_close(captured, plain.attention(q, k, v)[0], BF16)


def test_the_first_call_may_lie_in_a_capture():
    """The plan is made, and its kernels are loaded, while a stream is captured."""
    q, k, v = (normal(1, 70, 2, 72, dtype=torch.float16) for _ in range(3))
    torch.cuda.synchronize()
    _core.clear_plans()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ft.attend(q, k, v, softcap=7.0, window=(20, 3))
    graph.replay()
    plain.assert_close(captured, plain.attention(q, k, v, softcap=7.0, window=(20, 3))[0], torch.float16)


def test_graphs_of_forward_and_backward():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return fa.flash_attn_func(q, k, v, causal=True)

    inputs = [normal(2, 130, 4, 64, grad=True) for _ in range(3)]
    graphed = torch.cuda.make_graphed_callables(Layer(), tuple(inputs))
    for _ in range(2):
        fresh = [normal(2, 130, 4, 64, grad=True) for _ in range(3)]
        d_o = normal(2, 130, 4, 64)
        o = graphed(*fresh)
        expected, _ = plain.attention(*fresh, causal=True)
        plain.assert_close(o, expected, BF16)
        ours = torch.autograd.grad(o, fresh, d_o)
        theirs = torch.autograd.grad(expected, fresh, d_o.double())
        for a, b in zip(ours, theirs, strict=True):
            plain.assert_close(a, b, BF16, factor=4)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor(mode):
    pytest.importorskip("triton")
    torch._dynamo.reset()

    def model(q, k, v):
        return fa.flash_attn_func(q * 2, k, v, causal=True).sin()

    compiled = torch.compile(model, fullgraph=True, mode=mode)
    inputs = [normal(2, 65, 4, 64, grad=True) for _ in range(3)]
    d_o = normal(2, 65, 4, 64)
    for _ in range(3):  # reduce-overhead: warm-up, recording, replay
        got = compiled(*inputs)
        ours = torch.autograd.grad(got, inputs, d_o)
    expected = model(*inputs)
    theirs = torch.autograd.grad(expected, inputs, d_o)
    plain.assert_close(got, expected, BF16)
    for a, b in zip(ours, theirs, strict=True):
        plain.assert_close(a, b, BF16, factor=4)


def test_compiled_dropout_is_drawn_anew():
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: fa.flash_attn_func(*x, dropout_p=0.5), fullgraph=True, mode="reduce-overhead")
    q, k, v = (normal(1, 64, 2, 64) for _ in range(3))
    found = [compiled(q, k, v).clone() for _ in range(5)]
    assert all(not torch.equal(found[0], x) for x in found[1:])


def test_peak_memory_is_linear():
    q, k, v = (normal(1, 16_384, 2, 64, grad=True) for _ in range(3))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ft.attend(q, k, v, causal=True).sum().backward()
    # The matrix of scores has 1 GiB a head in 16 bits.
    assert torch.cuda.max_memory_allocated() - before < 64 << 20


def test_nothing_is_left_allocated():
    q, k, v = decode()
    trained = [normal(1, 100, 2, 64, grad=True) for _ in range(3)]

    def calls():
        ft.attend(q, k, v)
        torch.autograd.grad(ft.attend(*trained).sum(), trained)

    calls()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(200):
        calls()
    torch.cuda.synchronize()
    # autograd's thread frees the last tensors of a call a moment after it reports the result.
    until = time.monotonic() + 5
    while torch.cuda.memory_allocated() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert torch.cuda.memory_allocated() <= before


def test_memory_of_the_other_kind_is_refused():
    q = normal(1, 8, 2, 16)
    for bad in ({"k": q.cpu()}, {"v": q.cpu().pin_memory()}, {"bias": torch.zeros(1, 1, 8, 8)}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            ft.attend(**({"q": q, "k": q, "v": q} | bad))
    starts = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens"):
        fa.flash_attn_varlen_func(q[0], q[0], q[0], starts, starts, 8, 8)
    with pytest.raises(ValueError, match="float64"):
        ft.attend(*[q.double()] * 3)


def test_out_of_memory_is_pytorchs_error():
    q, k, v = decode()
    o = ft.attend(q, k, v)
    size = fovea.plan(q, k, v).workspace_size
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    held = []
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            while True:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        with pytest.raises(torch.cuda.OutOfMemoryError):
            _core.forward(q=q, k=k, v=v, o=o)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    _core.forward(q=q, k=k, v=v, o=o)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus():
    inputs = [normal(2, 70, 4, 64, grad=True, device="cuda:1") for _ in range(3)]
    o = ft.attend(*inputs, causal=True)
    expected, _ = plain.attention(*inputs, causal=True)
    plain.assert_close(o, expected, BF16)
    ours = torch.autograd.grad(o, inputs, torch.ones_like(o))
    theirs = torch.autograd.grad(expected, inputs, torch.ones_like(expected))
    for a, b in zip(ours, theirs, strict=True):
        plain.assert_close(a, b, BF16, factor=4)
    side = torch.cuda.Stream("cuda:1")
    side.wait_stream(torch.cuda.current_stream("cuda:1"))
    with torch.no_grad(), torch.cuda.stream(side):
        q, k, v = inputs
        plain.assert_close(ft.attend(q, k, v, causal=True), expected, BF16)
        heads_first = [x.transpose(1, 2) for x in inputs]
        got = ft.scaled_dot_product_attention(*heads_first, is_causal=True)
        plain.assert_close(got.transpose(1, 2), expected, BF16)
    assert torch.cuda.current_device() == 0
    for grad in (False, True):
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="k: .*cuda:0"):
            ft.attend(inputs[0], inputs[1].to("cuda:0"), inputs[2])


def test_cupy():
    cupy = pytest.importorskip("cupy")
    q, k, v = (cupy.random.standard_normal((1, n, 4, 64)).astype(cupy.float16) for n in (1, 20_000, 20_000))
    assert fovea.plan(q, k, v).workspace_size > 0
    expected = plain.attention(*(torch.from_dlpack(x) for x in (q, k, v)))
    stream = cupy.cuda.Stream(non_blocking=True)
    for _ in range(3):
        with stream:
            o, lse = fovea.attend(q, k, v, return_lse=True)
        stream.synchronize()
        assert type(o) is cupy.ndarray and o.dtype == cupy.float16
        plain.assert_close(torch.from_dlpack(o), expected[0], torch.float16)
        plain.assert_close(torch.from_dlpack(lse), expected[1], torch.float16)
    d_o = cupy.ones_like(o)
    gradients = fovea.attend_backward(d_o, q, k, v, o, lse)
    wanted = [torch.from_dlpack(x).double().requires_grad_() for x in (q, k, v)]
    theirs = torch.autograd.grad(plain.attention(*wanted)[0], wanted, torch.from_dlpack(d_o).double())
    for a, b in zip(gradients[:3], theirs, strict=True):
        plain.assert_close(torch.from_dlpack(a), b, torch.float16, factor=4)


def test_merge_joins_parts_on_the_gpu_and_in_a_graph():
    q, k, v = normal(3, 7, 8, 64), normal(3, 1000, 2, 64), normal(3, 1000, 2, 64)
    whole, whole_lse = ft.attend(q, k, v, return_lse=True)
    cuts = range(0, 1001, 10)  # more parts than one launch takes
    parts = [ft.attend(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in zip(cuts, cuts[1:], strict=False)]
    o_parts, lse_parts = [o for o, _ in parts], [lse for _, lse in parts]
    graph = torch.cuda.CUDAGraph()
    fovea.merge(o_parts, lse_parts)
    with torch.cuda.graph(graph):
        o, lse = fovea.merge(o_parts, lse_parts)
    graph.replay()
    torch.testing.assert_close(o, whole, atol=2e-2, rtol=0)
    torch.testing.assert_close(lse, whole_lse, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"lse_parts\[1\]: got memory of cpu, expected memory of cuda:0"):
        fovea.merge(o_parts[:2], [lse_parts[0], lse_parts[1].cpu()])
