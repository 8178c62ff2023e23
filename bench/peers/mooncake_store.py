"""Mooncake Store: a master, an owner of the segment in another process, and this client. In the peer's environment.

Ops: ``put`` (put_from, batch_put_from) and ``get`` (get_into, batch_get_into) between a registered buffer and the
owner's segment, over TCP; objects are removed outside the measured time.
"""

import itertools
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mooncake.store import MooncakeDistributedStore

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

_SEGMENT_BYTES = 1 << 30
_BUFFER_BYTES = 64 << 20


def main() -> None:
    if sys.argv[1:2] == ["other-end"]:
        store = connected_store(sys.argv[2], _SEGMENT_BYTES)
        _touch(store)
        be_other_end({"segment": store.get_hostname()})
        return
    with running_master() as address:
        other, _ = start_other_end("bench.peers.mooncake_store", "other-end", address)
        store = connected_store(address, 0)
        pool = np.full(POOL_BYTES, 7, np.uint8)
        check(store.register_buffer(pool.ctypes.data, POOL_BYTES))
        answer_all(_Client(store, pool.ctypes.data).measure)
        other.communicate()


@contextmanager
def running_master(*flags: str) -> Iterator[str]:
    """A master process; its address."""
    port, metrics = _free_port(), _free_port()
    program = str(Path(sys.executable).parent / "mooncake_master")
    ours = [f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={metrics}", "--default_kv_lease_ttl=300"]
    master = subprocess.Popen([program, *ours, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port)
        yield f"127.0.0.1:{port}"
    finally:
        master.kill()
        master.wait()


class _Client:
    """Puts and gets between the registered buffer at *local* and the owner's segment."""

    def __init__(self, store: Any, local: int) -> None:
        self._store = store
        self._local = local
        self._numbers = itertools.count()

    def measure(self, question: Question) -> Answer:
        calls_kept = max(1, POOL_BYTES // (question.size_bytes * question.batch))
        try:
            if question.op == "put":
                return self._put_in_stretches(question, calls_kept)
            kept = [key for call in range(calls_kept) for key in self._put(question, call)]
            return timed(question, lambda call: self._get(question, call, kept))
        finally:
            self._remove_all()

    def _put(self, question: Question, call: int) -> list[str]:
        places, size = offsets(question, call), question.size_bytes
        keys = [f"k{next(self._numbers)}" for _ in places]
        if len(places) == 1:
            check(self._store.put_from(keys[0], self._local + places[0], size))
        else:
            for code in self._store.batch_put_from(keys, [self._local + p for p in places], [size] * len(places)):
                check(code)
        return keys

    def _get(self, question: Question, call: int, kept: list[str]) -> None:
        places, size = offsets(question, call), question.size_bytes
        keys = [kept[(call * question.batch + i) % len(kept)] for i in range(len(places))]
        if len(places) == 1:
            check(self._store.get_into(keys[0], self._local + places[0], size), size)
        else:
            for code in self._store.batch_get_into(keys, [self._local + p for p in places], [size] * len(places)):
                check(code, size)

    def _put_in_stretches(self, question: Question, calls_kept: int) -> Answer:
        """Measure until the segment is full, empty it off the clock, go on."""
        answers: list[Answer] = []
        left_s = question.seconds
        while left_s > 0 or not answers:
            stretch = replace(question, seconds=left_s, most_calls=calls_kept)
            answers.append(timed(stretch, partial(self._put, question)))
            left_s -= answers[-1].seconds
            self._remove_all()
        longest = max(answers, key=lambda answer: answer.calls)
        return replace(
            longest,
            calls=sum(answer.calls for answer in answers),
            moved_bytes=sum(answer.moved_bytes for answer in answers),
            seconds=sum(answer.seconds for answer in answers),
            cpu_s=sum(answer.cpu_s for answer in answers),
        )

    def _remove_all(self) -> None:
        time.sleep(0.35)  # the read lease of 300 ms has to run out first
        self._store.remove_all(True)


def connected_store(master: str, segment_bytes: int, *, ssd_dir: str = "") -> Any:
    """A client of *master* that lends it *segment_bytes*, and the disk below *ssd_dir* where one is given."""
    store = MooncakeDistributedStore()
    disk = {"enable_ssd_offload": True, "ssd_offload_path": ssd_dir} if ssd_dir else {}
    check(store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, _BUFFER_BYTES, "tcp", "", master, **disk))
    return store


def _touch(store: Any) -> None:
    """First puts into untouched memory pay page faults; nobody's steady state does."""
    block = np.full(16 << 20, 7, np.uint8)
    check(store.register_buffer(block.ctypes.data, block.nbytes))
    for number in range(_SEGMENT_BYTES // block.nbytes - 4):
        store.put_from(f"touch{number}", block.ctypes.data, block.nbytes)
    store.remove_all(True)


def check(code: int, expected: int = 0) -> None:
    if code != expected:
        raise RuntimeError(f"the store answered {code}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _wait_for(port: int) -> None:
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError("the master did not start")


if __name__ == "__main__":
    main()
