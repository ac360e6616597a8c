"""The pair of calls of a prefix grouper, on PyTorch's attention: the prompt's own rows, then each response's rows over
prompt and response (a causal mask aligned to the last key).

    dualkv check ci --kernel verify/examples/torch_grouper.py:attention

`attention` leaves the backend to PyTorch, which on an H200 takes cuDNN's for the first call and flash for the second: two
arithmetics. `flash` has flash for both.
"""

import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

CONVENTION = "prefix-grouper"


def attention(q, k, v, is_causal=False, attn_mask=None, scale=None, enable_gqa=False):
    if attn_mask is not None:
        attn_mask = causal_lower_right(q.shape[-2], k.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale,
                                          enable_gqa=enable_gqa)


def flash(q, k, v, is_causal=False, attn_mask=None, scale=None, enable_gqa=False):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return attention(q, k, v, is_causal, attn_mask, scale, enable_gqa)


def refuses(p):
    return None if p.mask == "causal" else f"mask={p.mask}: its second call is causal"


def refuses_flash(p):
    if p.dtype == "fp32":
        return "fp32"
    return "dims of keys and values differ" if p.dqk != p.dv else refuses(p)


attention.refuses = refuses
flash.refuses = refuses_flash
