"""Attention and its gradients in plain Python, one head: what the program's results are compared with."""
import math


def weights(q, k, scale=None, causal=False, window=(-1, -1), softcap=0, bias=None, mask=None, slope=0, sink=None):
    """Rows of weights, and the lse of each row. q and k are lists of rows; bias and mask are indexed [i][j]."""
    scale = scale or 1 / math.sqrt(len(q[0]))
    shift = len(k) - len(q)
    rows, lses = [], []
    for i, q_row in enumerate(q):
        scores = []
        for j, k_row in enumerate(k):
            seen = not causal or j <= i + shift
            seen = seen and (window[0] < 0 or j >= i + shift - window[0])
            seen = seen and (window[1] < 0 or j <= i + shift + window[1])
            seen = seen and (mask is None or mask[i][j])
            s = scale * sum(a * b for a, b in zip(q_row, k_row))
            if softcap:
                s = softcap * math.tanh(s / softcap)
            s -= slope * abs(i + shift - j)
            s += bias[i][j] if bias else 0
            scores.append(s if seen else -math.inf)
        total = sum(math.exp(s) for s in scores) + (math.exp(sink) if sink is not None else 0)
        rows.append([math.exp(s) / total if total else 0.0 for s in scores])
        lses.append(math.log(total) if total else -math.inf)
    return rows, lses


def output(p, v):
    return [[sum(w * v_row[c] for w, v_row in zip(row, v)) for c in range(len(v[0]))] for row in p]


def gradients(q, k, v, d_o, scale=None, **terms):
    """dq, dk, dv; no softcap."""
    scale = scale or 1 / math.sqrt(len(q[0]))
    p, _ = weights(q, k, scale, **terms)
    o = output(p, v)
    dq = [[0.0] * len(q[0]) for _ in q]
    dk = [[0.0] * len(k[0]) for _ in k]
    dv = [[0.0] * len(v[0]) for _ in v]
    for i, row in enumerate(p):
        delta = sum(a * b for a, b in zip(d_o[i], o[i]))
        for j, w in enumerate(row):
            ds = w * (sum(a * b for a, b in zip(d_o[i], v[j])) - delta) * scale
            for c in range(len(q[0])):
                dq[i][c] += ds * k[j][c]
                dk[j][c] += ds * q[i][c]
            for c in range(len(v[0])):
                dv[j][c] += w * d_o[i][c]
    return dq, dk, dv
