"""FlashAttention-3's forward out of a library of PyTorch operators, as the wheel of vllm has one (`_vllm_fa3_C.abi3.so`).

Such a library has what serves: caches of any lengths, in one piece or in pages. That of vllm 0.33 refuses to append rows, and sequences
whose one length the host knows, so that it gets lengths in a tensor for these, too.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from contenders import Inputs, Outputs


class Fa3LibraryCall:
    """One run on one set of inputs. Who has which CTAs is decided before, as servers do once a step for all layers."""

    backend = "_vllm_fa3_C.fwd"

    def __init__(self, inputs: Inputs) -> None:
        shape = inputs.shape
        self._inputs, self._outputs = inputs, {}  # inputs: their tensors stay alive
        if shape.lse or shape.alibi or shape.term or shape.dropout:
            raise ValueError("the library is asked for forwards without slopes, masks and dropout alone")
        if shape.lengths or shape.latent or shape.append or (shape.e4m3 and not shape.e4m3_q):
            raise ValueError("packed sequences, values within keys, rows to append, and keys of 8 bits beside 16 are not for it here")
        whole = torch.full((shape.b,), shape.s_k, dtype=torch.int32, device="cuda")
        self._used = whole if inputs.used is None else inputs.used
        left = shape.window if shape.window >= 0 else -1
        self._window = (left, 0 if shape.causal and left >= 0 else -1)
        q = inputs.queries
        self._outputs["o"] = o = torch.empty_like(inputs.q)
        metadata = torch.ops._vllm_fa3_C.get_scheduler_metadata(
            shape.b, shape.s_q, shape.s_k, shape.h_q, shape.h_kv, shape.d, shape.d_v, q.dtype, self._used,
            None, None, None, None, None, shape.page or None, 0, shape.causal, *self._window, False, 0, None, 0,
        )  # fmt: skip
        factors = (inputs.descales.get(name) for name in ("q_descale", "k_descale", "v_descale"))
        self._arguments = (
            q, *inputs.pools, None, None, None, o, None, None, None, None, self._used, shape.s_q,
            shape.s_k, inputs.page_table, None, None, None, None, None, *factors,
            1 / math.sqrt(shape.d), shape.causal, *self._window, float(shape.softcap), False, metadata, 0, None, 0, None, 1, 0, None,
        )  # fmt: skip

    def run(self) -> None:
        torch.ops._vllm_fa3_C.fwd(*self._arguments)

    def outputs(self) -> Outputs:
        return self._outputs

    def poison(self) -> None:
        """Fills the output with NaN, so that an element that nobody writes shows."""
        self._outputs["o"].fill_(float("nan"))


def load(path: Path) -> None:
    torch.ops.load_library(str(path))
