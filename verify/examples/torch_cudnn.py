"""cuDNN's attention (CUDNN_ATTENTION of PyTorch's scaled_dot_product_attention), one sequence a response.

    dualkv check ci --kernel verify/examples/torch_cudnn.py:attention
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

CONVENTION = "sdpa"


def attention(q, k, v, is_causal=False, scale=None, enable_gqa=False):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


def refuses(p):
    if not torch.cuda.is_available():
        return "no CUDA device"
    if p.dtype == "fp32":
        return "fp32"
    if p.dqk != p.dv or p.dqk % 8 or p.dqk > 128:
        return "head dimensions that are not equal, a multiple of 8 and at most 128"
    if any(s.q_len == 1 for s in p.segments):
        return "a sequence of one token"
    return None


attention.refuses = refuses
