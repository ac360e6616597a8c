"""Verdicts from Python are the program's; what is wrong with a function has one clear word; replay lines run."""

import contextlib
import io
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import unittest

import dualkv
import kernels
from dualkv import _lib, checks, host

LINE = "shape=20+3x7 heads=4:2 dim=32"
FORWARD = LINE + " grad=off"


@contextlib.contextmanager
def quiet():
    """Tracebacks of functions that raise go elsewhere."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        yield said


def python(code, **more):
    """Another interpreter on these tests' modules."""
    here = os.path.dirname(os.path.abspath(__file__))
    path = os.pathsep.join([here, os.path.dirname(os.path.dirname(os.path.abspath(dualkv.__file__)))])
    env = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, **more)


class Verdicts(unittest.TestCase):
    def test_a_right_function_passes(self):
        result = dualkv.check(kernels.attention, LINE)
        self.assertEqual((result.status, result.exit_code, result.passed, result.why), ("PASSED", 0, True, ""), result)
        self.assertEqual(result.line, dualkv.canonical(LINE))
        self.assertEqual(set(result.tensors), {"O", "LSE", "dQ", "dK", "dV"})
        for name, numbers in result.tensors.items():
            self.assertLess(numbers["max_bound_ratio"], 1, name)
        self.assertEqual(result.cases[0].record["checks"]["bound"], "passed")

    def test_a_suite_where_it_applies(self):
        result = dualkv.check(kernels.attention, "smoke")
        self.assertEqual(set(result.counts) - {"PASSED", "UNSUPPORTED"}, set(), result)
        self.assertGreater(result.counts["PASSED"], 15)
        self.assertEqual([c.line for c in result.cases], dualkv.suite("smoke"))
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "records.jsonl")
            result.write(path)
            done = subprocess.run([str(_lib.program_path()), "report", path], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(":attention", done.stdout)

    def test_a_wrong_scale_fails_with_a_sentence_and_a_replay_line_that_runs(self):
        result = dualkv.check(kernels.wrong_scale, FORWARD)
        self.assertEqual((result.status, result.exit_code), ("FAILED", 1))
        self.assertIn("times what rounding allows", result.why)
        worst = result.tensors["LSE"]["worst"]
        self.assertGreater(abs(worst["got"] - worst["want"]), worst["bound"])
        words = shlex.split(result.replay)
        self.assertEqual(words[:2], ["dualkv", "replay"])
        done = subprocess.run([str(_lib.program_path()), *words[1:]], capture_output=True, text=True, timeout=60,
                              env={**os.environ, "DUALKV_PYTHON": sys.executable})
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn(result.why, done.stdout)

    def test_in_this_process_and_in_its_own_the_numbers_are_the_same(self):
        for fn in (kernels.attention, kernels.wrong_scale):
            here, there = dualkv.check(fn, FORWARD), dualkv.check(fn, FORWARD, isolated=True)
            self.assertEqual((here.status, here.why, here.tensors), (there.status, there.why, there.tensors))
            self.assertEqual(here.cases[0].record["kernel"], there.cases[0].record["kernel"])

    def test_specs(self):
        self.assertTrue(dualkv.check("emu", LINE).passed)
        result = dualkv.check("emu+fault=D1", [LINE, dualkv.Problem("shape=1+1 dim=1 grad=off")])
        self.assertEqual(result.status, "FAILED")
        self.assertEqual(len(result.cases), 2)

    def test_a_function_that_no_file_holds(self):
        def attention(q, k, v, *, problem):
            return kernels.attention(q, k, v, problem=problem, factor=1.1)

        result = dualkv.check(attention, FORWARD, convention="packed")
        self.assertEqual(result.status, "FAILED")
        self.assertIn("attention, 'shape=20+3x7 heads=4:2 dim=32 grad=off', convention='packed')", result.replay)
        self.assertIsNone(checks.spec_of(attention))
        with self.assertRaisesRegex(dualkv.DualKVError, "at the top of a file"):
            dualkv.check(attention, FORWARD, isolated=True)

    def test_its_backward_can_be_named(self):
        fn = lambda q, k, v, *, problem: kernels.attention(q, k, v, problem=problem)  # noqa: E731
        self.assertEqual(dualkv.check(fn, LINE).status, "UNSUPPORTED")
        self.assertTrue(dualkv.check(fn, LINE, backward=kernels.attention_backward).passed)

    def test_what_a_function_takes(self):
        passed = []

        def others(q, k, v, **more):
            passed.append(set(more))
            return kernels.attention(q, k, v, problem=more["problem"])

        self.assertTrue(dualkv.check(others, FORWARD).passed)
        self.assertEqual(passed[0], {"problem", "scale"})  # nothing that says nothing

        class Compiled:
            __name__, __signature__ = "fast", "hidden"
            __doc__ = "\nfast(query, key, value, attn_mask=None, *, scale: float=None) -> Tensor\n\nand so on (x, y)"

        self.assertEqual(host._parameters(Compiled()), ({"query", "key", "value", "attn_mask", "scale", "float", "None"}, False))
        Compiled.__doc__ = None
        self.assertEqual(host._parameters(Compiled()), (set(), True))

    def test_which_case_decides(self):
        def result(code, *statuses):
            return dualkv.Result(tuple(dualkv.Case(f"shape={i}", s, f"why {s}", "", 0, {}, {}) for i, s in enumerate(statuses)),
                                 code, "")

        for code, statuses, want, line in ((0, ("PASSED", "UNSUPPORTED"), "PASSED", "shape=1"),
                                           (1, ("INCONCLUSIVE", "UNSUPPORTED", "PASSED", "BIASED", "FAILED"), "BIASED", "shape=3"),
                                           (4, ("UNSUPPORTED", "PASSED", "INCONCLUSIVE"), "INCONCLUSIVE", "shape=2"),
                                           (3, ("UNSUPPORTED",), "UNSUPPORTED", "shape=0"),
                                           (4, ("PASSED", "PASSED"), "INCONCLUSIVE", "shape=0")):
            r = result(code, *statuses)
            self.assertEqual((r.status, r.line, r.passed, bool(r.why)), (want, line, code == 0, code != 0))

    def test_numbers_that_json_has_no_word_for(self):
        got = checks._numbers({"a": "nan", "b": {"c": "-inf", "region": "prompt"}, "d": 1.5})
        self.assertTrue(math.isnan(got["a"]))
        self.assertEqual((got["b"], got["d"]), ({"c": -math.inf, "region": "prompt"}, 1.5))


class Mistakes(unittest.TestCase):
    def test_of_functions(self):
        for fn, status, words in ((kernels.raises, "NOT_RUN", "ZeroDivisionError: on purpose (kernels.py, line"),
                                  (kernels.wrong_shape, "NOT_RUN", "O has shape [40, 4, 32], [41, 4, 32] is right"),
                                  (kernels.wrong_dtype, "NOT_RUN", "O is of type int64, a float type is right"),
                                  (kernels.no_lse, "NOT_RUN", "returned no LSE")):
            with quiet() as said:
                result = dualkv.check(fn, FORWARD)
            self.assertEqual(result.status, status, result)
            self.assertIn(words, result.why)
            self.assertEqual(result.exit_code, 1)
            self.assertEqual("Traceback" in said.getvalue(), fn is kernels.raises)
            self.assertNotIn("host.py", said.getvalue())

    def test_of_lines_and_words(self):
        with self.assertRaises(dualkv.LineError) as caught:
            dualkv.check(kernels.attention, "shape=4 dim=300")
        self.assertEqual(caught.exception.position, 13)
        for what in ("nosuch", "./nosuch.txt", [], "--kernel=emu", "", "shape=4\0 dim=8"):
            self.assertRaises(dualkv.LineError, dualkv.check, kernels.attention, what)
        self.assertRaises(dualkv.DualKVError, dualkv.check, "emu", "shape=4+2 mask=bidir")
        self.assertRaises(dualkv.LineError, dualkv.check, "enu", LINE)
        self.assertRaises(TypeError, dualkv.check, 7, LINE)
        self.assertRaises(TypeError, dualkv.check, kernels.attention, 7)
        self.assertRaisesRegex(dualkv.DualKVError, "not a function", dualkv.check, kernels.attention, LINE, backward=3)
        for options in ({"convention": "spda"}, {"options": {"colour": "red"}}, {"options": {"convention": "a b"}},
                        {"timeout": -1}, {"isolated": True, "convention": "spda"}):
            with self.assertRaises(dualkv.DualKVError) as wrong:
                dualkv.check(kernels.attention, LINE, **options)
            self.assertNotIn("\n", str(wrong.exception))

    def test_a_crash_is_a_status_where_the_function_has_its_own_process(self):
        result = dualkv.check(kernels.crashes, FORWARD, isolated=True)
        self.assertEqual(result.status, "CRASHED", result)
        done = python(f"import dualkv, kernels\ndualkv.check(kernels.leaves, {FORWARD!r})")
        self.assertEqual(done.returncode, 7, done.stderr)  # here it takes this process along, and nothing hangs

    def test_exit_and_interrupt_are_not_this_processs_end(self):
        result = dualkv.check(kernels.exits, FORWARD)
        self.assertEqual((result.status, result.why), ("NOT_RUN", "exits called exit(3)"))
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
        try:
            self.assertRaises(KeyboardInterrupt, dualkv.check, kernels.interrupted, FORWARD)
        finally:
            signal.signal(signal.SIGINT, before)
        self.assertTrue(dualkv.check(kernels.attention, FORWARD).passed)

    def test_a_kernel_file_that_checks_itself(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "mine.py")
            with open(path, "w") as f:
                f.write("import dualkv\nfrom kernels import attention\n"
                        "def mine(q, k, v, *, problem): return attention(q, k, v, problem=problem)\n"
                        f"dualkv.check(mine, {FORWARD!r})\n")
            done = python(f"import dualkv\ndualkv.check({path + ':mine'!r}, {FORWARD!r})")
            self.assertIn("if __name__ ==", done.stderr)


class Tests(unittest.TestCase):
    def test_assert_equivalent(self):
        self.assertTrue(dualkv.assert_equivalent(kernels.attention, LINE).passed)
        with self.assertRaises(AssertionError) as caught:
            dualkv.assert_equivalent(kernels.wrong_scale, FORWARD)
        self.assertIn("replay: dualkv replay", str(caught.exception))
        with self.assertRaisesRegex(unittest.SkipTest, "nothing is good enough"):
            dualkv.assert_equivalent(kernels.refuses_all, FORWARD)

    def test_pytest(self):
        try:
            import pytest  # noqa: F401
        except ImportError:
            self.skipTest("no pytest")
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "test_mine.py"), "w") as f:
                f.write("import dualkv, kernels\n"
                        "@dualkv.cases('shape=4+2 dim=8', 'shape=3 dim=8 softcap=2')\n"
                        "def test_decorated(line): dualkv.assert_equivalent(kernels.attention, line)\n"
                        "def test_plugin(dualkv_line): dualkv.assert_equivalent(kernels.wrong_scale, dualkv_line)\n")
            code = ("import pytest, sys\nsys.exit(pytest.main(['-q', '-p', 'dualkv.pytest_plugin', '-p', 'no:cacheprovider',"
                    " '--dualkv-suite', 'shape=9+4 dim=8 grad=off', '--dualkv-suite', 'shape=9+5 dim=8 grad=off', '.']))")
            out = python(code, cwd=folder).stdout
            self.assertIn("2 failed, 1 passed, 1 skipped", out, out)


if __name__ == "__main__":
    unittest.main()
