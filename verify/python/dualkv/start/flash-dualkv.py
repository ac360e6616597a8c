"""my_attention: a kernel for `dualkv check --kernel THIS_FILE:my_attention`. It is right; make it yours.

Sequence n has query rows cu_seqlens_q[n]..cu_seqlens_q[n+1] and sees context group[n], then its own decoded keys; its last
query is that of the last key. +packing=every (the prompt's rows before each response's), first (before the first alone) or
separate (a call of their own). Returns o [T, H, Dv] and the natural-logarithm LSE [H, T]; the backward comes from autograd.
"""

import torch

CONVENTION = "flash-dualkv"


def my_attention(q, k_context, v_context, k_decoded, v_decoded, cu_seqlens_q, cu_seqlens_context, cu_seqlens_decoded, group,
                 softmax_scale, causal):
    heads = q.shape[1] // k_context.shape[1]
    o, lse = [q.new_zeros(0, q.shape[1], v_context.shape[2])], [q.new_zeros(q.shape[1], 0, dtype=torch.float32)]
    # float32 before anything is sliced: gradients of a shared context are summed before they are rounded
    kc, vc, kd, vd = (x.float().repeat_interleave(heads, 1) for x in (k_context, v_context, k_decoded, v_decoded))
    ends, context, decoded = cu_seqlens_q.tolist(), cu_seqlens_context.tolist(), cu_seqlens_decoded.tolist()
    for n, g in enumerate(group.tolist()):
        keys = torch.cat([kc[context[g]:context[g + 1]], kd[decoded[n]:decoded[n + 1]]])
        values = torch.cat([vc[context[g]:context[g + 1]], vd[decoded[n]:decoded[n + 1]]])
        s = softmax_scale * torch.einsum("qhd,khd->hqk", q[ends[n]:ends[n + 1]].float(), keys)
        if causal:
            hidden = torch.ones(s.shape[1:], dtype=torch.bool, device=q.device).triu(1 + s.shape[2] - s.shape[1])
            s = s.masked_fill(hidden, -torch.inf)
        o.append(torch.einsum("hqk,khd->qhd", s.softmax(-1), values).to(q.dtype))
        lse.append(s.logsumexp(-1))
    return torch.cat(o), torch.cat(lse, 1)


my_attention.lse = True
