"""my_attention: a kernel for `dualkv check --kernel THIS_FILE:my_attention`. It is right; make it yours.

Called for parts of the keys: rows over the prompt alone (is_causal false), rows over their own segment (is_causal true);
the harness merges the parts by their LSE. q [B, H, S, D], k, v [B, Hkv, S, D]; returns o [B, H, S, Dv] and the
natural-logarithm LSE [B, H, S]; the backward comes from autograd, through both.
"""

import torch

CONVENTION = "cascade"


def my_attention(q, k, v, is_causal, scale, enable_gqa):
    group = q.shape[1] // k.shape[1]
    s = scale * q.float() @ k.float().repeat_interleave(group, 1).transpose(-1, -2)
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    return (s.softmax(-1) @ v.float().repeat_interleave(group, 1)).to(q.dtype), s.logsumexp(-1)
