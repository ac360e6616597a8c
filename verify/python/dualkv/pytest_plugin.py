"""pytest: a test with an argument ``dualkv_line`` runs once for each line of ``--dualkv-suite`` (default: smoke)."""

from __future__ import annotations

from typing import Any

from .problem import lines_of


def pytest_addoption(parser: Any) -> None:
    parser.getgroup("dualkv").addoption(
        "--dualkv-suite", action="append", metavar="SUITE|LINE",
        help="problem lines of tests that take `dualkv_line`; may be given again (default: smoke)")


def pytest_generate_tests(metafunc: Any) -> None:
    marked = any("dualkv_line" in str(mark.args[:1]) for mark in metafunc.definition.iter_markers("parametrize"))
    if "dualkv_line" in metafunc.fixturenames and not marked:
        lines = lines_of(metafunc.config.getoption("--dualkv-suite") or ["smoke"])
        metafunc.parametrize("dualkv_line", lines, ids=lines)
