"""The example of docs/transports.md runs and prints what the page says."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "transports.md"


def test_the_example_runs() -> None:
    text = PAGE.read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (promised,) = re.findall(r"It prints `(.*?)`", text)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], capture_output=True, text=True, timeout=50, check=True
    )
    assert promised in done.stdout.splitlines()
