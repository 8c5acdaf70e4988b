"""fovea.flash_attn's bert_padding, layers.rotary and ops.triton.rotary, against plain formulas in float64."""

import inspect
import random

import pytest

torch = pytest.importorskip("torch")

import plain  # noqa: E402
from fovea.flash_attn import bert_padding  # noqa: E402
from fovea.flash_attn import flash_attn_interface as interface  # noqa: E402
from fovea.flash_attn.layers import rotary  # noqa: E402
from fovea.flash_attn.ops.triton.rotary import apply_rotary  # noqa: E402


def by_complex_numbers(x, angle, interleaved):
    """x (rows, heads, size) turned by angle (rows, rotary_dim / 2), pair by pair, in float64."""
    half = angle.shape[-1]
    first = torch.arange(half) * (2 if interleaved else 1)
    second = first + (1 if interleaved else half)
    y = x.double()
    z = torch.complex(y[..., first], y[..., second]) * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
    columns = {int(c): z.real[..., i] for i, c in enumerate(first)} | {int(c): z.imag[..., i] for i, c in enumerate(second)}
    return torch.stack([columns.get(c, y[..., c]) for c in range(x.shape[-1])], -1)


class Draw:
    """A random problem of rotation, the same for the same seed."""

    def __init__(self, seed, device):
        r = self.r = random.Random(seed)
        self.device = device
        self.dtype = r.choice([torch.float32, torch.float16, torch.bfloat16, torch.float64])
        self.batch, self.seqlen, self.heads = r.randint(1, 3), r.randint(1, 9), r.choice([2, 4])
        self.size = r.choice([8, 16, 34])
        self.rotary_dim = r.choice([self.size, self.size // 2 // 2 * 2])
        self.interleaved = r.random() < 0.5
        self.angle = torch.rand(30, self.rotary_dim // 2, dtype=torch.float64, device=device) * 6.3
        kind = r.choice(["none", "integer", "tensor"])
        self.firsts = [0] * self.batch
        self.settings = {"interleaved": self.interleaved}
        if kind == "integer":
            self.firsts = [r.randint(0, 20)] * self.batch
            self.settings["seqlen_offsets"] = self.firsts[0]
        elif kind == "tensor":
            self.firsts = [r.randint(0, 20) for _ in range(self.batch)]
            integer = r.choice([torch.int32, torch.int64])
            self.settings["seqlen_offsets"] = torch.tensor(self.firsts, dtype=integer, device=device)

    def tensor(self, *shape):
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def tables(self):
        return self.angle.cos().to(self.dtype), self.angle.sin().to(self.dtype)

    def expected(self, x):
        """Of x (batch, seqlen, heads, size)."""
        rows = [self.angle[n : n + x.shape[1]] for n in self.firsts]
        return torch.stack([by_complex_numbers(a, b, self.interleaved) for a, b in zip(x, rows, strict=True)])


def check_gradient(out, x, expected, exact, dtype):
    """The gradient of out with respect to x, beside that of expected with respect to exact."""
    weight = torch.randn_like(out)
    (ours,) = torch.autograd.grad(out, x, weight)
    (theirs,) = torch.autograd.grad(expected, exact, weight.double())
    assert ours.dtype == x.dtype
    plain.assert_close(ours, theirs, dtype, factor=2)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("seed", range(16))
def test_rotary_of_a_tensor(seed, inplace, device):
    d = Draw(seed, device)
    x = d.tensor(d.batch, d.seqlen, d.heads, d.size).requires_grad_()
    before = x.detach().clone()
    exact = before.double().requires_grad_()
    expected = d.expected(exact)
    out = rotary.apply_rotary_emb(x, *d.tables(), inplace=inplace, **d.settings)
    assert out.dtype == d.dtype
    plain.assert_close(out, expected, d.dtype, factor=2)
    assert torch.equal(x, out if inplace else before)
    check_gradient(out, x, expected, exact, d.dtype)
    turned = apply_rotary(before, *d.tables(), **d.settings)
    assert torch.equal(turned, out)
    assert torch.equal(turned[..., d.rotary_dim :], before[..., d.rotary_dim :])
    plain.assert_close(apply_rotary(turned, *d.tables(), conjugate=True, **d.settings), before, factor=2)
    assert apply_rotary(before, *d.tables(), inplace=True, **d.settings) is before and torch.equal(before, turned)


@pytest.mark.parametrize("seed", range(8))
def test_rotary_of_packed_sequences(seed, device):
    d = Draw(100 + seed, device)
    lengths = [d.r.randint(0, 9) for _ in range(d.batch)]
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    x = d.tensor(sum(lengths) + 2, d.heads, d.size).requires_grad_()  # two rows behind the last sequence
    exact = x.detach().double().requires_grad_()
    rows = [d.angle[n : n + length] for n, length in zip(d.firsts, lengths, strict=True)]
    rows.append(torch.zeros_like(d.angle[:2]))
    expected = by_complex_numbers(exact, torch.cat(rows), d.interleaved)
    out = rotary.apply_rotary_emb(x, *d.tables(), cu_seqlens=starts, max_seqlen=9, **d.settings)
    plain.assert_close(out, expected, d.dtype, factor=2)
    check_gradient(out, x, expected, exact, d.dtype)


@pytest.mark.parametrize("seed", range(12))
def test_rotary_of_queries_and_keys(seed, device):
    d = Draw(200 + seed, device)
    form = d.r.choice(["packed", "grouped", "two tables", "kv"])
    key_angle = d.angle
    arguments = d.tables()
    if form == "grouped":
        heads_k = d.heads // 2
        qkv = d.tensor(d.batch, d.seqlen, d.heads + 2 * heads_k, d.size)
        parts, call = (d.heads, heads_k, heads_k), rotary.apply_rotary_emb_qkv_
        d.settings["num_heads_q"] = d.heads
    elif form == "kv":
        qkv = d.tensor(d.batch, d.seqlen, 2, d.heads, d.size)
        parts, call = None, rotary.apply_rotary_emb_kv_
    else:
        qkv = d.tensor(d.batch, d.seqlen, 3, d.heads, d.size)
        parts, call = None, rotary.apply_rotary_emb_qkv_
        if form == "two tables":
            key_angle = d.angle.flip(0)
            arguments += (key_angle.cos().to(d.dtype), key_angle.sin().to(d.dtype))
    exact = qkv.double().requires_grad_()
    pieces = list(exact.unbind(2) if parts is None else exact.split(parts, 2))
    if form != "kv":
        pieces[0] = d.expected(pieces[0])
    d.angle = key_angle
    pieces[-2] = d.expected(pieces[-2])
    expected = torch.stack(pieces, 2) if parts is None else torch.cat(pieces, 2)
    leaf = qkv.requires_grad_()
    given = leaf * 1
    out = call(given, *arguments, **d.settings)
    assert out.data_ptr() == given.data_ptr()
    plain.assert_close(out, expected, d.dtype, factor=2)
    check_gradient(out, leaf, expected, exact, d.dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("with_batch", [False, True])
def test_rotary_by_formula_has_all_gradients(interleaved, with_batch, device):
    angle = torch.rand(*((2, 5) if with_batch else (5,)), 3, dtype=torch.float64, device=device)
    x = torch.randn(2, 5, 2, 8, dtype=torch.float64, device=device, requires_grad=True)
    cos, sin = angle.cos().requires_grad_(), angle.sin().requires_grad_()
    out = rotary.apply_rotary_emb_torch(x, cos, sin, interleaved)
    rows = angle if with_batch else angle.expand(2, 5, 3)
    plain.assert_close(out, torch.stack([by_complex_numbers(a, b, interleaved) for a, b in zip(x, rows, strict=True)]))
    assert torch.autograd.gradcheck(rotary.apply_rotary_emb_torch, (x, cos, sin, interleaved))
    turned = x[..., :6] * rotary_columns(cos, interleaved) + rotary.rotate_half(x[..., :6], interleaved) * rotary_columns(
        sin, interleaved
    )
    plain.assert_close(out[..., :6], turned)


def rotary_columns(table, interleaved):
    return (table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)).unsqueeze(-2)


@pytest.mark.parametrize("scale_base", [None, 512.0])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(interleaved, scale_base, device):
    dim, rows = 8, 21
    layer = rotary.RotaryEmbedding(dim, base=100.0, interleaved=interleaved, scale_base=scale_base, device=device)
    assert not layer.state_dict()
    theta = 100.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    place = torch.arange(rows, dtype=torch.float64, device=device)
    angle = place.unsqueeze(1) * theta
    scale = torch.ones_like(angle)
    if scale_base:
        bases = (torch.arange(0, dim, 2, device=device).double() + 0.4 * dim) / (1.4 * dim)
        scale = bases ** ((place - rows // 2) / scale_base).unsqueeze(1)
    first = torch.full((2,), 14, dtype=torch.int32, device=device)

    def expected(x, scale):
        # Only the numbers that turn are scaled.
        turned = by_complex_numbers(x, angle[14 : 14 + x.shape[0]], interleaved)
        factor = rotary_columns(scale[14 : 14 + x.shape[0]], interleaved)
        return torch.cat((turned[..., :dim] * factor, turned[..., dim:]), -1)

    qkv = torch.randn(2, 7, 3, 2, 12, device=device)
    q, k, v = qkv.clone().unbind(2)
    wanted_q = torch.stack([expected(x, scale) for x in q])
    wanted_k = torch.stack([expected(x, 1 / scale) for x in k])
    with pytest.raises(ValueError, match="max_seqlen"):
        layer(qkv, seqlen_offset=first)
    for offset in (14, first):
        given = qkv.clone()
        out = layer(given, seqlen_offset=offset, max_seqlen=rows)
        assert out.data_ptr() == given.data_ptr()
        plain.assert_close(out[:, :, 0], wanted_q)
        plain.assert_close(out[:, :, 1], wanted_k)
        assert torch.equal(out[:, :, 2], v)
    kv = torch.stack((k, v), 2)
    out_q, out_kv = layer(q.clone(), kv, seqlen_offset=14)
    plain.assert_close(out_q, wanted_q)
    plain.assert_close(out_kv[:, :, 0], wanted_k)
    assert torch.equal(out_kv[:, :, 1], v)
    assert layer(qkv.bfloat16(), seqlen_offset=14).dtype == torch.bfloat16 and layer._cos_cached.dtype == torch.bfloat16


def test_rotary_refuses_what_does_not_fit():
    x, cos = torch.randn(2, 5, 2, 8), torch.ones(9, 4)
    with pytest.raises(ValueError, match=r"x: got shape \(5, 2, 8\)"):
        rotary.apply_rotary_emb(x[0], cos, cos)
    with pytest.raises(ValueError, match="cos, sin: got shapes"):
        rotary.apply_rotary_emb(x, torch.ones(9, 5), torch.ones(9, 5))
    with pytest.raises(ValueError, match="cos, sin: got 9 rows; expected at least 10"):
        rotary.apply_rotary_emb(x, cos, cos, seqlen_offsets=5)
    with pytest.raises(ValueError, match="cos, sin: got 9 rows; expected at least 10"):
        rotary.apply_rotary_emb(x, cos, cos, seqlen_offsets=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="seqlen_offsets: got shape"):
        rotary.apply_rotary_emb(x, cos, cos, seqlen_offsets=torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="qkv: got shape"):
        rotary.apply_rotary_emb_qkv_(x, cos, cos)
    with pytest.raises(ValueError, match="kv: got shape"):
        rotary.apply_rotary_emb_kv_(x, cos, cos)


@pytest.mark.parametrize("shape", [(), (3,), (2, 4)])
@pytest.mark.parametrize("mask_type", [torch.bool, torch.int64])
def test_padding_and_back(shape, mask_type, device):
    x = torch.randn(3, 7, *shape, dtype=torch.float64, device=device, requires_grad=True)
    keep = torch.tensor([[1, 1, 0, 1, 0, 0, 0], [0] * 7, [1] * 7], device=device)
    unused = torch.zeros_like(keep)
    unused[0, 4] = 1
    rows, indices, starts, longest, used = bert_padding.unpad_input(x, keep.to(mask_type), unused.to(mask_type))
    packed = (keep + unused).bool()
    assert torch.equal(rows, x[packed]) and torch.equal(indices, packed.flatten().nonzero().flatten())
    assert starts.tolist() == [0, 4, 4, 11] and starts.dtype == torch.int32
    assert longest == 7 and isinstance(longest, int)
    assert used.tolist() == [3, 0, 7] and used.dtype == torch.int32
    back = bert_padding.pad_input(rows, indices, 3, 7)
    assert torch.equal(back, torch.where(packed.reshape(3, 7, *(1 for _ in shape)), x, 0.0))
    weight = torch.randn_like(x)
    (gradient,) = torch.autograd.grad(back, x, weight)
    assert torch.equal(gradient, torch.where(packed.reshape(3, 7, *(1 for _ in shape)), weight, 0.0))
    alone = bert_padding.unpad_input(x, keep.to(mask_type))
    assert torch.equal(alone[0], x[keep.bool()]) and alone[2].tolist() == [0, 3, 3, 10] and alone[4].tolist() == [3, 0, 7]


def test_padding_of_concatenated_sequences(device):
    x = torch.randn(3, 6, 2, device=device, requires_grad=True)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]], device=device)
    rows, indices, starts, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(rows, torch.cat((x[0, :5], x[1, :5], x[2])))
    assert starts.tolist() == [0, 2, 5, 8, 10, 16] and starts.dtype == torch.int32 and longest == 6
    back = bert_padding.pad_input(rows, indices, 3, 6)
    assert torch.equal(back[:, :5], x[:, :5]) and not back[:2, 5].any()


def test_rows_by_index(device):
    x = torch.randn(6, 3, dtype=torch.float64, device=device, requires_grad=True)
    indices = torch.tensor([4, 0, 5], device=device)
    assert torch.autograd.gradcheck(lambda x: bert_padding.index_first_axis(x, indices), x)
    assert torch.autograd.gradcheck(lambda x: bert_padding.index_put_first_axis(x[:3], indices, 8), x)
    assert torch.equal(bert_padding.IndexFirstAxis.apply(x, indices), x[indices])
    put = bert_padding.IndexPutFirstAxis.apply(x[:3], indices, 8)
    assert torch.equal(put[indices], x[:3]) and not put[[1, 2, 3, 6, 7]].any()
    rows, same = bert_padding.index_first_axis_residual(x, indices)
    assert torch.equal(rows, x[indices]) and torch.equal(same, x)


def test_signatures_are_those_of_the_package():
    """Names, order and defaults, as documented by flash-attn 2.8.4."""
    turned = "seqlen_offsets=0, cu_seqlens=None, max_seqlen=None"
    window = "window_size_left, window_size_right, softcap, alibi_slopes"
    starts = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
    gradients = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
    expected = {
        apply_rotary: f"x, cos, sin, {turned}, interleaved=False, inplace=False, conjugate=False",
        rotary.apply_rotary_emb: f"x, cos, sin, interleaved=False, inplace=False, {turned}",
        rotary.apply_rotary_emb_func: f"x, cos, sin, interleaved=False, inplace=False, {turned}",
        rotary.apply_rotary_emb_torch: "x, cos, sin, interleaved=False",
        rotary.apply_rotary_emb_qkv_: "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, "
        "num_heads_q=None",
        rotary.apply_rotary_emb_kv_: "kv, cos, sin, interleaved=False, seqlen_offsets=0",
        rotary.RotaryEmbedding: "dim, base=10000.0, interleaved=False, scale_base=None, device=None",
        rotary.RotaryEmbedding.forward: "self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None",
        bert_padding.unpad_input: "hidden_states, attention_mask, unused_mask=None",
        bert_padding.unpad_input_for_concatenated_sequences: "hidden_states, attention_mask_in_length",
        bert_padding.pad_input: "hidden_states, indices, batch, seqlen",
        interface._flash_attn_forward: f"q, k, v, dropout_p, softmax_scale, causal, {window}, return_softmax",
        interface._flash_attn_backward: f"{gradients}, dropout_p, softmax_scale, causal, {window}, deterministic, "
        "rng_state=None",
        interface._flash_attn_varlen_forward: f"q, k, v, {starts}, dropout_p, softmax_scale, causal, window_size_left=-1, "
        "window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, "
        "seqused_k=None, zero_tensors=False, num_splits=0",
        interface._flash_attn_varlen_backward: f"{gradients}, {starts}, dropout_p, softmax_scale, causal, {window}, "
        "deterministic, rng_state=None, zero_tensors=False",
    }
    for function, wanted in expected.items():
        parameters = inspect.signature(function).parameters.values()
        text = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
        assert text == wanted, function
