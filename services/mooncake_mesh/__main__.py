"""``mooncake`` and ``python -m mooncake_mesh``."""

import sys

from mooncake_mesh.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
