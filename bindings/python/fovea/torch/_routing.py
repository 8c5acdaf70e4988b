"""Two ways of computing PyTorch's own attention calls by Fovea: as an implementation in its registry, and for a block of
code."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import _core
from . import _attend, _ops
from ._sdpa import scaled_dot_product_attention

_plain_sdpa = torch.nn.functional.scaled_dot_product_attention
_lock = threading.Lock()
_users = 0  # blocks with an SdpaMode that are running, of all threads
_thread = threading.local()
_stacks: list[list[Callable[..., Any]]] = []  # _functions() of the threads that are in blocks


def _functions() -> list[Callable[..., Any]]:
    """What replaces SDPA in the blocks that this thread is in, the innermost last."""
    if not hasattr(_thread, "functions"):
        _thread.functions = []
    return _thread.functions


def _functions_for_this_thread() -> list[Callable[..., Any]]:
    """The same for autograd's threads, which Python has not started: what they recompute belongs to the thread that waits for
    them, and Tensor.backward takes it out of the mode before they could inherit it."""
    own = _functions()
    if own or not isinstance(threading.current_thread(), threading._DummyThread):
        return own
    with _lock:
        if len(_stacks) > 1:
            raise RuntimeError(
                f"scaled_dot_product_attention: recomputed by autograd while {len(_stacks)} threads are in blocks that replace it; "
                "expected one, as nobody knows whose it is; let one thread at a time recompute"
            )
        return list(_stacks[0]) if _stacks else own


def _sdpa_of_this_thread(*args: Any, **kwargs: Any) -> Any:
    """In place of torch.nn.functional.scaled_dot_product_attention: Python code of PyTorch that looks it up there (that of
    MultiheadAttention) runs outside of every mode."""
    query = args[0] if args else kwargs["query"]
    functions = _functions_for_this_thread()
    if functions and query.device.type in ("cpu", "cuda"):
        return functions[-1](*args, **kwargs)
    return _plain_sdpa(*args, **kwargs)


class SdpaMode(TorchFunctionMode):
    """Inside of it calls of torch.nn.functional.scaled_dot_product_attention on devices cpu and cuda go to `function`: those of
    this thread, and those of autograd's threads that recompute what this one checkpointed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def __enter__(self) -> Any:
        global _users
        with _lock:
            _users += 1
            torch.nn.functional.scaled_dot_product_attention = _sdpa_of_this_thread
            if not _functions():
                _stacks.append(_functions())
            _functions().append(self._function)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        global _users
        super().__exit__(*error)
        with _lock:
            own = _functions()
            own.pop()
            if not own:
                _stacks[:] = [stack for stack in _stacks if stack is not own]
            _users -= 1
            if _users == 0:
                torch.nn.functional.scaled_dot_product_attention = _plain_sdpa

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is _plain_sdpa:
            function = _sdpa_of_this_thread
        functions = _functions()
        if functions:
            return function(*args, **(kwargs or {}))
        # A thread of autograd's is in the mode, but did not enter it.
        functions.append(self._function)
        try:
            return function(*args, **(kwargs or {}))
        finally:
            functions.pop()


class replace_sdpa(SdpaMode):
    """Inside `with replace_sdpa():` calls of torch.nn.functional.scaled_dot_product_attention in this thread, those made by
    PyTorch's modules among them, go to fovea.torch.scaled_dot_product_attention. Calls on devices other than cpu and cuda
    stay with PyTorch."""

    def __init__(self) -> None:
        super().__init__(scaled_dot_product_attention)


# ---- the registry: PyTorch's flash-attention operators, called below autograd


def _window(size: int | None) -> int:
    return -1 if size is None else size


def _settings(
    scale: float | None,
    causal: bool,
    dropout: float,
    left: int | None,
    right: int | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_q: int,
    max_k: int,
) -> dict[str, Any]:
    packed = cu_seqlens_q is not None
    return {
        "scale": scale,
        "causal": causal,
        "window": (_window(left), _window(right)),
        "dropout": dropout,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_q if packed else 0,
        "max_seqlen_k": max_k if packed and cu_seqlens_k is not None else 0,
    }


def _backward(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, settings: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    return _attend.backward_pass(d_o, q, k, v, o, lse, settings | {"deterministic": deterministic})


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    out: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, ...]:
    given = [name for name, value in unknown.items() if value is not None]
    if return_debug_mask or given:
        raise ValueError(
            f"fovea: got {given or 'return_debug_mask=True'}, which Fovea lacks; leave it out, or call "
            "torch.nn.attention.restore_flash_attention_impl()"
        )
    if block_table is not None:
        cum_seq_k = None  # the pages of each sequence tell where its keys are
    settings = _settings(scale, is_causal, dropout_p, window_size_left, window_size_right, cum_seq_q, cum_seq_k, max_q, max_k)
    settings |= {"seqused_k": seqused_k, "page_table": block_table, "alibi": alibi_slopes}
    seed = _ops.draw_seed() if dropout_p > 0 else 0
    query, key, value = (_ops.contiguous_rows(x) for x in (query, key, value))
    o = _attend.new_output(query, value) if out is None else out
    lse = _attend.new_lse(query)
    _core.forward(q=query, k=key, v=value, o=o, lse=lse, seed=seed, **settings)
    rng_state = torch.tensor([seed, 0], dtype=torch.int64).view(torch.uint64)
    return o, lse, rng_state, torch.zeros((), dtype=torch.uint64), query.new_empty(0)


def _flash_forward_into(out: Tensor, *arguments: Any, **settings: Any) -> Tensor:
    """_flash_forward whose result goes into `out`; returns lse. PyTorch 2.12 and newer call it without gradients."""
    return _flash_forward(*arguments, out=out, **settings)[1]


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    settings = _settings(scale, is_causal, dropout_p, window_size_left, window_size_right, cum_seq_q, cum_seq_k, max_q, max_k)
    if dropout_p > 0:
        settings["seed"] = int(rng_state.view(torch.int64)[0])
    return _backward(grad_out, query, key, value, out, logsumexp, settings)


def _sdpa_flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    # Tensors of this operator are (batch, heads, seqlen, size). It means the causal mask of equal lengths only.
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    o, lse, rng_state, offset, debug = _flash_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, is_causal, return_debug_mask, scale=scale
    )
    return o.transpose(1, 2), lse, None, None, q.shape[1], k.shape[1], rng_state, offset, debug


def _sdpa_flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    q, k, v, o, d_o = (x.transpose(1, 2) for x in (query, key, value, out, grad_out))
    gradients = _flash_backward(
        d_o,
        q,
        k,
        v,
        o,
        logsumexp,
        None,
        None,
        q.shape[1],
        k.shape[1],
        dropout_p,
        is_causal,
        philox_seed,
        philox_offset,
        scale=scale,
    )
    return tuple(x.transpose(1, 2) for x in gradients)


def _cpu_arguments(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None
) -> dict[str, Any]:
    settings: dict[str, Any] = {"scale": scale}
    if is_causal:
        # PyTorch's diagonal begins at the first key; Fovea's ends at the last one.
        difference = query.shape[2] - key.shape[2]
        settings |= {"causal": True} if difference == 0 else {"window": (-1, difference)}
    if attn_mask is not None:
        mask = attn_mask
        while mask.ndim < 4:
            mask = mask.unsqueeze(0)
        settings["mask" if mask.dtype == torch.bool else "bias"] = mask
    return settings


def _cpu_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    if is_causal and key.shape[2] > query.shape[2]:
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    q, k, v = (_ops.contiguous_rows(x.transpose(1, 2)) for x in (query, key, value))
    o, lse = _attend.new_output(q, v), _attend.new_lse(q)
    _core.forward(q=q, k=k, v=v, o=o, lse=lse, **_cpu_arguments(query, key, attn_mask, is_causal, scale))
    return o.transpose(1, 2), lse


def _cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    seen = min(key.shape[2], query.shape[2]) if is_causal else key.shape[2]
    used_key, used_value = key[:, :, :seen], value[:, :, :seen]
    q, k, v = (x.transpose(1, 2) for x in (query, used_key, used_value))
    settings = _cpu_arguments(query, used_key, attn_mask, is_causal, scale)
    dq, dk, dv = _backward(grad_out.transpose(1, 2), q, k, v, out.transpose(1, 2), logsumexp, settings)
    if seen < key.shape[2]:
        missing = (0, 0, 0, 0, 0, key.shape[2] - seen)
        dk, dv = torch.nn.functional.pad(dk, missing), torch.nn.functional.pad(dv, missing)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class _Handle:
    """Keeps the operators replaced until remove is called."""

    def __init__(self) -> None:
        library = torch.library.Library("aten", "IMPL")
        for name, function, key in (
            ("_flash_attention_forward", _flash_forward, "CUDA"),
            ("_flash_attention_forward", _flash_forward, "CPU"),
            ("_flash_attention_forward_no_dropout_inplace", _flash_forward_into, "CUDA"),
            ("_flash_attention_forward_no_dropout_inplace", _flash_forward_into, "CPU"),
            ("_flash_attention_backward", _flash_backward, "CUDA"),
            ("_flash_attention_backward", _flash_backward, "CPU"),
            ("_scaled_dot_product_flash_attention", _sdpa_flash_forward, "CUDA"),
            ("_scaled_dot_product_flash_attention_backward", _sdpa_flash_backward, "CUDA"),
            ("_scaled_dot_product_flash_attention_for_cpu", _cpu_forward, "CPU"),
            ("_scaled_dot_product_flash_attention_for_cpu_backward", _cpu_backward, "CPU"),
        ):
            if hasattr(torch.ops.aten, name):
                library.impl(name, function, key, allow_override=True)
        self._library: torch.library.Library | None = library

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
        self._library = None


def register_flash_attention_impl() -> None:
    """Adds "fovea" to PyTorch's registry of flash-attention implementations (PyTorch 2.11 and newer).

    Afterwards torch.nn.attention.activate_flash_attention_impl("fovea") computes what PyTorch gives to its
    flash-attention operators, on CUDA and on the CPU, by Fovea, and restore_flash_attention_impl() ends that. Among them is
    torch.nn.attention.varlen.varlen_attn, which the CPU has by Fovea alone. What PyTorch
    decides before (masks on CUDA, float32 on CUDA) does not get there; replace_sdpa takes every call.

    Raises RuntimeError where this PyTorch has no registry.
    """
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is None:
        raise RuntimeError(
            f"torch.nn.attention: PyTorch {torch.__version__} has no registry of flash-attention implementations; "
            "expected 2.11 or newer; use fovea.torch.replace_sdpa()"
        )
    register("fovea", register_fn=_Handle)
