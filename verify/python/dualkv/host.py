"""A Python function as a kernel of the public ABI (ref/dualkv_kernel.h): its table, whose functions are called by
libdualkv.so, which serves the worker's protocol on a socket (dualkv_serve)."""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import socket
import sys
import traceback
from contextlib import nullcontext
from ctypes import (CFUNCTYPE, POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64,
                    c_void_p)
from difflib import get_close_matches
from typing import Any, Callable, Sequence

import numpy as np

from . import _lib, conventions
from .arrays import KernelError, NumpyArrays, TorchArrays
from .conventions import Call, Setting
from .view import View

HOST, CUDA = 0, 1
KEPT_BYTES = 4 << 30  # of device memory that torch keeps between launches
LSE_BIT = 1 << 1
WATCHED = 16  # launches of a problem after which copies of inputs are compared: a case has fewer, what is timed more


class CTensor(ctypes.Structure):
    """dualkv_tensor."""

    _fields_ = [("data", c_void_p), ("row", c_int64), ("head", c_int64)]


class CLaunch(ctypes.Structure):
    """dualkv_launch."""

    _fields_ = [("size", c_uint32), ("problem", POINTER(_lib.CProblem)), ("device_segments", c_void_p),
                ("device_ranges", c_void_p), ("device_alibi_slopes", c_void_p), ("stream", c_void_p),
                ("workspace", c_void_p), ("workspace_size", c_size_t), ("q", CTensor), ("k", CTensor),
                ("v", CTensor), ("sink", c_void_p), ("o", CTensor), ("lse", CTensor), ("d_o", CTensor),
                ("d_lse", CTensor), ("dq", CTensor), ("dk", CTensor), ("dv", CTensor), ("dsink", c_void_p)]


_OPEN = CFUNCTYPE(c_void_p, c_char_p, c_void_p, c_size_t)
_CLOSE = CFUNCTYPE(None, c_void_p)
_REFUSES = CFUNCTYPE(c_void_p, c_void_p, POINTER(_lib.CProblem))
_ASKS = CFUNCTYPE(c_int, c_void_p, POINTER(_lib.CProblem))
_COUNTS = CFUNCTYPE(c_uint64, c_void_p)
_RUNS = CFUNCTYPE(c_int, c_void_p, POINTER(CLaunch), c_void_p, c_size_t)


class CKernel(ctypes.Structure):
    """dualkv_kernel."""

    _fields_ = [("size", c_uint32), ("abi", c_uint32), ("name", c_char_p), ("doc", c_char_p), ("memory", c_int32),
                ("alignment", c_int32), ("replicated", c_int32), ("absent", c_int32), ("open", _OPEN),
                ("close", _CLOSE), ("refuses", _REFUSES), ("arithmetic", c_void_p), ("deterministic", _ASKS),
                ("workspace", c_void_p), ("forward", _RUNS), ("backward", _RUNS), ("launches", _COUNTS)]


class SpecError(Exception):
    """What was asked for cannot be opened; one line says why."""


class BrokenRefusal(Exception):
    """refuses() of the function under test failed, with the exception `why`: nobody knows whether the problem is refused."""

    def __init__(self, why: Exception):
        super().__init__(why)
        self.why = why


def _put(where: int, room: int, text: str) -> None:
    """A reason into a C buffer, as plain text on one line."""
    data = " ".join(text.split()).encode("ascii", "replace")[:room - 1] + b"\0"
    ctypes.memmove(where, data, len(data))


def flush() -> None:
    """What was printed goes out. A function may have closed where to: nobody hears it, then."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # noqa: BLE001: of a stream that the function put there; exit() would not come through C
            pass


def print_traceback(e: BaseException, files: Sequence[str] = ()) -> None:
    """Of an exception, from the first place in `files` on; none of a mistake that was found here (KernelError). Only
    where there is still a place for it: an exception out of a callback would reach C as a return value that nobody chose."""
    at = whole = e.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename not in files:
        at = at.tb_next
    try:
        if at is not None or not isinstance(e, KernelError):
            traceback.print_exception(type(e), e, at or whole)
    except BaseException:  # noqa: BLE001
        pass


def explain(e: BaseException, files: Sequence[str] = ()) -> str:
    """An exception in one line, with the innermost place of it in `files` (else the innermost of all)."""
    if isinstance(e, KernelError):
        return str(e)
    lines = "".join(traceback.format_exception_only(type(e), e)).strip().splitlines()
    if isinstance(e, SyntaxError) and e.filename:
        return f"{lines[-1]} ({os.path.basename(e.filename)}, line {e.lineno})"
    text = " ".join(lines)
    text = text if len(text) <= 240 else text[:237] + "..."  # the place is to be told, too; all of it is in the traceback
    frames = traceback.extract_tb(e.__traceback__)
    mine = [f for f in frames if f.filename in files] or [f for f in frames if not f.filename.startswith("<frozen ")]
    return f"{text} ({os.path.basename(mine[-1].filename)}, line {mine[-1].lineno}, in {mine[-1].name})" if mine else text


# ---- the function ----


def uses_torch(function: Any) -> bool:
    """Was torch imported where the function was written? (A function that is not Python: is torch there?)"""
    written = getattr(inspect.unwrap(function), "__globals__", None)
    if written is None:
        return "torch" in sys.modules
    seen = written.values()
    return any(getattr(v, "__name__", "") == "torch" or str(getattr(v, "__module__", "")).split(".")[0] == "torch"
               for v in seen)


def _parameters(function: Any) -> tuple[set[str], bool]:
    """Keywords that a function names, and whether it takes others. One that is not Python names them at the beginning of
    its docstring, NAME(a, b=1), or is given what it may need."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        listed = re.match(rf"\s*{re.escape(getattr(function, '__name__', '?'))}\(([^()]*)\)", function.__doc__ or "")
        return (set(re.findall(r"\w+(?=\s*(?:[=,:]|$))", listed[1])), False) if listed else (set(), True)
    named = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _taker(function: Any) -> Callable[[str], bool]:
    """Which keywords a function takes."""
    named, others = _parameters(function)
    return lambda name: name in named or (others and name not in ("return_lse", "out"))


OPTIONS = {
    "convention": "how the function is called: `dualkv list conventions`",
    "device": "cpu or cuda: where its arrays are",
    "arrays": "numpy or torch",
    "lse": "yes or no: does it return (o, lse)?",
    "backward": "yes or no: has it a backward?",
    "deterministic": "yes or no: does it promise repeatable bits?",
    "align": "bytes that addresses and strides are multiples of",
    "packing": "flash-dualkv: every, first or separate",
}


def parse_options(text: str) -> dict[str, str]:
    """"a=b,flag" as a dict; SpecError where one is unknown."""
    out = {}
    for word in filter(None, text.split(",")):
        key, equals, value = word.partition("=")
        if key not in OPTIONS:
            near = get_close_matches(key, OPTIONS, 1)
            raise SpecError(f"unknown option '{key}'" + (f": did you mean '{near[0]}'?" if near else
                                                        f" (there are {', '.join(OPTIONS)})"))
        out[key] = value if equals else "yes"
    return out


class Function:
    """A function, its backward if it has one of its own, and how both are called.

    What is not among the spec's `options` is an attribute of the function (``fn.convention = "sdpa"``; also ``device``,
    ``arrays``, ``lse``, ``deterministic``, ``align``, ``packing``,
    ``backward``, ``refuses``, ``launches``), or, for the convention, ``CONVENTION`` in its module.
    ``refuses(problem)`` returns None or the reason why a problem is not supported; ``launches()`` how often its own code ran
    so far, so that a fallback does not pass for it. `convention`: where nothing else says.
    """

    def __init__(self, function: Any, backward: Any = None, options: dict[str, str] | None = None,
                 name: str = "", torch_seen: bool = False, convention: str | None = None):
        if not callable(function):
            raise SpecError(f"{name or function!r} is not a function")
        if backward is not None and not callable(backward):
            raise SpecError(f"the backward of {name or function!r} is not a function")
        self.function, self.options = function, dict(options or {})
        self.watches = True  # are its inputs compared after each call?
        self.name = name or getattr(function, "__name__", "function")
        files = [getattr(getattr(inspect.unwrap(f), "__code__", None), "co_filename", "") for f in (function, backward)]
        self.files = [f for f in files if f]
        own = getattr(function, "backward", None)  # a function, or True or False
        self.backward = backward if backward is not None else own if callable(own) else None
        self.refuses, self.launches = self._attribute("refuses"), self._attribute("launches")
        self._choose_convention(convention)
        self._choose_arrays(torch_seen)
        takes = _taker(function)
        for word in self.row.always:
            if not takes(word):
                raise SpecError(f"convention {self.convention.name} passes {word}=, and {self.name} takes no such keyword")
        self.lse = self._yes("lse", self.convention.lse or takes("return_lse"))
        self.takes_out = takes("out") and self.convention.name in ("packed", "flash-varlen")
        self.deterministic = self._yes("deterministic", False)
        self.has_backward = self._yes("backward", own is not False and (self.backward is not None or self.torch))
        if self.has_backward and self.backward is None and not self.torch:
            raise SpecError(f"{self.name} has no backward: {self.name}_backward, or {self.name}.backward")
        self.alignment = int(self._choice("align", "1", [str(1 << i) for i in range(9)]))

    # ---- what was chosen ----

    def _attribute(self, name: str) -> Any:
        value = getattr(self.function, name, None)
        return value if not hasattr(type(self.function), name) else None

    def _choice(self, name: str, default: str, among: Sequence[str] | None) -> str:
        given: Any = self.options.get(name)
        if given is None:
            given = self._attribute(name)
        if given is None:
            given = default
        value = ("no", "yes")[given] if isinstance(given, bool) else str(given)
        if among and value not in among:
            near = get_close_matches(value, among, 1)
            raise SpecError(f"{name}={value}: " + (f"did you mean '{near[0]}'?" if near else f"it is one of {', '.join(among)}"))
        return value

    def _yes(self, name: str, default: bool) -> bool:
        if name == "backward" and "backward" not in self.options:
            return default
        return self._choice(name, "yes" if default else "no", ("yes", "no")) == "yes"

    def _choose_convention(self, default: str | None) -> None:
        rows = {n.name: n for n in conventions.names()}
        module = default or getattr(inspect.unwrap(self.function), "__globals__", {}).get("CONVENTION", "packed")
        self.convention = rows[self._choice("convention", str(module), list(rows))]
        self.row = conventions.TABLE[self.convention.name]
        self.options["packing"] = self._choice("packing", conventions.PACKINGS[0], conventions.PACKINGS)

    def _choose_arrays(self, torch_seen: bool) -> None:
        default = "torch" if torch_seen or self.row.torch_only or uses_torch(self.function) else "numpy"
        self.torch = self._choice("arrays", default, ("numpy", "torch")) == "torch"
        if self.torch:
            try:
                import torch
            except ImportError as e:
                raise SpecError(f"torch cannot be imported: {e}") from None
            there = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = self._choice("device", there if self.torch else "cpu", ("cpu", "cuda"))
        if self.device == "cuda" and not self.torch:
            raise SpecError("device=cuda wants torch arrays")

    # ---- problems ----

    def refusal(self, p: View) -> str | None:
        """Why a problem is not supported, or None."""
        setting = self._setting(p)
        why = self.row.refuses(setting, p)
        if why:
            return f"convention {self.convention.name}: {why}"
        for keyword, words in self.row.needs(setting, p).items():
            if not setting.takes(keyword):
                return f"{self.name} takes no {keyword}: {words}"
        if p.dlse and not self.lse:
            return f"{self.name} gives no LSE, so there is no gradient through it (lse=yes says that it does)"
        if p.dlse and self.backward is not None and not _taker(self.backward)("dlse"):
            return f"the backward of {self.name} takes no dlse: a gradient through LSE"
        said = self.asked(p)
        if said is not None:
            return said or "it says so"
        if p.grad and not self.torch and not self.has_backward:
            return f"it has no backward: there is no {self.name}_backward, nor {self.name}.backward (grad=off checks its forward)"
        return None

    def asked(self, p: View) -> str | None:
        """What the function's own refuses() says. BrokenRefusal where it fails, or says something else than a reason."""
        try:
            said = self.refuses(p) if self.refuses else None
            if said is not None and not isinstance(said, str):
                raise KernelError(f"refuses() of {self.name} returned {said!r:.80}, None or a reason (a str) is right")
        except Exception as e:
            raise BrokenRefusal(e) from None
        return said

    def _setting(self, p: View) -> Setting:
        arrays = TorchArrays(p.dtype, self.device) if self.torch else NumpyArrays(p.dtype)
        return Setting(_taker(self.function), self.options, arrays, self.lse)

    def run(self, launch: CLaunch, backward: bool) -> None:
        """One launch; raises what the function raises."""
        p = View(launch.problem.contents)
        if self.torch and self.device == "cuda":
            import torch

            stream: Any = torch.cuda.ExternalStream(launch.stream)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                Launch(self, p, launch).run(backward)
            if torch.cuda.memory_reserved() > KEPT_BYTES:  # the oracle, and buffers at another place, want it as well
                stream.synchronize()
                torch.cuda.empty_cache()
        else:
            Launch(self, p, launch).run(backward)


# ---- one launch ----


class Launch:
    """The memory of one launch as arrays, and the calls that fill it."""

    def __init__(self, f: Function, p: View, l: CLaunch):
        self.f, self.p, self.setting = f, p, f._setting(p)
        self.xp = self.setting.arrays

        def tensor(t: CTensor, rows: int, heads: int, dim: int) -> Any:
            return self.xp.memory(t.data, (rows, heads, dim), (t.row, t.head, 1), p.dtype) if t.data else None

        def lse(t: CTensor) -> Any:
            return self.xp.memory(t.data, (p.hq, p.tq), (t.head, t.row), "fp32") if t.data else None

        def vector(data: int | None) -> Any:
            return self.xp.memory(data, (p.hq,), (1,), "fp32") if data else None

        self.q, self.k = tensor(l.q, p.tq, p.hq, p.dqk), tensor(l.k, p.tk, p.hkv, p.dqk)
        self.v, self.o = tensor(l.v, p.tk, p.hkv, p.dv), tensor(l.o, p.tq, p.hq, p.dv)
        self.do, self.dq = tensor(l.d_o, p.tq, p.hq, p.dv), tensor(l.dq, p.tq, p.hq, p.dqk)
        self.dk, self.dv = tensor(l.dk, p.tk, p.hkv, p.dqk), tensor(l.dv, p.tk, p.hkv, p.dv)
        self.lse, self.dlse = lse(l.lse), lse(l.d_lse)
        self.sink, self.dsink = vector(l.sink), vector(l.dsink)

    # ---- to and from a call's layout ----

    def take(self, x: Any, rows: Any, call: Call, absent: bool = False) -> Any:
        """Rows of [T, H, D] in the call's layout; with `absent`, rows of -1 are zero."""
        if rows is None:
            out = x[None] if call.heads_first else x
        else:
            out = x[self.xp.index(rows if not absent else np.maximum(rows, 0))]
            if absent and (rows < 0).any():
                out[self.xp.index(np.flatnonzero(rows < 0)) if rows.ndim == 1 else rows < 0] = 0
        return self.xp.swap(out, 1, 2) if call.heads_first else out

    def take_lse(self, x: Any, rows: Any, call: Call) -> Any:
        """Rows of [H, T] as [H, T] or [B, H, S]."""
        if rows is None:
            return x[None] if call.heads_first else x
        out = x[:, self.xp.index(np.maximum(rows, 0))]
        return self.xp.swap(out, 0, 1) if call.heads_first else out

    def rows_first(self, x: Any, call: Call) -> Any:
        return self.xp.swap(x, 1, 2) if call.heads_first else x

    def shape(self, call: Call, rows: Any, total: int, heads: int, dim: int) -> list[int]:
        lead = list(rows.shape) if rows is not None else [1, total] if call.heads_first else [total]
        return [lead[0], heads, lead[1], dim] if call.heads_first else [lead[0], heads, dim]

    def lse_shape(self, call: Call) -> list[int]:
        n = self.shape(call, call.q, self.p.tq, self.p.hq, 1)
        return n[:3] if call.heads_first else [n[1], n[0]]

    def put(self, to: Any, rows: Any, x: Any) -> None:
        """Stores [rows..., H, D] into rows of [T, H, D]; those of -1 are dropped."""
        if rows is None:
            self.xp.store(to, x.reshape(tuple(to.shape)))
            return
        flat, index = x.reshape((-1,) + tuple(to.shape[1:])), rows.reshape(-1)
        kept = np.flatnonzero(index >= 0)
        if not len(kept):
            return
        if len(kept) < len(index):
            flat = flat[self.xp.index(kept)]
        room = self.xp.memory(None, tuple(flat.shape), (), self.p.dtype)
        self.xp.store(room, flat)
        to[self.xp.index(index[kept])] = room

    def put_lse(self, to: Any, rows: Any, x: Any, call: Call) -> None:
        if rows is None:
            self.xp.store(to, x.reshape(tuple(to.shape)))
            return
        flat = self.xp.swap(x, 0, 1).reshape((self.p.hq, -1)) if call.heads_first else x
        index = rows.reshape(-1)
        kept = np.flatnonzero(index >= 0)
        if len(kept):
            to[:, self.xp.index(index[kept])] = flat[:, self.xp.index(kept)]

    def add(self, acc: Any, rows: Any, x: Any, pieces: Any) -> None:
        """Adds to rows of an accumulator, in order, each piece without repeated rows."""
        if rows is None:
            acc += x.reshape(tuple(acc.shape))
        elif rows.ndim == 2:
            for b in range(rows.shape[0]):
                acc[self.xp.index(rows[b])] += x[b]
        else:
            for begin, end in zip(pieces, list(pieces[1:]) + [len(rows)]):
                acc[self.xp.index(rows[begin:end])] += x[begin:end]

    # ---- calling ----

    def keywords(self, call: Call, function: Any, more: dict[str, Any]) -> dict[str, Any]:
        takes, (named, _) = _taker(function), _parameters(function)
        every = {**call.keywords, **more}
        idle = {k for k, v in every.items() if v is None or (k == "softcap" and not v)} - named  # none of these for **others
        return {k: v for k, v in every.items() if takes(k) and k not in idle}

    def leaves(self, call: Call) -> list[Any]:
        """q, then k and v of each set of keys, as the function gets them."""
        out = [self.take(self.q, call.q, call)]
        for rows in call.keys:
            out += [self.take(self.k, rows, call), self.take(self.v, rows, call)]
        return [self.xp.load(x) for x in out]

    def outputs(self, returned: Any, call: Call) -> tuple[Any, Any]:
        """(o, lse or None) of what a function returned, checked."""
        f, p = self.f, self.p
        several = isinstance(returned, (tuple, list))
        if f.lse and not (several and len(returned) >= 2):
            what = "no LSE" if several or hasattr(returned, "shape") else _called(returned)
            raise KernelError(f"{f.name} returned {what}, (o, lse) is right (lse=no says that it gives none)")
        if several and not f.lse and len(returned) != 1:
            raise KernelError(f"{f.name} returned {len(returned)} values, o alone is right (lse=yes says that it gives "
                              f"(o, lse))")
        o, lse = (returned[0] if several else returned), (returned[1] if f.lse else None)
        if o is None or inspect.isgenerator(o) or isinstance(o, dict):
            raise KernelError(f"{f.name} returned {_called(o)}, o is right")
        self.xp.checked("O", o, self.shape(call, call.q, p.tq, p.hq, p.dv), p.dtype)
        if f.lse:
            self.xp.checked("LSE", lse, self.lse_shape(call), "fp32")
        return o, lse

    def call(self, call: Call, leaves: list[Any], sink: Any) -> Any:
        more = {"sink": sink} if self.p.sink else {}
        return self.f.function(*leaves, **self.keywords(call, self.f.function, more))

    def run(self, backward: bool) -> None:
        if backward and self.f.backward is None:
            self.differentiate()
        elif backward:
            self.run_backward()
        else:
            self.run_forward()

    # ---- forward ----

    def run_forward(self) -> None:
        f, p = self.f, self.p
        if f.takes_out:
            return self.write_forward()
        with self.grad_mode(p.grad and f.backward is None):
            parts = []
            for call in self.calls():
                leaves, sink = self.make_leaves(call, p.grad and f.backward is None)
                kept = self.aliases(leaves)
                o, lse = self.outputs(self.call(call, leaves, sink), call)
                self.settle(call, kept, self.inputs(call))
                o = self.xp.checked("O", o, np.shape(o), p.dtype)
                lse = None if lse is None else self.xp.checked("LSE", lse, np.shape(lse), "fp32")
                if f.row.merges:
                    parts.append((call, o, lse))
                    continue
                rows = call.q if call.o is None else call.o
                self.put(self.o, rows, self.rows_first(o, call))
                if lse is not None:
                    self.put_lse(self.lse, rows, lse, call)
            if f.row.merges:
                merged = self.merge(parts)
                self.xp.store(self.o, merged[0])
                self.xp.store(self.lse, merged[1])
        return None

    def write_forward(self) -> None:
        """A function that writes its outputs itself."""
        for call in self.calls():
            out, leaves = (self.o, self.lse), self.leaves(call)
            kept = self.aliases(leaves)
            self.f.function(*leaves, **self.keywords(call, self.f.function, {"out": out, "sink": self.sink}))
            self.settle(call, kept, self.inputs(call))

    def inputs(self, call: Call) -> list[Any]:
        """The memory of a call's leaves."""
        return [self.q] + [self.k, self.v] * len(call.keys)

    def aliases(self, arrays: Sequence[Any]) -> list[Any]:
        """The same memory under another name: a function may give its arrays another shape in place."""
        return [self.xp.alias(x) for x in arrays]

    def calls(self) -> list[Call]:
        return list(self.f.row.calls(self.setting, self.p))

    def grad_mode(self, on: bool) -> Any:
        if not self.f.torch:
            return nullcontext()
        import torch

        return torch.enable_grad() if on else torch.no_grad()

    def settle(self, call: Call, got: Sequence[Any], memory: Sequence[Any]) -> None:
        """A function gets copies where rows are gathered, and in NumPy of all 16-bit inputs: what it changed in them (`got`: q, k,
        v, ..., dO last in backward) is changed in memory, where inputs are compared, as it would be in its caller's arrays."""
        rows = [call.q] + [r for r in call.keys for _ in range(2)] + [call.q if call.do is None else call.do]
        for x, to, r in zip(got, memory, rows if self.f.watches else []):
            if r is None and (self.f.torch or self.p.dtype == "fp32"):
                continue  # the memory itself
            absent = r is not None and to is self.do
            now, then = (self.rows_first(y, call).reshape((-1,) + tuple(to.shape[1:]))
                         for y in (x, self.xp.load(self.take(to, r, call, absent))))
            changed = self.xp.changed_rows(now, then) if len(now) else ()
            if len(changed):
                self.put(to, changed if r is None else r.reshape(-1)[changed], now[self.xp.index(changed)])

    def make_leaves(self, call: Call, differentiable: bool) -> tuple[list[Any], Any]:
        leaves, sink = self.leaves(call), self.sink
        if differentiable and self.f.torch:
            leaves = [x.detach().requires_grad_() for x in leaves]
            sink = None if sink is None else sink.detach().requires_grad_()
        return leaves, sink

    def merge(self, parts: list[tuple[Call, Any, Any]]) -> tuple[Any, Any]:
        """o [T, H, D] and lse [H, T] of partial outputs, in float32."""
        p, xp = self.p, self.xp
        o, lse = xp.zeros((p.tq, p.hq, p.dv), False), xp.zeros((p.hq, p.tq), False)
        lse[...] = -float("inf")
        for call, _, part in parts:
            for rows, piece in zip(call.q, part):
                at = xp.index(rows)
                lse[:, at] = _log_add(lse[:, at], piece)
        for call, value, part in parts:
            for rows, x, piece in zip(call.q, self.rows_first(value, call), part):
                at = xp.index(rows)
                o[at] += _weight(piece, lse[:, at]) * x
        return o, lse

    # ---- backward ----

    def is_alone(self) -> bool:
        """Is each row's gradient that of one call, so that nothing is to be added?"""
        return self.f.torch and self.f.row.alone and all(s.parent < 0 and s.q_len == s.k_len for s in self.p.segments)

    def accumulators(self) -> list[Any]:
        p, wide = self.p, self.p.dtype == "fp32"
        if self.is_alone():
            return [self.dq, self.dk, self.dv]
        return [self.xp.zeros((p.tq, p.hq, p.dqk), wide), self.xp.zeros((p.tk, p.hkv, p.dqk), wide),
                self.xp.zeros((p.tk, p.hkv, p.dv), wide)]

    def collect(self, call: Call, acc: list[Any], grads: Sequence[Any]) -> None:
        """Gradients of a call's leaves, checked, into the accumulators."""
        p = self.p
        names = ["dQ"] + ["dK", "dV"] * len(call.keys)
        rows = [call.q] + [r for r in call.keys for _ in range(2)]
        shapes = [(p.tq, p.hq, p.dqk)] + [(p.tk, p.hkv, p.dqk), (p.tk, p.hkv, p.dv)] * len(call.keys)
        to = [acc[0]] + [acc[1], acc[2]] * len(call.keys)
        if len(grads) != len(names):
            raise KernelError(f"the backward of {self.f.name} returned {len(grads)} gradients, {len(names)} are right")
        for i, name in enumerate(names):
            x = self.xp.checked(name, grads[i], self.shape(call, rows[i], *shapes[i]), p.dtype)
            pieces = call.pieces if i == 0 and call.pieces is not None else [0]
            if self.is_alone():
                self.put(to[i], rows[i], self.rows_first(x, call))
            else:
                self.add(to[i], rows[i], self.rows_first(x, call), pieces)

    def finish(self, acc: list[Any]) -> None:
        for to, x in zip((self.dq, self.dk, self.dv), acc):
            if to is not x:
                self.xp.store(to, x)

    def gradients_in(self, call: Call) -> tuple[Any, Any]:
        """dO and dLSE of a call."""
        rows = call.q if call.do is None else call.do
        do = self.xp.load(self.take(self.do, rows, call, absent=rows is not None))
        if self.dlse is None or not self.f.lse:
            return do, None
        dlse = self.take_lse(self.dlse, rows, call)
        if rows is not None and rows.ndim == 1 and (rows < 0).any():
            dlse[:, self.xp.index(np.flatnonzero(rows < 0))] = 0
        return do, dlse

    def run_backward(self) -> None:
        """A backward of its own: FUNCTION_backward(q, k, v, o, lse, do, ...) -> dq, dk, dv[, dsink]."""
        f, differentiate = self.f, self.f.backward
        assert differentiate is not None
        acc, dsink = self.accumulators(), None
        with self.grad_mode(False):
            for call in self.calls():
                do, dlse = self.gradients_in(call)
                o = self.xp.load(self.take(self.o, call.q, call))
                lse = self.take_lse(self.lse, call.q, call) if f.lse else None
                more = {"sink": self.sink} if self.p.sink else {}
                if dlse is not None:
                    more["dlse"] = dlse
                if f.takes_out and _taker(differentiate)("out"):
                    more["out"] = (self.dq, self.dk, self.dv, self.dsink)
                leaves = self.leaves(call)
                kept = self.aliases(leaves + [do])
                grads = differentiate(*leaves, o, lse, do, **self.keywords(call, differentiate, more))
                self.settle(call, kept, self.inputs(call) + [self.do])
                if "out" in more:
                    return
                if not isinstance(grads, (tuple, list)):
                    raise KernelError(f"the backward of {f.name} returned a {type(grads).__name__}, (dq, dk, dv) is right")
                if self.p.sink:
                    if len(grads) != 2 + 2 * len(call.keys):
                        raise KernelError(f"the backward of {f.name} returned {len(grads)} gradients, the last should be dsink")
                    own = self.xp.checked("dSink", grads[-1], (self.p.hq,), "fp32")
                    dsink, grads = own if dsink is None else dsink + own, grads[:-1]
                self.collect(call, acc, grads)
        self.finish(acc)
        if dsink is not None:
            self.xp.store(self.dsink, dsink)

    def differentiate(self) -> None:
        """Autograd: forward again, then backward. (The memory of the forward launch may be gone.)"""
        import torch

        f = self.f
        acc, parts = self.accumulators(), []
        with torch.enable_grad():
            for call in self.calls():
                leaves, sink = self.make_leaves(call, True)
                kept = self.aliases(leaves)
                o, lse = self.outputs(self.call(call, leaves, sink), call)
                if not o.requires_grad:
                    raise KernelError(f"O of {f.name} does not depend on q, k, v as far as autograd knows: {f.name}_backward, "
                                      f"or backward=no")
                parts.append((call, leaves, sink, o, lse))
                if not f.row.merges:
                    do, dlse = self.gradients_in(call)
                    kept += self.aliases([do])
                    self.pull(parts.pop(), acc, do, dlse)
                self.settle(call, kept, self.inputs(call) + [self.do])
            if parts:
                self.pull_merged(parts, acc)
        self.finish(acc)

    def pull(self, part: tuple[Any, ...], acc: list[Any], do: Any, dlse: Any) -> None:
        import torch

        call, leaves, sink, o, lse = part
        outputs, grads = [o], [do]
        if dlse is not None:
            if not lse.requires_grad:
                raise KernelError(f"LSE of {self.f.name} does not depend on q, k as far as autograd knows")
            outputs.append(lse)
            grads.append(dlse)
        inputs = leaves + ([sink] if sink is not None else [])
        got = list(torch.autograd.grad(outputs, inputs, grads, allow_unused=True))
        for i, x in enumerate(inputs):
            got[i] = torch.zeros_like(x) if got[i] is None else got[i]
        if sink is not None:
            self.xp.store(self.dsink, got.pop())
        self.collect(call, acc, got)

    def pull_merged(self, parts: Sequence[tuple[Any, ...]], acc: list[Any]) -> None:
        """Through the merge: o = sum of w o_i, w = exp(lse_i - lse), by rows."""
        o, lse = self.merge([(c, y.detach(), z.detach()) for c, _, _, y, z in parts])
        do = self.do.float()
        delta = (do * o).sum(-1)
        for part in parts:
            call, y, z = part[0], part[3].detach(), part[4].detach()
            rows = call.q
            weight = self.rows_first(_weight(z, self.take_lse(lse, rows, call)), call)
            mine = self.take(do, rows, call)
            dz = weight[..., 0] * ((mine * y.float()).sum(-1) - self.take(delta[..., None], rows, call)[..., 0])
            if self.dlse is not None:
                dz = dz + weight[..., 0] * self.take_lse(self.dlse, rows, call)
            self.pull(part, acc, (weight * mine).to(y.dtype), dz)


def _called(x: Any) -> str:
    return "None" if x is None else f"a {type(x).__name__}"


def _log_add(a: Any, b: Any) -> Any:
    if isinstance(a, np.ndarray):
        return np.logaddexp(a, b)
    import torch

    return torch.logaddexp(a, b)


def _weight(part: Any, whole: Any) -> Any:
    """exp(part - whole) of [.., H, S] as [.., S, H, 1]; 0 where nothing was seen."""
    if isinstance(part, np.ndarray):
        with np.errstate(invalid="ignore"):
            a = np.where(np.isneginf(part), 0, np.exp(part - whole))
        return np.swapaxes(a, -1, -2)[..., None]
    import torch

    w = torch.where(torch.isneginf(part), 0.0, torch.exp(part - whole))
    return w.transpose(-1, -2)[..., None]


# ---- the table ----


class Table:
    """The ABI's table of a function, or of the reason why there is none. Keeps its callbacks alive. `guest_of`: the socket
    that is served in somebody's own process, which exit() must not end and which Ctrl-C is for."""

    def __init__(self, function: "Function | str", guest_of: int | None = None):
        self.function, self.guest_of, self.interrupted = function, guest_of, False
        self.broken: BaseException | None = None  # why refuses() of the present problem, or launches(), failed
        self.launched = 0  # of the present problem
        self.reason = ctypes.create_string_buffer(400)
        cuda = isinstance(function, Function) and function.device == "cuda"
        known = function if isinstance(function, Function) else None
        self.callbacks = (_OPEN(self._open), _CLOSE(lambda _: None), _REFUSES(self._refuses), _ASKS(self._deterministic),
                          _RUNS(lambda _, l, err, n: self._run(l, err, n, False)),
                          _RUNS(lambda _, l, err, n: self._run(l, err, n, True)), _COUNTS(self._launches))
        opens, closes, refuses, asks, forward, backward, counts = self.callbacks
        self.c = CKernel(size=ctypes.sizeof(CKernel), abi=1, name=b"python", doc=b"a Python function",
                         memory=CUDA if cuda else HOST, alignment=known.alignment if known else 1,
                         replicated=int(known is not None and known.convention.layout == "replicated"),
                         absent=0 if known is None or known.lse else LSE_BIT,
                         open=opens, close=closes, refuses=refuses, deterministic=asks, forward=forward)
        if known is None or known.has_backward:
            self.c.backward = backward
        if known is not None and known.launches is not None:
            self.c.launches = counts

    def _open(self, options: bytes, err: int, room: int) -> int | None:
        if isinstance(self.function, str):
            _put(err, room, self.function)
            return None
        return 1

    def _deterministic(self, _: Any, p: Any) -> int:
        return int(isinstance(self.function, Function) and self.function.deterministic)

    def _launches(self, _: Any) -> int:
        assert isinstance(self.function, Function)
        try:
            return int(self.function.launches()) & (1 << 64) - 1
        except BaseException as e:  # it counted nothing, and the next launch says why
            self._leave(e)
            self.broken = e
            return 0

    def _refuses(self, _: Any, p: Any) -> int | None:
        assert isinstance(self.function, Function)
        self.broken = why = None
        self.launched = 0
        try:
            why = self.function.refusal(View(p.contents))
        except BaseException as e:  # no refusal, which would leave the case out: the launch that follows fails with it
            self._leave(e)
            self.broken = e
        if why is None:
            return None
        _put(ctypes.addressof(self.reason), len(self.reason), why)
        return ctypes.addressof(self.reason)

    def _leave(self, e: BaseException) -> None:
        """exit() ends a process of its own, and Ctrl-C the serving of a guest; returns for all else. An exception that came
        through C would be lost, and what it returned be nobody's choice."""
        if isinstance(e, SystemExit) and self.guest_of is None:
            flush()
            os._exit(e.code if isinstance(e.code, int) else 0 if e.code is None else 1)
        if isinstance(e, KeyboardInterrupt):
            self.interrupted = True
            if self.guest_of is not None:
                with socket.socket(fileno=os.dup(self.guest_of)) as channel:
                    channel.shutdown(socket.SHUT_RDWR)

    def _run(self, launch: Any, err: int, room: int, backward: bool) -> int:
        assert isinstance(self.function, Function)
        try:
            if self.broken is not None:
                raise self.broken
            self.launched += 1
            self.function.watches = self.launched <= WATCHED
            self.function.run(launch.contents, backward)
            return 0
        except BrokenRefusal as e:
            print_traceback(e.why, self.function.files)
            _put(err, room, f"its refuses() failed: {explain(e.why, self.function.files)}")
            return 1
        except BaseException as e:
            self._leave(e)
            if isinstance(e, SystemExit):
                _put(err, room, f"{self.function.name} called exit({e.code})")
            elif isinstance(e, KeyboardInterrupt):
                _put(err, room, "KeyboardInterrupt")
            else:
                print_traceback(e, self.function.files)
                _put(err, room, explain(e, self.function.files))
            return 1
        finally:
            flush()


def serve(fd: int, function: "Function | str", guest: bool = False) -> int:
    """Serves the worker's protocol with this function until the socket closes. A str: the reason why it cannot. `guest`: in
    a process that goes on afterwards; raises KeyboardInterrupt where that ended it. Returns the exit code of a worker."""
    table = Table(function, fd if guest else None)
    serving = _lib.lib().dualkv_serve
    serving.restype, serving.argtypes = c_int, [c_int, POINTER(CKernel), c_char_p]
    code = int(serving(fd, ctypes.byref(table.c), None))
    if guest and table.interrupted:
        raise KeyboardInterrupt
    return code
