"""Helpers that have nothing to do leave the cores to others, in a process of its own."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

PROBE = """
import os, time
from mooncake_mesh.engine.openmp import sleep_soon
sleep_soon()
import torch
torch.set_num_threads(2)
one = torch.randn(400, 400)
after_s = []
for _ in range(20):
    for _ in range(10):
        one @ one
    before_s = time.process_time()
    time.sleep(0.02)
    after_s.append(time.process_time() - before_s)
print(os.environ.get("GOMP_SPINCOUNT"), sorted(after_s)[10])
"""


def run(**environment: str) -> tuple[str, float]:
    """What was set, and the CPU time that 20 ms after a computation took."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, env=own | environment, capture_output=True, text=True, check=True)
    count, after_s = done.stdout.split()
    return count, float(after_s)


def test_helpers_sleep_soon() -> None:
    count, after_s = run()
    assert count == "10000"
    _, usual_s = run(GOMP_SPINCOUNT="300000")
    assert after_s < max(usual_s / 2, 0.003)  # on one core the usual is little


def test_what_the_environment_says_stays() -> None:
    assert run(GOMP_SPINCOUNT="123")[0] == "123"
    assert run(OMP_WAIT_POLICY="passive")[0] == "None"
