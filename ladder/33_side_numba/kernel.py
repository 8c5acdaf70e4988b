"""Rung 32 in Python, compiled by numba-cuda: a block owns its queries and walks over the keys.

`attend` writes O = softmax(scale Q K^T) V and L, the logarithm of the sum of exponentials of each row of scores. All arrays
are float32, dense, and on the GPU: q, k, v, o (batch, n, d), lse (batch, n), with d up to 128.
"""

import functools
import math

import numpy as np
from numba import cuda, float32

LANES = 32
WARPS = 4
ROWS = 8  # queries of a warp
TILE_M = ROWS * WARPS  # queries of a block
# Arrays of numba have sizes that the compiler knows, and such shared memory ends at 48 KiB a block.
KEYS = {32: 64, 64: 32, 128: 32}  # of a tile, for each padded head size
WHOLE_WARP = 0xFFFFFFFF


@functools.cache
def kernel(size):
    """The kernel for head sizes up to `size`: 32, 64 or 128. Its loops over registers have bounds that are constants of
    the closure, so they unroll and what they index stays in registers."""
    keys, across, columns = KEYS[size], KEYS[size] // LANES, size // LANES
    row = size + 1  # floats: lanes that read one column of 32 rows meet 32 banks
    tile_q, tile_k, tile_p = (TILE_M, size), (keys, row), (TILE_M, keys)
    threads = WARPS * LANES

    @cuda.jit
    def flash(q, k, v, o, lse, scale):
        n, d = q.shape[1], q.shape[2]
        thread = cuda.threadIdx.x
        lane, first = thread % LANES, thread // LANES * ROWS  # of the rows of this warp in the tile
        batch, i0 = cuda.blockIdx.y, cuda.blockIdx.x * TILE_M
        q_tile = cuda.shared.array(tile_q, float32)
        kv_tile = cuda.shared.array(tile_k, float32)  # K, then V
        weights = cuda.shared.array(tile_p, float32)
        scores = cuda.local.array((ROWS, across), float32)
        sums = cuda.local.array((ROWS, columns), float32)
        largest = cuda.local.array(ROWS, float32)
        total = cuda.local.array(ROWS, float32)  # of this lane's keys, until the end
        for r in range(ROWS):
            largest[r] = -math.inf
            total[r] = 0
            for y in range(columns):
                sums[r, y] = 0
        for at in range(thread, TILE_M * size, threads):
            i, c = at // size, at % size
            q_tile[i, c] = q[batch, i0 + i, c] if i0 + i < n and c < d else float32(0)

        for j0 in range(0, n, keys):
            cuda.syncthreads()  # all have read the tile before: it may be overwritten
            for at in range(thread, keys * size, threads):
                j, c = at // size, at % size
                kv_tile[j, c] = k[batch, j0 + j, c] if j0 + j < n and c < d else float32(0)
            cuda.syncthreads()
            for r in range(ROWS):
                for x in range(across):
                    scores[r, x] = 0
            for c in range(size):
                for x in range(across):
                    value = kv_tile[lane + LANES * x, c]
                    for r in range(ROWS):
                        scores[r, x] += q_tile[first + r, c] * value
            for r in range(ROWS):
                highest = largest[r]
                for x in range(across):
                    if j0 + lane + LANES * x < n:
                        scores[r, x] *= scale
                    else:
                        scores[r, x] = -math.inf
                    highest = max(highest, scores[r, x])
                for step in range(5):
                    highest = max(highest, cuda.shfl_xor_sync(WHOLE_WARP, highest, 16 >> step))
                base = highest if highest > -math.inf else float32(0)  # -inf - -inf would be NaN
                factor = math.exp(largest[r] - base)
                largest[r] = highest
                total[r] *= factor
                for x in range(across):
                    weight = math.exp(scores[r, x] - base)
                    weights[first + r, lane + LANES * x] = weight
                    total[r] += weight
                for y in range(columns):
                    sums[r, y] *= factor
            cuda.syncthreads()  # all have read K, which may be overwritten; the weights may be read
            for at in range(thread, keys * size, threads):
                j, c = at // size, at % size
                kv_tile[j, c] = v[batch, j0 + j, c] if j0 + j < n and c < d else float32(0)
            cuda.syncthreads()
            for j in range(keys):
                for y in range(columns):
                    value = kv_tile[j, lane + LANES * y]
                    for r in range(ROWS):
                        sums[r, y] += weights[first + r, j] * value

        for r in range(ROWS):
            for step in range(5):
                total[r] += cuda.shfl_xor_sync(WHOLE_WARP, total[r], 16 >> step)
            i = i0 + first + r
            if i < n:
                for y in range(columns):
                    if lane + LANES * y < d:
                        o[batch, i, lane + LANES * y] = sums[r, y] / total[r]
                if lane == 0:
                    lse[batch, i] = largest[r] + math.log(total[r])

    return flash


def attend(q, k, v, o, lse, stream=0):
    """Starts the kernel on a stream of numba. Arrays may be of anything with the CUDA array interface (PyTorch, CuPy).

    Raises ValueError for a head size above 128 or a batch above 65535, the planes of a grid.
    """
    batch, n, d = q.shape
    if not 1 <= d <= 128:
        raise ValueError(f"q: got head size {d}, expected 1 to 128")
    if not 1 <= batch <= 65535:
        raise ValueError(f"q: got a batch of {batch}, expected 1 to 65535")
    size = 32 if d <= 32 else 64 if d <= 64 else 128
    grid = ((n + TILE_M - 1) // TILE_M, batch)
    kernel(size)[grid, WARPS * LANES, stream](q, k, v, o, lse, np.float32(1 / math.sqrt(d)))
