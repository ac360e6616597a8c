"""The wheel, installed where nothing else is: in a fresh virtual environment, from an empty folder, without the source tree.

    python3 check_wheel.py WHEEL

NumPy comes from the interpreter that runs this; where that has no pip, the wheel is unpacked instead of installed.
"""

import base64
import csv
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile

KERNEL = '''
import numpy as np


def mine(q, k, v, *, problem):
    o, lse = np.zeros(q.shape[:2] + v.shape[2:]), np.zeros((problem.hq, problem.tq))
    group = problem.hq // problem.hkv
    for s in problem.segments:
        keys, rows = problem.key_rows(s), problem.query_rows(s)
        for h in range(problem.hq):
            x = problem.scale * SCALE * q[rows, h].astype(np.float64) @ k[keys, h // group].T
            x = np.where(problem.visible(s), x, -np.inf)
            lse[h, rows] = np.logaddexp.reduce(x, axis=1)
            o[rows, h] = np.exp(x - lse[h, rows, None]) @ v[keys, h // group]
    return o, lse
'''


def run(command, folder, want=0):
    """A command without this process's settings; its output."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DUALKV", "PYTHON"))}
    done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=300)
    if done.returncode != want:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode} instead of {want}\n{done.stdout}")
    return done.stdout


def check_record(wheel):
    """Every file is in RECORD, with its hash."""
    with zipfile.ZipFile(wheel) as z:
        names = set(z.namelist())
        record = next(n for n in names if n.endswith(".dist-info/RECORD"))
        rows = {name: digest for name, digest, _ in csv.reader(io.StringIO(z.read(record).decode()))}
        assert set(rows) == names, set(rows) ^ names
        for name in names - {record}:
            digest = base64.urlsafe_b64encode(hashlib.sha256(z.read(name)).digest()).rstrip(b"=").decode()
            assert rows[name] == f"sha256={digest}", name


def install(wheel, venv):
    """Into the environment; its Python and its folder of scripts."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", venv], check=True)
    python = os.path.join(venv, "bin", "python")
    pip = subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index",
                          "--disable-pip-version-check", wheel], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if pip.returncode == 0:
        return python, True
    print(f"no pip that can install it, so the wheel is unpacked ({pip.stdout.strip().splitlines()[-1]})")
    site = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], venv).strip()
    with zipfile.ZipFile(wheel) as z:
        for entry in z.infolist():
            os.chmod(z.extract(entry, site), entry.external_attr >> 16 & 0o777)
    return python, False


def main(wheel):
    began = time.time()
    check_record(wheel)
    with tempfile.TemporaryDirectory() as venv, tempfile.TemporaryDirectory() as folder:
        python, scripts = install(os.path.abspath(wheel), venv)
        for name, scale in (("right", "1"), ("wrong", "0.9")):
            with open(os.path.join(folder, f"{name}.py"), "w") as f:
                f.write(KERNEL.replace("SCALE", scale))
        line = "shape=30+3x17 heads=4:2 dim=32 grad=off"
        out = run([python, "-c", "import dualkv; print(dualkv.__file__); from dualkv import _lib; print(_lib.library_path());"
                   "print(len(dualkv.suite('ci')), dualkv.inputs('shape=4').q.shape)"], folder)
        assert all(row.startswith(os.path.realpath(venv)) or row.startswith(venv) for row in out.splitlines()[:2]), out
        out = run([python, "-c", f"import dualkv, right; print(dualkv.check(right.mine, {line!r}))"], folder)
        assert out.startswith("PASSED"), out
        out = run([python, "-m", "dualkv", "check", line, "--kernel", "right.py:mine"], folder)
        assert "1 PASSED" in out, out
        out = run([python, "-m", "dualkv", "check", line, "--kernel", "wrong.py:mine"], folder, want=1)
        assert "FAILED" in out and f"replay: dualkv replay '{line}' --kernel wrong.py:mine" in out, out
        run([python, "-m", "dualkv", "check", "shape=9+3 dim=256 fill=recorded:gemma3-270m-l1", "--kernel", "emu"], folder)
        if scripts:
            run([os.path.join(venv, "bin", "dualkv"), "replay", line, "--kernel", "wrong.py:mine"], folder, want=1)
        site = os.path.dirname(run([python, "-c", "import dualkv; print(dualkv.__file__)"], folder).strip())
        for name in ("dualkv", "libdualkv.so"):
            out = run(["ldd", os.path.join(site, "_bundle", name)], folder) if shutil.which("ldd") else ""
            outside = [row for row in out.splitlines() if any(w in row for w in ("openblas", "cjson", "quadmath", "gfortran"))
                       and "_bundle/lib" not in row]
            assert not outside, outside
    print(f"ok    {os.path.basename(wheel)}: installed and judged a kernel in {time.time() - began:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1])
