"""DualKV Verify from Python: is an attention kernel exactly attention, shared prompts included?

    import dualkv

    result = dualkv.check(my_attention, "shape=200+3x77 heads=8:2 dim=64", convention="packed")
    print(result.status, result.why)

Problems, inputs and expansion are those of libdualkv.so, verdicts those of the program ``dualkv``; ``python -m dualkv`` is
that program.
"""

from ._lib import VERSION as __version__
from ._lib import DualKVError, LibraryError, LineError, RefusedError
from .capture import capture
from .casefile import CaseFile, load, save
from .checks import Case, Result, assert_equivalent, cases, check
from .inputs import Inputs, decode_bf16, encode_bf16, inputs
from .problem import Expansion, KeyRange, Problem, Segment, canonical, suite, suites

__all__ = [
    "Case", "CaseFile", "DualKVError", "Expansion", "Inputs", "KeyRange", "LibraryError", "LineError", "Problem", "RefusedError",
    "Result", "Segment", "__version__", "assert_equivalent", "canonical", "capture", "cases", "check", "decode_bf16", "encode_bf16",
    "inputs", "load", "save", "suite", "suites",
]
