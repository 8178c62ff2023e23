"""Mooncake Store with its SSD offload: objects that have left the owner's memory. In the peer's environment.

Op ``ssd-get`` (get_into, batch_get_into): the owner reads its files, by io_uring as it does fastest, and this client
pulls the bytes over TCP. The page cache is emptied of the files before each question.
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.peers.mooncake_store import check, connected_store, running_master
from bench.transfer_child import POOL_BYTES, Answer, Question, answer_all, be_other_end, start_other_end, timed

_SEGMENT_BYTES: Final = 384 << 20
_OBJECTS_BYTES: Final = 896 << 20
_LEAST_BYTES: Final = 128 << 20
_PUT_PAUSE_S: Final = 0.01
_PATIENCE_S: Final = 40.0
_SETTINGS: Final = {
    "MOONCAKE_OFFLOAD_USE_URING": "true",
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
    "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(32 << 20),  # of 256 MiB: most objects go before one is full
}


def main() -> None:
    if sys.argv[1:2] == ["other-end"]:
        store = connected_store(sys.argv[2], _SEGMENT_BYTES, ssd_dir=sys.argv[3])
        be_other_end({"segment": store.get_hostname()})
        return
    os.environ.update(_SETTINGS)
    on_disk = tempfile.TemporaryDirectory(prefix="mooncake-bench-", dir=Path.home())
    with on_disk as folder, running_master("--enable_offload=true") as address:
        other, _ = start_other_end("bench.peers.mooncake_ssd", "other-end", address, folder)
        store = connected_store(address, 0)
        pool = np.full(POOL_BYTES, 7, np.uint8)
        check(store.register_buffer(pool.ctypes.data, POOL_BYTES))
        answer_all(_Client(store, pool.ctypes.data, Path(folder)).measure)
        other.communicate()


class _Client:
    def __init__(self, store: Any, local: int, folder: Path) -> None:
        self._store = store
        self._local = local
        self._folder = folder
        self._keys: dict[int, list[str]] = {}

    def measure(self, question: Question) -> Answer:
        size = question.size_bytes
        if size not in self._keys:
            self._keys[size] = self._fill(size)
        keys = self._keys[size]
        drop_from_page_cache(self._folder)

        def work(call: int) -> None:
            first = call % (len(keys) // question.batch) * question.batch
            wanted = keys[first : first + question.batch]
            places = [self._local + i * size for i in range(question.batch)]
            if len(wanted) == 1:
                check(self._store.get_into(wanted[0], places[0], size), size)
            else:
                for code in self._store.batch_get_into(wanted, places, [size] * len(places)):
                    check(code, size)

        return timed(question, work)

    def _fill(self, size: int) -> list[str]:
        """Put more than the segment holds; the keys that are on the owner's disk alone."""
        keys = [f"{size}-{number}" for number in range(_OBJECTS_BYTES // size)]
        deadline_s = time.monotonic() + _PATIENCE_S
        for key in keys:
            while self._store.put_from(key, self._local, size) != 0:  # full until the next heartbeat offloads
                if time.monotonic() > deadline_s:
                    raise RuntimeError("the store took no more objects")
                time.sleep(0.1)
            time.sleep(_PUT_PAUSE_S * size / 2**20)  # what goes faster than it is offloaded is dropped
        while True:
            on_disk = [key for key in keys if _is_on_disk_alone(self._store.get_replica_desc(key))]
            if len(on_disk) * size >= _LEAST_BYTES:
                return on_disk
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"only {len(on_disk)} of {len(keys)} objects left memory")
            time.sleep(0.5)


def _is_on_disk_alone(replicas: Any) -> bool:
    return bool(replicas) and not any(replica.is_memory_replica() for replica in replicas)


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
