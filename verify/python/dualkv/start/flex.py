"""my_attention: a kernel for `dualkv check --kernel THIS_FILE:my_attention`. It is right; make it yours.

Packed: q [1, H, Tq, D], k, v [1, Hkv, Tk, D]; `block_mask` says what each row of prompt and responses sees. On a CPU
FlexAttention has no backward (grad=off lines are judged there); with a GPU wrap it in torch.compile.
"""

import torch
import torch._dynamo.config
from torch.nn.attention.flex_attention import flex_attention

CONVENTION = "flex"
torch._dynamo.config.recompile_limit = 1024  # each shape is one; beyond the limit it would run uncompiled,
torch._dynamo.config.accumulated_recompile_limit = 1024
torch._dynamo.config.fail_on_recompile_limit_hit = True  # and nobody would know
# Static: else the second softcap of a process is a symbol, and PyTorch compiles no score_mod that closes over one
COMPILED = torch.compile(flex_attention, dynamic=False) if torch.cuda.is_available() else flex_attention


def my_attention(q, k, v, block_mask, score_mod=None, scale=None, enable_gqa=False):
    return COMPILED(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, enable_gqa=enable_gqa)


my_attention.backward = torch.cuda.is_available()
