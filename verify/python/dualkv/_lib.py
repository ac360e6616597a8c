"""The library behind the package: where it is, its names, its structures (verify/dualkv.h, ref/dualkv_kernel.h)."""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import (POINTER, byref, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32,
                    c_uint64, c_void_p)
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

API = 2  # DUALKV_API that this package was written for
VERSION = "0.1.0"
USER_ERROR, HARNESS_ERROR, REFUSED = 2, 3, 5
PACKED, REPLICATED = 0, 1
INPUTS = ("q", "k", "v", "do", "dlse", "sink")  # order of dualkv_input
BITS, FLOAT, DOUBLE = 0, 1, 2
DTYPES = ("bf16", "fp16", "fp32")  # order of dualkv_dtype


class DualKVError(Exception):
    """Something is wrong with what the package was given or found; one line says what."""


class LibraryError(DualKVError):
    """libdualkv.so or the program dualkv is missing, cannot be loaded, or is of another version."""


class LineError(DualKVError, ValueError):
    """A problem line or suite is malformed. `position`: character that is wrong, from 1; 0: none in particular."""

    def __init__(self, text: str, position: int = 0):
        super().__init__(text)
        self.position = position


class RefusedError(DualKVError, ValueError):
    """The line is well formed and means no computation that both layouts share: its mask is inadmissible."""


class Range(ctypes.Structure):
    """dualkv_range: `len` key rows from packed row `k_start`; the first has position `pos`."""

    _fields_ = [("k_start", c_int64), ("len", c_int64), ("pos", c_int64)]


class Segment(ctypes.Structure):
    """dualkv_segment."""

    _fields_ = [("group", c_int32), ("parent", c_int32), ("depth", c_int32), ("range_count", c_int32),
                ("range_begin", c_int64), ("q_start", c_int64), ("q_len", c_int64), ("k_start", c_int64),
                ("k_len", c_int64), ("context", c_int64)]


class CProblem(ctypes.Structure):
    """dualkv_problem: what a kernel receives. ``owner``: what keeps its arrays alive."""

    owner: Any = None
    _fields_ = [("size", c_uint32), ("n_groups", c_int32), ("n_segments", c_int32), ("hq", c_int32),
                ("hkv", c_int32), ("dqk", c_int32), ("dv", c_int32), ("dtype", c_int32), ("n_ranges", c_int64),
                ("tq", c_int64), ("tk", c_int64), ("max_q_len", c_int64), ("max_k_len", c_int64),
                ("segments", POINTER(Segment)), ("ranges", POINTER(Range)), ("mask", c_int32), ("alibi", c_int32),
                ("sink", c_int32), ("dlse", c_int32), ("grad", c_int32), ("window", c_int64),
                ("window_sinks", c_int64), ("chunk", c_int64), ("block", c_int64), ("block_density", c_double),
                ("block_seed", c_uint64), ("scale", c_float), ("softcap", c_float),
                ("alibi_slopes", POINTER(c_float))]


class CError(ctypes.Structure):
    """dualkv_error."""

    _fields_ = [("code", c_int32), ("position", c_int32), ("text", ctypes.c_char * 504)]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "dualkv_api": (c_uint32, []),
    "dualkv_version": (c_char_p, []),
    "dualkv_commit": (c_char_p, []),
    "dualkv_generator": (c_char_p, []),
    "dualkv_data_dir": (c_char_p, []),
    "dualkv_canonical": (c_int, [c_char_p, c_char_p, c_size_t, POINTER(CError)]),
    "dualkv_open": (c_int, [c_char_p, POINTER(c_void_p), POINTER(CError)]),
    "dualkv_close": (None, [c_void_p]),
    "dualkv_line": (c_char_p, [c_void_p]),
    "dualkv_view": (POINTER(CProblem), [c_void_p, c_int]),
    "dualkv_sequences": (c_int64, [c_void_p]),
    "dualkv_cu_seqlens": (c_int, [c_void_p, c_void_p, c_void_p, POINTER(CError)]),
    "dualkv_expansion": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p, POINTER(CError)]),
    "dualkv_positions": (c_int, [c_void_p, c_int, c_void_p, c_void_p, POINTER(CError)]),
    "dualkv_mask": (c_int, [c_void_p, c_int64, c_int64, c_void_p, POINTER(CError)]),
    "dualkv_mask_name": (c_char_p, [c_int]),
    "dualkv_visible": (c_int, [POINTER(CProblem), POINTER(Segment), c_void_p, POINTER(CError)]),
    "dualkv_shape": (c_int, [c_void_p, c_int, c_int, POINTER(c_int64)]),
    "dualkv_inputs": (c_int, [c_void_p, c_int, c_int, c_int, c_void_p, c_size_t, POINTER(CError)]),
    "dualkv_encode": (c_int, [c_int, c_void_p, c_size_t, c_void_p, POINTER(CError)]),
    "dualkv_decode": (c_int, [c_int, c_void_p, c_size_t, c_void_p, POINTER(CError)]),
    "dualkv_open_suite": (c_int, [c_char_p, POINTER(c_void_p), POINTER(CError)]),
    "dualkv_close_suite": (None, [c_void_p]),
    "dualkv_count_lines": (c_int64, [c_void_p]),
    "dualkv_suite_line": (c_char_p, [c_void_p, c_int64]),
    "dualkv_suite_name": (c_int, [c_int, c_char_p, c_size_t]),
}


def _places(library: bool) -> list[Path]:
    """Where a file of the build may lie, best first: in the wheel; beside build/python; installed; in the source tree."""
    package = Path(__file__).absolute().parent
    source = Path(__file__).resolve().parent.parent.parent.parent
    prefix = package.parent.parent.parent.parent
    return [package / "_bundle", package.parent.parent, prefix / ("lib" if library else "bin"), source / "build"]


def _find(name: str, variable: str, places: list[Path]) -> Path:
    named = os.environ.get(variable)
    if named:
        if not Path(named).is_file():
            raise LibraryError(f"{variable}={named}: no such file")
        return Path(named).absolute()
    for place in places:
        if (place / name).is_file():
            return place / name
    looked = ", ".join(str(p) for p in places)
    raise LibraryError(f"{name} is not there (looked in {looked}): run `make` in the source tree, "
                       f"install the wheel, or set {variable}")


def library_path() -> Path:
    """libdualkv.so: $DUALKV_LIBRARY, else the wheel's, else the build's."""
    return _find("libdualkv.so", "DUALKV_LIBRARY", _places(True))


def program_path() -> Path:
    """The program dualkv: $DUALKV_PROGRAM, else beside the library, else as the library is found."""
    beside = []
    if not os.environ.get("DUALKV_PROGRAM"):
        folder = library_path().parent
        beside = [folder, folder.parent / "bin"]
    return _find("dualkv", "DUALKV_PROGRAM", beside + _places(False))


def environment() -> dict[str, str]:
    """The program's environment: this interpreter serves FILE.py:FUNCTION, unless DUALKV_PYTHON names another."""
    return {"DUALKV_PYTHON": sys.executable, **os.environ} if sys.executable else dict(os.environ)


def load(path: Path) -> ctypes.CDLL:
    """Loads a library and checks that it speaks this package's interface."""
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as e:
        raise LibraryError(f"{path}: cannot be loaded: {e}") from None
    try:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(lib, name)
            function.restype = result
            function.argtypes = arguments
    except AttributeError:
        raise LibraryError(f"{path}: has no {name}: not a libdualkv.so of version {VERSION}") from None
    api, version = lib.dualkv_api(), lib.dualkv_version().decode()
    if api < API or version != VERSION:
        raise LibraryError(f"{path}: is version {version} (interface {api}); this package is {VERSION} "
                           f"(interface {API})")
    return lib


@lru_cache(maxsize=None)
def lib() -> ctypes.CDLL:
    """The library, loaded once."""
    return load(library_path())


def _fail(error: CError) -> NoReturn:
    text = error.text.decode(errors="replace")
    if error.code == REFUSED:
        raise RefusedError(text)
    if error.code == USER_ERROR:
        raise LineError(text, error.position)
    raise DualKVError(text)


def call(name: str, *arguments: Any) -> None:
    """Calls a function whose last parameter is the error; raises what it says."""
    error = CError()
    if getattr(lib(), name)(*arguments, byref(error)):
        _fail(error)


def mask_name(number: int) -> str:
    """Word of a dualkv_mask_kind."""
    return str(lib().dualkv_mask_name(number).decode())
