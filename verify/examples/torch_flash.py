"""PyTorch's flash attention (FLASH_ATTENTION of scaled_dot_product_attention), one sequence a response.

    dualkv check ci --kernel verify/examples/torch_flash.py:attention
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

CONVENTION = "sdpa"


def attention(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


def refuses(p):
    if not torch.cuda.is_available():
        return "no CUDA device"
    if p.dtype == "fp32":
        return "fp32"
    return "dims of keys and values differ" if p.dqk != p.dv else None


attention.refuses = refuses
