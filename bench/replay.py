"""Whether a conductor that is told the same decides the same: `python -m bench.replay FILE`.

FILE was recorded by a live conductor (`mooncake conductor --record FILE`, or MOONCAKE_CONDUCTOR_RECORD for one that
`mooncake up` starts). Exit code 1 when the digests differ.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mooncake_mesh.conductor.making import replay
from mooncake_mesh.conductor.recording import BadRecording
from mooncake_mesh.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Replay once and print both digests."""
    parser = argparse.ArgumentParser(prog="python -m bench.replay", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        found = replay(args.file)
    except (OSError, BadRecording, ConfigError) as error:
        sys.stderr.write(f"bench.replay: {error}\n")
        return 2
    print(f"{found.digest} {found.recorded} events={found.events} requests={len(found.decisions)}")
    return 0 if found.digest == found.recorded else 1


if __name__ == "__main__":
    sys.exit(main())
