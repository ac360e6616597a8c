"""Captured steps: what is written is judged where there is no torch; what is watched does not change."""

import contextlib
import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest
import warnings
from unittest import mock

import numpy as np

import dualkv

try:
    import torch
except ImportError:
    torch = None


def attention(q, k, v, mask, scale):
    """Textbook attention on packed [T, H, D], with its gradient as a function of dO."""
    s = np.einsum("thd,shd->hts", q, k) * scale
    s = np.where(mask[None], s, -np.inf).astype(np.float32)
    m = s.max(-1, keepdims=True)
    p = np.exp(s - m)
    total = p.sum(-1, keepdims=True)
    p, lse = p / total, (m + np.log(total))[..., 0]
    o = np.einsum("hts,shd->thd", p, v)

    def backward(do):
        dp = np.einsum("thd,shd->hts", do, v)
        ds = p * (dp - np.einsum("thd,thd->ht", do, o)[..., None]) * scale
        return np.einsum("hts,shd->thd", ds, k), np.einsum("hts,thd->shd", ds, q), np.einsum("hts,thd->shd", p, do)
    return o, lse, backward


def arrays(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def case(line, seed=0):
    p = dualkv.Problem(line)
    q, do = arrays(seed, (p.tq, p.hq, p.dqk), (p.tq, p.hq, p.dv))
    k, v = arrays(seed + 1, (p.tk, p.hkv, p.dqk), (p.tk, p.hkv, p.dv))
    o, lse, backward = attention(q, k, v, p.mask_array(), np.float32(p.scale))
    dq, dk, dv = backward(do)
    return {n: np.ascontiguousarray(x, np.float32) for n, x in
            dict(q=q, k=k, v=v, do=do, o=o, lse=lse, dq=dq, dk=dk, dv=dv).items()}


def header(path):
    with open(path, "rb") as f:
        return json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))


class InFolder(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.dir = os.path.join(self.folder.name, "cap")

    def judge(self, *words):
        """Statuses, by file, of `dualkv check files:DIR`."""
        records = os.path.join(self.folder.name, "r.jsonl")
        done = subprocess.run([sys.executable, "-m", "dualkv", "check", f"files:{self.dir}", *words, "--json", records], capture_output=True,
                              text=True)
        self.assertIn(done.returncode, (0, 1, 4), done.stderr)
        with open(records) as f:
            return {r["file"].removesuffix(".safetensors"): r["status"] for r in map(json.loads, f)}


class Captured(InFolder):
    LINE = "shape=20+2x9 heads=2:2 dim=8 dtype=fp32"

    def test_what_is_recorded_is_judged(self):
        t = case(self.LINE)
        with dualkv.capture(self.dir, step=3) as cap:
            self.assertTrue(cap.record(**t, problem="shape=20+2x9").endswith("step3-layer0.safetensors"))
            cap.record(**dict(t, dk=t["dk"] * 2), problem="shape=20+2x9")
            cap.record(**{n: t[n] for n in ("q", "k", "v", "o")}, problem="shape=20+2x9", name="Only O!")
        self.assertEqual(self.judge(), {"step3-layer0": "PASSED", "step3-layer1": "FAILED", "only_o_": "PASSED"})
        self.assertEqual(set(self.judge("--kernel", "emu").values()), {"PASSED"})  # their inputs, another kernel
        self.assertEqual(header(cap.files[0])["__metadata__"]["line"], self.LINE)

    def test_sequences_of_their_own(self):
        t = case("shape=5/9/1 heads=2:2 dim=8 dtype=fp32 mask=full")
        with dualkv.capture(self.dir) as cap:
            cap.record(**t, cu_seqlens=np.array([0, 5, 14, 15], np.int32), problem="mask=full")
        self.assertEqual(set(self.judge().values()), {"PASSED"})

    def test_the_dtype_is_the_tensors(self):
        q, k, v = arrays(3, (22, 2, 8), (22, 1, 8), (22, 1, 8))
        with dualkv.capture(self.dir) as cap:
            for x in ((q, k, v), [a.astype(np.float16) for a in (q, k, v)], [dualkv.encode_bf16(a) for a in (q, k, v)]):
                cap.record(q=x[0], k=x[1], v=x[2], problem="shape=12+2x5")
            cap.record(q=x[0], k=x[1], v=x[2], problem=dualkv.Problem("shape=12+2x5 heads=2:1 dim=8"))
        self.assertEqual([dualkv.load(f).problem.dtype for f in cap.files], ["fp32", "fp16", "bf16", "bf16"])

    def test_sixteen_bits(self):
        t = case("shape=12+4 heads=2:2 dim=8 dtype=fp32")
        bits = {n: dualkv.encode_bf16(x) for n, x in t.items() if n in ("q", "k", "v")}
        q, k, v = (dualkv.decode_bf16(bits[n]) for n in ("q", "k", "v"))
        p = dualkv.Problem("shape=12+4 heads=2:2 dim=8")
        o, lse, _ = attention(q, k, v, p.mask_array(), np.float32(p.scale))
        with dualkv.capture(self.dir) as cap:
            cap.record(**bits, o=dualkv.encode_bf16(o), lse=lse, problem="shape=12+4")
        self.assertEqual(set(self.judge().values()), {"PASSED"})

    def test_functions_are_watched_and_unchanged(self):
        t = case(self.LINE)
        p = dualkv.Problem(self.LINE)
        seen = []

        def mine(q, k, v):
            seen.append((q, k, v))
            return attention(q, k, v, p.mask_array(), np.float32(p.scale))[0]
        with dualkv.capture(self.dir, step=1, steps={1}, layers={1}) as cap:
            watched = cap.attention(mine, "shape=20+2x9")
            results = [watched(t["q"], t["k"], t["v"]) for _ in range(3)]
        self.assertEqual([os.path.basename(f) for f in cap.files], ["step1-layer1.safetensors"])
        for r, (q, k, v) in zip(results, seen):
            np.testing.assert_array_equal(r, t["o"])
            self.assertTrue(q is t["q"] and k is t["k"] and v is t["v"])
        watched(t["q"], t["k"], t["v"])  # outside: a plain call
        self.assertEqual(len(cap.files), 1)
        self.assertEqual(self.judge(), {"step1-layer1": "PASSED"})

    def test_other_steps_cost_nothing(self):
        with dualkv.capture(self.dir, step=2, steps={1}) as cap:
            self.assertIsNone(cap.record(**case(self.LINE), problem="shape=20+2x9"))
            self.assertEqual(cap.attention(lambda q, k, v: q + k + v, "nonsense")(1, 2, 3), 6)
        self.assertFalse(os.path.exists(self.dir))

    def test_the_folder_is_bounded(self):
        t = case(self.LINE)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with dualkv.capture(self.dir, max_bytes=40000) as cap:
                paths = [cap.record(**t, problem="shape=20+2x9") for _ in range(3)]
        self.assertIsNotNone(paths[0])
        self.assertIsNone(paths[2])
        self.assertTrue(cap.skipped and said and "max_bytes=40000" in cap.skipped[0])
        self.assertLessEqual(sum(os.path.getsize(os.path.join(self.dir, f)) for f in os.listdir(self.dir)), 40000)

    def test_files_appear_whole(self):
        t = case(self.LINE)
        with dualkv.capture(self.dir) as cap:
            cap.record(**t, problem="shape=20+2x9")
        self.assertEqual(os.listdir(self.dir), ["step0-layer0.safetensors"])
        with mock.patch("os.replace", side_effect=OSError("no room")), dualkv.capture(self.dir) as cap:
            with self.assertRaises(OSError):
                cap.record(**t, problem="shape=20+2x9")
        self.assertEqual(os.listdir(self.dir), ["step0-layer0.safetensors"])

    def test_what_does_not_fit_is_said(self):
        t = case(self.LINE)
        rows = [(dict(t, o=t["o"][:-1]), "shape=20+2x9", "o is [37, 2, 8]"), (t, "shape=20+2x8", "'shape=20+2x8"),
                (dict(t, k=t["k"].astype(np.float16)), "shape=20+2x9", "q is fp32 and k fp16: q, k, v, o and"), (t, "shape=20+", "shape"),
                (dict(t, q=t["q"].astype(np.float64)), "shape=20+2x9", "q is of float64"),
                (dict(t, o=dualkv.encode_bf16(t["o"])), "shape=20+2x9", "q is fp32 and o bf16 (NumPy: its bits, uint16"),
                (dict(t, lse=t["lse"].astype(np.float64)), "shape=20+2x9", "lse is of float64; it is float32"),
                (t, "shape=20+2x9 dtype=bf16", "q is fp32, and the problem says dtype=bf16"),
                (t, dualkv.Problem("shape=20+2x9 heads=2:2 dim=8"), "q is fp32, and the problem says dtype=bf16"),
                (t, dualkv.Problem("shape=20+2x9 dim=8 dtype=fp32"), "q is [38, 2, 8]; [38, 1, 8] is right"),
                (dict(t, v=t["v"] * np.nan), "shape=20+2x9", "v holds NaN"),
                (dict(t, q=t["q"][0]), "shape=20+2x9", "packed"),
                ({n: x for n, x in t.items() if n != "do"}, "shape=20+2x9", "dq without do"),
                (dict(t, dsink=np.zeros(4, np.float32)), "shape=20+2x9", "dsink without sink")]
        for tensors, words, says in rows:
            with dualkv.capture(self.dir) as cap, self.assertRaises(ValueError) as raised:
                cap.record(**tensors, problem=words)
            self.assertIn(says, str(raised.exception))
        with warnings.catch_warnings(record=True):  # a watched function goes on
            warnings.simplefilter("always")
            with dualkv.capture(self.dir) as cap:
                self.assertIs(cap.attention(lambda q, k, v: v, "shape=1")(t["q"], t["k"], t["v"]), t["v"])
        self.assertEqual(len(cap.skipped), 1)


@unittest.skipUnless(torch, "needs torch")
class Torch(InFolder):
    def step(self, cap=None, batched=True):
        """A step with two attention calls; the gradients of its leaves."""
        torch.manual_seed(5)
        shape = (2, 4, 33, 16) if batched else (66, 4, 16)
        x = [torch.randn(shape, requires_grad=True) for _ in range(3)]
        f = torch.nn.functional
        q, k, v = (y.to(torch.bfloat16) for y in x)
        o = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        o = f.scaled_dot_product_attention(o + q, k, v * 2, is_causal=False, scale=0.2)
        (o.float() ** 2).sum().backward()
        return [y.grad.clone() for y in x] + [o.detach().clone()]

    def test_a_step_is_captured_and_unchanged(self):
        plain = self.step()
        with dualkv.capture(self.dir, step=9, sdpa=True) as cap:
            watched = self.step()
        for a, b in zip(plain, watched):
            self.assertTrue(torch.equal(a, b))
        self.assertEqual(cap.skipped, [])
        self.assertEqual([os.path.basename(f) for f in sorted(cap.files)],
                         ["step9-layer0.safetensors", "step9-layer1.safetensors"])
        for f in cap.files:
            names = set(header(f)) - {"__metadata__"}
            self.assertEqual(names, {"q", "k", "v", "o", "do", "dq", "dk", "dv"})
        statuses = self.judge()
        self.assertEqual(len(statuses), 2)
        for status in statuses.values():  # CPU kernels may be less precise than any profile that is known; never wrong
            self.assertIn(status, ("PASSED", "INCONCLUSIVE"))
        self.assertEqual(set(self.judge("--kernel", "emu").values()), {"PASSED"})

    def test_the_function_is_put_back(self):
        before = torch.nn.functional.scaled_dot_product_attention
        with contextlib.suppress(RuntimeError), dualkv.capture(self.dir, sdpa=True):
            self.assertIsNot(torch.nn.functional.scaled_dot_product_attention, before)
            raise RuntimeError
        self.assertIs(torch.nn.functional.scaled_dot_product_attention, before)

    def test_forward_alone(self):
        with torch.no_grad(), dualkv.capture(self.dir, sdpa=True) as cap:
            q, k, v = torch.randn(3, 1, 2, 20, 8)
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        self.assertIn("grad=off", header(cap.files[0])["__metadata__"]["line"])
        self.assertEqual(set(self.judge().values()), {"PASSED"})

    def test_varlen(self):
        def flash(q, k, v, cu_q, cu_k, most_q, most_k, *, softmax_scale=None, causal=False):
            parts = [torch.nn.functional.scaled_dot_product_attention(
                *(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), is_causal=causal)[0].transpose(0, 1)
                for a, b in zip(cu_q.tolist(), cu_q.tolist()[1:])]
            return torch.cat(parts)
        cu = torch.tensor([0, 7, 20, 21], dtype=torch.int32)
        q, k, v = (torch.randn(21, 2, 8, requires_grad=True) for _ in range(3))
        with dualkv.capture(self.dir) as cap:
            cap.varlen(flash)(q, k, v, cu, cu, 13, 13, causal=True).sum().backward()
        self.assertIn("shape=7/13/1", header(cap.files[0])["__metadata__"]["line"])
        self.assertEqual(set(self.judge().values()), {"PASSED"})
