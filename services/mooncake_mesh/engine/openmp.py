"""How long the helpers of a computation look for more of it before they sleep.

OpenMP has them look for some 6 ms. Between the layers of a forward they must not sleep; after the last one they keep a
core from those who bring the first token to its reader, and from the decode step that follows.
"""

import os
from typing import Final

_LOOKS: Final = 10_000
"""About 0.2 ms."""


def sleep_soon() -> None:
    """Have them sleep soon in this process, which must not have loaded torch yet; what the environment says stays.

    For prompts, which come one by one. Steps follow one another: there helpers that sleep have to be woken.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_LOOKS))
