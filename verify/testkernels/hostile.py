"""Kernels that attack the process they run in, or the one that judges them, for the tests (convention packed, NumPy)."""

import atexit
import os
import signal
import sys
import threading
import time

import conventions
import numpy as np
from dishonest import _backward, honest


def generates(q, k, v, problem, scale):
    yield from honest(q, k, v, problem, scale)


def returns_dict(q, k, v, problem, scale):
    o, lse = honest(q, k, v, problem, scale)
    return {"o": o, "lse": lse}


def interrupts(q, k, v, problem):
    raise KeyboardInterrupt


class _Unsayable(Exception):
    def __str__(self):
        raise RuntimeError("it cannot be said")


def raises_unsayable(q, k, v, problem):
    raise _Unsayable


def recurses(q, k, v, problem):
    return recurses(q, k, v, problem)


def prints(q, k, v, problem, scale):
    for stream in (sys.stdout, sys.stderr):
        stream.write("PASSED \x1b[31m \udcff"[:15] + "x" * (8 << 20))
    os.write(1, b"\xff\x00" * (1 << 20))
    return honest(q, k, v, problem, scale)


def moves_away(q, k, v, problem, scale):
    os.chdir("/")
    return honest(q, k, v, problem, scale)


def closes_all(q, k, v, problem, scale):
    os.closerange(0, 256)
    return honest(q, k, v, problem, scale)


def handles_signals(q, k, v, problem, scale):
    for s in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGPIPE, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(s, lambda *_: os._exit(0))
    return honest(q, k, v, problem, scale)


def sleeps_through_signals(q, k, v, problem):
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
    time.sleep(1000)


def alarms(q, k, v, problem, scale):
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(3)
    return honest(q, k, v, problem, scale)


def leaves_threads(q, k, v, problem, scale):
    """They neither end nor let the process end."""
    for _ in range(4):
        threading.Thread(target=lambda: time.sleep(1000)).start()
    return honest(q, k, v, problem, scale)


def hangs_at_exit(q, k, v, problem, scale):
    atexit.register(time.sleep, 1000)
    return honest(q, k, v, problem, scale)


def writes_later(q, k, v, problem, scale, out):
    """Its answer comes when it has returned, by a thread."""
    def write():
        time.sleep(0.2)
        try:
            out[0][...], out[1][...] = honest(q, k, v, problem, scale)
        except BaseException:
            pass
    threading.Thread(target=write, daemon=True).start()


def forks(q, k, v, problem, scale):
    """A child that goes on with the harness's work."""
    if os.fork() == 0:
        time.sleep(1000)
    return honest(q, k, v, problem, scale)


def patches_checks(q, k, v, problem, scale):
    """Its change of an input is to look like none."""
    np.array_equal = lambda *a, **b: True
    np.testing.assert_array_equal = np.allclose = np.array_equal
    o = honest(q, k, v, problem, scale)
    k[0, 0, 0] += 1
    return o


def changes_gathered(q, k, v, is_causal, attn_mask, scale, enable_gqa):
    """When it is done. (Convention sdpa: what it changes is a copy.)"""
    out = conventions.sdpa(q, k, v, is_causal, attn_mask, scale, enable_gqa)
    v[..., -1, 0] += 1
    return out


def changes_do(q, k, v, is_causal, attn_mask, scale, enable_gqa):
    return conventions.sdpa(q, k, v, is_causal, attn_mask, scale, enable_gqa)


def _doubled(q, k, v, o, lse, do, is_causal, attn_mask, scale):
    grads = conventions.sdpa_backward(q, k, v, o, lse, do, is_causal, attn_mask, scale)
    do *= 2
    do.shape += (1,)
    return grads


def patches_numpy(q, k, v, problem, scale):
    """Nobody has arrays any more."""
    np.asarray = np.empty = np.zeros = np.frombuffer = lambda *a, **b: None
    return honest(q, k, v, problem, scale)


def patches_harness(q, k, v, problem):
    """What it returned is to be taken unseen."""
    import dualkv.arrays
    import dualkv.host

    dualkv.arrays.NumpyArrays.checked = lambda self, name, x, shape, dtype: np.zeros(shape)
    dualkv.arrays.NumpyArrays.store = lambda self, to, x: None
    dualkv.host.Launch.run = lambda self, backward: None
    return "anything", "at all"


def reads_its_judge(q, k, v, problem, scale):
    """The truth is in there."""
    with open(f"/proc/{os.getppid()}/mem", "rb") as f:
        f.read(1)
    return honest(q, k, v, problem, scale)


def reads_do_in_forward(q, k, v, problem, scale):
    """It lies between inputs and outputs, if at all."""
    import dualkv.host

    frame = sys._getframe()
    while frame and not isinstance(frame.f_locals.get("self"), dualkv.host.Launch):
        frame = frame.f_back
    assert frame and frame.f_locals["self"].do is None
    return honest(q, k, v, problem, scale)


class _Liar(np.ndarray):
    """An array whose shape and type are as they should be, and whose values change when they are looked at."""

    @property
    def shape(self):
        return 12, 2, 8

    def __array__(self, *a, **b):
        return np.zeros((3, 3))


def lies(q, k, v, problem, scale):
    o, lse = honest(q, k, v, problem, scale)
    return o[:1].view(_Liar), lse


def read_only(q, k, v, problem, scale):
    o, lse = honest(q, k, v, problem, scale)
    o = np.broadcast_to(o[None], (1,) + o.shape)[0]
    return np.asfortranarray(o)[:], np.flip(np.flip(lse))


def masked(q, k, v, problem, scale):
    o, lse = honest(q, k, v, problem, scale)
    return np.ma.masked_array(o, np.zeros(o.shape, bool)), lse.astype(np.longdouble)


def complex_numbers(q, k, v, problem, scale):
    o, lse = honest(q, k, v, problem, scale)
    return o.astype(np.complex64), lse


for _f in [x for x in list(vars().values()) if getattr(x, "__module__", "") == __name__ and callable(x) and not isinstance(x, type)]:
    _f.backward = _backward
for _f in (changes_gathered, changes_do):
    _f.convention, _f.lse, _f.backward = "sdpa", True, conventions.sdpa_backward
changes_do.backward = _doubled
