"""What the disk below the temporary folder can do: ``python -m bench.transfer_disk``.

Op ``disk-read``: direct reads of a file's blocks in random order, a call's blocks spread over two threads, as the SSD
tier reads.
"""

import mmap
import os
import random
import tempfile
from typing import Final

from bench.transfer_child import Answer, Question, answer_all, timed
from bench.transfer_limits import Helper

_FILE_BYTES: Final = 512 << 20
_MOST_BYTES: Final = 16 << 20


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as folder:
        fd = os.open(f"{folder}/blocks", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        part = _pages(_MOST_BYTES)
        part[:] = random.randbytes(_MOST_BYTES)
        for place in range(0, _FILE_BYTES, _MOST_BYTES):
            os.pwrite(fd, part, place)
        answer_all(lambda question: _measure(question, fd))
        os.close(fd)


def _measure(question: Question, fd: int) -> Answer:
    size = question.size_bytes
    helper = Helper()
    buffers = [memoryview(_pages(size)) for _ in range(2)]

    def read(buffer: memoryview, places: list[int]) -> None:
        for place in places:
            if os.preadv(fd, [buffer], place) != size:
                raise OSError("a short read")

    def work(_: int) -> None:
        places = random.sample(range(0, _FILE_BYTES, size), question.batch)
        helper.both(lambda: read(buffers[0], places[::2]), lambda: read(buffers[1], places[1::2]))

    return timed(question, work)


def _pages(size_bytes: int) -> mmap.mmap:
    """Aligned private memory, on 2 MiB pages where there are some, touched."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:] = bytes(size_bytes)
    return memory


if __name__ == "__main__":
    main()
