"""The GitHub action's steps, run as a runner runs them; the example workflow; both are YAML that says what it should."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from dualkv import _lib

ROOT = Path(__file__).resolve().parents[3]
ACTION = ROOT / ".github/actions/dualkv-gate"
LINE = "shape=33+5 dim=32 dtype=fp16"


def load_yaml(path):
    """By the Python that has a parser: this one, or the system's."""
    code = "import json, sys, yaml; json.dump(yaml.safe_load(open(sys.argv[1])), sys.stdout)"
    for python in ("/usr/bin/python3", sys.executable):
        done = subprocess.run([python, "-c", code, str(path)], capture_output=True, text=True)
        if done.returncode == 0:
            return json.loads(done.stdout)
    raise AssertionError(f"{path} cannot be parsed: {done.stderr}")


def unescape(text, prop=False):
    """As the runner does it: of a command's message, or of one of its properties."""
    for code, char in (("%0D", "\r"), ("%0A", "\n")) + ((("%3A", ":"), ("%2C", ",")) if prop else ()):
        text = text.replace(code, char)
    return re.sub("%(0[0-9A-F]|1[0-9A-F]|7F)", lambda m: chr(int(m[1], 16)), text).replace("%25", "%")


class Runner:
    """A workspace, a checkout of the action in which `make` builds nothing, and what a runner gives its steps."""

    def __init__(self, folder):
        self.root, self.work = Path(folder) / "action root", Path(folder) / "work"
        (self.root / "build").mkdir(parents=True)
        self.work.mkdir()
        shutil.copytree(ROOT / ".github", self.root / ".github")
        (self.root / "build/dualkv").symlink_to(_lib.program_path())
        (self.root / "data").symlink_to(ROOT / "data")
        (self.root / "Makefile").write_text("all:\n\t@echo built >built\n")
        self.action = load_yaml(self.root / ".github/actions/dualkv-gate/action.yml")

    def run(self, **given):
        """The exit code of the step that failed, or 0; stdout; outputs; the summary."""
        inputs = {k: v.get("default", "") for k, v in self.action["inputs"].items()} | given
        files = {n: self.work.parent / n for n in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        for f in files.values():
            f.write_text("")
        out, code = "", 0
        for step in self.action["runs"]["steps"]:
            assert step["shell"] == "bash" and "${{" not in step["run"], "an input in the script itself could run anything"
            env = {k: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: inputs[m[1]], v) for k, v in step.get("env", {}).items()}
            base = {"PATH": os.environ["PATH"], "HOME": str(self.work), "GITHUB_ACTION_PATH": str(self.root / ".github/actions/dualkv-gate"),
                    "GITHUB_WORKSPACE": str(self.work), "GITHUB_ACTIONS": "true"}
            base |= {k: os.environ[k] for k in ("LD_LIBRARY_PATH", "ASAN_OPTIONS") if k in os.environ}
            done = subprocess.run(["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]], cwd=self.work,
                                  env=base | env | {k: str(v) for k, v in files.items()}, capture_output=True, text=True, timeout=300)
            out, code = out + done.stdout, done.returncode
            self.errors = done.stderr
            if code:
                break
        outputs = dict(line.split("=", 1) for line in files["GITHUB_OUTPUT"].read_text().splitlines())
        return code, out, outputs, files["GITHUB_STEP_SUMMARY"].read_text()


class ActionTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.runner = Runner(folder.name)

    def test_passes_fails_and_says_why(self):
        usual = {"kernel": "emu", "options": f"--no-fuzz\n{LINE.replace(' ', chr(10))}"}
        code, out, outputs, summary = self.runner.run(**usual, accepted="my acc.jsonl")
        self.assertEqual((code, outputs), (2, {"verdict": "ERROR", "exit-code": "2"}), self.runner.errors)
        self.assertIn("::error title=dualkv gate::--accepted: cannot read 'my acc.jsonl'", out)
        code, out, outputs, summary = self.runner.run(kernel="emu", accepted="my acc.jsonl", options=usual["options"] + " --accept")
        self.assertEqual((code, outputs), (0, {"verdict": "PASSED", "exit-code": "0"}), self.runner.errors)
        self.assertTrue((self.runner.root / "built").exists() and (self.runner.work / "my acc.jsonl").exists())
        code, out, outputs, summary = self.runner.run(**usual, accepted="my acc.jsonl", out="the folder")
        self.assertEqual((code, outputs["verdict"]), (0, "PASSED"))
        self.assertTrue(summary.startswith("# dualkv gate: PASSED\n"))
        self.assertEqual({p.name for p in (self.runner.work / "the folder").iterdir()},
                         {"records.jsonl", "junit.xml", "summary.md", "report.html"})
        code, out, outputs, summary = self.runner.run(kernel="emu+fault=D1", accepted="my acc.jsonl", options=usual["options"])
        self.assertEqual((code, outputs), (1, {"verdict": "FAILED", "exit-code": "1"}))
        self.assertIn(f"FINDING (status): {LINE}: was PASSED and is now FAILED", summary)
        errors = [line for line in out.splitlines() if line.startswith("::error ")]
        self.assertLessEqual(len(errors), 10)
        self.assertTrue(errors[0].startswith("::error title=dualkv gate%3A status::" + LINE))

    def test_nothing_of_an_input_is_run(self):
        # each way alone: an unbalanced quote would keep an `eval` from running the rest
        for bad in ("$(touch owned)", "`touch owned`", "x; touch owned", "' ; touch owned ; '", '" ; touch owned ; "', "x || touch owned \\"):
            for name in ("kernel", "accepted", "time", "floor", "options", "out"):
                code, out, outputs, summary = self.runner.run(**{"kernel": "emu", "time": "1", "options": "--no-fuzz " + LINE} | {name: bad})
                self.assertFalse(list(self.runner.work.rglob("owned")), (name, bad))
                self.assertEqual(code == 0, name == "out", (name, bad))  # it is a name like any other, for a folder
                self.assertEqual(set(outputs), {"verdict", "exit-code"})

    def test_annotations_survive_the_runner(self):
        kernel = self.runner.work / "k.py"
        kernel.write_text("CONVENTION = 'packed'\ndef f(q, k, v, problem):\n    print('::error::said'); raise ValueError('::error::100% of it')\n")
        os.environ.setdefault("DUALKV_PYTHON", sys.executable)
        code, out, outputs, summary = self.runner.run(kernel="./k.py:f", options="--no-fuzz --forward " + LINE)
        self.assertEqual(code, 1, self.runner.errors)
        stop = re.search("^::stop-commands::(.{8,})$", out, re.M)[1]
        before, after = out.split(f"\n::{stop}::\n")
        self.assertIn("::error::100% of it", before)  # words that look like commands, but are none there
        errors = [line for line in after.splitlines() if line.lstrip().startswith("::error")]
        self.assertEqual(len(errors), 1, errors)
        head, text = errors[0].removeprefix("::error ").split("::", 1)
        props = {k: unescape(v, True) for k, v in (p.split("=", 1) for p in head.split(","))}
        self.assertEqual(props, {"file": "k.py", "title": "dualkv gate: NOT_RUN"})
        self.assertTrue(unescape(text).startswith(LINE + " grad=off: "))
        self.assertIn("::error::100% of it", unescape(text))

    def test_the_example_uses_it_rightly(self):
        flow = load_yaml(ROOT / ".github/workflows/gate-example.yml")
        self.assertEqual(flow["permissions"], {"contents": "read"})
        steps = flow["jobs"]["gate"]["steps"]
        used = [s for s in steps if s.get("uses", "").startswith("./")]
        self.assertEqual([ROOT / s["uses"] for s in used], [ACTION])
        action = load_yaml(ACTION / "action.yml")
        for s in used:
            self.assertLessEqual(set(s["with"]), set(action["inputs"]))
        self.assertTrue(all(k in s["with"] for s in used for k, v in action["inputs"].items() if v.get("required")))
        ids = {s.get("id") for s in action["runs"]["steps"]}
        for o in action["outputs"].values():
            self.assertIn(re.fullmatch(r"\$\{\{ steps\.(\w+)\.outputs\.[\w-]+ \}\}", o["value"])[1], ids)


if __name__ == "__main__":
    unittest.main()
