"""Attention calls of a real training step, written as cases that can be judged anywhere.

    for step in range(steps):
        with dualkv.capture("captured", step=step, steps={100}, layers={0, 11}, sdpa=True):
            loss = model(batch)
            loss.backward()
            optimizer.step()

    $ dualkv check files:captured                  # no torch, no GPU needed
    $ dualkv check files:captured --kernel cuda    # another kernel on the same inputs

Each captured call becomes one file, ``step100-layer0.safetensors``: q, k, v, o, and where they are known lse, do, dq, dk,
dv, with the problem line that they belong to. What is captured are copies, and hooks look at gradients without changing
them; with torch, q, k and v reach the function through an alias each (view_as), so that the gradients seen are those of this
call alone. Outside of the chosen steps and layers nothing is copied, hooked or aliased.
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from typing import Any, Callable, Collection, Iterable, Mapping, Sequence, cast

import numpy as np
import numpy.typing as npt

from .casefile import CODES, write_safetensors
from .problem import Problem

#: Names in a file, in the order of ref/dualkv_kernel.h.
TENSORS = ("q", "k", "v", "do", "dlse", "sink", "o", "lse", "dq", "dk", "dv", "dsink")
_SINGLE = ("dlse", "sink", "lse", "dsink")
_ENDING = ".safetensors"


def _is_torch(x: Any) -> bool:
    return type(x).__module__.split(".")[0] == "torch" or hasattr(x, "detach")


def _copy(x: Any) -> npt.NDArray[Any]:
    """A contiguous copy in host memory; bfloat16 as its bits (uint16)."""
    if not _is_torch(x):
        return np.array(x, order="C", copy=True)
    import torch

    x = x.detach().to("cpu", copy=True).contiguous()
    out = x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()
    return cast("npt.NDArray[Any]", out)


def _functional() -> Any:
    import torch.nn.functional

    return torch.nn.functional


_KINDS = {"uint16": "bf16", "float16": "fp16", "float32": "fp32"}
_SAID = {"bf16": "bf16 (NumPy: its bits, uint16, as dualkv.encode_bf16 makes them)", "fp16": "fp16", "fp32": "fp32"}


def _dtype_of(tensors: Mapping[str, npt.NDArray[Any]]) -> str:
    """The one dtype of q, k, v, o and their gradients; LSE and the sink are fp32 beside them."""
    kinds = {n: _KINDS.get(str(x.dtype)) for n, x in tensors.items()}
    for n, kind in kinds.items():
        if kind is None and n not in _SINGLE:
            raise ValueError(f"{n} is of {tensors[n].dtype}; bfloat16 (NumPy: its bits, uint16), float16 and float32 can be judged")
        if n in _SINGLE and kind != "fp32":
            raise ValueError(f"{n} is of {tensors[n].dtype}; it is float32, whatever q is")
        if n not in _SINGLE and kind != kinds["q"]:
            raise ValueError(f"q is {_SAID[kinds['q'] or '']} and {n} {_SAID[kind or '']}: q, k, v, o and their gradients are of one dtype")
    return kinds["q"] or ""


def _words_of(p: Problem) -> str:
    """Of a problem, with the words that its line leaves out and that the tensors would say otherwise."""
    said = {w.split("=")[0] for w in p.line.split()}
    words = {"heads": f"{p.hq}:{p.hkv}", "dim": f"{p.dqk}:{p.dv}", "dtype": p.dtype}
    return " ".join([p.line] + [f"{k}={v}" for k, v in words.items() if k not in said])


def _shape_of(cu_seqlens: Any) -> str:
    cu = [int(x) for x in (cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else cu_seqlens)]
    lengths = [b - a for a, b in zip(cu, cu[1:])]
    if not lengths or cu[0] != 0 or min(lengths) < 0:
        raise ValueError("cu_seqlens: starts with 0 and never falls")
    return "/".join(str(n) for n in lengths)


class capture:
    """Captures attention calls while it is entered.

    dir: the folder, made if need be. step: the number of this step, in the names. steps: those to capture (None: this
    one). layers: those to capture, counted in the order of the calls unless they are named (None: all). max_bytes: what
    the folder may hold in all; a call that does not fit is left out. sdpa: also capture calls of
    torch.nn.functional.scaled_dot_product_attention (of code that looks it up when it is called, not compiled).

    ``files``: paths written. ``skipped``: one line for each call that could not be captured. Neither raises: a step must
    not fail for being watched. `record` does, for what it is given.
    """

    def __init__(self, dir: str | os.PathLike[str], *, step: int = 0, steps: Collection[int] | None = None,
                 layers: Collection[int | str] | None = None, max_bytes: int = 4 << 30, sdpa: bool = False):
        self.dir, self.step, self.layers, self.max_bytes = os.fspath(dir), step, layers, max_bytes
        self.active = False
        self.files: list[str] = []
        self.skipped: list[str] = []
        self._wanted = steps is None or step in steps
        self._sdpa, self._original = sdpa, cast(Any, None)
        self._calls = 0
        self._open: list[_Call] = []

    # ---- entering ----

    def __enter__(self) -> capture:
        if not self._wanted:
            return self
        os.makedirs(self.dir, exist_ok=True)
        self.active = True
        if self._sdpa:
            functional = _functional()
            self._original = functional.scaled_dot_product_attention
            functional.scaled_dot_product_attention = self.sdpa(self._original)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._original is not None:
            _functional().scaled_dot_product_attention = self._original
            self._original = None
        self.active = False
        for call in self._open:
            call.finish()
        self._open = []

    def _next(self, layer: int | str | None) -> int | str | None:
        """The layer of this call, None where it is not to be captured."""
        if not self.active:
            return None
        number = self._calls
        self._calls += 1
        layer = number if layer is None else layer
        return layer if self.layers is None or layer in self.layers else None

    def _skip(self, layer: int | str, why: object) -> None:
        text = f"step {self.step}, layer {layer}: {why}"
        self.skipped.append(text)
        warnings.warn(f"dualkv.capture: {text}", RuntimeWarning, stacklevel=3)

    # ---- functions ----

    def attention(self, fn: Callable[..., Any], problem: str = "", *, layer: int | str | None = None,
                  pack: Callable[..., tuple[str, dict[str, Any]]] | None = None) -> Callable[..., Any]:
        """fn(q, k, v, ...), which returns o or (o, lse, ...), captured at each call. q [Tq, Hq, Dqk], k, v [Tk, Hkv, D],
        packed as `problem` says: the words of a line (`shape=` at least; heads, dim and dtype are read off the tensors).
        torch: gradients of this call alone are captured as they pass in backward."""
        def words(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> tuple[str, dict[str, Any]]:
            return problem, {}

        @functools.wraps(fn)
        def call(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
            name = self._next(layer)
            if name is None:
                return fn(q, k, v, *args, **kwargs)
            one = _Call(self, name)
            try:
                line, how = (pack or words)(q, k, v, *args, **kwargs)
                q, k, v = one.inputs(line, how, q, k, v)
            except Exception as e:  # noqa: BLE001: watching must not change what is watched
                self._skip(name, e)
                return fn(q, k, v, *args, **kwargs)
            out = fn(q, k, v, *args, **kwargs)
            one.outputs(out)
            return out
        return call

    def varlen(self, fn: Callable[..., Any], *, layer: int | str | None = None) -> Callable[..., Any]:
        """A function like flash_attn_varlen_func: (q, k, v, cu_seqlens_q, cu_seqlens_k, ..., softmax_scale, causal,
        window_size, softcap), rows packed. Each sequence becomes a group of its own."""
        def pack(q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, *args: Any,
                 **kw: Any) -> tuple[str, dict[str, Any]]:
            shape = _shape_of(cu_seqlens_q)
            if shape != _shape_of(cu_seqlens_k):
                raise ValueError("queries and keys have different sequences")
            if len(args) > 2:
                raise ValueError("options of the call must be given by name to be captured")
            if kw.get("alibi_slopes") is not None or kw.get("dropout_p"):
                raise ValueError("dropout and ALiBi slopes of the caller's own cannot be said in a line")
            window = tuple(kw.get("window_size") or (-1, -1))
            line = f"shape={shape} mask=" + _mask(bool(kw.get("causal")), window)
            if kw.get("softmax_scale") is not None:
                line += f" scale={float(kw['softmax_scale'])!r}"
            if kw.get("softcap"):
                line += f" softcap={float(kw['softcap'])!r}"
            return line, {}
        return self.attention(fn, layer=layer, pack=pack)

    def sdpa(self, fn: Callable[..., Any], *, layer: int | str | None = None) -> Callable[..., Any]:
        """A function like torch's scaled_dot_product_attention: q [B, H, S, D]. Each sequence of the batch becomes a
        group of its own."""
        def pack(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
                 scale: float | None = None, enable_gqa: bool = False, **kw: Any) -> tuple[str, dict[str, Any]]:
            if attn_mask is not None or dropout_p or kw:
                raise ValueError("a mask or dropout of the caller's own cannot be said in a line")
            if len(query.shape) != 4 or query.shape[2] != key.shape[2]:
                raise ValueError(f"q {tuple(query.shape)}, k {tuple(key.shape)}: self-attention on [B, H, S, D] is captured")
            line = f"shape={'/'.join([str(query.shape[2])] * query.shape[0])} mask={_mask(is_causal, (-1, -1))}"
            return line + (f" scale={float(scale)!r}" if scale is not None else ""), {"batched": True}

        captured = self.attention(fn, layer=layer, pack=pack)

        @functools.wraps(fn)
        def call(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            return captured(query, key, value, *args, **kwargs)
        return call

    # ---- explicitly ----

    def record(self, *, q: Any, k: Any, v: Any, o: Any = None, lse: Any = None, do: Any = None, dq: Any = None,
               dk: Any = None, dv: Any = None, dlse: Any = None, sink: Any = None, dsink: Any = None,
               problem: str | Problem = "", cu_seqlens: Iterable[int] | None = None, layer: int | str | None = None, name: str | None = None) -> str | None:
        """Writes one case of packed tensors, torch or NumPy: q, dq [Tq, Hq, Dqk], k, dk [Tk, Hkv, Dqk], v, dv [Tk, Hkv, Dv], o, do
        [Tq, Hq, Dv] of one dtype (bf16 in NumPy: bits, uint16), lse, dlse [Hq, Tq], sink, dsink [Hq] of float32. `problem`: the
        words of its line that the tensors do not show (shape, mask, scale, ...; without `dtype=` it is the tensors'), or a
        Problem, whose dtype they must have; `cu_seqlens` in place of a shape of plain sequences.
        Returns the path; None outside of `with`, where this step or layer is not wanted, or the folder is full. ValueError
        where tensors and line do not fit each other."""
        chosen = self._next(layer)
        if chosen is None:
            return None
        given = {"q": q, "k": k, "v": v, "do": do, "dlse": dlse, "sink": sink, "o": o, "lse": lse, "dq": dq, "dk": dk,
                 "dv": dv, "dsink": dsink}
        words = _words_of(problem) if isinstance(problem, Problem) else problem
        if cu_seqlens is not None:
            words = f"shape={_shape_of(cu_seqlens)} {words}"
        return self._write(chosen, words, {n: _copy(x) for n, x in given.items() if x is not None}, name)

    # ---- writing ----

    def _line(self, words: str, dtype: str, t: Mapping[str, npt.NDArray[Any]]) -> Problem:
        keys = [w.split("=")[0] for w in words.split()]
        for key, value in (("heads", f"{t['q'].shape[1]}:{t['k'].shape[1]}"),
                           ("dim", f"{t['q'].shape[2]}:{t['v'].shape[2]}"), ("dtype", dtype),
                           ("grad", "on" if "do" in t else "off"), ("dlse", "on" if "dlse" in t else "off"),
                           ("sinklogit", "0" if "sink" in t else "")):
            if key not in keys and value:
                words += f" {key}={value}"
        return Problem(words)

    def _write(self, layer: int | str, words: str, tensors: dict[str, npt.NDArray[Any]],
               name: str | None = None) -> str | None:
        if any(tensors[n].ndim != 3 for n in ("q", "k", "v")):
            raise ValueError("q, k and v are packed: [tokens, heads, dim]")
        for n, needs in (("dq", "do"), ("dk", "do"), ("dv", "do"), ("dlse", "do"), ("dsink", "do"), ("dsink", "sink")):
            if n in tensors and needs not in tensors:
                raise ValueError(f"{n} without {needs}: nobody can say what it should be")
        dtype = _dtype_of(tensors)
        p = self._line(words, dtype, tensors)
        if p.dtype != dtype:
            raise ValueError(f"q is {_SAID[dtype]}, and the problem says dtype={p.dtype}")
        shapes = {"q": (p.tq, p.hq, p.dqk), "k": (p.tk, p.hkv, p.dqk), "v": (p.tk, p.hkv, p.dv), "o": (p.tq, p.hq, p.dv),
                  "lse": (p.hq, p.tq), "sink": (p.hq,)}
        shapes.update({"do": shapes["o"], "dq": shapes["q"], "dk": shapes["k"], "dv": shapes["v"], "dlse": shapes["lse"],
                       "dsink": shapes["sink"]})
        out = {}
        for n, x in tensors.items():
            if x.shape != shapes[n]:
                raise ValueError(f"{n} is {list(x.shape)}; {list(shapes[n])} is right for '{p.line}'")
            if n in ("q", "k", "v", "do", "dlse", "sink") and not _finite(x):
                raise ValueError(f"{n} holds NaN or Inf")
            out[n] = (CODES["fp32" if n in _SINGLE else p.dtype], x)
        size = sum(x.nbytes for _, x in out.values()) + 4096
        if size + _held(self.dir) > self.max_bytes:
            self._skip(layer, f"{size} bytes more than max_bytes={self.max_bytes} leaves room for in {self.dir}")
            return None
        path = self._path(name if name is not None else f"step{self.step}-layer{layer}")
        write_safetensors(path, out, {"line": p.line, "layout": "packed", "kernel": "captured"})
        self.files.append(path)
        return path

    def _path(self, name: str) -> str:
        stem = re.sub(r"[^a-z0-9_.-]", "_", name.lower()).lstrip(".")[:50] or "case"
        path, n = os.path.join(self.dir, stem + _ENDING), 1
        while os.path.exists(path):
            path, n = os.path.join(self.dir, f"{stem}-{n}{_ENDING}"), n + 1
        return path


def _finite(x: npt.NDArray[Any]) -> bool:
    if x.dtype == np.uint16:  # bf16: all bits of the exponent
        return not bool(np.any((x & 0x7F80) == 0x7F80))
    return bool(np.isfinite(x).all())


def _held(folder: str) -> int:
    return sum(e.stat().st_size for e in os.scandir(folder) if e.name.endswith(_ENDING) and e.is_file())


def _mask(causal: bool, window: Sequence[int]) -> str:
    left, right = window
    if left >= 0 and (not causal or right > 0):
        raise ValueError("a window that is not causal cannot be said in a line")
    return f"window:{left + 1}" if left >= 0 else "causal" if causal else "full"


class _Call:
    """One call on its way: its inputs, then its outputs, then (torch) its gradients as they come."""

    def __init__(self, owner: capture, layer: int | str):
        self.owner, self.layer = owner, layer
        self.words, self.batched = "", False
        self.tensors: dict[str, npt.NDArray[Any]] = {}
        self.waiting: set[str] = set()
        self.done = False

    def _packed(self, x: Any) -> npt.NDArray[Any]:
        a = _copy(x)
        if self.batched:  # [B, H, S, D] -> [B S, H, D]
            a = np.ascontiguousarray(np.moveaxis(a, 1, 2)).reshape(-1, a.shape[1], a.shape[3])
        return a

    def inputs(self, words: str, how: Mapping[str, Any], *qkv: Any) -> tuple[Any, ...]:
        """Copies them, and returns what the function is to get: with torch an alias of each, whose gradient is that of
        this call alone."""
        self.words, self.batched = words, bool(how.get("batched"))
        passed = []
        for name, x in zip(("q", "k", "v"), qkv):
            self.tensors[name] = self._packed(x)
            if _is_torch(x) and x.requires_grad:
                x = x.view_as(x)
                self._await("d" + name, x)
            passed.append(x)
        return tuple(passed)

    def outputs(self, out: Any) -> None:
        try:
            o, *more = out if isinstance(out, (tuple, list)) else (out,)
            self.tensors["o"] = self._packed(o)
            q = self.tensors["q"]
            for x in more[:1]:
                if getattr(x, "shape", None) is not None and tuple(x.shape) == (q.shape[1], q.shape[0]):
                    self.tensors["lse"] = _copy(x).astype(np.float32, copy=False)
            if self.waiting and _is_torch(o) and o.requires_grad:
                self._await("do", o)
                self.owner._open.append(self)
                return
        except Exception as e:  # noqa: BLE001
            self.owner._skip(self.layer, e)
            self.done = True
        self.waiting.clear()
        self.finish()

    def _await(self, name: str, x: Any) -> None:
        self.waiting.add(name)

        def arrived(gradient: Any) -> None:
            try:
                if not self.done and gradient is not None:
                    self.tensors[name] = self._packed(gradient)
                    self.waiting.discard(name)
                    if not self.waiting:
                        self.finish()
            except Exception as e:  # noqa: BLE001
                self.owner._skip(self.layer, e)
                self.done = True
        x.register_hook(arrived)

    def finish(self) -> None:
        """Writes what has come; without the gradient of o the case is one of the forward alone."""
        if self.done:
            return
        self.done = True
        if "do" not in self.tensors:
            for name in ("dq", "dk", "dv"):
                self.tensors.pop(name, None)
        try:
            self.owner._write(self.layer, self.words, self.tensors)
        except Exception as e:  # noqa: BLE001
            self.owner._skip(self.layer, e)
        self.tensors = {}
