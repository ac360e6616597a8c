"""The package says py.typed: mypy --strict finds nothing, in it and in what uses it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import dualkv

PACKAGE = Path(dualkv.__file__).resolve().parent

USER = '''
import numpy as np
import numpy.typing as npt

import dualkv


def mine(q: npt.NDArray[np.float32], k: npt.NDArray[np.float32], v: npt.NDArray[np.float32], problem: dualkv.Problem,
         scale: float) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    rows = [problem.query_rows(s) for s in problem.segments]
    return v[rows[0]], q[..., 0].T


result: dualkv.Result = dualkv.check(mine, ["smoke", dualkv.Problem("shape=3")], convention="packed")
status: str = result.cases[0].status
with dualkv.capture("folder", step=1) as c:
    path = c.record(q=np.zeros(3), k=np.zeros(3), v=np.zeros(3), problem=dualkv.Problem("shape=3"))
loaded = dualkv.load(path or "")
dualkv.save("x", o=loaded["q"] + dualkv.inputs("shape=3").q)
'''


@unittest.skipUnless(importlib.util.find_spec("mypy"), "needs mypy")
class Types(unittest.TestCase):
    cache: "tempfile.TemporaryDirectory[str]"

    @classmethod
    def setUpClass(cls) -> None:
        cls.cache = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.cache.cleanup)

    def mypy(self, *words: str) -> "tuple[int, str]":
        done = subprocess.run([sys.executable, "-m", "mypy", "--cache-dir", self.cache.name, *words], capture_output=True, text=True,
                              env={**os.environ, "MYPYPATH": str(PACKAGE.parent)}, cwd=self.cache.name, timeout=300)
        return done.returncode, done.stdout + done.stderr

    def test_the_package(self) -> None:
        code, said = self.mypy("--config-file", str(PACKAGE.parent / "pyproject.toml"), str(PACKAGE))
        self.assertEqual(code, 0, said)

    def test_its_users(self) -> None:
        with tempfile.TemporaryDirectory() as d:
            Path(d, "user.py").write_text(USER)
            code, said = self.mypy("--strict", "--follow-imports=silent", f"{d}/user.py")
            self.assertEqual(code, 0, said)
            Path(d, "user.py").write_text(USER.replace("status: str", "status: int"))
            self.assertIn("Incompatible types in assignment", self.mypy("--strict", "--follow-imports=silent", f"{d}/user.py")[1])


if __name__ == "__main__":
    unittest.main()
