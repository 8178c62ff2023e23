"""``mooncake ping``: whether a process of a mesh answers; for health checks and scripts.

Exit codes: 0 when it does, 1 when it does not.
"""

import asyncio
import sys

from mooncake_mesh.config_commands import PingConfig
from mooncake_mesh.errors import MooncakeError
from mooncake_mesh.mesh import key_folder
from mooncake_mesh.mesh.rpc import RpcClient
from mooncake_proto.control import Ping, Pong


def run(config: PingConfig) -> int:
    return asyncio.run(_run(config))


async def _run(config: PingConfig) -> int:
    keys = None if config.keys is None else key_folder.load(config.keys)
    try:
        async with RpcClient(config.endpoint, keys=keys) as client:
            pong = await client.call(Ping(), Pong, timeout_s=config.timeout_s)
    except MooncakeError as error:
        sys.stderr.write(f"mooncake ping: no answer from {config.endpoint}: {error}\n")
        return 1
    sys.stdout.write(f"{pong.role.value} {pong.instance_id} incarnation={pong.incarnation}\n")
    return 0
