"""Cases as safetensors files (data/casefile.h), read and written with NumPy alone. NumPy has no bfloat16, so
``safetensors.numpy`` cannot read such a file: here 16-bit values arrive as float32 of the same values, as they do in a NumPy
function under test, or as they are.

    $ dualkv export ci --forward --out cases

    for path in glob.glob("cases/*.safetensors"):
        x = dualkv.load(path)                    # x["q"], x["k"], ...; x.problem
        o, lse = elsewhere(x["q"], x["k"], x["v"])
        dualkv.save(path, o=o, lse=lse)          # beside the inputs

    $ dualkv check files:cases
"""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
from typing import Any, Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from . import _lib
from .inputs import decode_bf16, encode_bf16
from .problem import Problem

_TYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4"),
                                    "F64": np.dtype("<f8"), "I32": np.dtype("<i4"), "I64": np.dtype("<i8")}
#: What a safetensors file calls the dtypes of a line.
CODES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


class CaseFile(Mapping[str, npt.NDArray[Any]]):
    """Arrays of a case by name: q [Tq, Hq, Dqk], k [Tk, Hkv, Dqk], v [Tk, Hkv, Dv], do [Tq, Hq, Dv], dlse [Hq, Tq], sink [Hq];
    outputs o, lse, dq, dk, dv, dsink where the file has them. ``problem``, ``line``; ``layout`` ("packed", "replicated");
    ``metadata``: the file's own words."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]):
        self._arrays, self.metadata = dict(arrays), dict(metadata)
        self.line, self.layout = self.metadata.get("line", ""), self.metadata.get("layout", "packed")

    @property
    def problem(self) -> Problem:
        """Of the line in the metadata; LineError where there is none."""
        return Problem(self.line)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def write_safetensors(path: str, tensors: Mapping[str, tuple[str, npt.NDArray[Any]]], metadata: Mapping[str, str]) -> int:
    """Writes name: (safetensors dtype, contiguous array) and metadata, atomically. Returns the bytes written."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    order = sorted(tensors, key=lambda name: -tensors[name][1].itemsize)  # the larger first, so that all are aligned
    for name in order:
        kind, array = tensors[name]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    fd, temporary = tempfile.mkstemp(prefix=".capture-", dir=os.path.dirname(path) or ".")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            for name in order:
                f.write(np.ascontiguousarray(tensors[name][1]).reshape(-1).view(np.uint8).data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return 8 + len(text) + at


def _tensor(entry: Any, data: bytes) -> tuple[str, npt.NDArray[Any]]:
    code, shape, (begin, end) = entry["dtype"], list(entry["shape"]), entry["data_offsets"]
    if any(type(n) is not int for n in (*shape, begin, end)):  # nothing is cut or converted: "3", 2.9, true
        raise ValueError("shape and place are not whole numbers")
    if code not in _TYPES:
        raise ValueError(f"of type {code}")
    if min(shape, default=0) < 0 or not 0 <= begin <= end <= len(data) or end - begin != math.prod(shape) * _TYPES[code].itemsize:
        raise ValueError("shape and place do not fit each other")
    return code, np.frombuffer(data[begin:end], _TYPES[code]).reshape(shape).copy()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name is there twice")
    return dict(pairs)


def _check_cover(name: str, header: Mapping[str, Any], size: int) -> None:
    """Tensors lie side by side and fill the file: another reader would find the same."""
    at = 0
    for begin, end in sorted(tuple(entry["data_offsets"]) for entry in header.values()):
        if begin != at:
            raise _lib.DualKVError(f"{name}: tensors overlap, or leave bytes between them, at {begin}")
        at = end
    if at != size:
        raise _lib.DualKVError(f"{name}: {size - at} bytes behind the last tensor")


def read_safetensors(path: str | os.PathLike[str]) -> tuple[dict[str, tuple[str, npt.NDArray[Any]]], dict[str, str]]:
    """name: (safetensors dtype, array; BF16 as uint16), and the metadata. DualKVError, one line, for what is no such file."""
    name = os.fspath(path)
    try:
        with open(name, "rb") as f:
            start = f.read(8)
            n = struct.unpack("<Q", start)[0] if len(start) == 8 else 1 << 62
            if n > min(os.fstat(f.fileno()).st_size - 8, 100 << 20):
                raise ValueError("its header is cut off")
            header = json.loads(f.read(n), object_pairs_hook=_object)
            data = f.read()
        metadata = {str(k): str(v) for k, v in header.pop("__metadata__", {}).items()}
    except OSError as e:
        raise _lib.DualKVError(f"{name}: cannot be read: {e.strerror}") from None
    except (ValueError, AttributeError, TypeError, RecursionError) as e:
        raise _lib.DualKVError(f"{name}: not a safetensors file: {e}") from None
    tensors = {}
    for tensor, entry in header.items():
        try:
            tensors[str(tensor)] = _tensor(entry, data)
        except (ValueError, TypeError, KeyError) as e:
            shown = tensor if tensor.isprintable() else ascii(tensor)[1:-1]
            raise _lib.DualKVError(f"{name}: {shown:.80}: {e!s:.200}") from None
    _check_cover(name, header, len(data))
    return tensors, metadata


def load(path: str | os.PathLike[str], *, bits: bool = False) -> CaseFile:
    """The case of a file that `dualkv export` or ``dualkv.capture`` wrote, as NumPy arrays: float32, 16-bit values widened; with
    bits=True as they are, float16 and, for bf16, uint16. (``safetensors.torch.load_file`` reads it, too, as torch tensors.)"""
    tensors, metadata = read_safetensors(path)
    if bits:
        return CaseFile({n: x for n, (_, x) in tensors.items()}, metadata)
    wide: dict[str, Callable[[npt.NDArray[Any]], npt.NDArray[Any]]] = {
        "BF16": decode_bf16, "F16": lambda x: x.astype(np.float32)}
    return CaseFile({n: wide[code](x) if code in wide else x for n, (code, x) in tensors.items()}, metadata)


def _outputs_shapes(path: str, p: Problem, layout: str) -> dict[str, tuple[int, ...]]:
    if layout not in ("packed", "replicated"):
        raise _lib.DualKVError(f"{path}: layout={layout}: it is packed or replicated")
    v = p.view("packed" if layout == "packed" else "replicated")
    q, k, o = (v.tq, v.hq, v.dqk), (v.tk, v.hkv, v.dqk), (v.tq, v.hq, v.dv)
    return {"o": o, "lse": (v.hq, v.tq), "dq": q, "dk": k, "dv": (v.tk, v.hkv, v.dv), "dsink": (v.hq,)}


def save(path: str | os.PathLike[str], *, o: Any = None, lse: Any = None, dq: Any = None, dk: Any = None, dv: Any = None,
         dsink: Any = None) -> None:
    """Puts outputs into the file of a case, in place of those that it had, for `dualkv check files:DIR`: o [Tq, Hq, Dv], lse
    [Hq, Tq], dq, dk, dv as q, k, v, dsink [Hq], in the layout of the file. Floats of any type are rounded once, to nearest
    even, to the dtype of the line (LSE and dSink: float32); uint16 are bits of bf16. The file is replaced whole or not at all."""
    name = os.fspath(path)
    tensors, metadata = read_safetensors(name)
    if "line" not in metadata:
        raise _lib.DualKVError(f"{name}: its metadata have no line: which problem is it?")
    p = Problem(metadata["line"])
    shapes = _outputs_shapes(name, p, metadata.get("layout", "packed"))
    for n, x in {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "dsink": dsink}.items():
        if x is None:
            continue
        a, code = np.asarray(x), CODES["fp32" if n in ("lse", "dsink") else p.dtype]
        if a.shape != shapes[n]:
            raise ValueError(f"{n} is {list(a.shape)}; {list(shapes[n])} is right for '{p.line}'")
        bits = code == "BF16" and a.dtype == np.uint16
        if not bits and a.dtype.kind != "f":
            raise ValueError(f"{n} is of type {a.dtype}, a float type is right")
        with np.errstate(over="ignore"):
            tensors[n] = code, a if bits else encode_bf16(a) if code == "BF16" else a.astype(_TYPES[code])
    write_safetensors(name, tensors, metadata)
