"""A library that is missing, foreign, of another version: one clear exception each. And what it exports."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

from dualkv import _lib

FAKE = """
#include <stdint.h>
uint32_t dualkv_api(void) { return %d; }
const char *dualkv_version(void) { return "%s"; }
"""


def fake(folder, api=1, version="9.9.9", names=()):
    """A library with these functions that do nothing."""
    source, path = os.path.join(folder, "fake.c"), os.path.join(folder, "libdualkv.so")
    with open(source, "w") as f:
        f.write(FAKE % (api, version) + "".join(f"void {name}(void) {{}}\n" for name in names))
    subprocess.run([os.environ.get("CC", "gcc"), "-shared", "-fPIC", "-w", source, "-o", path], check=True)
    return pathlib.Path(path)


class Library(unittest.TestCase):
    def refused(self, path, words):
        with self.assertRaises(_lib.LibraryError) as caught:
            _lib.load(pathlib.Path(path))
        self.assertIn(words, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))

    def test_libraries_that_are_not_ours(self):
        with tempfile.TemporaryDirectory() as folder:
            self.refused(os.path.join(folder, "no.so"), "cannot be loaded")
            text = os.path.join(folder, "text.so")
            with open(text, "w") as f:
                f.write("not a library")
            self.refused(text, "cannot be loaded")
            self.refused(fake(folder), "has no dualkv_")

    @unittest.skipUnless(shutil.which(os.environ.get("CC", "gcc")), "no compiler")
    def test_another_version(self):
        names = [n for n in _lib._SIGNATURES if n not in ("dualkv_api", "dualkv_version")]
        with tempfile.TemporaryDirectory() as folder:
            self.refused(fake(folder, names=names), "is version 9.9.9")
        with tempfile.TemporaryDirectory() as folder:
            self.refused(fake(folder, api=0, version=_lib.VERSION, names=names), "interface 0")

    def run_python(self, code, **environment):
        env = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(_lib.__file__))), **environment}
        return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)

    def test_a_missing_library_and_program(self):
        done = self.run_python("import dualkv\ndualkv.Problem('shape=4')", DUALKV_LIBRARY="/nonexistent.so")
        self.assertIn("LibraryError: DUALKV_LIBRARY=/nonexistent.so: no such file", done.stderr)
        done = self.run_python("from dualkv import __main__ as m; m.main()", DUALKV_PROGRAM="/nonexistent")
        self.assertEqual((done.returncode, done.stderr), (1, "dualkv: DUALKV_PROGRAM=/nonexistent: no such file\n"))

    def test_the_module_is_the_program(self):
        code = "import sys\nsys.argv = ['dualkv', %s]\nfrom dualkv.__main__ import main\nmain()"
        done = self.run_python(code % "'version'")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(_lib.VERSION, done.stdout)
        done = self.run_python(code % "'check', 'shape=x', '--kernel', 'emu'")
        self.assertEqual(done.returncode, 2)
        self.assertTrue(done.stderr.startswith("dualkv: shape=x"), done.stderr)

    @unittest.skipUnless(shutil.which("nm"), "no nm")
    def test_only_public_names_are_exported(self):
        out = subprocess.run(["nm", "-D", "--defined-only", str(_lib.library_path())], capture_output=True, text=True,
                             check=True).stdout
        names = [row.split()[-1] for row in out.splitlines()]
        self.assertGreater(len(names), 20)
        self.assertEqual([n for n in names if not n.startswith("dualkv_")], [])
        for name in _lib._SIGNATURES:
            self.assertIn(name, names)


if __name__ == "__main__":
    unittest.main()
