"""Functions to judge, under convention `packed`: q [Tq, Hq, D], k, v [Tk, Hkv, D], problem."""

import os
import signal
import time

import numpy as np


def weights(q, k, problem, s, scale):
    """Of one segment: rows of K that it sees, heads' keys, softmax [H, rows, keys], LSE [H, rows]."""
    keys, group = problem.key_rows(s), problem.hq // problem.hkv
    rows = slice(s.q_start, s.q_start + s.q_len)
    kk = np.repeat(k[keys], group, axis=1)
    x = scale * np.einsum("qhd,khd->hqk", q[rows].astype(np.float64), kk)
    x = np.where(problem.visible(s), x, -np.inf)
    top = x.max(-1, keepdims=True, initial=-np.inf)
    with np.errstate(invalid="ignore", divide="ignore"):
        e = np.where(np.isneginf(x), 0, np.exp(x - top))
        lse = top[..., 0] + np.log(e.sum(-1))
        p = np.divide(e, e.sum(-1, keepdims=True), out=np.zeros_like(e), where=e.sum(-1, keepdims=True) > 0)
    return rows, keys, kk, p, np.where(np.isnan(lse), -np.inf, lse)


def attention(q, k, v, *, problem, factor=1.0):
    o, lse = np.zeros((problem.tq, problem.hq, problem.dv)), np.zeros((problem.hq, problem.tq))
    for s in problem.segments:
        rows, keys, _, p, lse[:, s.q_start:s.q_start + s.q_len] = weights(q, k, problem, s, problem.scale * factor)
        o[rows] = np.einsum("hqk,khd->qhd", p, np.repeat(v[keys], problem.hq // problem.hkv, axis=1))
    return o, lse


def attention_backward(q, k, v, o, lse, do, *, problem, factor=1.0):
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    group, scale = problem.hq // problem.hkv, problem.scale * factor
    for s in problem.segments:
        rows, keys, kk, p, _ = weights(q, k, problem, s, scale)
        g = do[rows].astype(np.float64)
        dp = np.einsum("qhd,khd->hqk", g, np.repeat(v[keys], group, axis=1))
        ds = scale * p * (dp - np.einsum("qhd,qhd->hq", g, o[rows].astype(np.float64))[..., None])
        dq[rows] = np.einsum("hqk,khd->qhd", ds, kk)
        dk[keys] += np.einsum("hqk,qhd->khd", ds, q[rows]).reshape(len(keys), problem.hkv, group, q.shape[2]).sum(2)
        dv[keys] += np.einsum("hqk,qhd->khd", p, g).reshape(len(keys), problem.hkv, group, v.shape[2]).sum(2)
    return dq, dk, dv


def refuse_modifiers(problem):
    return "softcap, ALiBi" if problem.softcap or problem.alibi_slopes is not None else None


attention.refuses = refuse_modifiers


def wrong_scale(q, k, v, *, problem):
    return attention(q, k, v, problem=problem, factor=1.1)


def raises(q, k, v, *, problem):
    raise ZeroDivisionError("on purpose")


def crashes(q, k, v, *, problem):
    os.abort()


def leaves(q, k, v, *, problem):
    os._exit(7)


def exits(q, k, v, *, problem):
    raise SystemExit(3)


def interrupted(q, k, v, *, problem):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(20)


def wrong_shape(q, k, v, *, problem):
    o, lse = attention(q, k, v, problem=problem)
    return o[1:], lse


def wrong_dtype(q, k, v, *, problem):
    o, lse = attention(q, k, v, problem=problem)
    return o.astype(int), lse


def no_lse(q, k, v, *, problem):
    return attention(q, k, v, problem=problem)[0]


def refuses_all(q, k, v, *, problem):
    return attention(q, k, v, problem=problem)


refuses_all.refuses = lambda problem: "nothing is good enough"
