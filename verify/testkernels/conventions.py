"""Right NumPy functions of the conventions, forward and backward, for the tests (which must not need torch)."""

import numpy as np


def _forward(q, k, v, scale, sees):
    """q [n, H, D], k, v [m, Hkv, D], sees [n, m]: o [n, H, Dv], lse [H, n]."""
    group = q.shape[1] // k.shape[1]
    s = scale * np.einsum("nhd,mhd->hnm", q, np.repeat(k, group, 1), dtype=np.float64)
    s = np.where(sees, s, -np.inf)
    top = np.where(np.isneginf(s.max(2, initial=-np.inf)), 0, s.max(2, initial=-np.inf))
    p = np.exp(s - top[..., None])
    total = p.sum(2)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    p /= np.where(total > 0, total, 1)[..., None]
    return np.einsum("hnm,mhd->nhd", p, np.repeat(v, group, 1)), lse


def _backward(q, k, v, o, lse, do, scale, sees):
    group, kv = q.shape[1] // k.shape[1], k.shape[1]
    wide_k, wide_v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    s = scale * np.einsum("nhd,mhd->hnm", q, wide_k, dtype=np.float64)
    p = np.where(sees, np.exp(s - np.where(np.isneginf(lse), 0, lse)[..., None]), 0)
    ds = p * (np.einsum("nhd,mhd->hnm", do, wide_v) - (do * o).sum(2).T[..., None])

    def narrow(x):
        return x.reshape(x.shape[0], kv, group, x.shape[2]).sum(2)

    return (scale * np.einsum("hnm,mhd->nhd", ds, wide_k), narrow(scale * np.einsum("hnm,nhd->mhd", ds, q)),
            narrow(np.einsum("hnm,nhd->mhd", p, do)))


def _last_aligned(n, m, causal):
    return (np.arange(m)[None] <= np.arange(n)[:, None] + m - n) if causal else np.ones((n, m), bool)


# ---- [B, H, S, D] ----


def _rows(x):
    return np.swapaxes(x, 0, 1)


def _sees(q, k, is_causal, attn_mask):
    return attn_mask if attn_mask is not None else _last_aligned(q.shape[2], k.shape[2], is_causal)


def _batched(q, k, v, is_causal, attn_mask, scale):
    parts = [_forward(_rows(a), _rows(b), _rows(c), scale, _sees(q, k, is_causal, attn_mask)) for a, b, c in zip(q, k, v)]
    return np.stack([_rows(o) for o, _ in parts]), np.stack([lse for _, lse in parts]).astype(np.float32)


def _batched_backward(q, k, v, o, lse, do, is_causal, attn_mask, scale):
    sees = _sees(q, k, is_causal, attn_mask)
    parts = [_backward(*(_rows(x) for x in (a, b, c, d)), e, _rows(f), scale, sees)
             for a, b, c, d, e, f in zip(q, k, v, o, lse, do)]
    return tuple(np.stack([_rows(p[i]) for p in parts]) for i in range(3))


def sdpa(q, k, v, is_causal, attn_mask, scale, enable_gqa):
    return _batched(q, k, v, is_causal, attn_mask, scale)


def sdpa_backward(q, k, v, o, lse, do, is_causal, attn_mask, scale):
    return _batched_backward(q, k, v, o, lse, do, is_causal, attn_mask, scale)


def no_lse(q, k, v, is_causal, attn_mask, scale, enable_gqa):
    return _batched(q, k, v, is_causal, attn_mask, scale)[0]


def cascade(q, k, v, is_causal, scale, enable_gqa):
    return _batched(q, k, v, is_causal, None, scale)


def cascade_backward(q, k, v, o, lse, do, is_causal, scale):
    return _batched_backward(q, k, v, o, lse, do, is_causal, None, scale)


# ---- [T, H, D] ----


def _varlen(pieces, q, k, v, causal, scale):
    o, lse = np.zeros(q.shape[:2] + v.shape[2:]), np.zeros((q.shape[1], q.shape[0]), np.float32)
    for a, b, keys in pieces:
        o[a:b], lse[:, a:b] = _forward(q[a:b], k[keys], v[keys], scale, _last_aligned(b - a, len(keys), causal))
    return o, lse


def _varlen_backward(pieces, q, k, v, o, lse, do, causal, scale):
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    for a, b, keys in pieces:
        sees = _last_aligned(b - a, len(keys), causal)
        x, y, z = _backward(q[a:b], k[keys], v[keys], o[a:b], lse[:, a:b], do[a:b], scale, sees)
        dq[a:b] += x
        dk[keys] += y
        dv[keys] += z
    return dq, dk, dv


def _sequences(cu_q, cu_k):
    return [(a, b, np.arange(c, d)) for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:])]


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
    return _varlen(_sequences(cu_seqlens_q, cu_seqlens_k), q, k, v, causal, softmax_scale)


def varlen_backward(q, k, v, o, lse, do, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal):
    return _varlen_backward(_sequences(cu_seqlens_q, cu_seqlens_k), q, k, v, o, lse, do, causal, softmax_scale)


def _decoded(cu_q, context, decoded, group):
    shared = int(context[-1])
    return [(cu_q[n], cu_q[n + 1], np.concatenate([np.arange(context[g], context[g + 1]),
                                                   shared + np.arange(decoded[n], decoded[n + 1])]))
            for n, g in enumerate(group)]


def dualkv(q, k_context, v_context, k_decoded, v_decoded, cu_seqlens_q, cu_seqlens_context, cu_seqlens_decoded, group,
           softmax_scale, causal):
    k, v = np.concatenate([k_context, k_decoded]), np.concatenate([v_context, v_decoded])
    return _varlen(_decoded(cu_seqlens_q, cu_seqlens_context, cu_seqlens_decoded, group), q, k, v, causal, softmax_scale)


def dualkv_backward(q, k_context, v_context, k_decoded, v_decoded, o, lse, do, cu_seqlens_q, cu_seqlens_context,
                    cu_seqlens_decoded, group, softmax_scale, causal):
    k, v = np.concatenate([k_context, k_decoded]), np.concatenate([v_context, v_decoded])
    pieces = _decoded(cu_seqlens_q, cu_seqlens_context, cu_seqlens_decoded, group)
    dq, dk, dv = _varlen_backward(pieces, q, k, v, o, lse, do, causal, softmax_scale)
    n = len(k_context)
    return dq, dk[:n], dv[:n], dk[n:], dv[n:]


sdpa.lse = varlen.lse = dualkv.lse = True
