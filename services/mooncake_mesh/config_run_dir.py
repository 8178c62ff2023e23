"""Where a user's sockets lie unless a configuration says otherwise."""

import os
import tempfile
from pathlib import Path


def default_run_dir() -> Path:
    """Folder of this user's sockets: ``$XDG_RUNTIME_DIR/mooncake``, or one in the folder for temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "mooncake" if runtime else Path(tempfile.gettempdir()) / f"mooncake-{os.getuid()}"
