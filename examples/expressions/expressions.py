"""Scores and masks of known models, each in a line, compared with the formula in numpy. Prints a line for each.

    python examples/expressions/expressions.py
"""

import math

import numpy as np

import fovea
from fovea.expressions import clamp

BATCH, SEQLEN, HEADS, SIZE = 2, 96, 4, 16


def arrays(rng, queries=SEQLEN):
    """q, k and v of normal numbers."""
    return tuple(rng.standard_normal((BATCH, length, HEADS, SIZE), np.float32) for length in (queries, SEQLEN, SEQLEN))


def formula(q, k, v, score=lambda s: s, sees=True):
    """softmax(score(q k^T / sqrt(size))) v, with all scores in memory. `sees` is broadcast to (batch, head, query, key)."""
    s = score(np.einsum("bqhd,bkhd->bhqk", q, k).astype(np.float64) / math.sqrt(SIZE))
    s = np.where(sees, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v)


def positions(queries=SEQLEN):
    """Positions of queries and keys, ready to broadcast."""
    return np.arange(queries)[:, None], np.arange(SEQLEN)[None, :]


def alibi(rng):
    """ALiBi: a penalty that grows with the distance, by a slope of each head."""
    q, k, v = arrays(rng)
    slopes = (2.0 ** -np.arange(1, HEADS + 1)).astype(np.float32)
    slope = fovea.named(slopes)
    o = fovea.attend(q, k, v, score=lambda s, h, q, k: s - slope[h] * abs(q - k))
    i, j = positions()
    return o, formula(q, k, v, lambda s: s - slopes[:, None, None] * abs(i - j))


def t5_buckets():
    """T5's buckets of distances 0 to 127: one for each distance to 15, then ever wider ones."""
    n = np.arange(128)
    wide = 16 + np.log(np.maximum(n, 1) / 16) / math.log(128 / 16) * 16
    return np.where(n < 16, n, np.minimum(wide.astype(int), 31)).astype(np.int32)


def t5(rng):
    """T5: a learned number for each bucket of distances and each head. A tensor may index another."""
    q, k, v = arrays(rng)
    table, buckets = rng.standard_normal((HEADS, 32)).astype(np.float32), t5_buckets()
    tensors = {"table": table, "bucket": buckets}
    o = fovea.attend(
        q, k, v, causal=True, tensors=tensors,
        score=lambda s, h, q, k, table, bucket: s + table[h, bucket[clamp(q - k, 0, 127)]],
    )  # fmt: skip
    i, j = positions()
    return o, formula(q, k, v, lambda s: s + table[:, buckets[np.clip(i - j, 0, 127)]], j <= i)


def t5_gradient(rng):
    """The gradient of T5's table: that of each score, added up by bucket."""
    q, k, v = arrays(rng)
    table, buckets = rng.standard_normal((HEADS, 32)).astype(np.float32), t5_buckets()
    options = {
        "causal": True,
        "score": lambda s, h, q, k, table, bucket: s + table[h, bucket[clamp(q - k, 0, 127)]],
        "tensors": {"table": table, "bucket": buckets},
    }
    o, lse = fovea.attend(q, k, v, return_lse=True, **options)
    found = fovea.attend_backward(np.ones_like(o), q, k, v, o, lse, **options).dtensors["table"]

    i, j = positions()
    index = np.broadcast_to(buckets[np.clip(i - j, 0, 127)], (SEQLEN, SEQLEN))
    s = np.einsum("bqhd,bkhd->bhqk", q, k).astype(np.float64) / math.sqrt(SIZE) + table[:, index]
    p = np.exp(np.where(j <= i, s - lse[..., None], -np.inf))
    dp = np.einsum("bqhd,bkhd->bhqk", np.ones_like(o), v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    expected = np.zeros(table.shape)
    for head in range(HEADS):
        np.add.at(expected[head], index, ds[:, head].sum(0))
    return found, expected


def documents(rng):
    """Several documents in one row: a query sees its own."""
    q, k, v = arrays(rng)
    of_token = np.sort(rng.integers(0, 5, (BATCH, SEQLEN))).astype(np.int32)
    doc = fovea.named(of_token)
    o = fovea.attend(q, k, v, causal=True, sees=lambda b, q, k: doc[b, q] == doc[b, k])
    i, j = positions()
    return o, formula(q, k, v, sees=((of_token[:, :, None] == of_token[:, None, :]) & (j <= i))[:, None])


def prefix(rng):
    """A prefix language model: all queries see the prompt, and after it each sees what came before."""
    q, k, v = arrays(rng)
    lengths = np.array([40, 7], np.int32)
    o = fovea.attend(q, k, v, sees=lambda b, q, k, prompt: (k < prompt[b]) | (k <= q), tensors={"prompt": lengths})
    i, j = positions()
    return o, formula(q, k, v, sees=((j < lengths[:, None, None]) | (j <= i))[:, None])


def tree(rng):
    """Speculative decoding: the last tokens are a tree of guesses, in the order of a walk that visits a node before those
    under it. end[i] is where the walk leaves what is under i. A guess sees the text before, its ancestors and itself."""
    parents = [-1, 0, 1, 1, 0, 4, -1, 6]
    guesses = len(parents)
    end = np.arange(1, guesses + 1, dtype=np.int32)
    for node in reversed(range(guesses)):
        if parents[node] >= 0:
            end[parents[node]] = max(end[parents[node]], end[node])
    q, k, v = arrays(rng, guesses)

    def sees(q, k, nq, nk, end):
        guess = k - (nk - nq)
        return (guess < 0) | ((guess <= q) & (q < end[guess]))  # what | does not need is not read

    o = fovea.attend(q, k, v, sees=sees, tensors={"end": end})
    seen = np.ones((guesses, SEQLEN), bool)
    for node in range(guesses):
        ancestors, at = {node}, node
        while (at := parents[at]) >= 0:
            ancestors.add(at)
        seen[node, SEQLEN - guesses :] = [other in ancestors for other in range(guesses)]
    return o, formula(q, k, v, sees=seen)


def dilated(rng):
    """Dilated blocks: of blocks of 16 tokens, every fourth is seen."""
    q, k, v = arrays(rng)
    o = fovea.attend(q, k, v, sees=lambda q, k: ((q // 16 - k // 16) % 4 == 0) & (k <= q))
    i, j = positions()
    return o, formula(q, k, v, sees=((i // 16 - j // 16) % 4 == 0) & (j <= i))


def graph(rng):
    """Graphormer: a learned number for the distance between two nodes of a graph, which is looked up for each pair."""
    q, k, v = arrays(rng)
    hops = rng.integers(0, 6, (BATCH, SEQLEN, SEQLEN)).astype(np.uint8)
    table = rng.standard_normal((HEADS, 6)).astype(np.float32)
    distance, by_distance = fovea.named(hops), fovea.named(table)
    o = fovea.attend(q, k, v, score=lambda s, b, h, q, k: s + by_distance[h, distance[b, q, k]])
    return o, formula(q, k, v, lambda s: s + table[:, hops].swapaxes(0, 1))


def temperature(rng):
    """A learned temperature of each head, and its gradient."""
    q, k, v = arrays(rng)
    values = np.array([0.5, 1, 1.5, 2], np.float32)
    options = {"score": lambda s, h, t: s * t[h], "tensors": {"t": values}}
    o, lse = fovea.attend(q, k, v, return_lse=True, **options)
    found = fovea.attend_backward(np.ones_like(o), q, k, v, o, lse, **options).dtensors["t"]

    s = np.einsum("bqhd,bkhd->bhqk", q, k).astype(np.float64) / math.sqrt(SIZE)
    p = np.exp(s * values[:, None, None] - lse[..., None])
    dp = np.einsum("bqhd,bkhd->bhqk", np.ones_like(o), v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    return found, (ds * s).sum((0, 2, 3))


EXAMPLES = (alibi, t5, t5_gradient, documents, prefix, tree, dilated, graph, temperature)


def main():
    for example in EXAMPLES:
        found, expected = example(np.random.default_rng(0))
        print(f"{example.__name__:12} largest difference {abs(found - expected).max():.1e}")


if __name__ == "__main__":
    main()
