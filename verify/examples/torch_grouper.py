"""The pair of calls of a prefix grouper, on PyTorch's attention: the prompt's own rows, then each response's rows over
prompt and response (a causal mask aligned to the last key).

    dualkv check ci --kernel verify/examples/torch_grouper.py:attention
"""

import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

CONVENTION = "prefix-grouper"


def attention(q, k, v, is_causal=False, attn_mask=None, scale=None, enable_gqa=False):
    if attn_mask is not None:
        attn_mask = causal_lower_right(q.shape[-2], k.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale,
                                          enable_gqa=enable_gqa)


def refuses(p):
    return None if p.mask == "causal" else f"mask={p.mask}: its second call is causal"


attention.refuses = refuses
