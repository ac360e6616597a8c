"""Verdicts: the program's. It runs as a child process and asks this process, over a socket, to run the function."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Callable, Iterable

from . import _lib, host
from .problem import Problem, What, canonical, lines_of

#: Statuses that are not a defect of the kernel.
NO_DEFECT = ("PASSED", "UNSUPPORTED", "INCONCLUSIVE", "HARNESS_ERROR")

Kernel = Callable[..., Any]


@dataclass(frozen=True, repr=False)
class Case:
    """One line, judged. ``tensors``: for O, LSE, dQ, dK, dV, dSink, as far as judged, a dict of numbers: max_bound_ratio
    (largest error as a share of what rounding allows), twin_rms, twin_gain, bad (elements outside), total, worst (group,
    segment, row, head, dim, got, want, bound, region), regions. ``record``: the program's JSON object."""

    line: str
    status: str
    why: str
    replay: str
    seconds: float
    tensors: dict[str, dict[str, Any]]
    record: dict[str, Any]

    @property
    def passed(self) -> bool:
        return self.status == "PASSED"

    def __str__(self) -> str:
        if self.passed:
            return f"PASSED  {self.line}"
        return f"{self.status}  {self.line}\n  {self.why}\n  replay: {self.replay}"

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class Result:
    """What the program said: of every case (``cases``), and of all (``exit_code``, ``text``). ``line``, ``status``, ``why``,
    ``replay``, ``tensors`` are those of the case that decides: the first defect, else the first that did not pass."""

    cases: tuple[Case, ...]
    exit_code: int
    text: str

    @property
    def decisive(self) -> Case:
        def rank(case: Case) -> int:
            return 0 if case.status not in NO_DEFECT else 3 if case.passed else 2 if case.status == "UNSUPPORTED" else 1

        return min(self.cases, key=rank)

    @property
    def passed(self) -> bool:
        """No defect, and nothing that leaves room for doubt; refused cases are in ``counts``."""
        return self.exit_code == 0

    @property
    def status(self) -> str:
        if self.passed:
            return "PASSED"
        return "INCONCLUSIVE" if self.exit_code == 4 and self.decisive.passed else self.decisive.status

    @property
    def why(self) -> str:
        if self.status == "INCONCLUSIVE" and self.decisive.passed:
            return "no defect was seen, and these cases together could not have seen every planted one"
        return "" if self.passed else self.decisive.why

    @property
    def line(self) -> str:
        return self.decisive.line

    @property
    def replay(self) -> str:
        return self.decisive.replay

    @property
    def tensors(self) -> dict[str, dict[str, Any]]:
        return self.decisive.tensors

    @property
    def counts(self) -> dict[str, int]:
        """How many cases have each status."""
        return dict(Counter(case.status for case in self.cases))

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {status}" for status, n in self.counts.items())
        if len(self.cases) == 1:
            return str(self.cases[0])
        if self.passed:
            return f"PASSED: {len(self.cases)} cases: {counts}"
        return f"{self.status}: {self.why}\n  line: {self.line}\n  replay: {self.replay}\n  {len(self.cases)} cases: {counts}"

    __repr__ = __str__

    def write(self, path: str | os.PathLike[str]) -> None:
        """The records, one JSON object a line, as `dualkv report` and `dualkv replay` read them."""
        with open(path, "w") as f:
            f.writelines(json.dumps(case.record) + "\n" for case in self.cases)


# ---- what is run, and what it is called ----


def _module(fn: Kernel) -> Any:
    return sys.modules.get(getattr(fn, "__module__", None) or "")


def backward_of(fn: Kernel) -> Kernel | None:
    """NAME_backward of a function NAME at the top of a module, as FILE.py:NAME finds it."""
    name = getattr(fn, "__qualname__", "")
    found = getattr(_module(fn), f"{name}_backward", None) if name.isidentifier() else None
    return found if callable(found) else None


def spec_of(fn: Kernel, backward: Kernel | None = None, options: str = "") -> str | None:
    """FILE.py:FUNCTION of a function at the top of a file that can be read again; None of any other."""
    name = getattr(fn, "__qualname__", "")
    try:
        file = inspect.getsourcefile(fn)
    except TypeError:
        return None
    if not file or not name.isidentifier() or not file.endswith(".py") or not os.path.isfile(file):
        return None
    if getattr(_module(fn), name, None) is not fn or (backward is not None and backward is not backward_of(fn)):
        return None
    path, inside = os.path.abspath(file), os.path.relpath(file)
    spec = f"{path if inside.startswith('..') else inside}:{name}{options}"
    return spec if len(spec) < 1000 else None


def _words(what: Any) -> list[str]:
    """Words of the command line: canonical lines, names of suites, files."""
    if isinstance(what, Problem):
        return [what.line]
    if isinstance(what, os.PathLike):
        path = os.fspath(what)
        return [path if "/" in path else f"./{path}"]
    if isinstance(what, str):
        if what.startswith("-"):
            raise _lib.LineError(f"{what!r}: neither a problem line nor a suite")
        return [canonical(what)] if "=" in what and not os.path.isfile(what) else [what]
    if isinstance(what, Iterable):
        return [word for one in what for word in _words(one)]
    raise TypeError(f"a problem line, a suite or several of them, not {type(what).__name__}")


def _numbers(x: Any) -> Any:
    """Numbers that JSON has no word for are strings in a record."""
    if isinstance(x, dict):
        return {k: _numbers(v) for k, v in x.items()}
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.get(x, x) if isinstance(x, str) else x


def _case(record: dict[str, Any], replay: Callable[[str], str] | None) -> Case:
    line = str(record["line"])
    return Case(line=line, status=str(record["status"]), why=str(record["why"]),
                replay=replay(line) if replay else str(record["replay"]), seconds=float(record["seconds"]),
                tensors=_numbers(record.get("tensors", {})), record=record)


# ---- the program ----


@lru_cache(maxsize=None)
def _program() -> str:
    """The program, of the same build as the library: they exchange plain structs."""
    path, lib = str(_lib.program_path()), _lib.lib()
    want = f"dualkv {lib.dualkv_version().decode()}, commit {lib.dualkv_commit().decode()}"
    try:
        done = subprocess.run([path, "version"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError as e:
        raise _lib.LibraryError(f"{path}: cannot be run: {e.strerror}") from None
    said = (done.stdout.splitlines() or [f"it ended with {done.returncode}"])[0]
    if said != want:
        raise _lib.LibraryError(f"{path} and {_lib.library_path()} are of two builds: '{said}' and '{want}'")
    return path


def _complain(code: int, text: str) -> _lib.DualKVError:
    last = text.strip().splitlines()[-1] if text.strip() else f"it ended with {code} and said nothing"
    last = re.sub(r"^dualkv: ", "", last)
    at = re.search(r"\(at character (\d+)\)$", last)
    return _lib.LineError(last, int(at[1]) if at else 0) if code == 2 else _lib.DualKVError(last)


def _run(arguments: list[str], child_end: socket.socket | None,
         serve: Callable[[], object] | None) -> tuple[int, list[dict[str, Any]], str]:
    """The program with these arguments, served until it ends: exit code, records, words."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as words:
        child = subprocess.Popen([_program(), *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=words,
                                 pass_fds=[child_end.fileno()] if child_end else [], env=_lib.environment())
        try:
            if child_end:
                child_end.close()
            if serve:
                serve()
            code = child.wait()
        except BaseException:
            child.kill()
            child.wait()
            raise
        out.seek(0)
        words.seek(0)
        text = words.read().decode(errors="replace")
        records = [json.loads(row) for row in out.read().decode(errors="replace").splitlines() if row]
    if code == 130:
        raise KeyboardInterrupt
    if code == 2 or not records:
        raise _complain(code, text)
    return code, records, text


def _arguments(what: Any, spec: str, options: dict[str, Any]) -> list[str]:
    words = _words(what)
    if not words:
        raise _lib.LineError("no problem line was given")
    out = ["check", *words, "--kernel", spec, "--json", "-"]
    for name, value in options.items():
        if value is not None:
            out.append(f"--{name}={os.fspath(value) if isinstance(value, os.PathLike) else value}")
    return out


def check(fn: Kernel | str, what: What = "smoke", *, convention: str | None = None, backward: Kernel | None = None,
          options: dict[str, Any] | None = None, isolated: bool = False, timeout: float | None = None,
          budget: float | None = None, level: float | None = None, repeats: int | None = None,
          peer: str | None = None, waivers: str | os.PathLike[str] | None = None,
          files: str | os.PathLike[str] | None = None) -> Result:
    """Judges a function on a problem line, a suite ("ci"), a file of lines, or several of these.

    fn: a function under one of the calling conventions (`dualkv list conventions`; ``convention`` names it, default: the
    function's or its module's own, else "packed"), or a kernel spec ("emu", "./mine.so:plain", "FILE.py:FUNCTION"). backward: its gradients, where they are
    neither autograd's nor NAME_backward beside it. options: further words of the spec (``{"packing": "first"}``).

    The function runs in this process, in this thread: if it crashes, this process does, and while it hangs, this waits.
    ``isolated=True`` runs it in a process of its own (it must stand at the top of a file), as a kernel spec always does; then
    both are a status.

    timeout, budget, level, repeats, peer, waivers, files: as the options of `dualkv check`.

    Raises LineError for a bad line or suite, DualKVError where nothing could be learned. A defect is no exception.
    """
    words = {k: ("yes" if v else "no") if isinstance(v, bool) else str(v) for k, v in (options or {}).items()}
    limits = {"timeout": timeout, "budget": budget, "level": level, "repeats": repeats, "peer": peer, "waivers": waivers,
              "files": files}
    if convention is not None:
        words = {"convention": convention, **words}
    if isinstance(fn, str):
        if backward is not None:
            raise TypeError("backward=: a kernel spec has its own")
        return _judge(_arguments(what, fn + _options(words), limits), None, None, None)
    if not callable(fn):
        raise TypeError(f"a function or a kernel spec, not {type(fn).__name__}")
    return _judge_function(fn, backward, words, what, limits, isolated)


def _options(words: dict[str, str]) -> str:
    for word in (*words, *words.values()):
        if re.search(r"[+,\s]", word):
            raise _lib.DualKVError(f"option '{word}': no word of a kernel spec")
    return "".join(f"+{k}={v}" for k, v in words.items())


def _judge(arguments: list[str], child_end: socket.socket | None, serve: Callable[[], object] | None,
           replay: Callable[[str], str] | None) -> Result:
    code, records, text = _run(arguments, child_end, serve)
    return Result(tuple(_case(record, replay) for record in records), code, text)


def _judge_function(fn: Kernel, backward: Kernel | None, words: dict[str, str], what: Any, limits: dict[str, Any],
                    isolated: bool) -> Result:
    if _in_worker():
        raise _lib.DualKVError("dualkv.check was called while a worker imports this file: "
                               "put it under `if __name__ == \"__main__\":`")
    name = getattr(fn, "__qualname__", type(fn).__name__)
    tail = _options(words)
    spec = spec_of(fn, backward, tail)
    if isolated:
        if spec is None:
            raise _lib.DualKVError(f"isolated=True: {name} must stand, by its name, at the top of a file")
        return _judge(_arguments(what, spec, limits), None, None, None)
    try:
        chosen = host.parse_options(",".join(f"{k}={v}" for k, v in words.items()))
        function = host.Function(fn, backward or backward_of(fn), chosen, getattr(fn, "__name__", name))
    except host.SpecError as e:
        raise _lib.DualKVError(str(e)) from None

    def replay(line: str) -> str:
        more = f", convention={words['convention']!r}" if "convention" in words else ""
        return f"dualkv.check({name}, {line!r}{more})"

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        called = spec or f"python:{getattr(fn, '__module__', '?')}.{name}{tail}"
        return _judge(_arguments(what, f"attached:{theirs.fileno()}={called}", limits), theirs,
                      lambda: host.serve(ours.fileno(), function, guest=True), None if spec else replay)


def _in_worker() -> bool:
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return main is not None and main.name == "dualkv.worker"


def assert_equivalent(fn: Kernel | str, what: What = "smoke", **options: Any) -> Result:
    """check(), as a test wants it: AssertionError with the sentence and the replay line unless everything passed, SkipTest
    (which pytest and unittest count) where the function refused every case."""
    __tracebackhide__ = True
    result = check(fn, what, **options)
    if result.passed:
        return result
    if set(result.counts) == {"UNSUPPORTED"}:
        raise unittest.SkipTest(f"refused: {result.why}")
    raise AssertionError(f"not equivalent to attention:\n{result}")


def cases(*what: What, argument: str = "line") -> Any:
    """A pytest decorator: the test runs once for each problem line of these suites, files and lines.

        @dualkv.cases("smoke", "shape=200+3x77 mask=window:64")
        def test_mine(line):
            dualkv.assert_equivalent(mine, line)
    """
    import pytest

    lines = [line for one in what for line in lines_of(one)]
    return pytest.mark.parametrize(argument, lines, ids=lines)
