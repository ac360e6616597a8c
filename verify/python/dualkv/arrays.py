"""Arrays over a kernel's memory: what its function gets, and what becomes of what it returns.

================  ==========================================  =====================================================
dtype             a NumPy function gets                       a torch function gets
================  ==========================================  =====================================================
fp32              the memory itself, float32                  the memory itself, torch.float32
fp16, bf16        float32 copies of the same values           the memory itself, torch.float16, torch.bfloat16
LSE, dLSE, sink   the memory itself, float32                  the memory itself
================  ==========================================  =====================================================

A NumPy function may return any float type: the harness rounds once, to nearest even. A torch function returns the dtype
of its inputs (LSE: float32). A function that takes `out` writes its outputs itself (conventions packed and flash-varlen):
forward out=(o, lse), backward out=(dq, dk, dv, dsink); in NumPy, bf16 memory is uint16.
"""

from __future__ import annotations

import ctypes
from typing import Any, Sequence

import numpy as np

from . import _lib

BITS: dict[str, Any] = {"bf16": np.uint16, "fp16": np.float16, "fp32": np.float32}


class KernelError(Exception):
    """The function under test did not keep its side of the convention; one line says how."""


def _where(data: int, count: int, item: int) -> Any:
    return (ctypes.c_char * (count * item)).from_address(data)


class NumpyArrays:
    """Host memory as NumPy arrays."""

    def __init__(self, dtype: str):
        self.dtype = dtype

    def memory(self, data: int | None, shape: Sequence[int], strides: Sequence[int], dtype: str) -> Any:
        """The memory at `data`; strides in elements."""
        kind = np.dtype(BITS[dtype])
        if not data or 0 in shape:
            return np.zeros(shape, kind)
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides))
        flat = np.frombuffer(_where(data, span, kind.itemsize), kind)
        return np.lib.stride_tricks.as_strided(flat, shape, [s * kind.itemsize for s in strides])

    def load(self, x: Any) -> Any:
        """What a function gets of it."""
        if x.dtype == np.uint16:
            return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return x.astype(np.float32) if x.dtype == np.float16 else x

    def index(self, rows: Any) -> Any:
        return rows

    def constant(self, x: Any) -> Any:
        """A small array of the host, for a keyword."""
        return x

    def zeros(self, shape: Sequence[int], wide: bool) -> Any:
        return np.zeros(shape, np.float64 if wide else np.float32)

    def swap(self, x: Any, a: int, b: int) -> Any:
        return np.swapaxes(x, a, b)

    def checked(self, name: str, x: Any, shape: Sequence[int], dtype: str) -> Any:
        """What came back, or KernelError."""
        a = np.asarray(x)
        if a.dtype.kind != "f":
            raise KernelError(f"{name} is of type {a.dtype}, a float type is right")
        if a.shape != tuple(shape):
            raise KernelError(f"{name} has shape {list(a.shape)}, {list(shape)} is right")
        return a

    def alias(self, x: Any) -> Any:
        return x[...]

    def changed_rows(self, now: Any, then: Any) -> Any:
        """Rows whose bits differ, NaN or not. By methods of arrays alone, which a function cannot put others in place of."""
        differ = now.view(np.uint32) != then.view(np.uint32)
        return differ.reshape(len(differ), -1).any(1).nonzero()[0]

    def store(self, to: Any, x: Any) -> None:
        """Rounds x into memory."""
        if to.dtype == np.uint16:
            wide = np.ascontiguousarray(x, np.float64)
            bits = np.empty(wide.shape, np.uint16)
            _lib.call("dualkv_encode", 0, wide.ctypes.data, wide.size, bits.ctypes.data)
            to[...] = bits
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                to[...] = x


class _CudaMemory:
    """Device memory as the interface that torch reads."""

    def __init__(self, data: int, shape: Sequence[int], strides: Sequence[int], kind: str, item: int):
        self.__cuda_array_interface__ = {"shape": tuple(shape), "strides": tuple(s * item for s in strides),
                                         "typestr": kind, "data": (data, False), "version": 3}


class TorchArrays:
    """Host or device memory as torch tensors."""

    def __init__(self, dtype: str, device: str):
        import torch

        self.torch, self.device = torch, device
        self.types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

    def memory(self, data: int | None, shape: Sequence[int], strides: Sequence[int], dtype: str) -> Any:
        torch, kind = self.torch, self.types[dtype]
        if not data or 0 in shape:
            return torch.zeros(tuple(shape), dtype=kind, device=self.device)
        if self.device == "cpu":
            span = 1 + sum((n - 1) * s for n, s in zip(shape, strides))
            item = 4 if dtype == "fp32" else 2
            flat = torch.frombuffer(_where(data, span, item), dtype=kind)
            return torch.as_strided(flat, tuple(shape), tuple(strides))
        raw = _CudaMemory(data, shape, strides, "<f4" if dtype == "fp32" else "<i2", 4 if dtype == "fp32" else 2)
        return torch.as_tensor(raw, device=self.device).view(kind)

    def load(self, x: Any) -> Any:
        return x

    def index(self, rows: Any) -> Any:
        return self.torch.as_tensor(rows, dtype=self.torch.int64, device=self.device)

    def constant(self, x: Any) -> Any:
        return self.torch.as_tensor(x if x.flags.writeable else x.copy(), device=self.device)

    def zeros(self, shape: Sequence[int], wide: bool) -> Any:
        kind = self.torch.float64 if wide else self.torch.float32
        return self.torch.zeros(tuple(shape), dtype=kind, device=self.device)

    def swap(self, x: Any, a: int, b: int) -> Any:
        return x.transpose(a, b)

    def checked(self, name: str, x: Any, shape: Sequence[int], dtype: str) -> Any:
        torch = self.torch
        if not isinstance(x, torch.Tensor):
            raise KernelError(f"{name} is a {type(x).__name__}, a torch.Tensor is right")
        if tuple(x.shape) != tuple(shape):
            raise KernelError(f"{name} has shape {list(x.shape)}, {list(shape)} is right")
        if x.dtype != self.types[dtype]:
            raise KernelError(f"{name} is of type {x.dtype}, {self.types[dtype]} is right")
        if x.device.type != self.device:
            raise KernelError(f"{name} is on {x.device.type}, {self.device} is right")
        return x.detach()

    def alias(self, x: Any) -> Any:
        return x.detach()

    def changed_rows(self, now: Any, then: Any) -> Any:
        """Rows whose bits differ, on the host."""
        kind = self.torch.int32 if now.dtype == self.torch.float32 else self.torch.int16
        differ = now.detach().view(kind) != then.view(kind)
        return differ.reshape(len(differ), -1).any(1).nonzero()[:, 0].cpu().numpy()

    def store(self, to: Any, x: Any) -> None:
        to.copy_(x)
