"""FlexAttention, compiled, over prompts and responses packed once, with the mask of a shared prompt.

    dualkv check 'shape=2048+8x512 heads=8:2 dim=128' --kernel verify/examples/torch_flex.py:attention

`attention` compiles for each shape; `uncompiled` is the same function without torch.compile (its forward runs on a CPU).
"""

import torch
import torch._inductor.config
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

CONVENTION = "flex"
torch._dynamo.config.recompile_limit = 1024  # each shape is one; beyond the limit it would run uncompiled,
torch._dynamo.config.accumulated_recompile_limit = 1024
torch._dynamo.config.fail_on_recompile_limit_hit = True  # and nobody would know
torch._inductor.config.compile_threads = 1  # two kernels a shape: starting processes that compile takes longer

# Else a number that changes from call to call becomes a symbol, and PyTorch (2.11, 2.15) cannot compile a score_mod that
# closes over one: the second softcap in a process fails.
_compiled = torch.compile(flex_attention, dynamic=False)


def _kernel_options(q, k):
    """For fewer than 128 rows PyTorch takes its decoding kernel, whose tile is all rows of all heads of a KV head: where
    they are more than a block of the mask (128) it has none (PyTorch 2.11: NoValidChoicesError). In fp32 it takes minutes to
    compile. The other kernel takes any number of rows."""
    rows, group = q.shape[2], q.shape[1] // k.shape[1]
    other = rows < 128 and (rows * group > 128 or q.dtype == torch.float32)
    return {"FORCE_USE_FLEX_ATTENTION": True} if other else None


def _answer(result, return_lse):
    return (result[0], result[1].lse) if return_lse else result


def attention(q, k, v, block_mask, score_mod=None, scale=None, enable_gqa=False, return_lse=False):
    result = _compiled(q, k, v, score_mod, block_mask, scale, enable_gqa, kernel_options=_kernel_options(q, k),
                       return_aux=AuxRequest(lse=True) if return_lse else None)
    return _answer(result, return_lse)


def uncompiled(q, k, v, block_mask, score_mod=None, scale=None, enable_gqa=False, return_lse=False):
    result = flex_attention(q, k, v, score_mod, block_mask, scale, enable_gqa,
                            return_aux=AuxRequest(lse=True) if return_lse else None)
    return _answer(result, return_lse)


def refuses(p):
    if min(p.dqk, p.dv) < 16:
        return "a head dimension below 16"
    if p.dtype == "fp32" and 128 < p.dqk < 256:  # PyTorch 2.11, H200: 279808 bytes, and there are 232448
        return "fp32 with a head dimension between 128 and 256: more shared memory than there is"
    return None


attention.refuses = refuses
uncompiled.backward = torch.cuda.is_available()
