"""my_attention: a kernel for `dualkv check --kernel THIS_FILE:my_attention`. It is right; make it yours.

q [Tq, H, D], k, v [Tk, Hkv, D] are packed: per group the prompt, then its responses, each once. `problem` says what each
segment sees. Returns o [Tq, H, Dv] and the natural-logarithm LSE [H, Tq]. bfloat16 arrives as float32; what is returned is
rounded by the harness.
"""

import numpy as np

CONVENTION = "packed"


def _probabilities(q, k, problem, scale, segment, head):
    """P [rows, keys], LSE [rows], rows of q, rows of k of one segment and head."""
    rows, keys = problem.query_rows(segment), problem.key_rows(segment)
    kv = head // (problem.hq // problem.hkv)
    s = scale * (q[rows, head] @ k[keys, kv].T)
    s = np.where(problem.visible(segment), s, -np.inf)
    top = s.max(1, initial=-np.inf, keepdims=True)
    p = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = p.sum(1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, top + np.log(total), -np.inf)[:, 0]
    return p / np.where(total > 0, total, 1), lse, rows, keys, kv


def my_attention(q, k, v, problem, scale):
    o = np.zeros((problem.tq, problem.hq, problem.dv), np.float32)
    lse = np.full((problem.hq, problem.tq), -np.inf, np.float32)
    for segment in problem.segments:
        for head in range(problem.hq):
            p, l, rows, keys, kv = _probabilities(q, k, problem, scale, segment, head)
            o[rows, head], lse[head, rows] = p @ v[keys, kv], l
    return o, lse


def my_attention_backward(q, k, v, o, lse, do, problem, scale):
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for segment in problem.segments:
        for head in range(problem.hq):
            p, _, rows, keys, kv = _probabilities(q, k, problem, scale, segment, head)
            dp = do[rows, head] @ v[keys, kv].T
            ds = p * (dp - (do[rows, head] * o[rows, head]).sum(1, keepdims=True))
            dq[rows, head] += scale * (ds @ k[keys, kv])
            dk[keys, kv] += scale * (ds.T @ q[rows, head])
            dv[keys, kv] += p.T @ do[rows, head]
    return dq, dk, dv


def refuses(problem):
    """None, or why this problem is not supported."""
    if problem.softcap or problem.alibi_slopes is not None or problem.sink:
        return "no softcap, ALiBi or sink logit yet"
    return "no gradient through LSE yet" if problem.dlse else None


my_attention.refuses = refuses
