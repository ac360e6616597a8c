"""Problem lines as objects: what a line means in the packed and in the replicated layout.

A line such as ``shape=200+3x77 heads=8:2 dim=64`` names groups of token segments: a prompt, its responses, their branches.
*Packed*: per group the segments in depth-first order, each once. *Replicated*: one ordinary sequence for each segment
that has queries: what it sees, then its own tokens. The expansion E maps packed rows to replicated rows.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Iterable, Literal, Union, cast

import numpy as np
import numpy.typing as npt

from . import _lib

Layout = Literal["packed", "replicated"]
Rows = Literal["q", "k"]

_LAYOUTS = {"packed": _lib.PACKED, "replicated": _lib.REPLICATED}


def layout_number(layout: str) -> int:
    """The library's number of a layout's name."""
    if layout not in _LAYOUTS:
        raise ValueError(f"layout={layout!r}: it is 'packed' or 'replicated'")
    return _LAYOUTS[layout]


@dataclass(frozen=True)
class KeyRange:
    """``length`` rows of K and V from packed row ``start``; the first has position ``position``."""

    start: int
    length: int
    position: int


@dataclass(frozen=True)
class Segment:
    """One segment: a prompt (parent -1), a response, a branch. Its queries are rows ``q_start..q_start+q_len`` of Q (none
    where it is key-only), its own keys rows ``k_start..k_start+k_len`` of K. ``ranges``: all the keys that it sees, in
    order of position, its own last. ``context``: tokens that it sees before its own."""

    index: int
    group: int
    parent: int
    depth: int
    q_start: int
    q_len: int
    k_start: int
    k_len: int
    context: int
    ranges: tuple[KeyRange, ...]


@dataclass(frozen=True)
class Expansion:
    """E as rows: ``q`` [replicated Tq] and ``k`` [replicated Tk] give the packed row that each replicated row copies;
    ``own`` [replicated Tq] is true where a query row is its segment's own (it carries dO and dLSE)."""

    q: npt.NDArray[np.int64]
    k: npt.NDArray[np.int64]
    own: npt.NDArray[np.bool_]


class Problem:
    """A parsed problem line.

    >>> p = Problem("shape=4+2x3 heads=2:1 dim=16")
    >>> str(p), p.tq, p.cu_seqlens_k.tolist()
    ('shape=4+2x3 heads=2:1 dim=16', 10, [0, 4, 11, 18])

    Attributes: ``line`` (canonical), ``hq``, ``hkv`` (heads of queries, of keys), ``dqk``, ``dv`` (head dimensions),
    ``dtype`` ("bf16", "fp16", "fp32"), ``mask`` (its word, as in `dualkv list masks`) with ``window``,
    ``window_sinks``, ``chunk``, ``block``, ``block_density``, ``block_seed``; ``scale``, ``softcap`` (0: off), ``alibi``,
    ``sink``, ``grad``, ``dlse``; ``tq``, ``tk``: rows of Q and of K in the packed layout.

    Raises LineError (with the position of what is wrong) and RefusedError (an inadmissible mask).
    """

    def __init__(self, line: str):
        if not isinstance(line, str):
            raise TypeError(f"a problem line is a str, not {type(line).__name__}")
        self._handle = ctypes.c_void_p()
        _lib.call("dualkv_open", _bytes(line), ctypes.byref(self._handle))
        weakref.finalize(self, _lib.lib().dualkv_close, self._handle)
        self.line: str = _lib.lib().dualkv_line(self._handle).decode()
        v = self.view("packed")
        self.hq, self.hkv, self.dqk, self.dv = int(v.hq), int(v.hkv), int(v.dqk), int(v.dv)
        self.dtype: str = _lib.DTYPES[v.dtype]
        self.mask: str = _lib.mask_name(v.mask)
        self.window, self.window_sinks = int(v.window), int(v.window_sinks)
        self.chunk, self.block = int(v.chunk), int(v.block)
        self.block_density, self.block_seed = float(v.block_density), int(v.block_seed)
        self.scale, self.softcap = float(v.scale), float(v.softcap)
        self.alibi, self.sink, self.grad, self.dlse = bool(v.alibi), bool(v.sink), bool(v.grad), bool(v.dlse)
        self.tq, self.tk = int(v.tq), int(v.tk)

    def __str__(self) -> str:
        return self.line

    def __repr__(self) -> str:
        return f"Problem({self.line!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Problem) and other.line == self.line

    def __hash__(self) -> int:
        return hash(self.line)

    def __reduce__(self) -> tuple[Any, ...]:
        return Problem, (self.line,)

    def view(self, layout: Layout = "packed") -> _lib.CProblem:
        """The ``dualkv_problem`` of ref/dualkv_kernel.h that a kernel of this layout receives."""
        found = _lib.lib().dualkv_view(self._handle, layout_number(layout))
        if not found:
            raise _lib.DualKVError(f"{self.line}: its {layout} layout does not fit into memory")
        view = cast(_lib.CProblem, found.contents)
        view.owner = self  # the arrays that it points to live as long as the problem
        return view

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Its segments in depth-first order, each once (packed)."""
        return self.segments_of("packed")

    def segments_of(self, layout: Layout) -> tuple[Segment, ...]:
        """The segments of a layout; ``"replicated"``: one for each sequence, without a parent."""
        v = self.view(layout)
        out = []
        for i in range(v.n_segments):
            s = v.segments[i]
            ranges = tuple(KeyRange(r.k_start, r.len, r.pos)
                           for r in (v.ranges[s.range_begin + k] for k in range(s.range_count)))
            out.append(Segment(i, s.group, s.parent, s.depth, s.q_start, s.q_len, s.k_start, s.k_len, s.context,
                               ranges))
        return tuple(out)

    @property
    def alibi_slopes(self) -> npt.NDArray[np.float32] | None:
        """[hq], or None where alibi=off."""
        v = self.view("packed")
        return np.array(v.alibi_slopes[:self.hq], np.float32) if self.alibi else None

    # ---- replicated ----

    @property
    def n_sequences(self) -> int:
        """Sequences of the replicated layout: one for each segment that has queries."""
        return int(_lib.lib().dualkv_sequences(self._handle))

    def _cu_seqlens(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        q, k = (np.empty(self.n_sequences + 1, np.int64) for _ in range(2))
        _lib.call("dualkv_cu_seqlens", self._handle, q.ctypes.data, k.ctypes.data)
        small = max(q[-1], k[-1]) < 2**31
        return (q.astype(np.int32), k.astype(np.int32)) if small else (q, k)

    @property
    def cu_seqlens_q(self) -> npt.NDArray[Any]:
        """First query row of each sequence of the replicated layout, the number of rows last: [n_sequences + 1], int32
        (int64 from 2**31 rows on)."""
        return self._cu_seqlens()[0]

    @property
    def cu_seqlens_k(self) -> npt.NDArray[Any]:
        """The same of key rows; it differs from ``cu_seqlens_q`` only below a key-only prompt."""
        return self._cu_seqlens()[1]

    def expansion(self) -> Expansion:
        """E as rows."""
        v = self.view("replicated")
        q, k = np.empty(v.tq, np.int64), np.empty(v.tk, np.int64)
        own = np.empty(v.tq, np.bool_)
        _lib.call("dualkv_expansion", self._handle, q.ctypes.data, k.ctypes.data, own.ctypes.data)
        return Expansion(q, k, own)

    def _rows(self, x: npt.NDArray[Any], rows: str, axis: int, replicated: bool) -> npt.NDArray[np.int64]:
        if rows not in ("q", "k"):
            raise ValueError(f"rows={rows!r}: it is 'q' or 'k'")
        e = self.expansion()
        source = e.q if rows == "q" else e.k
        have = len(source) if replicated else self.tq if rows == "q" else self.tk
        if x.ndim <= axis or x.shape[axis] != have:
            raise ValueError(f"axis {axis} of an array of shape {x.shape} should have the {have} "
                             f"{'replicated' if replicated else 'packed'} {'query' if rows == 'q' else 'key'} rows")
        return source

    def expand(self, x: npt.ArrayLike, rows: Rows, axis: int = 0) -> npt.NDArray[Any]:
        """E x: rows of a packed array (queries' or keys') copied to where the replicated layout has them. For Q, O:
        [tq, ...] -> [replicated tq, ...]; for K, V: rows="k"; for LSE [hq, tq]: axis=1."""
        a = np.asarray(x)
        return np.take(a, self._rows(a, rows, axis, False), axis=axis)

    def reduce(self, x: npt.ArrayLike, rows: Rows, axis: int = 0) -> npt.NDArray[Any]:
        """Eᵀ x: rows of a replicated array summed into the packed rows that they copy, in the array's own precision. For
        dQ: [replicated tq, ...] -> [tq, ...]; for dK, dV: rows="k"."""
        a = np.asarray(x)
        source = self._rows(a, rows, axis, True)
        first = self.cu_seqlens_q if rows == "q" else self.cu_seqlens_k
        a = np.moveaxis(a, axis, 0)
        out = np.zeros((self.tq if rows == "q" else self.tk,) + a.shape[1:], a.dtype)
        for begin, end in zip(first[:-1], first[1:]):  # a sequence holds each packed row at most once
            out[source[begin:end]] += a[begin:end]
        return np.moveaxis(out, 0, axis)

    def own(self, x: npt.ArrayLike, axis: int = 0) -> npt.NDArray[Any]:
        """The packed rows of a replicated O ([replicated tq, ...]) or LSE ([hq, replicated tq], axis=1): each from its own
        segment's sequence, copies left out."""
        a = np.moveaxis(np.asarray(x), axis, 0)
        e = self.expansion()
        self._rows(a, "q", 0, True)
        out = np.empty((self.tq,) + a.shape[1:], a.dtype)
        out[e.q[e.own]] = a[e.own]
        return np.moveaxis(out, 0, axis)

    # ---- what a row sees ----

    @cached_property
    def _kernel_view(self) -> Any:
        from .view import View

        return View(self.view("packed"))

    def query_rows(self, s: Segment) -> npt.NDArray[np.int64]:
        """Packed rows of Q of a segment [q_len], in order of position."""
        return cast("npt.NDArray[np.int64]", self._kernel_view.query_rows(s))

    def key_rows(self, s: Segment) -> npt.NDArray[np.int64]:
        """Packed rows of K and V [keys] that a segment sees, in order of position; the mask may hide some from a row."""
        return cast("npt.NDArray[np.int64]", self._kernel_view.key_rows(s))

    def visible(self, s: Segment) -> npt.NDArray[np.bool_]:
        """[q_len, keys]: which of ``key_rows(s)`` each row of the segment sees."""
        return cast("npt.NDArray[np.bool_]", self._kernel_view.visible(s))

    def positions(self, layout: Layout = "packed") -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Position of each query row [tq] and of each key row [tk]: tokens that its segment sees before it."""
        v = self.view(layout)
        q, k = np.empty(v.tq, np.int64), np.empty(v.tk, np.int64)
        _lib.call("dualkv_positions", self._handle, layout_number(layout), q.ctypes.data, k.ctypes.data)
        return q, k

    def mask_array(self, layout: Layout = "packed") -> npt.NDArray[np.bool_]:
        """[tq, tk]: does the query row see the key row? Of every pair, so for small problems (MemoryError from 2**31 pairs
        on)."""
        if layout_number(layout) == _lib.REPLICATED:
            v = self.view("replicated")
            self._mask_fits(v.tq, v.tk)
            e = self.expansion()
            q, k = (np.repeat(np.arange(self.n_sequences), np.diff(cu)) for cu in self._cu_seqlens())
            return cast("npt.NDArray[np.bool_]", self.mask_array()[np.ix_(e.q, e.k)] & (q[:, None] == k[None, :]))
        self._mask_fits(self.tq, self.tk)
        out = np.empty((self.tq, self.tk), np.bool_)
        _lib.call("dualkv_mask", self._handle, 0, self.tq, out.ctypes.data)
        return out

    def _mask_fits(self, tq: int, tk: int) -> None:
        if tq * tk >= 2**31:
            raise MemoryError(f"{self.line}: its mask has {tq} x {tk} pairs")

    def shapes(self, layout: Layout = "packed") -> dict[str, tuple[int, ...]]:
        """Shape of each input that this problem has: q, k, v, do, dlse, sink."""
        out = {}
        for i, name in enumerate(_lib.INPUTS):
            shape = (ctypes.c_int64 * 3)()
            rank = _lib.lib().dualkv_shape(self._handle, layout_number(layout), i, shape)
            if rank:
                out[name] = tuple(shape[:rank])
        return out


#: A problem, a line, a suite's name, a path of a file of lines; or several of these.
What = Union[Problem, str, "os.PathLike[str]", Iterable[Union[Problem, str, "os.PathLike[str]"]]]


def as_problem(what: Problem | str) -> Problem:
    """A problem of a line, or the problem itself."""
    return what if isinstance(what, Problem) else Problem(what)


def _bytes(line: str) -> bytes:
    """As C takes it, which would read no further than a NUL."""
    if "\0" in line:
        raise _lib.LineError("a problem line holds no NUL", line.index("\0") + 1)
    return line.encode(errors="replace")


def canonical(line: str) -> str:
    """The canonical form of a line: keys in order, defaults dropped, runs collapsed."""
    out = ctypes.create_string_buffer(4097)
    _lib.call("dualkv_canonical", _bytes(line), out, len(out))
    return out.value.decode()


def suite(name: str | os.PathLike[str]) -> list[str]:
    """The lines, canonical, of a suite ("ci"), of the corpus ("corpus"), or of a file of lines ("./lines.txt")."""
    handle = ctypes.c_void_p()
    _lib.call("dualkv_open_suite", os.fsencode(name), ctypes.byref(handle))
    try:
        lib = _lib.lib()
        return [lib.dualkv_suite_line(handle, i).decode() for i in range(lib.dualkv_count_lines(handle))]
    finally:
        _lib.lib().dualkv_close_suite(handle)


def suites() -> list[str]:
    """Names of the suites that there are."""
    out, i, name = [], 0, ctypes.create_string_buffer(64)
    while _lib.lib().dualkv_suite_name(i, name, len(name)):
        out.append(name.value.decode())
        i += 1
    return out


def lines_of(what: What) -> list[str]:
    """Canonical lines of a line, a suite's name, a file, or several of them."""
    if isinstance(what, Problem):
        return [what.line]
    if isinstance(what, os.PathLike):
        return suite(os.path.abspath(what))
    if isinstance(what, str):
        return [canonical(what)] if "=" in what and not os.path.exists(what) else suite(what)
    return [line for one in what for line in lines_of(one)]
