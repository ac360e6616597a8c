"""What a kernel is told of a problem: `dualkv_problem` (ref/dualkv_kernel.h) as Python values."""

from __future__ import annotations

import ctypes
from functools import cached_property

import numpy as np
import numpy.typing as npt

from . import _lib
from .problem import KeyRange, Segment

Bools = npt.NDArray[np.bool_]


class View:
    """A problem as the kernel sees it: packed, or replicated (each group one sequence).

    ``hq``, ``hkv``, ``dqk``, ``dv``; ``dtype`` ("bf16", "fp16", "fp32"); ``tq``, ``tk`` rows of Q and of K; ``mask``
    (its word, as in `dualkv list masks`) with ``window``, ``window_sinks``, ``chunk``, ``block``;
    ``scale``; ``softcap`` (0: off); ``alibi_slopes`` [hq] or None; ``sink``, ``grad``, ``dlse`` (bool); ``segments``.
    """

    def __init__(self, p: _lib.CProblem):
        self.hq, self.hkv, self.dqk, self.dv = int(p.hq), int(p.hkv), int(p.dqk), int(p.dv)
        self.dtype: str = _lib.DTYPES[p.dtype]
        self.tq, self.tk, self.n_groups = int(p.tq), int(p.tk), int(p.n_groups)
        self.max_q_len, self.max_k_len = int(p.max_q_len), int(p.max_k_len)
        self.mask: str = _lib.mask_name(p.mask)
        self.window, self.window_sinks = int(p.window), int(p.window_sinks)
        self.chunk, self.block = int(p.chunk), int(p.block)
        self.block_density, self.block_seed = float(p.block_density), int(p.block_seed)
        self._mask = _lib.CProblem(mask=p.mask, window=p.window, window_sinks=p.window_sinks, chunk=p.chunk, block=p.block,
                                   block_density=p.block_density, block_seed=p.block_seed)
        self.scale, self.softcap = float(p.scale), float(p.softcap)
        self.alibi_slopes = np.array(p.alibi_slopes[:self.hq], np.float32) if p.alibi else None
        self.sink, self.grad, self.dlse = bool(p.sink), bool(p.grad), bool(p.dlse)
        ranges = [KeyRange(r.k_start, r.len, r.pos) for r in p.ranges[:p.n_ranges]]
        self.segments = tuple(
            Segment(i, s.group, s.parent, s.depth, s.q_start, s.q_len, s.k_start, s.k_len, s.context,
                    tuple(ranges[s.range_begin:s.range_begin + s.range_count]))
            for i, s in enumerate(p.segments[:p.n_segments]))

    @cached_property
    def groups(self) -> list[list[Segment]]:
        """The segments of each group, in order."""
        out: list[list[Segment]] = [[] for _ in range(self.n_groups)]
        for s in self.segments:
            out[s.group].append(s)
        return out

    def query_rows(self, s: Segment) -> npt.NDArray[np.int64]:
        """Rows of Q of a segment, in order of position."""
        return np.arange(s.q_start, s.q_start + s.q_len)

    def key_rows(self, s: Segment) -> npt.NDArray[np.int64]:
        """Rows of K and V that a segment sees, in order of position; the mask may hide some from a row."""
        return np.concatenate([np.arange(r.start, r.start + r.length) for r in s.ranges] or [np.empty(0, np.int64)])

    def visible(self, s: Segment) -> Bools:
        """[q_len, keys]: which of ``key_rows(s)`` each row of the segment sees."""
        out = np.empty((s.q_len, s.context + s.k_len), np.uint8)
        segment = _lib.Segment(group=s.group, parent=s.parent, depth=s.depth, q_len=s.q_len, k_len=s.k_len, context=s.context)
        _lib.call("dualkv_visible", ctypes.byref(self._mask), ctypes.byref(segment), out.ctypes.data)
        return out.view(np.bool_)
