"""``mooncake simulate``: the benchmark program ``bench.simulate``, for users.

The programs under ``bench`` belong to a checkout and are not installed with the package.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_CHECKOUT: Final = Path(__file__).resolve().parents[3]


def run(argv: Sequence[str]) -> int:
    """Run the simulator with the flags *argv*; its exit code, 2 where there is no checkout to run it from."""
    if find_spec("bench") is None and (_CHECKOUT / "bench" / "simulate.py").is_file():
        sys.path.insert(0, str(_CHECKOUT))
    try:
        program = importlib.import_module("bench.simulate")
    except ModuleNotFoundError as missing:
        if missing.name not in ("bench", "bench.simulate"):
            raise
        sys.stderr.write("mooncake simulate: needs a checkout of mooncake-mesh; run it from there\n")
        return 2
    code: int = program.main(argv, "mooncake simulate")
    return code
