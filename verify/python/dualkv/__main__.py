"""``python -m dualkv ...``: the program dualkv, with this Python for kernels that are functions of Python files."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from . import _lib


def main() -> NoReturn:
    """Becomes the program: same arguments, same exit code."""
    try:
        program = str(_lib.program_path())
    except _lib.LibraryError as e:
        sys.exit(f"dualkv: {e}")
    sys.stdout.flush()
    try:
        os.execve(program, ["dualkv", *sys.argv[1:]], _lib.environment())
    except OSError as e:
        sys.exit(f"dualkv: {program}: cannot be run: {e.strerror}")


if __name__ == "__main__":
    main()
