"""Exported cases read, answered and judged with NumPy alone."""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

import numpy as np

import dualkv

try:
    import safetensors.torch as through_torch
except ImportError:
    through_torch = None

START = Path(dualkv.__file__).parent / "start" / "packed.py"
LINES = ["shape=12+2x5 heads=2:1 dim=8", "shape=9+3,2 heads=2:2 dim=8:4 dtype=fp16", "shape=7/4+2 dim=8 dtype=fp32 grad=off"]


def kernel() -> Any:
    spec = importlib.util.spec_from_file_location("start_packed", START)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "dualkv", *words], capture_output=True, text=True, timeout=120)


class InFolder(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = os.path.join(folder.name, "cases")

    def export(self, *words: str) -> "list[str]":
        done = program("export", *words, "--out", self.dir)
        self.assertEqual(done.returncode, 0, done.stderr)
        return sorted(glob.glob(f"{self.dir}/*.safetensors"))

    def statuses(self) -> "list[str]":
        records = os.path.join(self.dir, "..", "r.jsonl")
        program("check", f"files:{self.dir}", "--json", records)
        return [json.loads(x)["status"] for x in Path(records).read_text().splitlines()]


class Exported(InFolder):
    def test_inputs_are_those_of_the_line(self) -> None:
        for path in self.export(*LINES):
            x, bits = dualkv.load(path), dualkv.load(path, bits=True)
            want = dualkv.inputs(x.problem)
            self.assertEqual((set(x), x.layout), (set(want), "packed"))
            for name in want:
                np.testing.assert_array_equal(x[name], want[name])
                self.assertEqual(x[name].dtype, np.float32)
                self.assertTrue(x[name].flags.writeable)
            if x.problem.dtype == "fp16":
                self.assertEqual((bits["q"].dtype, bits["do"].dtype), (np.float16, np.float16))
            if x.problem.dtype == "bf16":
                np.testing.assert_array_equal(bits["q"], dualkv.inputs(x.problem, bf16="uint16").q)
        self.assertEqual(len(dualkv.load(path)), 3)

    def test_answers_are_judged(self) -> None:
        right = kernel()
        for path in self.export(*LINES):
            x = dualkv.load(path)
            p = x.problem
            o, lse = right.my_attention(x["q"], x["k"], x["v"], p, p.scale)
            dualkv.save(path, o=o, lse=lse)
            if p.grad:
                o = dualkv.load(path)["o"]
                dq, dk, dv = right.my_attention_backward(x["q"], x["k"], x["v"], o, lse, x["do"], p, p.scale)
                dualkv.save(path, dq=dq, dk=dk, dv=dv)
        self.assertEqual(self.statuses(), ["PASSED"] * 3)
        dualkv.save(path, lse=lse + 0.1)
        self.assertEqual(self.statuses(), ["PASSED"] * 2 + ["FAILED"])

    def test_forward_alone(self) -> None:
        for path in self.export(*LINES, "--forward"):
            x = dualkv.load(path)
            self.assertNotIn("do", x)
            o, lse = kernel().my_attention(x["q"], x["k"], x["v"], x.problem, x.problem.scale)
            dualkv.save(path, o=o, lse=lse)
        self.assertEqual(self.statuses(), ["PASSED"] * 3)

    def test_replicated(self) -> None:
        path, = self.export(LINES[0], "--layout", "replicated", "--outputs", "truth")
        x = dualkv.load(path)
        self.assertEqual((x.layout, x["q"].shape, list(x["cu_seqlens_q"])), ("replicated", (46, 2, 8), [0, 12, 29, 46]))
        dualkv.save(path, o=x["o"], dk=x["dk"])
        self.assertEqual(self.statuses(), ["PASSED"])
        dualkv.save(path, o=x["o"] * 1.1)
        self.assertEqual(self.statuses(), ["FAILED"])

    @unittest.skipUnless(through_torch, "needs safetensors and torch")
    def test_torch_reads_the_same(self) -> None:
        path, = self.export(LINES[0])
        there = through_torch.load_file(path)
        np.testing.assert_array_equal(there["q"].float().numpy(), dualkv.load(path)["q"])

    def test_what_does_not_fit_is_said(self) -> None:
        path, = self.export(LINES[0])
        before = Path(path).read_bytes()
        for given, says in (({"o": np.zeros((22, 2, 7))}, r"o is \[22, 2, 7\]; \[22, 2, 8\] is right for 'shape=12"),
                            ({"o": np.zeros((22, 2, 8), int)}, "o is of type int64, a float type is right"),
                            ({"lse": np.zeros((2, 22), np.uint16)}, "lse is of type uint16"),
                            ({"o": np.zeros((22, 2, 8)), "dq": 3.0}, r"dq is \[\]")):
            with self.assertRaisesRegex(ValueError, says):
                dualkv.save(path, **given)
        self.assertEqual(Path(path).read_bytes(), before)

    def test_hostile_files(self) -> None:
        os.mkdir(self.dir)

        def file(header: Any, data: bytes = b"") -> str:
            text = header if isinstance(header, bytes) else json.dumps(header).encode()
            Path(self.dir, "x").write_bytes(struct.pack("<Q", len(text)) + text + data)
            return os.path.join(self.dir, "x")

        one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
        self.assertEqual(dualkv.load(file({"q": one}, bytes(4)))["q"], 0)
        for header, data, says in (({"q": one}, b"", "q: shape and place"), ({"q": dict(one, shape=[-1])}, bytes(4), "q: shape"),
                                   ({"q": dict(one, dtype="F8_E4M3")}, bytes(4), "q: of type F8_E4M3"), ({"q": 3}, b"", "q: "),
                                   ({"q": dict(one, data_offsets=[2, 1])}, bytes(4), "q: "), ([1], b"", "not a safetensors file"),
                                   (b"{", b"", "not a safetensors file"), (b"\xff", b"", "not a safetensors file"),
                                   ({"__metadata__": 3}, b"", "not a safetensors file"), (b"[" * 100000, b"", "not a safetensors"),
                                   ({"q": dict(one, shape=[1 << 62, 1 << 62])}, bytes(4), "q: shape"),
                                   ({"q": dict(one, data_offsets=["0", "4"])}, bytes(4), "q: shape and place are not whole"),
                                   ({"q": dict(one, shape=[float("inf")])}, bytes(4), "q: shape and place are not whole"),
                                   ({"q": dict(one, shape=[1.9])}, bytes(4), "q: shape and place are not whole"),
                                   ({"q": dict(one, shape="1")}, bytes(4), "q: shape and place are not whole"),
                                   ({"q": dict(one, shape=[True])}, bytes(4), "q: shape and place are not whole"),
                                   ({"q": one, "k": one}, bytes(4), "tensors overlap"), ({"q": one}, bytes(8), "4 bytes behind"),
                                   ({"q": dict(one, data_offsets=[4, 8])}, bytes(8), "leave bytes between them"),
                                   (b'{"q":1,"q":2}', b"", "a name is there twice"),
                                   ({"a\nb" + "c" * 9999: 3}, b"", r"^[^\n]{1,200}$")):
            with self.assertRaisesRegex(dualkv.DualKVError, says):
                dualkv.load(file(header, data))
        Path(self.dir, "x").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
        with self.assertRaisesRegex(dualkv.DualKVError, "its header is cut off"):
            dualkv.load(os.path.join(self.dir, "x"))
        with self.assertRaisesRegex(dualkv.DualKVError, "no line"):
            dualkv.save(file({"q": one}, bytes(4)), o=np.zeros(1))
        for path in (self.dir, os.path.join(self.dir, "none")):
            with self.assertRaisesRegex(dualkv.DualKVError, "cannot be read"):
                dualkv.load(path)


if __name__ == "__main__":
    unittest.main()
