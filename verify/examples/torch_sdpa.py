"""Backends of PyTorch's scaled_dot_product_attention, one sequence a response: flash (FLASH_ATTENTION) and
cudnn (CUDNN_ATTENTION).

    dualkv check ci --kernel verify/examples/torch_sdpa.py:flash --kernel verify/examples/torch_sdpa.py:cudnn
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

CONVENTION = "sdpa"


def flash(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


def cudnn(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


def refuses(p):
    if not torch.cuda.is_available():
        return "no CUDA device"
    if p.dtype == "fp32":
        return "fp32"
    return "dims of keys and values differ" if p.dqk != p.dv else None


def refuses_cudnn(p):
    if p.dqk % 8 or p.dqk > 128:
        return "a head dimension that is no multiple of 8 or above 128"
    return "a sequence of one token" if any(s.q_len == 1 for s in p.segments) else refuses(p)


flash.refuses = refuses
cudnn.refuses = refuses_cudnn
