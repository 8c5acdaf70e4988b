"""torch.func: gradients and torch.vmap of the operators. vmap folds the mapped dimension into the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._arguments import TENSORS
from . import _ops
from ._ops import named

_PER_BATCH = ("bias", "mask", "block_mask", "keys")


def _fold(x: Tensor, dim: int | None, size: int) -> Tensor:
    x = x.movedim(dim, 0) if dim is not None else x.unsqueeze(0).expand(size, *x.shape)
    return x.reshape(size * x.shape[1], *x.shape[2:])


def _fold_common(size: int, batch: int, dims: list[int | None], rest: tuple[Any, ...]) -> list[Any]:
    """The optional tensors and numbers for a batch of size * batch."""
    arguments = named(rest)
    for name, dim in zip(TENSORS, dims, strict=False):
        x = arguments[name]
        if x is None:
            continue
        if name.startswith("cu_seqlens"):
            raise NotImplementedError(
                "fovea: torch.vmap over packed sequences (cu_seqlens) is not there; map over (batch, seqlen, heads, size)"
            )
        if name in ("page_table", "cache_batch"):
            raise NotImplementedError(f"fovea: torch.vmap over a cache ({name}) is not there; make one call with a larger batch")
        if name == "sink" or (name == "alibi" and x.ndim == 1 + (dim is not None) and dim is None):
            if dim is not None:
                raise NotImplementedError("fovea: torch.vmap over sink is not there; call attend for each sink")
            continue
        if name == "alibi" and x.ndim == 1 + (dim is not None):
            x = x.movedim(dim, 0).unsqueeze(1).expand(size, batch, -1)  # slopes for each mapped element
            arguments[name] = x.reshape(size * batch, -1)
            continue
        if name in _PER_BATCH:
            at = 0 if dim is None else int(dim == 0)
            if x.shape[at] == 1 and dim is None:
                continue
            if x.shape[at] == 1:
                x = x.movedim(dim, 0).expand(size, batch, *(-1,) * 3)
                arguments[name] = x.reshape(size * batch, *x.shape[2:])
                continue
        arguments[name] = _fold(x, dim, size)
    return list(arguments.values())


def _unfold(x: Tensor, size: int) -> Tensor:
    return x.reshape(size, x.shape[0] // size, *x.shape[1:])


def _forward_vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
    size = info.batch_size
    q, k, v = (_fold(x, d, size) for x, d in zip(inputs[:3], in_dims[:3], strict=True))
    draw, rest = inputs[3], inputs[4:]
    if draw and info.randomness != "different":
        raise RuntimeError(
            f"fovea: got dropout under torch.vmap(randomness={info.randomness!r}); expected 'different'; say so, or "
            "leave dropout out"
        )
    common = _fold_common(size, q.shape[0] // size, list(in_dims[4:]), rest)
    o, lse, rng_state = Forward.apply(q, k, v, draw, *common)
    return (_unfold(o, size), _unfold(lse, size), rng_state), (0, 0, None)


def _backward_vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
    size = info.batch_size
    d_o, dlse, q, k, v, o, lse = (
        None if x is None else _fold(x, d, size) for x, d in zip(inputs[:7], in_dims[:7], strict=True)
    )
    rng_state, need_dbias, need_dsink, rest = inputs[7], inputs[8], inputs[9], inputs[10:]
    arguments = named(rest)
    bias_dim = in_dims[10 + TENSORS.index("bias")]
    if need_dsink:
        raise NotImplementedError("fovea: torch.vmap over the gradient of sink is not there; call attend in a loop")
    if need_dbias:
        # Each mapped element has a gradient of its own.
        bias = arguments["bias"]
        bias = bias.movedim(bias_dim, 0) if bias_dim is not None else bias.expand(size, *bias.shape)
        if bias.shape[1] == 1 and q.shape[0] // size > 1:
            raise NotImplementedError(
                "fovea: torch.vmap over the gradient of a bias that the batch shares is not there; expand the bias"
            )
        rest = tuple((arguments | {"bias": bias}).values())
        bias_dim = 0
    dims = list(in_dims[10:])
    dims[TENSORS.index("bias")] = bias_dim
    common = _fold_common(size, q.shape[0] // size, dims, rest)
    dq, dk, dv, dbias, dsink = Backward.apply(d_o, dlse, q, k, v, o, lse, rng_state, need_dbias, need_dsink, *common)
    outputs = [_unfold(x, size) for x in (dq, dk, dv)]
    return (*outputs, _unfold(dbias, size) if need_dbias else dbias, dsink), (
        0,
        0,
        0,
        0 if need_dbias else None,
        None,
    )


class Forward(torch.autograd.Function):
    """fovea::forward, as torch.func wants it."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return torch.ops.fovea.forward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _ops.setup_context(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _ops.differentiate(ctx, *gradients, call=Backward.apply)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _forward_vmap(info, in_dims, *inputs)


class Backward(torch.autograd.Function):
    """fovea::backward, as torch.func wants it."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return torch.ops.fovea.backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    backward = staticmethod(_ops.refuse_second_derivative)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _backward_vmap(info, in_dims, *inputs)
