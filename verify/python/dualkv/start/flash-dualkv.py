"""my_attention: a kernel for `dualkv check --kernel THIS_FILE:my_attention`. It is right; make it yours.

Sequence n has query rows cu_seqlens_q[n]..cu_seqlens_q[n+1] and sees context group[n], then its own decoded keys; its last
query is that of the last key. +packing=every (the prompt's rows before each response's), first (before the first alone) or
separate (a call of their own). Returns o [T, H, Dv] and the natural-logarithm LSE [H, T]; the backward comes from autograd.
"""

import torch

CONVENTION = "flash-dualkv"


def _part(q, k, v, scale, causal):
    """Rows over all of these keys, the last query at the last key: o, lse."""
    s = scale * torch.einsum("qhd,khd->hqk", q.float(), k)
    if causal:
        hidden = torch.ones(s.shape[1:], dtype=torch.bool, device=q.device).triu(1 + s.shape[2] - s.shape[1])
        s = s.masked_fill(hidden, -torch.inf)
    return torch.einsum("hqk,khd->qhd", s.softmax(-1), v).to(q.dtype), s.logsumexp(-1)


def my_attention(q, k_context, v_context, k_decoded, v_decoded, cu_seqlens_q, cu_seqlens_context, cu_seqlens_decoded, group,
                 softmax_scale, causal):
    heads = q.shape[1] // k_context.shape[1]
    parts = [(q.new_zeros(0, q.shape[1], v_context.shape[2]), q.new_zeros(q.shape[1], 0, dtype=torch.float32))]
    # float32 before anything is sliced: gradients of a shared context are summed before they are rounded
    kc, vc, kd, vd = (x.float().repeat_interleave(heads, 1) for x in (k_context, v_context, k_decoded, v_decoded))
    ends, context, decoded = cu_seqlens_q.tolist(), cu_seqlens_context.tolist(), cu_seqlens_decoded.tolist()
    for n, g in enumerate(group.tolist()):
        shared, own = slice(context[g], context[g + 1]), slice(decoded[n], decoded[n + 1])
        middle = ends[n + 1] - (decoded[n + 1] - decoded[n])  # rows before are the prompt's: not even a NaN of the response
        parts.append(_part(q[ends[n]:middle], kc[shared], vc[shared], softmax_scale, causal))  # may reach them
        k, v = torch.cat([kc[shared], kd[own]]), torch.cat([vc[shared], vd[own]])
        parts.append(_part(q[middle:ends[n + 1]], k, v, softmax_scale, causal))
    return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts], 1)


my_attention.lse = True
