"""What a kernel is told of a problem: `dualkv_problem` (ref/dualkv_kernel.h) as Python values."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _lib
from .problem import KeyRange, Segment

Bools = npt.NDArray[np.bool_]


class View:
    """A problem as the kernel sees it: packed, or replicated (each group one sequence).

    ``hq``, ``hkv``, ``dqk``, ``dv``; ``dtype`` ("bf16", "fp16", "fp32"); ``tq``, ``tk`` rows of Q and of K; ``mask``
    ("causal", "full", "prefix", "window", "chunk", "block") with ``window``, ``window_sinks``, ``chunk``, ``block``;
    ``scale``; ``softcap`` (0: off); ``alibi_slopes`` [hq] or None; ``sink``, ``grad``, ``dlse`` (bool); ``segments``.
    """

    def __init__(self, p: _lib.CProblem):
        self.hq, self.hkv, self.dqk, self.dv = int(p.hq), int(p.hkv), int(p.dqk), int(p.dv)
        self.dtype: str = _lib.DTYPES[p.dtype]
        self.tq, self.tk, self.n_groups = int(p.tq), int(p.tk), int(p.n_groups)
        self.max_q_len, self.max_k_len = int(p.max_q_len), int(p.max_k_len)
        self.mask: str = _lib.MASKS[p.mask]
        self.window, self.window_sinks = int(p.window), int(p.window_sinks)
        self.chunk, self.block = int(p.chunk), int(p.block)
        self.block_density, self.block_seed = float(p.block_density), int(p.block_seed)
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

    def rule(self, p: Any, k: Any, root: Any) -> Any:
        """Does a query at position p see a key at position k? Arrays that broadcast; root: is the row of a prompt?"""
        below = k <= p
        if self.mask == "full":
            return (below | ~below)
        if self.mask == "prefix":
            return below | root
        if self.mask == "window":
            return below & ((k > p - self.window) | (k < self.window_sinks))
        if self.mask == "chunk":
            return below & (p // self.chunk == k // self.chunk)
        if self.mask in ("causal", "block"):  # of block, the kept ones: see visible
            return below
        raise _lib.DualKVError(f"mask={self.mask} has no rule here")

    def kept_blocks(self, blocks: int) -> Bools:
        """mask=block: [blocks, blocks], which blocks of positions are kept (dualkv_block_kept)."""
        q, k = np.arange(blocks, dtype=np.uint64)[:, None], np.arange(blocks, dtype=np.uint64)[None, :]
        with np.errstate(over="ignore"):
            x = (np.uint64(self.block_seed) * np.uint64(0x9E3779B97F4A7C15) + q * np.uint64(0xD1B54A32D192ED03)
                 + k * np.uint64(0x8CB92BA72F3D8DD7) + np.uint64(0x2545F4914F6CDD1D))
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        return (x >> np.uint64(11)).astype(np.float64) < self.block_density * 2.0**53

    def visible(self, s: Segment) -> Bools:
        """[q_len, keys]: which of ``key_rows(s)`` each row of the segment sees."""
        keys = sum(r.length for r in s.ranges)
        p, k = s.context + np.arange(s.q_len)[:, None], np.arange(keys)[None, :]
        out: Bools = np.broadcast_to(self.rule(p, k, s.depth == 0), (s.q_len, keys))
        if self.mask == "block" and s.q_len and keys:
            blocks = self.kept_blocks((s.context + s.q_len - 1) // self.block + 1)
            out = out & blocks[p // self.block, np.minimum(k // self.block, len(blocks) - 1)]
        return out
