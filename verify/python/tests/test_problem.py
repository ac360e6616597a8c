"""Problems and inputs: against NumPy written from the definitions, and against a small independent generator of rows."""

import ctypes
import doctest
import os
import subprocess
import pickle
import types
import unittest

import numpy as np

import dualkv
import dualkv.problem
from dualkv import _lib
from dualkv.conventions import BATCH_ROWS, _batches, _flex_score, flex_blocks, flex_mask
from dualkv.view import View

try:
    import torch
except ImportError:
    torch = None

LINES = [
    "shape=4",
    "shape=4+2x3 heads=2:1 dim=16",
    "shape=5+3@2,(2+1x2)/4 heads=4:2 dim=8:12 sinklogit=0.5 dlse=on seed=9",
    "shape=6k+3@2,4 heads=2:1 dim=8 dtype=fp16 mask=prefix",
    "shape=0+3x4 dim=8 dtype=fp32 mask=window:3:1",
    "shape=9+4,5 dim=8 mask=block:2:0.5:3 alibi=on heads=4:4 grad=off",
    "shape=3+(2+2,1),2x(1+2x1) dim=4 mask=full",
    "shape=7+5,2/3+2x4 dim=4 mask=chunk:3",
]


def visible(p, position, key, seen_before, root):
    """The definition of each mask, over positions."""
    if p.mask == "full" or (p.mask == "prefix" and root):
        return True
    if key > position:
        return False
    if p.mask == "window":
        return key > position - p.window or key < p.window_sinks
    if p.mask == "chunk":
        return key // p.chunk == position // p.chunk
    return True


class Problems(unittest.TestCase):
    def test_a_line_is_what_it_says(self):
        p = dualkv.Problem("dim=16   heads=2:1 shape=4+3,3 seed=1")
        self.assertEqual(str(p), "shape=4+2x3 heads=2:1 dim=16")
        self.assertEqual((p.hq, p.hkv, p.dqk, p.dv, p.dtype, p.mask, p.tq, p.tk), (2, 1, 16, 16, "bf16", "causal", 10, 10))
        self.assertEqual(p.scale, 0.25)
        self.assertEqual(p, dualkv.Problem(str(p)))
        self.assertEqual(pickle.loads(pickle.dumps(p)), p)
        self.assertEqual(dualkv.canonical("shape=4+3,3"), "shape=4+2x3")
        self.assertIsNone(p.alibi_slopes)
        np.testing.assert_allclose(dualkv.Problem(LINES[5]).alibi_slopes, [2**-2, 2**-4, 2**-6, 2**-8])

    def test_segments_cover_the_rows(self):
        for line in LINES:
            p = dualkv.Problem(line)
            rows = [r for s in p.segments for r in range(s.k_start, s.k_start + s.k_len)]
            self.assertEqual(rows, list(range(p.tk)), line)
            for s in p.segments:
                self.assertEqual(sum(r.length for r in s.ranges), s.context + s.k_len, line)

    def test_the_mask_is_its_definition(self):
        for line in LINES:
            p = dualkv.Problem(line)
            want = np.zeros((p.tq, p.tk), bool)
            for s in p.segments:
                keys = [r.start + i for r in s.ranges for i in range(r.length)]
                for t in range(s.q_len):
                    for position, key in enumerate(keys):
                        want[s.q_start + t, key] = visible(p, s.context + t, position, s.context, s.parent < 0)
            got = p.mask_array()
            if p.mask == "block":  # a hash decides within what is causal
                self.assertTrue((got <= want).all() and got.any())
            else:
                np.testing.assert_array_equal(got, want, line)

    def test_what_kernels_are_told_is_the_mask(self):
        for line in LINES:
            p = dualkv.Problem(line)
            v = View(p.view("packed"))
            got = np.zeros((p.tq, p.tk), bool)
            for s in v.segments:
                got[v.query_rows(s)[:, None], v.key_rows(s)[None, :]] = v.visible(s)
            np.testing.assert_array_equal(got, p.mask_array(), line)
            if all(s.depth < 2 for s in v.segments):
                q, k = np.arange(p.tq)[:, None], np.arange(p.tk)[None, :]
                np.testing.assert_array_equal(flex_mask(v, np.asarray)(0, 0, q, k), p.mask_array(), line)

    @unittest.skipUnless(torch, "needs torch")
    def test_blocks_of_the_mask_are_those_that_torch_makes(self):
        from torch.nn.attention.flex_attention import create_block_mask

        for line in ("shape=200+2x70,129", "shape=128+2x128", "shape=300+40 mask=full", "shape=390+2x1 mask=window:130",
                     "shape=257k+5,3 mask=prefix", "shape=200+129 mask=block:64:0.5:3"):
            v = View(dualkv.Problem(line).view("packed"))
            mask = flex_mask(v, torch.as_tensor)
            want = create_block_mask(mask, None, None, v.tq, v.tk, device="cpu")
            for pairs in (1, 3 * 128 * 512, 2**28):
                got = flex_blocks(mask, v.tq, v.tk, "cpu", pairs)
                for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices",
                             "full_q_num_blocks", "full_q_indices"):
                    self.assertTrue(torch.equal(getattr(got, name), getattr(want, name)), (line, pairs, name))
                self.assertEqual((got.shape, got.BLOCK_SIZE, got.mask_mod), (want.shape, want.BLOCK_SIZE, mask), line)

    @unittest.skipUnless(torch, "needs torch")
    def test_scores_are_modified_by_tensors_and_numbers_alone(self):
        def closed(f):
            for x in (c.cell_contents for c in f.__closure__ or ()):
                yield from closed(x) if callable(x) else (x,)

        for line, cap, slope in (("shape=9+3,4 softcap=5", 5, False), ("shape=9+3,4 heads=2:1 alibi=on mask=window:3:1", 0, True),
                                 ("shape=9+3,4 heads=4:2 alibi=on softcap=0.5 mask=chunk:4", 0.5, True), ("shape=9+3", 0, None)):
            v = View(dualkv.Problem(line).view("packed"))
            mask = flex_mask(v, torch.as_tensor)
            score = _flex_score(v, mask, torch.as_tensor)
            if slope is None:
                self.assertIsNone(score)
                continue
            for x in (*closed(mask), *closed(score)):
                self.assertIsInstance(x, (torch.Tensor, int, float, types.ModuleType, type(None)), line)
            h, q, k = v.hq - 1, torch.arange(v.tq)[:, None], torch.arange(v.tk)[None, :]
            pos, kpos = (x.numpy() for x in mask.positions)
            x = np.linspace(-9, 9, v.tq * v.tk).reshape(v.tq, v.tk)
            want = cap * torch.tanh(torch.as_tensor(x / cap)).numpy() if cap else x
            if slope:
                want = want - v.alibi_slopes[h] * np.abs(pos[:, None] - kpos[None, :])
            np.testing.assert_array_equal(score(torch.as_tensor(x), 0, h, q, k).numpy(), want, line)  # slopes are powers of 2

    def test_long_sequences_go_in_several_calls(self):
        for line, calls in (("shape=4096+28x2048", 2), ("shape=32768+28x2048", 5), ("shape=300000+2x1", 3), ("shape=4+5x3", 2)):
            v = View(dualkv.Problem(line).view("replicated"))
            batches = _batches(v)
            self.assertEqual(sorted(s.index for b in batches for s in b), list(range(len(v.segments))), line)
            self.assertEqual(len(batches), calls, line)
            for b in batches:
                self.assertTrue(len(b) == 1 or len(b) * b[0].k_len <= BATCH_ROWS, line)

    def test_replicated_rows_see_what_packed_rows_see(self):
        for line in LINES:
            p = dualkv.Problem(line)
            e = p.expansion()
            mask = p.mask_array("replicated")
            packed = p.mask_array()
            self.assertEqual(mask.shape, (len(e.q), len(e.k)), line)
            np.testing.assert_array_equal(mask.sum(1), packed.sum(1)[e.q], line)
            self.assertEqual(e.own.sum(), p.tq, line)

    def test_expansion_and_its_transpose(self):
        rng = np.random.default_rng(1)
        for line in LINES:
            p = dualkv.Problem(line)
            for rows, n, first in (("q", p.tq, p.cu_seqlens_q), ("k", p.tk, p.cu_seqlens_k)):
                x, y = rng.integers(-9, 9, (n, 3)), rng.integers(-9, 9, (first[-1], 3))
                self.assertEqual((p.expand(x, rows) * y).sum(), (x * p.reduce(y, rows)).sum(), line)  # <Ex, y> = <x, E'y>
                np.testing.assert_array_equal(p.expand(x.T, rows, axis=1), p.expand(x, rows).T)
                np.testing.assert_array_equal(p.reduce(y.T, rows, axis=1), p.reduce(y, rows).T)
            x = rng.integers(-9, 9, (p.tq, 2))
            np.testing.assert_array_equal(p.own(p.expand(x, "q")), x)

    def test_wrong_shapes_are_refused(self):
        p = dualkv.Problem("shape=4+2x3")
        for call in (lambda: p.expand(np.zeros((11, 2)), "q"), lambda: p.reduce(np.zeros(10), "k"),
                     lambda: p.expand(np.zeros(10), "rows"), lambda: p.view("other"), lambda: p.expand(1.0, "q")):
            self.assertRaises(ValueError, call)

    def test_bad_lines(self):
        for line, position in (("shape=4 dim=300", 13), ("shape=4+", 9), ("", 0), ("shape=4 \0", 9), ("shape=é", 7)):
            with self.assertRaises(dualkv.LineError) as caught:
                dualkv.Problem(line)
            self.assertEqual(caught.exception.position, position, str(caught.exception))
            self.assertNotIn("\n", str(caught.exception))
        self.assertRaises(dualkv.RefusedError, dualkv.Problem, "shape=4+2 mask=bidir")
        self.assertRaises(TypeError, dualkv.Problem, 7)
        self.assertRaises(MemoryError, dualkv.Problem("shape=65536").mask_array)

    def test_suites(self):
        self.assertIn("ci", dualkv.suites())
        lines = dualkv.suite("smoke")
        self.assertEqual(lines, [dualkv.canonical(line) for line in lines])
        self.assertRaises(dualkv.LineError, dualkv.suite, "nosuch")


class Inputs(unittest.TestCase):
    def test_shapes_and_dtypes(self):
        p = dualkv.Problem(LINES[2])
        i = dualkv.inputs(p)
        self.assertEqual({k: v.shape for k, v in dict(i).items()}, p.shapes())
        self.assertEqual(i.q.shape, (p.tq, 4, 8))
        self.assertEqual(i.v.shape, (p.tk, 2, 12))
        self.assertEqual(i.dlse.shape, (4, p.tq))
        self.assertTrue(all(x.dtype == np.float32 for x in dict(i).values()))
        self.assertEqual(dualkv.inputs(LINES[3]).q.dtype, np.float16)
        self.assertEqual(dualkv.inputs(p, bf16="uint16").k.dtype, np.uint16)
        self.assertIsNone(dualkv.inputs(LINES[5]).do)
        self.assertNotIn("do", dict(dualkv.inputs(LINES[5])))

    def test_bits_and_values_agree(self):
        p = dualkv.Problem(LINES[2])
        values, bits = dualkv.inputs(p), dualkv.inputs(p, bf16="uint16")
        np.testing.assert_array_equal((bits.q.astype(np.uint32) << 16).view(np.float32), values.q)
        np.testing.assert_array_equal(dualkv.decode_bf16(bits.k), values.k)
        np.testing.assert_array_equal(dualkv.encode_bf16(values.k), bits.k)
        self.assertEqual(dualkv.encode_bf16([1 + 2**-8, 1 + 3 * 2**-8]).tolist(), [0x3F80, 0x3F82])  # ties to even

    def test_replicated_inputs_are_expanded(self):
        for line in LINES:
            p = dualkv.Problem(line)
            i, r = dualkv.inputs(p), dualkv.inputs(p, "replicated")
            np.testing.assert_array_equal(r.q, p.expand(i.q, "q"))
            np.testing.assert_array_equal(r.k, p.expand(i.k, "k"))
            np.testing.assert_array_equal(r.v, p.expand(i.v, "k"))
            if i.do is not None:
                np.testing.assert_array_equal(p.reduce(r.do, "q"), i.do)
                self.assertFalse(r.do[~p.expansion().own].any())
            if i.dlse is not None:
                np.testing.assert_array_equal(p.reduce(r.dlse, "q", axis=1), i.dlse)
            if i.sink is not None:
                np.testing.assert_array_equal(r.sink, i.sink)

    def test_torch(self):
        try:
            import torch
        except ImportError:
            self.skipTest("no torch")
        i, n = dualkv.inputs(LINES[2], as_="torch"), dualkv.inputs(LINES[2])
        self.assertEqual(i.q.dtype, torch.bfloat16)
        np.testing.assert_array_equal(i.q.float().numpy(), n.q)
        np.testing.assert_array_equal(i.dlse.numpy(), n.dlse)

    def test_words_that_are_not(self):
        for options in ({"layout": "other"}, {"as_": "jax"}, {"bf16": "bf16"}, {"device": "cuda"}):
            self.assertRaises(ValueError, dualkv.inputs, "shape=4", **options)


class Library(unittest.TestCase):
    def test_version_is_the_packages(self):
        self.assertEqual(_lib.lib().dualkv_version().decode(), dualkv.__version__)
        here = os.path.dirname(os.path.abspath(__file__))
        with open(os.path.join(here, "..", "pyproject.toml")) as f:
            self.assertIn(f'version = "{dualkv.__version__}"', f.read())

    def test_structures_have_the_size_that_the_library_says(self):
        self.assertEqual(dualkv.Problem("shape=4").view().size, ctypes.sizeof(_lib.CProblem))

    def test_masks_are_the_programs(self):
        said = subprocess.run([str(_lib.program_path()), "list", "masks"], capture_output=True, text=True, check=True)
        masks = [row.split()[0].split(":")[0] for row in said.stdout.splitlines()]
        self.assertEqual(masks, [_lib.mask_name(i) for i in range(len(masks))])
        self.assertIsNone(_lib.lib().dualkv_mask_name(len(masks)))


def load_tests(loader, tests, pattern):
    """The examples in docstrings, too."""
    tests.addTests(doctest.DocTestSuite(dualkv.problem))
    return tests


if __name__ == "__main__":
    unittest.main()
