"""FILE.py:FUNCTION as a kernel: each dishonest one gets its status, and the run finishes the other cases."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

from dualkv import _lib, host
from dualkv.conventions import TABLE, names

ROOT = Path(__file__).resolve().parents[3]
DISHONEST = ROOT / "verify" / "testkernels" / "dishonest.py"
HOSTILE = DISHONEST.parent / "hostile.py"
LINE = "shape=12+2x5 heads=2:1 dim=8 dtype=fp32"
ABA = LINE + " run=aba"


def dualkv(*words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([str(_lib.program_path()), *words], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "DUALKV_PYTHON": sys.executable, **env})


def statuses(lines: list[str], functions: list[str], *words: str, file: Path = DISHONEST) -> "dict[str, list[dict[str, Any]]]":
    """Records of each function, in the order of the lines."""
    if len(functions) > 16:  # a run takes no more
        return {**statuses(lines, functions[:16], *words, file=file), **statuses(lines, functions[16:], *words, file=file)}
    kernels = [w for f in functions for w in ("--kernel", f"{file}:{f}")]
    with tempfile.TemporaryDirectory() as folder:
        records = os.path.join(folder, "records.jsonl")
        dualkv("check", *lines, *kernels, "--json", records, "--quiet", *words)
        found = [json.loads(x) for x in Path(records).read_text().splitlines()]
    return {f: [r for r in found if r["kernel"].endswith(":" + f)] for f in functions}


class Dishonest(unittest.TestCase):
    def expect(self, expected: "dict[str, str]", lines: list[str], *words: str, file: Path = DISHONEST) -> None:
        got = statuses(lines, list(expected), *words, file=file)
        for name, status in expected.items():
            with self.subTest(kernel=name):
                self.assertEqual([r["status"] for r in got[name]], [status] * len(lines), [r["why"] for r in got[name]])

    def test_wrong_answers(self) -> None:
        self.expect({"honest": "PASSED", "zeros": "FAILED", "copy_of_q": "FAILED", "previous": "FAILED",
                     "by_pointer": "FAILED", "remembers_gradients": "FAILED",
                     "remembers_forward": "FAILED", "nothing": "UNWRITTEN", "last_row_left": "UNWRITTEN",
                     "mutates": "INPUT_MUTATED", "overruns": "OUT_OF_BOUNDS", "unsteady": "NONDETERMINISTIC",
                     "fallback": "NOT_RUN"}, [ABA])

    def test_crashes(self) -> None:
        self.expect({"exits": "CRASHED", "exits_at_once": "CRASHED", "killed": "CRASHED", "segfault": "CRASHED",
                     "garbles": "CRASHED", "deaf": "NOT_RUN", "cuts": "NOT_RUN", "raises": "NOT_RUN", "wrong_shape": "NOT_RUN", "wrong_type": "NOT_RUN",
                     "returns_none": "NOT_RUN", "exits_when_asked": "CRASHED", "exits_when_counted": "CRASHED", "gags": "PASSED",
                     "lists": "PASSED", "honest": "PASSED"}, [LINE, LINE + " seed=2"])

    def test_attacks(self) -> None:
        passed = ["prints", "moves_away", "handles_signals", "leaves_threads", "hangs_at_exit", "forks", "reads_do_in_forward",
                  "read_only", "masked"]
        not_run = ["generates", "returns_dict", "interrupts", "raises_unsayable", "recurses", "patches_numpy", "reads_its_judge",
                   "lies", "complex_numbers"]
        self.expect({**dict.fromkeys(passed, "PASSED"), **dict.fromkeys(not_run, "NOT_RUN"), "closes_all": "CRASHED",
                     "alarms": "CRASHED", "changes_gathered": "INPUT_MUTATED",
                     "changes_do": "INPUT_MUTATED"}, [LINE, LINE.replace("fp32", "bf16")], file=HOSTILE)
        self.expect({"patches_checks": "INPUT_MUTATED"}, [LINE.replace("fp32", "bf16")] * 2, file=HOSTILE)
        got = statuses([LINE], ["generates", "returns_dict", "patches_harness", "writes_later", "closes_all", "sleeps_through_signals"], "--timeout", "4", file=HOSTILE)
        self.assertIn("generates returned a generator, (o, lse) is right", got["generates"][0]["why"])
        self.assertIn("returns_dict returned a dict, (o, lse) is right", got["returns_dict"][0]["why"])
        self.assertIn("it closed or garbled the harness's channel in forward", got["closes_all"][0]["why"])
        self.assertIn(got["patches_harness"][0]["status"], ("NOT_RUN", "UNWRITTEN"))
        self.assertIn(got["writes_later"][0]["status"], ("UNWRITTEN", "CRASHED"))  # by where its thread stands
        self.assertEqual(got["sleeps_through_signals"][0]["status"], "TIMEOUT")

    def test_a_reason_is_given(self) -> None:
        got = statuses([LINE], ["deaf", "starves", "segfault", "points_nowhere", "miscounts"])
        self.assertEqual(got["miscounts"][0]["status"], "NOT_RUN")
        self.assertIn("ValueError: invalid literal for int() with base 10: 'many'", got["miscounts"][0]["why"])
        self.assertRegex(got["segfault"][0]["why"], r"^signal 11 \(.*\) in forward \(dishonest.py, line \d+, in segfault\)$")
        self.assertIn("OSError: [Errno 9] Bad file descriptor (dishonest.py, line", got["deaf"][0]["why"])
        self.assertRegex(got["points_nowhere"][0]["why"], r"^signal 11 \([^)]*\) in forward$")  # no place of its own
        self.assertIn("the limit on open files", got["starves"][0]["why"])
        with tempfile.TemporaryDirectory() as d:
            Path(d, "forks.py").write_text("import os\nos.fork()\ndef f(q, k, v, problem): pass\n")
            r = dualkv("check", LINE + " grad=off", "--kernel", f"{d}/forks.py:f")
            self.assertNotIn("PASSED", r.stdout)
            self.assertNotIn("replay:", (r.stdout.splitlines() + r.stderr.splitlines() + [""])[1], r.stdout)
            Path(d, "first.py").write_text("def f(q, k, v, problem):\n    raise ValueError('it says ' + "
                                           "open('/proc/self/oom_score_adj').read())\n")
            r = dualkv("check", LINE + " grad=off", "--kernel", f"{d}/first.py:f")
            self.assertIn("it says 1000", r.stdout)  # the first to go where memory ends

    def test_a_broken_refusal_leaves_nothing_out(self) -> None:
        wide, odd = LINE.replace("dim=8", "dim=16"), "refuses_yes_no"
        got = statuses([LINE, wide], ["cannot_refuse", odd])
        self.assertEqual([r["status"] for r in got["cannot_refuse"]], ["PASSED", "NOT_RUN"])
        self.assertRegex(got["cannot_refuse"][1]["why"], r"^its refuses\(\) failed: KeyError: 'no such tile: 16' \(dishonest.py, line \d+")
        self.assertEqual([r["status"] for r in got[odd]], ["NOT_RUN"] * 2)
        self.assertIn("refuses() of refuses_yes_no returned False, None or a reason (a str) is right", got[odd][0]["why"])
        r = dualkv("check", wide, "--kernel", f"{DISHONEST}:cannot_refuse")
        self.assertEqual(r.returncode, 1)
        self.assertIn("Traceback (most recent call last)", r.stdout)
        self.assertIn('raise KeyError("no such tile: "', r.stdout)

    def test_copies_of_inputs_are_inputs(self) -> None:
        self.expect({"honest": "PASSED", "mutates": "INPUT_MUTATED", "mutates_do": "INPUT_MUTATED"},
                    [LINE.replace("fp32", "bf16"), LINE.replace("fp32", "fp16")])

    def test_a_hang_ends(self) -> None:
        self.expect({"hangs": "TIMEOUT", "honest": "PASSED"}, [LINE], "--timeout", "8")

    def test_a_file_is_imported_once(self) -> None:
        with tempfile.TemporaryDirectory() as d:
            Path(d, "counted.py").write_text(f"import os\nopen('{d}/pids', 'a').write(f'{{os.getpid()}}\\n')\n" + DISHONEST.read_text())
            r = dualkv("check", LINE, LINE + " seed=2", "--kernel", f"{d}/counted.py:honest", "--jobs", "1")
            self.assertIn("2 of 2 cases: 2 PASSED", r.stdout, r.stderr)
            self.assertEqual(len(Path(d, "pids").read_text().splitlines()), 1)
            r = dualkv("check", LINE + " mask=window:0", "--kernel", f"{d}/counted.py:honest")  # opened, then refused
            self.assertEqual(r.returncode, 2, r.stdout)

    def test_null_kernels_fail_everywhere(self) -> None:
        got = statuses(["smoke"], ["zeros", "copy_of_q"], "--jobs", "2")
        for name, records in got.items():
            self.assertGreater(len(records), 20)
            judged = [r["status"] for r in records if r["status"] != "UNSUPPORTED"]
            self.assertGreater(len(judged), 10)
            self.assertEqual({s for s in judged}, {"FAILED"}, name)


WAITING: "list[tuple[str, subprocess.Popen[str]]]" = []


def setUpModule() -> None:
    """An interpreter that never answers is waited for 20 s, beside the other tests."""
    folder = tempfile.mkdtemp()
    Path(folder, "python").write_text("#!/bin/sh\nsleep 300\n")
    Path(folder, "python").chmod(0o755)
    WAITING.append((folder, subprocess.Popen(
        [str(_lib.program_path()), "check", LINE, "--kernel", f"{DISHONEST}:honest"], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env={**os.environ, "DUALKV_PYTHON": f"{folder}/python"})))


def tearDownModule() -> None:
    shutil.rmtree(WAITING[0][0])


class Waiting(unittest.TestCase):
    def test_an_interpreter_that_hangs_is_ended(self) -> None:
        try:
            said, _ = WAITING[0][1].communicate(timeout=60)
        finally:
            WAITING[0][1].kill()
        self.assertEqual(WAITING[0][1].returncode, 2)
        self.assertIn("does not import numpy", said)


class Messages(unittest.TestCase):
    def refused(self, spec: str, says: str, *words: str) -> None:
        r = dualkv("check", LINE, "--kernel", spec, *words)
        self.assertEqual((r.returncode, r.stdout), (2, ""), r.stdout + r.stderr)
        self.assertEqual(r.stderr.count("\n"), 1, r.stderr)
        self.assertIn(says, r.stderr)

    def test_what_cannot_be_opened(self) -> None:
        with tempfile.TemporaryDirectory() as d:
            for name, text in {"imports": "import numpy\nimport not_there\n", "syntax": "x = 1\ndef f(:\n",
                               "leaves": "import os\nos._exit(3)\n", "plain": "def f(q, k, v): pass\ng = 3\n"}.items():
                Path(d, name + ".py").write_text(text)
            self.refused(f"{d}/imports.py:f", "No module named 'not_there' (imports.py, line 2")
            self.refused(f"{d}/syntax.py:f", "syntax.py, line 2")
            self.refused(f"{d}/leaves.py:f", "exit(3)")
            self.refused(f"{d}/plain.py:h", "has no 'h' (it has f)")
            Path(d, "many.py").write_text("".join(f"def {n}(q, k, v, problem): pass\n" for n in (
                "_help", "attend", "attend_backward", "refuses", *"bcdefghij")))
            self.refused(f"{d}/many.py:atend", "has no 'atend': did you mean 'attend'?")
            self.refused(f"{d}/many.py:z", "has no 'z' (it has attend, b, c, d, e, f, g, h, ...)")
            r = dualkv("check", LINE, "--kernel", f"{d}/many.py:b")
            self.assertIn("UNSUPPORTED", r.stdout)
            self.assertIn("it has no backward: there is no b_backward, nor b.backward (grad=off", r.stdout)
            self.refused(f"{d}/plain.py:g", "'g' is not a function")
            self.refused(os.path.relpath(f"{d}/syntax.py") + ":f", "(syntax.py, line 2)")
            os.mkfifo(f"{d}/pipe.py")
            self.refused(f"{d}/pipe.py:f", "is not a file", "--timeout", "5")
            self.refused(f"{d}/plain.py", "which function?")
            self.refused(f"{d}/none.py:f", "cannot read")
            self.refused(f"{d}/plain.py:f", "passes problem=")
            self.refused(f"{d}/plain.py:f", "did you mean 'sdpa'", "--convention", "spda")
            self.refused(f"{d}/plain.py:f+convntion=sdpa", "did you mean 'convention'")

    def test_no_interpreter(self) -> None:
        r = dualkv("check", LINE, "--kernel", f"{DISHONEST}:honest", DUALKV_PYTHON="/nowhere/python")
        self.assertEqual((r.returncode, r.stdout), (2, ""))
        self.assertIn("DUALKV_PYTHON=/nowhere/python", r.stderr)

    def test_a_traceback_is_shown(self) -> None:
        r = dualkv("check", LINE, "--kernel", f"{DISHONEST}:raises")
        self.assertEqual(r.returncode, 1)
        self.assertIn("ValueError: the grid is too large how to make it smaller (dishonest.py, line", r.stdout)
        self.assertIn("Traceback (most recent call last)", r.stdout)

    def test_a_wrong_scale(self) -> None:
        with tempfile.TemporaryDirectory() as d:
            self.assertEqual(dualkv("init", f"{d}/k.py:f").returncode, 0)
            path = Path(d, "k.py")
            path.write_text(path.read_text().replace("s = scale *", "s = 1.1 * scale *"))
            r = dualkv("check", "shape=20+2x7 heads=4:2", "--kernel", f"{path}:f")
            self.assertEqual(r.returncode, 1, r.stdout)
            self.assertIn("times what rounding allows at group 0", r.stdout)
            self.assertIn("replay: dualkv replay 'shape=20+2x7 heads=4:2' --kernel", r.stdout)


class Conventions(unittest.TestCase):
    def test_rows_and_lines_agree(self) -> None:
        self.assertEqual([n.name for n in names()], list(TABLE))
        listed = dualkv("list", "conventions").stdout.splitlines()
        self.assertEqual([x.split()[0] for x in listed], list(TABLE))

    def test_start_files_pass(self) -> None:
        torch = importlib.util.find_spec("torch") is not None
        if not torch:
            print("torch is not installed: start files of conventions other than packed are not run")
        lines = ["shape=20+2x7 heads=4:2 dim=32", "shape=9+3x4/5+6 heads=2:2 dim=16 dtype=fp32",
                 "shape=9+3x4/5+6 heads=2:2 dim=16 dtype=fp32 grad=off"]
        with tempfile.TemporaryDirectory() as d:
            for n in names():
                target = f"{d}/{n.name.replace('-', '_')}.py:mine"
                self.assertEqual(dualkv("init", target, "--convention", n.name).returncode, 0)
                again = dualkv("init", target, "--convention", n.name)
                self.assertEqual(again.returncode, 2)
                self.assertIn("is there already", again.stderr)
                if not torch and n.name != "packed":
                    continue
                r = dualkv("check", *(lines if n.name != "flex" else lines[2:]), "--kernel", target)
                self.assertIn(r.returncode, (0, 4) if n.name == "cascade" else (0,), r.stdout + r.stderr)


class Adapters(unittest.TestCase):
    """What the harness does to put a problem to a function, and back: every convention but flex, without torch."""

    SPECS = ["sdpa+convention=sdpa", "sdpa+convention=prefix-grouper", "cascade+convention=cascade",
             "varlen+convention=flash-varlen", "dualkv+convention=flash-dualkv",
             "dualkv+convention=flash-dualkv+packing=first", "dualkv+convention=flash-dualkv+packing=separate"]

    def check(self, lines: list[str], specs: list[str]) -> "list[dict[str, Any]]":
        kernels = [w for s in specs for w in ("--kernel", f"{DISHONEST.parent / 'conventions.py'}:{s}")]
        with tempfile.TemporaryDirectory() as folder:
            records = os.path.join(folder, "records.jsonl")
            dualkv("check", *lines, *kernels, "--json", records, "--quiet")
            return [json.loads(x) for x in Path(records).read_text().splitlines()]

    def test_each_passes(self) -> None:
        lines = ["shape=20+2x7,5/9+3 heads=4:2 dim=16 dtype=fp32", "shape=17+3x6 heads=2:2 dim=24:8 layout=strided",
                 "shape=12k+3,4 heads=2:1 dim=8 dtype=fp32"]
        records = self.check(lines, self.SPECS)
        self.assertEqual(len(records), len(lines) * len(self.SPECS))
        for r in records:
            with self.subTest(line=r["line"], kernel=r["kernel"]):
                self.assertIn(r["status"], ("PASSED", "INCONCLUSIVE"), r["why"])
                if "dtype=fp32" in r["line"]:
                    self.assertEqual((r["status"], r["profile"]), ("PASSED", "fp32"))

    def test_masks_and_refusals(self) -> None:
        lines = ["shape=20+2x7 heads=2:1 dim=8 dtype=fp32 mask=window:6:2", "shape=20+2x7 heads=2:1 dim=8 dtype=fp32 mask=block:4:0.5:3",
                 "shape=20+2x7 heads=2:1 dim=8 dtype=fp32 mask=prefix", "shape=8+2x(4+2x3) heads=2:1 dim=8 dtype=fp32",
                 "shape=8+2x5@3 heads=2:1 dim=8 dtype=fp32"]
        got = {(r["kernel"].split(":")[-1], r["line"]): r["status"]
               for r in self.check(lines, ["sdpa+convention=sdpa", "varlen+convention=flash-varlen"])}
        self.assertEqual(len(got), 10)
        for (kernel, what), status in got.items():
            states = kernel.startswith("sdpa") or "mask=" not in what
            self.assertEqual(status, "PASSED" if states else "UNSUPPORTED", (kernel, what))
        trees = self.check(lines[3:], ["dualkv+convention=flash-dualkv", "sdpa+convention=prefix-grouper"])
        self.assertEqual([(r["status"], "tree" in r["why"]) for r in trees],
                         [("UNSUPPORTED", True), ("UNSUPPORTED", True), ("UNSUPPORTED", False), ("PASSED", False)])

    def test_no_lse(self) -> None:
        line = "shape=9+2x4 heads=2:1 dim=8 dtype=fp32"
        passed, refused = self.check([line + " grad=off", line + " dlse=on"], ["no_lse+convention=sdpa"])
        self.assertEqual((passed["status"], passed["not_judged"]), ("PASSED", ["LSE"]))
        self.assertEqual(refused["status"], "UNSUPPORTED")


class Options(unittest.TestCase):
    def test_options(self) -> None:
        self.assertEqual(host.parse_options("convention=sdpa,lse"), {"convention": "sdpa", "lse": "yes"})
        with self.assertRaisesRegex(host.SpecError, "did you mean 'device'"):
            host.parse_options("devise=cuda")

    def test_a_keyword_that_is_not_taken_is_a_refusal(self) -> None:
        r = dualkv("check", "shape=9+2x3 heads=2:1 dim=8 sinklogit=1", "--kernel", f"{DISHONEST}:honest")
        self.assertEqual(r.returncode, 3)
        self.assertIn("honest takes no sink: a sink logit", r.stdout)


if __name__ == "__main__":
    unittest.main()
