"""NIXL over UCX, two processes. Runs in the peer's own environment; UCX_TLS decides what UCX may use.

Ops: ``write`` and ``read``.
"""

import os
import sys
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

from bench.transfer_child import (
    POOL_BYTES,
    Answer,
    Question,
    answer_all,
    be_other_end,
    offsets,
    start_other_end,
    timed,
)


def main() -> None:
    is_other = sys.argv[1:] == ["other-end"]
    agent = nixl_agent("receiver" if is_other else "sender", nixl_agent_config(True, backends=["UCX"]))
    pool = np.full(POOL_BYTES, 7, np.uint8)
    address = pool.ctypes.data
    agent.register_memory([(address, POOL_BYTES, 0, "pool")], "DRAM")
    if is_other:
        be_other_end({"metadata": agent.get_agent_metadata().hex(), "address": str(address)})
        os._exit(0)  # its threads do not end
    other, where = start_other_end("bench.peers.nixl_agents", "other-end")
    name = agent.add_remote_agent(bytes.fromhex(where["metadata"]))
    peer = name.decode() if isinstance(name, bytes) else name
    remote = int(where["address"])
    answer_all(lambda question: _measure(agent, peer, address, remote, question))
    assert other.stdin is not None
    other.stdin.close()
    other.wait(5)
    sys.stdout.flush()
    os._exit(0)


def _measure(agent: Any, peer: str, local: int, remote: int, question: Question) -> Answer:
    size = question.size_bytes

    def work(call: int) -> None:
        places = offsets(question, call)
        source = agent.get_xfer_descs([(local + place, size, 0) for place in places], "DRAM")
        target = agent.get_xfer_descs([(remote + place, size, 0) for place in places], "DRAM")
        handle = agent.initialize_xfer(question.op.upper(), source, target, peer)
        state = agent.transfer(handle)
        while state == "PROC":
            os.sched_yield()
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"the transfer ended {state}")

    return timed(question, work)


if __name__ == "__main__":
    main()
