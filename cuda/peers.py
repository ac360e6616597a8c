#!/usr/bin/env python3
"""peers.py: kernel `cuda` beside what else computes shared-prompt attention, in one run on one GPU.

    python3 cuda/peers.py --plugin build/libdualkv_cuda.so --json peers.jsonl --markdown peers.md

cuda             this project's kernel, through the plugin's C interface
cuda-replicated  the same code on N independent sequences of P + R tokens
flash, cudnn     PyTorch's SDPA with that backend on the replicated layout
flex             FlexAttention, compiled, with the shared-prompt block mask on the packed layout
cascade          three cuDNN calls (prompt causal; all response queries over the prompt as one sequence; responses
                 causal) merged by LSE; backward the same three with the merged O and LSE

bf16, normal inputs, device events, warmed up, medians. Replicated peers may run n of the N sequences, which are
independent: their times are then scaled by N / n, and the row says so. TFLOP/s count what the layout needs: 4 D (10 D
backward) for each visible pair and query head. Packed peers are compared with each other on every shape, the cascade
also with fp64 on a small one. Needs PyTorch 2.9 or later.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

HQ, HKV, D = 32, 8, 128
SCALE = D**-0.5
PAPER = ["4096+28x2048", "16384+28x2048", "32768+16x2048", "32768+28x2048", "8192+32x1024"]
MASK_BLOCK = 128
CHUNK_FLOPS = 3e13  # forward, of one call on the replicated layout


# ---- problems ----


class Problem:
    """A prompt of p tokens and n responses of r: packed q, k, v, dO [T, H, D]."""

    def __init__(self, text, seed):
        self.text = text
        p, rest = text.split("+")
        n, r = rest.split("x")
        self.p, self.n, self.r = int(p), int(n), int(r)
        self.t = self.p + self.n * self.r
        self.length = self.p + self.r
        gen = torch.Generator("cuda").manual_seed(seed)
        self.q, self.k, self.v, self.do = (
            torch.randn(self.t, h, D, generator=gen, device="cuda", dtype=torch.bfloat16)
            for h in (HQ, HKV, HKV, HQ)
        )

    def pairs(self):
        return self.p * (self.p + 1) // 2 + self.n * (self.r * self.p + self.r * (self.r + 1) // 2)

    def replicated_pairs(self):
        return self.n * (self.length * (self.length + 1) // 2)

    def replicate(self, x, n):
        """The first n sequences of packed x: [n, L, H, D]."""
        own = x[self.p :].unflatten(0, (self.n, self.r))[:n]
        return torch.cat([x[: self.p].expand(n, -1, -1, -1), own], 1)

    def chunk(self):
        one = 4 * D * HQ * (self.length * (self.length + 1) / 2)
        return max(1, min(self.n, int(CHUNK_FLOPS / one)))


# ---- timing ----


def measure(call, seconds):
    """Median milliseconds of call(), by device events, and how often it was timed."""

    def once():
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        last.synchronize()
        return first.elapsed_time(last)

    once()
    runs = max(5, min(50, int(1e3 * seconds / max(once(), 1e-3))))
    times = sorted(once() for _ in range(runs))
    return times[len(times) // 2], runs


# ---- the plugin ----


def fields(text):
    kinds = {
        "i": ctypes.c_int32,
        "u": ctypes.c_uint32,
        "l": ctypes.c_int64,
        "w": ctypes.c_uint64,
        "f": ctypes.c_float,
        "d": ctypes.c_double,
        "p": ctypes.c_void_p,
        "s": ctypes.c_char_p,
    }
    return [(name, kinds[kind]) for kind, name in (word.split(":") for word in text.split())]


class Range(ctypes.Structure):
    _fields_ = fields("l:k_start l:len l:pos")


class Segment(ctypes.Structure):
    _fields_ = fields(
        "i:group i:parent i:depth i:range_count l:range_begin l:q_start l:q_len l:k_start l:k_len l:context"
    )


class KernelProblem(ctypes.Structure):
    _fields_ = fields(
        "u:size i:n_groups i:n_segments i:hq i:hkv i:dqk i:dv i:dtype l:n_ranges l:tq l:tk l:max_q_len "
        "l:max_k_len p:segments p:ranges i:mask i:alibi i:sink i:dlse i:grad l:window l:window_sinks "
        "l:chunk l:block d:block_density w:block_seed f:scale f:softcap p:alibi_slopes"
    )


class Tensor(ctypes.Structure):
    _fields_ = fields("p:data l:row l:head")


class Launch(ctypes.Structure):
    _fields_ = (
        fields(
            "u:size p:problem p:device_segments p:device_ranges p:device_alibi_slopes p:stream p:workspace "
            "w:workspace_size"
        )
        + [(name, Tensor) for name in ("q", "k", "v")]
        + fields("p:sink")
        + [(name, Tensor) for name in ("o", "lse", "d_o", "d_lse", "dq", "dk", "dv")]
        + fields("p:dsink")
    )


LAUNCH_FN = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Launch), ctypes.c_char_p, ctypes.c_size_t
)


class Kernel(ctypes.Structure):
    _fields_ = fields("u:size u:abi s:name s:doc i:memory i:alignment i:replicated i:reserved") + [
        ("open", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)),
        ("close", ctypes.c_void_p),
        ("refuses", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p, ctypes.POINTER(KernelProblem))),
        ("arithmetic", ctypes.c_void_p),
        ("deterministic", ctypes.c_void_p),
        (
            "workspace",
            ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p, ctypes.POINTER(KernelProblem), ctypes.c_int),
        ),
        ("forward", LAUNCH_FN),
        ("backward", LAUNCH_FN),
        ("launches", ctypes.c_void_p),
    ]


def on_device(array):
    return torch.frombuffer(bytearray(bytes(array)), dtype=torch.uint8).cuda()


class Plugin:
    """One kernel of the plugin on one layout: segments are (parent, length) in packed order."""

    def __init__(self, path, name, options, segments, q, k, v, do):
        count = ctypes.c_int()
        library = ctypes.CDLL(path)
        library.dualkv_kernels.restype = ctypes.POINTER(ctypes.POINTER(Kernel))
        table = library.dualkv_kernels(ctypes.c_uint32(1), ctypes.byref(count))
        self.kernel = next(
            table[i].contents for i in range(count.value) if table[i].contents.name.decode() == name
        )
        self.why = ctypes.create_string_buffer(400)
        self.instance = self.kernel.open(options.encode(), self.why, 400)
        if not self.instance:
            raise RuntimeError(self.why.value.decode())
        self.make_problem(segments, q.shape[0])
        self.keep = [q, k, v, do]
        reason = self.kernel.refuses(self.instance, ctypes.byref(self.problem))
        if reason:
            raise RuntimeError(reason.decode())
        self.o, self.dq, self.dk, self.dv = (torch.empty_like(x) for x in (q, q, k, v))
        self.lse = torch.empty(HQ, q.shape[0], device="cuda")
        size = max(self.kernel.workspace(self.instance, ctypes.byref(self.problem), b) for b in (0, 1))
        self.workspace = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
        self.make_launch(q, k, v, do, size)

    def make_problem(self, segments, tokens):
        rows, ranges, at = [], [], 0
        for i, (parent, length) in enumerate(segments):
            seen = [] if parent < 0 else [Range(rows[parent].k_start, rows[parent].k_len, 0)]
            context = sum(g.len for g in seen)
            begin, seen = len(ranges), seen + [Range(at, length, context)]
            rows.append(
                Segment(
                    i if parent < 0 else rows[parent].group,
                    parent,
                    int(parent >= 0),
                    len(seen),
                    begin,
                    at,
                    length,
                    at,
                    length,
                    context,
                )
            )
            ranges += seen
            at += length
        assert at == tokens
        groups = sum(parent < 0 for parent, _ in segments)
        self.segments, self.ranges = (Segment * len(rows))(*rows), (Range * len(ranges))(*ranges)
        self.problem = KernelProblem(
            size=ctypes.sizeof(KernelProblem),
            n_groups=groups,
            n_segments=len(rows),
            hq=HQ,
            hkv=HKV,
            dqk=D,
            dv=D,
            dtype=0,
            n_ranges=len(ranges),
            tq=at,
            tk=at,
            max_q_len=max(s.q_len for s in rows),
            max_k_len=max(s.context + s.k_len for s in rows),
            segments=ctypes.addressof(self.segments),
            ranges=ctypes.addressof(self.ranges),
            grad=1,
            scale=SCALE,
        )

    def make_launch(self, q, k, v, do, size):
        def place(x):
            return Tensor(x.data_ptr(), x.stride(0), x.stride(1))

        self.there = [on_device(self.segments), on_device(self.ranges)]
        self.launch = Launch(
            size=ctypes.sizeof(Launch),
            problem=ctypes.addressof(self.problem),
            device_segments=self.there[0].data_ptr(),
            device_ranges=self.there[1].data_ptr(),
            stream=torch.cuda.current_stream().cuda_stream,
            workspace=self.workspace.data_ptr(),
            workspace_size=size,
            q=place(q),
            k=place(k),
            v=place(v),
            o=place(self.o),
            lse=Tensor(self.lse.data_ptr(), 1, self.lse.stride(0)),
            d_o=place(do),
            dq=place(self.dq),
            dk=place(self.dk),
            dv=place(self.dv),
        )

    def call(self, what):
        if what(self.instance, ctypes.byref(self.launch), self.why, 400):
            raise RuntimeError(self.why.value.decode())

    def forward(self):
        self.call(self.kernel.forward)

    def backward(self):
        self.call(self.kernel.backward)

    def results(self):
        return self.o, self.dq, self.dk, self.dv


# ---- PyTorch's own ----

NATIVE_GQA = [True]  # does cuDNN take fewer KV heads? else they are repeated beforehand, which is not timed


def spread(x):
    return x if NATIVE_GQA[0] else x.repeat_interleave(HQ // HKV, 1)


def gather(dx, heads):
    """Gradient [rows, H, D] of repeated heads, summed."""
    return dx if dx.shape[1] == heads else dx.unflatten(1, (heads, -1)).sum(2)


class Graph:
    """A function of q, k, v under autograd; layout and results as the function's."""

    def __init__(self, function, q, k, v, do):
        self.function, self.do = function, do
        self.inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        self.o, self.grads = None, None

    def forward(self):
        self.o = self.function(*self.inputs)

    def backward(self):
        self.grads = torch.autograd.grad(self.o, self.inputs, self.do, retain_graph=True)

    def results(self):
        return tuple(x[0].transpose(0, 1) for x in (self.o.detach(), *self.grads))


def make_sdpa(problem, backend, n):
    packed = (problem.q, problem.k, problem.v, problem.do)
    if backend == SDPBackend.CUDNN_ATTENTION:
        packed = (problem.q, spread(problem.k), spread(problem.v), problem.do)
    q, k, v, do = (problem.replicate(x, n).transpose(1, 2) for x in packed)

    def function(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)

    return Graph(function, q, k, v, do)


def shared_prompt_mask(problem):
    """Whole blocks, found by arithmetic; only those on a diagonal look at elements."""
    p, r = problem.p, problem.r
    if p % MASK_BLOCK or r % MASK_BLOCK:
        raise RuntimeError("the block mask wants multiples of %d tokens" % MASK_BLOCK)
    blocks, prompt, own = problem.t // MASK_BLOCK, p // MASK_BLOCK, r // MASK_BLOCK
    row = torch.arange(blocks, dtype=torch.int32)
    start = torch.where(row < prompt, 0, prompt + (row - prompt) // own * own)
    full = torch.zeros(blocks, blocks, dtype=torch.int32)
    for i in range(blocks):
        seen = row[:i] if i < prompt else torch.cat([row[:prompt], row[start[i] : i]])
        full[i, : len(seen)] = seen
    n_full = torch.where(row < prompt, row, prompt + row - start).to(torch.int32)
    edge = torch.zeros(blocks, blocks, dtype=torch.int32)
    edge[:, 0] = row

    def sees(b, h, i, j):
        return (j <= i) & ((j < p) | ((j - p) // r == (i - p) // r))

    return BlockMask.from_kv_blocks(
        torch.ones_like(row)[None, None].cuda(),
        edge[None, None].cuda(),
        n_full[None, None].cuda(),
        full[None, None].cuda(),
        BLOCK_SIZE=MASK_BLOCK,
        mask_mod=sees,
    )


COMPILED = {}


def compiled(name, function):
    if name not in COMPILED:
        COMPILED[name] = torch.compile(function, dynamic=False)
    return COMPILED[name]


def make_flex(problem):
    mask = shared_prompt_mask(problem)
    flex = compiled("flex", flex_attention)
    q, k, v, do = (x.transpose(0, 1)[None] for x in (problem.q, problem.k, problem.v, problem.do))
    return Graph(lambda q, k, v: flex(q, k, v, block_mask=mask, scale=SCALE, enable_gqa=True), q, k, v, do)


# ---- the cascade ----


def merge(o1, lse1, o2, lse2):
    """O [n, r, h, d] and LSE [n, r, h] of two disjoint sets of keys, each with its own."""
    lse = torch.logaddexp(lse1, lse2)
    o = o1 * torch.exp(lse1 - lse)[..., None] + o2 * torch.exp(lse2 - lse)[..., None]
    return o.to(o1.dtype), lse


class Cascade:
    def __init__(self, problem):
        self.x = x = problem
        packed = (x.q, spread(x.k), spread(x.v), x.do)
        prompt, own = [t[None, : x.p].transpose(1, 2) for t in packed], [t[x.p :] for t in packed]
        flat, cut = [t[None].transpose(1, 2) for t in own], [
            t.unflatten(0, (x.n, x.r)).transpose(1, 2) for t in own
        ]
        self.calls = [(prompt, True), ([flat[0], *prompt[1:3], flat[3]], False), (cut, True)]
        self.merge = compiled("merge", merge)
        self.saved = self.grads = None

    def one(self, i):
        (q, k, v, _), causal = self.calls[i]
        return torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=SCALE
        )

    def forward(self):
        n, r = self.x.n, self.x.r
        out = [self.one(i) for i in range(3)]
        (o1, lse1), (o2, lse2) = out[1][:2], out[2][:2]
        o, lse = self.merge(
            o1[0].transpose(0, 1).unflatten(0, (n, r)),
            lse1.reshape(HQ, n, r).permute(1, 2, 0),
            o2.transpose(1, 2),
            lse2.reshape(n, HQ, r).transpose(1, 2),
        )
        self.saved = [
            (out[0][0], out[0][1], out[0][2:8]),
            (o.flatten(0, 1)[None].transpose(1, 2), lse.permute(2, 0, 1).reshape(lse1.shape), out[1][2:8]),
            (o.transpose(1, 2), lse.transpose(1, 2).reshape(lse2.shape), out[2][2:8]),
        ]

    def one_back(self, i):
        (q, k, v, do), causal = self.calls[i]
        o, lse, (cum_q, cum_k, max_q, max_k, seed, offset) = self.saved[i]
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, causal, scale=SCALE
        )

    def backward(self):
        prompt, shared, cut = (
            [
                gather(t.transpose(1, 2).flatten(0, 1), heads)
                for t, heads in zip(self.one_back(i), (HQ, HKV, HKV))
            ]
            for i in range(3)
        )
        self.grads = (
            [prompt[0], shared[0] + cut[0]],
            [prompt[1] + shared[1], cut[1]],
            [prompt[2] + shared[2], cut[2]],
        )

    def results(self):
        o = [self.saved[i][0][0].transpose(0, 1) for i in (0, 1)]
        return tuple(torch.cat(pair) for pair in (o, *self.grads))


# ---- are they right? ----


def exact(problem):
    """O, dQ, dK, dV in fp64, one dense product."""
    t, p, r = problem.t, problem.p, problem.r
    at = torch.arange(t, device="cuda")
    sees = (at[None] <= at[:, None]) & ((at[None] < p) | ((at[None] - p) // r == (at[:, None] - p) // r))
    q, k, v = (x.double().requires_grad_() for x in (problem.q, problem.k, problem.v))
    kk, vv = (x.repeat_interleave(HQ // HKV, 1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q, kk) * SCALE
    o = torch.einsum("hij,jhd->ihd", s.masked_fill(~sees, float("-inf")).softmax(-1), vv)
    return (o.detach(), *torch.autograd.grad(o, (q, k, v), problem.do.double()))


def distance(got, want):
    """The largest of |got - want| / |want| over O, dQ, dK, dV."""
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(got, want))


def check_cascade(seed):
    problem = Problem("256+3x128", seed)
    for NATIVE_GQA[0] in (True, False):
        try:
            cascade = Cascade(problem)
            cascade.forward()
            cascade.backward()
            far = distance(cascade.results(), exact(problem))
            print(
                "cascade against fp64: %.2e%s" % (far, "" if NATIVE_GQA[0] else ", KV heads repeated"),
                flush=True,
            )
            if far < 1e-2:
                return ""
            reason = "its results differ from fp64 by %.2g" % far
        except (RuntimeError, TypeError, AttributeError) as e:
            reason = " ".join(str(e).split())[:200]
            print("cascade: " + reason, flush=True)
    return reason


# ---- the table ----


def make_plugin(problem, args, name, options=""):
    if name == "cuda-replicated":
        n = problem.chunk()
        tensors = [
            problem.replicate(x, n).flatten(0, 1) for x in (problem.q, problem.k, problem.v, problem.do)
        ]
        return Plugin(args.plugin, name, options, [(-1, problem.length)] * n, *tensors), n
    segments = [(-1, problem.p)] + [(0, problem.r)] * problem.n
    return Plugin(args.plugin, name, options, segments, problem.q, problem.k, problem.v, problem.do), 0


# name: (makes a peer and says how many sequences it runs, 0: the packed problem)
PEERS = {
    "cuda": lambda x, args: make_plugin(x, args, "cuda"),
    "cuda+det": lambda x, args: make_plugin(x, args, "cuda", "det"),
    "cascade": lambda x, args: (Cascade(x), 0),
    "flex": lambda x, args: (make_flex(x), 0),
    "cudnn": lambda x, args: (make_sdpa(x, SDPBackend.CUDNN_ATTENTION, x.chunk()), x.chunk()),
    "flash": lambda x, args: (make_sdpa(x, SDPBackend.FLASH_ATTENTION, x.chunk()), x.chunk()),
    "cuda-replicated": lambda x, args: make_plugin(x, args, "cuda-replicated"),
}


class OutOfTime(Exception):
    pass


def out_of_time(signum, frame):
    raise OutOfTime("not done in its time")


def time_peer(name, problem, args, want):
    """Rows of forward and backward, and the results of a packed peer."""
    rows = []
    start = time.time()
    peer, n = PEERS[name](problem, args)
    pairs = problem.replicated_pairs() if n else problem.pairs()
    factor = problem.n / n if n else 1
    peer.forward()
    peer.backward()
    got = None if n else peer.results()
    ready = time.time() - start
    for what, flops, call in (("forward", 4, peer.forward), ("backward", 10, peer.backward)):
        ms, runs = measure(call, args.seconds)
        ms *= factor
        row = {
            "shape": problem.text,
            "peer": name,
            "direction": what,
            "ms": ms,
            "runs": runs,
            "tflops": flops * D * HQ * pairs / ms / 1e9,
            "seconds_before": ready,
        }
        if n:
            row.update(sequences=n, of=problem.n)
        if got and want:
            row["distance"] = distance(got, want)
        rows.append(row)
    return rows, got


def machine(args, seed):
    def ask(*command):
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
        except OSError:
            return ""

    driver = ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver[0] if driver else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "dtype": "bf16",
        "heads": f"{HQ}:{HKV}",
        "dim": D,
        "seed": seed,
        "commit": args.commit or ask("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "command": " ".join(sys.argv),
    }


def table(rows, shapes, names, about):
    cells = {}
    for row in rows:
        at = (row["shape"], row["direction"], row["peer"])
        if "reason" in row:
            cells[at] = "– (%s)" % row["reason"][:40]
        else:
            part = (
                " ×%d/%d" % (row["of"], row["sequences"])
                if row.get("sequences", 0) != row.get("of", 0)
                else ""
            )
            cells[at] = "%.2f (%.0f)%s" % (row["ms"], row["tflops"], part)
    out = [
        "%s, driver %s, PyTorch %s, cuDNN %s, commit %s; bf16, heads=32:8 dim=128; ms (TFLOP/s that the layout needs)"
        % tuple(about[k] for k in ("device", "driver", "torch", "cudnn", "commit")),
        "",
        "| shape | | " + " | ".join(names) + " |",
        "|" + "---|" * (len(names) + 2),
    ]
    for shape in shapes:
        for what in ("forward", "backward"):
            out.append(
                "| %s | %s | " % (shape if what == "forward" else "", what)
                + " | ".join(cells.get((shape, what, name), "–") for name in names)
                + " |"
            )
    out.append("\n×N/n: n of the N sequences of the replicated layout timed, times scaled.")
    return "\n".join(out) + "\n"


def parse():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("shapes", nargs="*", default=PAPER)
    a.add_argument("--plugin", default="build/libdualkv_cuda.so")
    a.add_argument(
        "--peers", default="cuda,cascade,cudnn,flash,flex,cuda-replicated", help="of " + " ".join(PEERS)
    )
    a.add_argument("--json", default="peers.jsonl")
    a.add_argument("--markdown", default="peers.md")
    a.add_argument("--seconds", type=float, default=0.5, help="of one measurement")
    a.add_argument(
        "--each", type=int, default=90, help="seconds for one peer on one shape, compilation included"
    )
    a.add_argument("--limit", type=float, default=1e9, help="seconds of the whole; later rows say so")
    a.add_argument("--seed", type=int, default=None)
    a.add_argument("--commit", default=None)
    return a.parse_args()


def main():
    args = parse()
    args.plugin = os.path.abspath(args.plugin)
    names, start = args.peers.split(","), time.time()
    seed = int.from_bytes(os.urandom(4), "little") if args.seed is None else args.seed
    about = machine(args, seed)
    signal.signal(signal.SIGALRM, out_of_time)
    rows = []
    with open(args.json, "w") as records:

        def keep(row):
            rows.append(row)
            records.write(json.dumps({**row, **about}) + "\n")
            records.flush()

        missing = check_cascade(seed) if "cascade" in names else ""
        for shape in args.shapes:
            problem, want = Problem(shape, seed), None
            for name in names:
                signal.alarm(args.each)
                try:
                    if name == "cascade" and missing:
                        raise RuntimeError(missing)
                    if time.time() - start > args.limit:
                        raise OutOfTime("the run's time is over")
                    new, got = time_peer(name, problem, args, want)
                    want = want or got
                except Exception as e:  # a peer that is missing must not end the run: its row says why
                    reason = " ".join(("%s: %s" % (type(e).__name__, e)).split())[:200]
                    new = [
                        {"shape": shape, "peer": name, "direction": d, "reason": reason}
                        for d in ("forward", "backward")
                    ]
                finally:
                    signal.alarm(0)
                got = None
                torch.cuda.empty_cache()
                for row in new:
                    keep(row)
                    print(
                        " ".join(
                            "%s=%s" % (k, "%.4g" % v if isinstance(v, float) else v) for k, v in row.items()
                        ),
                        flush=True,
                    )
            del problem, want
    with open(args.markdown, "w") as f:
        f.write(table(rows, args.shapes, args.peers.split(","), about))
    sys.exit(0 if any("ms" in row for row in rows) else 3)


if __name__ == "__main__":
    main()
