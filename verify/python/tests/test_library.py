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

USE = """
#include "dualkv.h"
#include "dualkv_kernel.h"
#include <stdio.h>
int main(void) {
    dualkv_case *c = NULL;
    dualkv_error err;
    float sink[2];
    if (dualkv_open("shape=4+2x3 heads=2:1 dim=16 sinklogit=5.5", &c, &err)) return 1;
    if (dualkv_inputs(c, DUALKV_PACKED, DUALKV_SINK, DUALKV_FLOAT, sink, sizeof sink, &err)) return 1;
    printf("%lld %.1f ", (long long)dualkv_view(c, DUALKV_REPLICATED)->tq, sink[0] > 5 && sink[0] < 6 ? 5.5 : 0.0);
    dualkv_close(c);
    if (dualkv_open("shape=4+", &c, &err) != DUALKV_USER_ERROR) return 1;
    printf("%d\\n", (int)err.position);
    return 0;
}
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

    def test_the_module_runs_as_the_program(self):
        done = subprocess.run([sys.executable, "-W", "error", "-m", "dualkv", "version"], capture_output=True, text=True, timeout=60,
                              env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(_lib.__file__)))})
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_a_program_of_another_build(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "dualkv")
            for text, words in (("#!/bin/sh\necho dualkv 9.9.9, commit abc\n", "of two builds: 'dualkv 9.9.9, commit abc' and"),
                                ("#!/bin/sh\nexit 5\n", "of two builds: 'it ended with 5' and"),
                                ("not a program", "cannot be run: ")):
                with open(path, "w") as f:
                    f.write(text)
                os.chmod(path, 0o755)
                done = self.run_python("import dualkv\ndualkv.check('emu', 'shape=4')", DUALKV_PROGRAM=path)
                self.assertIn("dualkv._lib.LibraryError: ", done.stderr)
                self.assertIn(words, done.stderr)

    def test_a_program_that_says_nothing_of_any_case(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "dualkv")
            version = f"dualkv {_lib.VERSION}, commit {_lib.lib().dualkv_commit().decode()}"
            with open(path, "w") as f:
                f.write(f"#!/bin/sh\n[ $1 = version ] && echo '{version}' && exit 0\necho 'dualkv: out of luck' >&2\nexit 3\n")
            os.chmod(path, 0o755)
            done = self.run_python("import dualkv\ndualkv.check('emu', 'shape=4')", DUALKV_PROGRAM=path)
            self.assertTrue(done.stderr.endswith("dualkv._lib.DualKVError: out of luck\n"), done.stderr)

    @unittest.skipUnless(shutil.which(os.environ.get("CC", "gcc")), "no compiler")
    def test_a_c_program(self):
        """The two public headers, side by side as installed, and the library; as C11 and, where it is, as C++."""
        root = pathlib.Path(__file__).resolve().parent.parent.parent.parent
        with tempfile.TemporaryDirectory() as folder:
            for header in ("ref/dualkv_kernel.h", "verify/dualkv.h"):
                shutil.copy(root / header, folder)
            with open(os.path.join(folder, "use.c"), "w") as f:
                f.write(USE)
            library = _lib.library_path()
            for compiler, language in ((os.environ.get("CC", "gcc"), ["-std=c11"]), ("g++", ["-xc++"])):
                if not shutil.which(compiler):
                    continue
                command = [compiler, *language, "-Wall", "-Wextra", "-Wpedantic", "-Werror", "use.c", "-xnone", str(library),
                           f"-Wl,-rpath,{library.parent}", "-o", "use"]
                subprocess.run(command, cwd=folder, check=True)
                out = subprocess.run(["./use"], cwd=folder, capture_output=True, text=True)
                self.assertEqual(out.stdout, "18 5.5 9\n", out.stderr)

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
