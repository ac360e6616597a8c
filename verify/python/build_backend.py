"""Builds the wheel: the package, the program, its library and data. A PEP 517 backend of the standard library alone, so
that `pip install verify/python` and `make wheel` need no network and no other package.

    python3 build_backend.py FOLDER OUT     # a wheel of what `make wheel-files` put into FOLDER
"""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TAG = f"py3-none-linux_{platform.machine()}"


def _project(key: str) -> str:
    """A string of pyproject.toml (Python 3.9 has no parser for it)."""
    found = re.search(rf'^{key} = "(.*)"$', (HERE / "pyproject.toml").read_text(), re.M)
    assert found, key
    return found[1]


VERSION = _project("version")
INFO = f"dualkv-{VERSION}.dist-info"


def _metadata() -> dict[str, bytes]:
    head = (f"Metadata-Version: 2.1\nName: dualkv\nVersion: {VERSION}\nSummary: {_project('description')}\n"
            f"Requires-Python: {_project('requires-python')}\nRequires-Dist: numpy>=1.22\n"
            "Description-Content-Type: text/markdown\n\n")
    readme = ROOT / "README.md"
    entries = "[console_scripts]\ndualkv = dualkv.__main__:main\n\n[pytest11]\ndualkv = dualkv.pytest_plugin\n"
    wheel = f"Wheel-Version: 1.0\nGenerator: dualkv\nRoot-Is-Purelib: false\nTag: {TAG}\n"
    out = {"METADATA": head + (readme.read_text() if readme.is_file() else ""), "WHEEL": wheel,
           "entry_points.txt": entries, "top_level.txt": "dualkv\n"}
    license_file = ROOT / "LICENSE"
    if license_file.is_file():
        out["LICENSE"] = license_file.read_text()
    return {f"{INFO}/{name}": text.encode() for name, text in out.items()}


def _write(wheel: Path, files: dict[str, tuple[bytes, bool]]) -> None:
    """A zip with a RECORD; the flag: executable. Times are fixed, so that the same files make the same wheel."""
    record = ""
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as z:
        for name, (data, executable) in sorted(files.items()):
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record += f"{name},sha256={digest},{len(data)}\n"
            entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            entry.external_attr = (0o100755 if executable else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            z.writestr(entry, data)
        entry = zipfile.ZipInfo(f"{INFO}/RECORD", (2020, 1, 1, 0, 0, 0))
        entry.external_attr = 0o100644 << 16
        z.writestr(entry, record + f"{INFO}/RECORD,,\n")


def _tree(folder: Path, prefix: str) -> dict[str, tuple[bytes, bool]]:
    return {f"{prefix}/{p.relative_to(folder)}": (p.read_bytes(), os.access(p, os.X_OK))
            for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts}


def pack(bundle: Path, out: Path) -> Path:
    """The wheel of the package and of a folder that `make wheel-files` filled."""
    if not (bundle / "libdualkv.so").is_file():
        raise SystemExit(f"{bundle}: no libdualkv.so in it: `make wheel-files` fills such a folder")
    files = {**_tree(HERE / "dualkv", "dualkv"), **_tree(bundle, "dualkv/_bundle"),
             **{name: (data, False) for name, data in _metadata().items()}}
    out.mkdir(parents=True, exist_ok=True)
    wheel = out / f"dualkv-{VERSION}-{TAG}.whl"
    _write(wheel, files)
    return wheel


def _stage() -> Path:
    """The folder of built files: $DUALKV_WHEEL_FILES, else built now."""
    named = os.environ.get("DUALKV_WHEEL_FILES")
    if named:
        return Path(named)
    if not (ROOT / "Makefile").is_file():
        raise SystemExit("dualkv: the source tree is not around verify/python: install from a checkout, or from a wheel")
    if not shutil.which("make") or not shutil.which("gcc"):
        raise SystemExit("dualkv: building needs make and gcc (apt-get install make gcc), or install a wheel")
    build = Path(os.environ.get("DUALKV_BUILD", ROOT / "build")).absolute()
    done = subprocess.run(["make", "-s", f"-j{len(os.sched_getaffinity(0))}", "-C", str(ROOT), f"B={build}", "wheel-files"], env={
        k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "PYTHONPATH", "PYTHONHOME")})
    if done.returncode:
        raise SystemExit(f"dualkv: `make wheel-files` failed in {ROOT}")
    return build / "wheel"


# ---- what an installer calls ----


def get_requires_for_build_wheel(config_settings: object = None) -> list[str]:
    return []


get_requires_for_build_editable = get_requires_for_build_wheel


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: object = None) -> str:
    for name, text in _metadata().items():
        path = Path(metadata_directory) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return INFO


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_wheel(wheel_directory: str, config_settings: object = None, metadata_directory: str | None = None) -> str:
    return pack(_stage(), Path(wheel_directory)).name


def build_editable(wheel_directory: str, config_settings: object = None, metadata_directory: str | None = None) -> str:
    """Points at this folder; the library is that of the build folder."""
    _stage()
    wheel = Path(wheel_directory) / f"dualkv-{VERSION}-{TAG}.whl"
    files = {"dualkv.pth": f"{HERE}\n".encode(), **_metadata()}
    _write(wheel, {name: (data, False) for name, data in files.items()})
    return wheel.name


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("build_backend.py FOLDER OUT")
    print(pack(Path(sys.argv[1]), Path(sys.argv[2])))
