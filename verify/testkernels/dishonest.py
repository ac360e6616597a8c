"""Kernels that are not right, for the tests: each does its damage and hopes to pass (convention packed)."""

import ctypes
import importlib.util
import os
import resource
import signal
import sys
import time

import numpy as np

_START = os.path.join(os.path.dirname(__file__), "..", "python", "dualkv", "start", "packed.py")
_spec = importlib.util.spec_from_file_location("right", _START)
_right = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_right)


def honest(q, k, v, problem, scale):
    return _right.my_attention(q, k, v, problem, scale)


def _backward(q, k, v, o, lse, do, problem, scale):
    return _right.my_attention_backward(q, k, v, o, lse, do, problem, scale)


def zeros(q, k, v, problem):
    return np.zeros((problem.tq, problem.hq, problem.dv), np.float32), np.zeros((problem.hq, problem.tq), np.float32)


def copy_of_q(q, k, v, problem):
    return q[:, :, :problem.dv], np.zeros((problem.hq, problem.tq), np.float32)


def previous(q, k, v, problem, scale, _kept={}):
    """Right the first time, for each shape."""
    if q.shape not in _kept:
        _kept[q.shape] = honest(q, k, v, problem, scale)
    return _kept[q.shape]


def by_pointer(q, k, v, problem, scale, _kept={}):
    """Right the first time, for each address."""
    key = q.__array_interface__["data"][0], q.shape
    if key not in _kept:
        _kept[key] = honest(q, k, v, problem, scale)
    return _kept[key]


def nothing(q, k, v, problem, out):
    pass


def last_row_left(q, k, v, problem, scale, out):
    o, lse = honest(q, k, v, problem, scale)
    out[0][:-1], out[1][...] = o[:-1], lse


def mutates(q, k, v, problem, scale):
    o = honest(q, k, v, problem, scale)
    k[0, 0, 0] += 1
    return o


def mutates_do(q, k, v, problem, scale):
    return honest(q, k, v, problem, scale)


def _doubles_do(q, k, v, o, lse, do, problem, scale):
    grads = _backward(q, k, v, o, lse, do, problem, scale)
    do *= 2
    return grads


def overruns(q, k, v, problem, scale, out):
    out[0][...], out[1][...] = honest(q, k, v, problem, scale)
    ctypes.memset(out[0].__array_interface__["data"][0] + out[0].nbytes, 0, 64)


def exits(q, k, v, problem):
    sys.exit(0)


def exits_at_once(q, k, v, problem):
    os._exit(0)


def killed(q, k, v, problem):
    os.kill(os.getpid(), signal.SIGKILL)


def segfault(q, k, v, problem):
    ctypes.string_at(8)


def points_nowhere(q, k, v, problem):
    """Its outputs are read where there is no memory."""
    shape = problem.tq, problem.hq, problem.dv
    return np.frombuffer((ctypes.c_float * (shape[0] * shape[1] * shape[2])).from_address(8), np.float32).reshape(shape), np.zeros(
        (problem.hq, problem.tq), np.float32)


def garbles(q, k, v, problem):
    for fd in range(3, 16):
        try:
            os.write(fd, b"PASSED")
        except OSError:
            pass
    time.sleep(60)


def deaf(q, k, v, problem):
    """Closes where it prints to, then fails."""
    os.close(1), os.close(2), os.close(2)


def cuts(q, k, v, problem, scale, out):
    """Cuts the memory off that it was given, when it is done."""
    out[0][...], out[1][...] = honest(q, k, v, problem, scale)
    for line in open("/proc/self/maps"):
        if "memfd:dualkv-arena" in line:
            with open("/proc/self/map_files/" + line.split()[0], "r+b") as f:
                f.truncate(0)


def starves(q, k, v, problem, scale):
    """No more open files for its process."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, 1))
    return honest(q, k, v, problem, scale)


def raises(q, k, v, problem):
    raise ValueError("the grid is too large\nhow to make it smaller")


class _Dead:
    """A stream that nothing can be written to, and that ends the process."""

    def write(self, text):
        sys.exit(0)

    flush = close = lambda self: sys.exit(0)


def gags(q, k, v, problem, scale):
    sys.stdout = sys.stderr = _Dead()
    return honest(q, k, v, problem, scale)


def exits_when_asked(q, k, v, problem, scale):
    return honest(q, k, v, problem, scale)


def exits_when_counted(q, k, v, problem, scale):
    return honest(q, k, v, problem, scale)


def remembers_gradients(q, k, v, problem, scale):
    return honest(q, k, v, problem, scale)


def remembers_gradients_backward(q, k, v, o, lse, do, problem, scale, _kept={}):
    """By Q, K and V: those of another loss are the same to it."""
    key = q.tobytes(), k.tobytes(), v.tobytes()
    if key not in _kept:
        _kept[key] = _backward(q, k, v, o, lse, do, problem, scale)
    return _kept[key]


_last: dict = {}


def remembers_forward(q, k, v, problem, scale):
    """For its backward: which may be that of another layer's forward."""
    _last["q, k, v, o, lse"] = (q, k, v, *honest(q, k, v, problem, scale))
    return _last["q, k, v, o, lse"][3:]


def remembers_forward_backward(q, k, v, o, lse, do, problem, scale):
    return _backward(*_last["q, k, v, o, lse"], do, problem, scale)


def lists(q, k, v, problem, scale):
    return tuple(x.tolist() for x in honest(q, k, v, problem, scale))


def hangs(q, k, v, problem):
    while True:
        pass


def wrong_shape(q, k, v, problem, scale):
    o, lse = honest(q, k, v, problem, scale)
    return o[:, :, :-1], lse


def wrong_type(q, k, v, problem, scale):
    o, lse = honest(q, k, v, problem, scale)
    return o.astype(np.int32), lse


def returns_none(q, k, v, problem):
    pass


def unsteady(q, k, v, problem, scale, _calls=[0]):
    _calls[0] += 1
    o, lse = honest(q, k, v, problem, scale)
    return o * np.float32(1 + 1e-7 * (_calls[0] % 2)), lse


def fallback(q, k, v, problem, scale):
    """The right answer, of somebody else."""
    return honest(q, k, v, problem, scale)


def cannot_refuse(q, k, v, problem, scale):
    return honest(q, k, v, problem, scale)


def _asks_too_much(p):
    if p.dqk > 8:
        raise KeyError("no such tile: " + str(p.dqk))


def refuses_yes_no(q, k, v, problem, scale):
    return honest(q, k, v, problem, scale)


def miscounts(q, k, v, problem, scale):
    return honest(q, k, v, problem, scale)


unsteady.deterministic = True
miscounts.launches = lambda: "many"
cannot_refuse.refuses = _asks_too_much
refuses_yes_no.refuses = lambda p: p.mask != "causal"
exits_when_asked.refuses = lambda p: sys.exit(0)
exits_when_counted.launches = lambda: sys.exit(0)
fallback.launches = lambda: 0
for _f in (honest, zeros, copy_of_q, previous, by_pointer, nothing, last_row_left, mutates, overruns, exits, exits_at_once,
           killed, segfault, points_nowhere, garbles, deaf, cuts, starves, raises, gags, exits_when_asked, exits_when_counted, lists, hangs,
           wrong_shape, wrong_type, returns_none, unsteady, fallback, cannot_refuse, refuses_yes_no,
           miscounts):
    _f.backward = _backward
mutates_do.backward = _doubles_do
