"""my_attention: a kernel for `dualkv check --kernel THIS_FILE:my_attention`. It is right; make it yours.

One ordinary sequence a response: q [B, H, S, D], k, v [B, Hkv, S, D]. `is_causal`, or a boolean `attn_mask` [S, S] (true:
seen). The backward comes from autograd. A keyword that the function does not take is not asked of it.
"""

import torch.nn.functional as F

CONVENTION = "sdpa"


def my_attention(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale,
                                          enable_gqa=enable_gqa)
