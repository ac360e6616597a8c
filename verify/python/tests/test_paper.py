"""verify/paper.py: with the program on small lines, and with one that answers as it is told."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

from dualkv import _lib

ROOT = Path(__file__).resolve().parents[3]
LINE = "shape=64+2x32 heads=2:1 dim=32"

# Writes the record that FAKE names ("STATUS why"; "hang": never), and notes when it ran.
FAKE = """#!{python}
import json, os, sys, time
args = sys.argv[1:]
line, kernel, path = args[1], args[args.index("--kernel") + 1], args[args.index("--json") + 1]
said = dict(x.split("=", 1) for x in open("{at}/fake.txt").read().splitlines())[kernel].split("|")
seen = "{at}/seen-" + kernel
n = len(open(seen).readlines()) if os.path.exists(seen) else 0
with open(seen, "a") as f:
    print(len([x for x in os.listdir("{at}") if x.startswith("here-")]), file=f)
status, _, why = said[min(n, len(said) - 1)].partition(" ")
open("{at}/here-" + kernel, "w").close()
time.sleep(60 if status == "hang" else float(why) if why.isdigit() else 0.2)
os.remove("{at}/here-" + kernel)
if status == "garbage":
    open(path, "w").write('{{"line": 5}}\\nnull\\n[{{"cut')
elif status != "none":
    open(path, "w").write(json.dumps({{"line": line, "kernel": kernel, "status": status, "why": why, "seconds": "nan"}}) + "\\n")
print(why)
"""


class Paper(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.at = Path(folder.name)

    def command(self, rows, *options, program=None):
        (self.at / "table").write_text("# rows\n" + "".join("\t".join(r) + "\n" for r in rows))
        program = program or _lib.program_path()
        return [sys.executable, str(ROOT / "verify/paper.py"), str(program), str(self.at / "out"), "--table", str(self.at / "table"),
                "--oracle", "cpu", *options]

    def run_it(self, *args, **kwargs):
        env = dict(os.environ, PATH="/usr/bin:/bin")
        done = subprocess.run(self.command(*args, **kwargs), capture_output=True, text=True, env=env, timeout=300)
        self.assertNotIn("Traceback", done.stderr)
        return done

    def fake(self, **answers):
        (self.at / "fake.txt").write_text("".join(f"{k}={v}\n" for k, v in answers.items()))
        program = self.at / "fake.py"
        program.write_text(FAKE.format(python=sys.executable, at=self.at))
        program.chmod(0o755)
        return program

    def records(self):
        return [json.loads(x) for x in (self.at / "out/paper.jsonl").read_text().splitlines()]

    def beside(self, kernel):
        return [int(x) for x in (self.at / f"seen-{kernel}").read_text().split()]

    def test_judges_keeps_and_goes_on(self):
        rows = [("emu", "-", "packed", LINE), ("emu-replicated", "-", "replicated", LINE + " dtype=bf16 seed=1"),
                ("emu+fault=D1", "-", "packed", "shape=200+3x77 heads=4:2 dim=64")]
        done = self.run_it(rows[:2])
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("0 left", done.stdout)
        self.assertEqual([r["status"] for r in self.records()], ["PASSED"] * 2)
        done = self.run_it(rows)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertEqual([r["status"] for r in self.records()], ["PASSED", "PASSED", "FAILED"])
        with open(self.at / "out/paper.jsonl", "a") as f:
            f.write('{"line": "cut')
        self.assertEqual(self.run_it(rows).returncode, 0)
        os.rename(self.at / "out/paper.jsonl", self.at / "before.jsonl")
        self.assertIn("0 left", self.run_it(rows, "--done", str(self.at / "before.jsonl")).stdout)
        self.assertEqual(self.records(), [])
        self.assertIn("emu+fault=D1", (self.at / "out/paper.txt").read_text())

    def test_want_of_memory_waits_for_the_others(self):
        program = self.fake(a="HARNESS_ERROR it needs 32.0 GiB of the device, 31.3 are free|PASSED", b="PASSED", c="PASSED",
                            d="HARNESS_ERROR something else", e="none cudaMalloc: out of memory", f="garbage")
        done = self.run_it([(k, "-", "packed", LINE) for k in "abcdef"], program=program)
        self.assertEqual(done.returncode, 3, done.stdout + done.stderr)
        self.assertEqual(self.beside("a")[-1], 0)
        self.assertEqual([len(self.beside(k)) for k in "abcdef"], [2, 1, 1, 1, 2, 1])
        self.assertEqual(sorted(x.split()[1] for x in done.stdout.splitlines() if x.startswith("left:")), ["d", "e", "f"])

    def test_memory_and_lanes_hold(self):
        rows = [(k, "-", "packed", LINE) for k in "abcd"]
        program = self.fake(a="PASSED 1", b="PASSED 1", c="PASSED 1", d="PASSED 1")
        for options, most in ((["--lanes", "4"], 3), (["--lanes", "2"], 1), (["--lanes", "4", "--host", "2.5"], 1),
                              (["--lanes", "4", "--device", "4"], 0)):
            for old in list(self.at.glob("seen-*")) + list(self.at.glob("out/*")):
                old.unlink()
            self.assertEqual(self.run_it(rows, "--host", "20", *options, program=program).returncode, 0)
            beside = max(n for k in "abcd" for n in self.beside(k))
            self.assertLessEqual(beside, most, options)
            self.assertGreaterEqual(beside, min(most, 1), options)

    def test_what_is_there_is_kept_when_it_ends(self):
        program = self.fake(a="PASSED", b="hang")
        a, b = ("a", "-", "packed", LINE), ("b", "-", "packed", LINE)
        for how in ("time", signal.SIGTERM, signal.SIGINT):
            for old in list(self.at.glob("seen-*")) + list(self.at.glob("here-*")) + list(self.at.glob("out/*")):
                old.unlink()
            rows, seconds = ([b], "8") if how == "time" else ([a, b], "300")
            p = subprocess.Popen(self.command(rows, "--seconds", seconds, program=program), stdout=subprocess.PIPE, text=True)
            while how != "time" and not ((self.at / "out/paper.jsonl").exists() and self.records() and (self.at / "here-b").exists()):
                time.sleep(0.1)
            if how != "time":
                p.send_signal(how)
            said = p.communicate(timeout=50)[0]  # b would take 60
            self.assertEqual(p.returncode, 3, said)
            self.assertIn("cut after", said)
            self.assertIn("left: b ", said)
            self.assertEqual([r["kernel"] for r in self.records()], [r[0] for r in rows if r is a])
            self.assertEqual(list((self.at / "out").glob("run-*")), [])

    def test_what_a_killed_one_left_is_taken(self):
        rows = [(k, "-", "packed", LINE) for k in "abc"]
        program = self.fake(a="PASSED", b="none", c="PASSED")
        out = self.at / "out"
        out.mkdir()
        (out / "paper.jsonl").write_text('{"line": "cut')
        whole = json.dumps({"line": LINE, "kernel": "c", "status": "PASSED"})
        (out / "run-0.jsonl").write_text(whole + '\n{"line": "cut')
        done = self.run_it(rows, program=program)
        self.assertEqual(done.returncode, 3, done.stdout + done.stderr)  # b has no record: c's is not its
        self.assertIn(f"left: b {LINE}\n1 left", done.stdout)
        self.assertFalse((self.at / "seen-c").exists())
        self.run_it(rows, program=program)
        self.assertEqual([len(self.beside(k)) for k in "ab"], [1, 2])
        self.assertEqual([json.loads(x)["kernel"] for x in (out / "paper.jsonl").read_text().splitlines()[1:]], ["c", "a"])

    def test_one_at_a_time(self):
        program = self.fake(a="hang", b="PASSED")
        p = subprocess.Popen(self.command([("a", "-", "packed", LINE)], program=program), stdout=subprocess.DEVNULL)
        while not (self.at / "here-a").exists():
            time.sleep(0.1)
        done = self.run_it([("b", "-", "packed", LINE)], program=program)
        p.terminate()
        p.wait(timeout=50)
        self.assertEqual((done.returncode, len(done.stderr.splitlines())), (2, 1), done.stderr)
        self.assertIn("another campaign is running there", done.stderr)
        self.assertEqual(self.run_it([("b", "-", "packed", LINE)], program=program).returncode, 0)

    def test_records_of_wrong_types(self):
        program = self.fake(a="PASSED")
        words = {"line": LINE, "kernel": "a", "status": ["PASSED"], "tensors": {"O": 3, "dV": {"twin_rms": []}}, "phases": [1]}
        (self.at / "before").write_text(json.dumps(words) + "\n")
        program.write_text(program.read_text().replace("print(why)\n", f"open(path, 'a').write({json.dumps(words)!r})\nprint(why)\n"))
        done = self.run_it([("a", "-", "packed", LINE)], "--done", str(self.at / "before"), program=program)
        self.assertEqual(done.returncode, 3, done.stdout + done.stderr)
        self.assertIn("dV nan/nan", done.stdout)

    @unittest.skipUnless(os.path.exists("/dev/full"), "needs /dev/full")
    def test_a_full_disk_is_no_defect(self):
        (self.at / "out").mkdir()
        os.symlink("/dev/full", self.at / "out/paper.txt")
        done = self.run_it([("a", "-", "packed", LINE)], program=self.fake(a="PASSED"))
        self.assertEqual((done.returncode, len(done.stderr.splitlines())), (3, 1), done.stderr)
        self.assertIn("No space left", done.stderr)

    def test_mistakes_are_one_line(self):
        good = ("emu", "-", "packed", LINE)
        for rows, options, says in (
                ([("emu", "-", LINE)], [], "table:2: SPEC"), ([("emu", "-", "dense", LINE)], [], "table:2: SPEC"), ([], [], "no row"),
                ([good, ("emu", "-", "packed", "shape=64/32 dim=8")], [], "table:3: 'shape=64/32 dim=8': shape=P+NxR"),
                ([("emu", "-", "packed", "shape=1+1x1 heads=x")], [], "table:2:"),
                ([("emu", "-", "packed", "shape=1+1x1 dim=\u00b2")], [], "table:2:"),
                ([("emu", "-", "packed", f"shape=1+1x{'9' * 400}")], [], "table:2:"),
                ([good], ["--done", "/nowhere/x"], "/nowhere/x: No such file")):
            done = self.run_it(rows, *options)
            self.assertEqual((done.returncode, len(done.stderr.splitlines())), (2, 1), done.stderr)
            self.assertIn(says, done.stderr)
        self.assertIn("no program", self.run_it([good], program="/nowhere/dualkv").stderr)


if __name__ == "__main__":
    unittest.main()
