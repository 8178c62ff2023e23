"""Mooncake's TransferEngine over TCP, two processes, default settings. Runs in the peer's own environment.

Ops: ``write`` and ``read``.
"""

import sys
from typing import Any

import numpy as np
from mooncake.engine import TransferEngine

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
    engine, pool = _engine()
    if sys.argv[1:] == ["other-end"]:
        be_other_end({"name": f"127.0.0.1:{engine.get_rpc_port()}", "address": str(pool.ctypes.data)})
        return
    other, where = start_other_end("bench.peers.mooncake_engine", "other-end")
    name, remote, local = where["name"], int(where["address"]), pool.ctypes.data

    def measure(question: Question) -> Answer:
        one = engine.transfer_sync_write if question.op == "write" else engine.transfer_sync_read
        many = engine.batch_transfer_sync_write if question.op == "write" else engine.batch_transfer_sync_read

        def work(call: int) -> None:
            places = offsets(question, call)
            size = question.size_bytes
            if len(places) == 1:
                done = one(name, local + places[0], remote + places[0], size)
            else:
                done = many(name, [local + p for p in places], [remote + p for p in places], [size] * len(places))
            if done != 0:
                raise RuntimeError(f"the engine answered {done}")

        return timed(question, work)

    answer_all(measure)
    other.communicate()


def _engine() -> tuple[Any, "np.ndarray[Any, np.dtype[np.uint8]]"]:
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("initialize failed")
    pool = np.full(POOL_BYTES, 7, np.uint8)
    if engine.register_memory(pool.ctypes.data, POOL_BYTES) != 0:
        raise RuntimeError("register_memory failed")
    return engine, pool


if __name__ == "__main__":
    main()
