"""The worker process of FILE.py:FUNCTION: `python -m dualkv.worker FD FILE FUNCTION OPTIONS`, started by the program."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.util
import os
import resource
import select
import signal
import sys
from difflib import get_close_matches
from typing import Any

from . import host
from .host import Function, SpecError

PR_SET_PDEATHSIG = 1


def load(path: str) -> Any:
    """The file as a module, its folder first on the path, as `python FILE` has it. SpecError: one line, with the place."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SpecError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as e:
        host.print_traceback(e)
        raise SpecError(f"importing it failed: {host.explain(e, [path, os.path.abspath(path)])}") from None
    return module


def find(path: str, name: str, options: str) -> Function:
    """The function of a spec."""
    chosen = host.parse_options(options)
    module = load(path)
    function = getattr(module, name, None)
    if function is None:
        there = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__
                 and n != "refuses" and not n.startswith("_") and not n.endswith("_backward")]
        near = get_close_matches(name, there, 1)
        has = f": did you mean '{near[0]}'?" if near else f" (it has {', '.join(there[:8] + ['...'] * (len(there) > 8))})"
        raise SpecError(f"{path} has no '{name}'" + (has if there else ""))
    return Function(function, getattr(module, f"{name}_backward", None), chosen, name, "torch" in sys.modules,
                    getattr(module, "CONVENTION", None))


def main(argv: list[str]) -> int:
    fd, path, name, options = int(argv[0]), argv[1], argv[2], argv[3]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a hanging kernel must not outlive its coordinator
    watch = select.poll()
    watch.register(fd, 0)
    if watch.poll(0):  # it is dead already, and nothing would end what the file does
        return 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:  # where memory ends, it ends for the kernel first
        with open("/proc/self/oom_score_adj", "w") as f:
            f.write("1000")
    except OSError:
        pass
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(fd, False)
    faulthandler.enable()
    if "" in sys.path:
        sys.path.remove("")
    try:
        function: Function | str = find(path, name, options)
    except SpecError as e:
        function = str(e)
    host.flush()
    return host.serve(fd, function)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
