"""FlexAttention, compiled, over prompts and responses packed once, with the mask of a shared prompt.

    dualkv check 'shape=2048+8x512 heads=8:2 dim=128' --kernel verify/examples/torch_flex.py:attention

`attention` compiles for each shape; `uncompiled` is the same function without torch.compile (its forward runs on a CPU).
"""

import torch
import torch._inductor.config
from torch.nn.attention.flex_attention import flex_attention

CONVENTION = "flex"
torch._dynamo.config.recompile_limit = 1024  # each shape is one; beyond the limit it would run uncompiled,
torch._dynamo.config.accumulated_recompile_limit = 1024
torch._dynamo.config.fail_on_recompile_limit_hit = True  # and nobody would know
torch._inductor.config.compile_threads = 1  # two kernels a shape: starting processes that compile takes longer
_compiled = torch.compile(flex_attention)


def attention(q, k, v, block_mask, score_mod=None, scale=None, enable_gqa=False, return_lse=False):
    return _compiled(q, k, v, score_mod, block_mask, scale, enable_gqa, return_lse)


def uncompiled(q, k, v, block_mask, score_mod=None, scale=None, enable_gqa=False, return_lse=False):
    return flex_attention(q, k, v, score_mod, block_mask, scale, enable_gqa, return_lse)


uncompiled.backward = torch.cuda.is_available()
