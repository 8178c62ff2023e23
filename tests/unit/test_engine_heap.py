"""The heap of a process that computes, in a process of its own."""

import subprocess
import sys

import pytest

PROBE = """
import ctypes, resource, sys, threading
if sys.argv[1] == "kept":
    from mooncake_mesh.engine.heap import keep_freed_memory
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: pages of one size, however much memory lies together
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(100 << 20)
    ctypes.memset(block, 1, 100 << 20)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

found = []
for _ in range(3):
    thread = threading.Thread(target=lambda: found.append(faults()))
    thread.start()
    thread.join()
print(*found)
"""


@pytest.mark.parametrize("how", ["kept", "given back"])
def test_memory_is_touched_for_the_first_time_only_once(how: str) -> None:
    out = subprocess.run([sys.executable, "-c", PROBE, how], capture_output=True, text=True, check=True).stdout
    first, *later = map(int, out.split())
    pages = (100 << 20) // 4096
    assert first > 0.9 * pages  # its heap may have a few of them already
    if how == "kept":
        assert max(later) < first / 20
    else:
        assert min(later) > first / 2
