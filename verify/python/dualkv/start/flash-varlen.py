"""my_attention: a kernel for `dualkv check --kernel THIS_FILE:my_attention`. It is right; make it yours.

One ordinary sequence a response, one after another: q [T, H, D], k, v [T, Hkv, D]; sequence i has rows
cu_seqlens_q[i]..cu_seqlens_q[i+1] of q. The last query is that of the last key. Returns o [T, H, Dv] and the
natural-logarithm LSE [H, T]; the backward comes from autograd.
"""

import torch

CONVENTION = "flash-varlen"


def my_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal):
    group = q.shape[1] // k.shape[1]
    o, lse = [q.new_zeros(0, q.shape[1], v.shape[2])], [q.new_zeros(q.shape[1], 0, dtype=torch.float32)]
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for a, b, c, d in zip(q_ends, q_ends[1:], k_ends, k_ends[1:]):
        keys, values = (x[c:d].float().repeat_interleave(group, 1) for x in (k, v))
        s = softmax_scale * torch.einsum("qhd,khd->hqk", q[a:b].float(), keys)
        if causal:
            s = s.masked_fill(torch.ones(s.shape[1:], dtype=torch.bool, device=q.device).triu(1 + d - c - (b - a)), -torch.inf)
        o.append(torch.einsum("hqk,khd->qhd", s.softmax(-1), values).to(q.dtype))
        lse.append(s.logsumexp(-1))
    return torch.cat(o), torch.cat(lse, 1)


my_attention.lse = True
