"""Inputs of a problem: a pure function of its line, the same values that the program gives to kernels."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Iterator, Literal

import numpy as np
import numpy.typing as npt

from . import _lib
from .problem import Layout, Problem, as_problem, layout_number


@dataclass
class Inputs:
    """q [tq, hq, dqk], k [tk, hkv, dqk], v [tk, hkv, dv], do [tq, hq, dv] (None where grad=off), dlse [hq, tq] fp32 (None
    unless dlse=on), sink [hq] fp32 (None unless the line has a sinklogit). Also a mapping of those that there are."""

    q: Any
    k: Any
    v: Any
    do: Any = None
    dlse: Any = None
    sink: Any = None

    def keys(self) -> list[str]:
        return [f.name for f in fields(self) if getattr(self, f.name) is not None]

    def __getitem__(self, name: str) -> Any:
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())


_NUMPY: dict[str, np.dtype[Any]] = {"bf16": np.dtype(np.uint16), "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}


def _one(problem: Problem, layout: str, name: str, form: int, dtype: np.dtype[Any],
         shape: tuple[int, ...]) -> npt.NDArray[Any]:
    out = np.empty(shape, dtype)
    _lib.call("dualkv_inputs", problem._handle, layout_number(layout), _lib.INPUTS.index(name), form, out.ctypes.data,
              out.nbytes)
    return out


def _torch(bits: npt.NDArray[Any], bf16: bool, device: Any) -> Any:
    import torch
    from torch.utils.dlpack import from_dlpack

    tensor = from_dlpack(bits.view(np.int16) if bf16 else bits)
    tensor = tensor.view(torch.bfloat16) if bf16 else tensor
    return tensor if device is None else tensor.to(device)


def inputs(problem: Problem | str, layout: Layout = "packed", as_: Literal["numpy", "torch"] = "numpy", *,
           bf16: Literal["float32", "uint16"] = "float32", device: Any = None) -> Inputs:
    """The inputs of a problem, contiguous, in the packed or the replicated layout (there dO and dLSE are zero on copies).

    as_="torch": tensors of the line's dtype (torch.bfloat16, float16, float32), on ``device`` if given. as_="numpy":
    float16, float32; NumPy has no bfloat16, so bf16 comes as float32 (the same values), or with bf16="uint16" as bits.
    Captured cases (fill=file:NAME) lie in the folder that $DUALKV_FILES names.
    """
    p = as_problem(problem)
    if as_ not in ("numpy", "torch"):
        raise ValueError(f"as_={as_!r}: it is 'numpy' or 'torch'")
    if bf16 not in ("float32", "uint16"):
        raise ValueError(f"bf16={bf16!r}: it is 'float32' or 'uint16'")
    if device is not None and as_ != "torch":
        raise ValueError("device=: NumPy arrays have none")
    out = {}
    for name, shape in p.shapes(layout).items():
        narrow = p.dtype == "bf16" and name not in ("dlse", "sink")
        if narrow and as_ == "numpy" and bf16 == "float32":
            out[name] = _one(p, layout, name, _lib.FLOAT, np.dtype(np.float32), shape)
            continue
        dtype = np.dtype(np.float32) if name in ("dlse", "sink") else _NUMPY[p.dtype]
        bits = _one(p, layout, name, _lib.BITS, dtype, shape)
        out[name] = _torch(bits, narrow, device) if as_ == "torch" else bits
    return Inputs(**out)


def encode_bf16(x: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """Bits of the nearest bfloat16 (ties to even), any shape."""
    a = np.ascontiguousarray(x, np.float64)
    out = np.empty(a.shape, np.uint16)
    _lib.call("dualkv_encode", 0, a.ctypes.data, a.size, out.ctypes.data)
    return out


def decode_bf16(bits: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Values of bfloat16 bits (uint16), any shape."""
    if np.asarray(bits).dtype.kind not in "ui":
        raise TypeError(f"bits are integers (uint16), not {np.asarray(bits).dtype}")
    a = np.ascontiguousarray(bits, np.uint16)
    out = np.empty(a.shape, np.float64)
    _lib.call("dualkv_decode", 0, a.ctypes.data, a.size, out.ctypes.data)
    return out.astype(np.float32)
