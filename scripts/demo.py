"""What ``scripts/demo`` shows: a mesh starts, a conversation of two turns, its status, its end, and no leftovers.

Exit code 0 when everything went as it should; otherwise 1, and the last lines say what did not.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

MOONCAKE: Final = Path(sys.executable).parent / "mooncake"
SHM: Final = Path("/dev/shm")
STOP_WITHIN_S: Final = 60.0

TEXT: Final = (
    "The Moon is the only natural satellite of the Earth. It circles the Earth at an average distance of 384,400 "
    "kilometres and needs about 27 days for one round. Because it turns around itself in the same time, it always "
    "shows us the same face. The gravity of the Moon is one sixth of that of the Earth; it has almost no atmosphere, "
    "so the sky above it is black even by day. Its pull, together with that of the Sun, makes the tides of the oceans. "
    "Twelve people walked on it between 1969 and 1972, and they brought back 382 kilograms of rock and dust."
)
QUESTIONS: Final = (
    f"{TEXT}\n\nIn one sentence: why do we always see the same face of the Moon?",
    "And how many people walked on it?",
)


class DemoFailed(Exception):
    """What did not go as it should, in words for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningMesh:
    """What the ready line says, and the processes behind it."""

    supervisor: subprocess.Popen[str]
    url: str
    facts: dict[str, str]
    processes: tuple[psutil.Process, ...]

    @property
    def run_dir(self) -> Path:
        return Path(self.facts["conductor"].removeprefix("ipc://")).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    answer: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description="Run a mesh on this machine and talk to it.")
    parser.add_argument("--dtype", default="float32", help="float32 (default) or bfloat16")
    parser.add_argument("--model", default="smollm2-135m", help="a known name, a local folder or a hub id")
    options, up_flags = parser.parse_known_args()
    shared_memory = _shared_memory()
    with tempfile.TemporaryDirectory(prefix="mooncake-demo-") as logs:
        flags = ["--nodes=2", f"--dtype={options.dtype}", f"--model={options.model}", *up_flags]
        try:
            with _mesh(flags, Path(logs)) as mesh:
                _converse(mesh)
                _show_transfers(Path(logs) / "prefill0.log")
                _show_status(mesh)
            _section("Leftovers")
            _check_leftovers(mesh, shared_memory)
        except (DemoFailed, httpx.HTTPError) as error:
            _show_logs(Path(logs))
            _say(f"\nDEMO FAILED: {error}")
            return 1
    _say("\nThe demo went as it should.")
    return 0


@contextmanager
def _mesh(flags: list[str], logs: Path) -> Iterator[RunningMesh]:
    """A mesh that is ready; stopped with SIGTERM at the end, whatever happened."""
    _section("Start: gateway, conductor, and on each of two nodes a messenger and a worker")
    command = [str(MOONCAKE), "up", "--port=0", f"--log-dir={logs}", "--log-format=json", *flags]
    _say("$ mooncake " + " ".join(command[1:]))
    began = time.monotonic()
    with (logs / "up.log").open("wb") as log:
        stderr = None if sys.stderr.isatty() else log  # a terminal shows what the start waits for
        supervisor = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert supervisor.stdout is not None
        line = supervisor.stdout.readline()
        if not line.startswith("ready "):
            raise DemoFailed(f"mooncake up ended with code {supervisor.wait()}")
        _say(f"{line}(after {time.monotonic() - began:.1f} s)\n")
        _, url, *words = line.split()
        children = psutil.Process(supervisor.pid).children(recursive=True)
        for child in children:
            _say(f"  pid {child.pid:<8} {' '.join(child.cmdline()[4:6])}")
        yield RunningMesh(
            supervisor=supervisor,
            url=url,
            facts=dict(word.split("=", 1) for word in words),
            processes=(psutil.Process(supervisor.pid), *children),
        )
    finally:
        _stop(supervisor)


def _stop(supervisor: subprocess.Popen[str]) -> None:
    if supervisor.poll() is not None:
        return
    _section("Stop")
    _say(f"$ kill -TERM {supervisor.pid}")
    began = time.monotonic()
    supervisor.terminate()
    try:
        code = supervisor.wait(STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        raise DemoFailed(f"mooncake up did not stop within {STOP_WITHIN_S:.0f} s") from None
    _say(f"stopped with exit code {code} after {time.monotonic() - began:.1f} s")
    if code != 0:
        raise DemoFailed(f"mooncake up stopped with exit code {code}")


def _converse(mesh: RunningMesh) -> None:
    """Two turns; the second one's prompt begins with all of the first."""
    messages: list[dict[str, str]] = []
    turns = []
    for number, question in enumerate(QUESTIONS, 1):
        _section(f"Turn {number}: POST /v1/chat/completions, streaming")
        _say(f"user: {question}\n")
        messages.append({"role": "user", "content": question})
        turn = _ask(mesh, messages)
        messages.append({"role": "assistant", "content": turn.answer})
        _say(f"\n\nTTFT {turn.ttft_s * 1000:.0f} ms, cached_tokens {turn.cached_tokens} of {turn.prompt_tokens}")
        turns.append(turn)
    _section("The KVCache at work")
    for number, turn in enumerate(turns, 1):
        computed = turn.prompt_tokens - turn.cached_tokens
        _say(
            f"turn {number}: {turn.prompt_tokens:4} prompt tokens, {turn.cached_tokens:4} from the pool, "
            f"{computed:4} computed, TTFT {turn.ttft_s * 1000:5.0f} ms"
        )
    if turns[1].cached_tokens <= 0:
        raise DemoFailed("the second turn found nothing in the pool (cached_tokens is 0)")


def _ask(mesh: RunningMesh, messages: list[dict[str, str]]) -> Turn:
    """One streamed answer, printed as it comes."""
    request = {
        "model": mesh.facts["model"],
        "messages": messages,
        "temperature": 0,
        "max_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer, ttft_s, usage = "", None, None
    _say("assistant: ", end="")
    began = time.monotonic()
    for chunk in _chunks(f"{mesh.url}/v1/chat/completions", request):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") or ""
            if text and ttft_s is None:
                ttft_s = time.monotonic() - began
            answer += text
            _say(text, end="")
    if ttft_s is None or usage is None:
        raise DemoFailed("the answer has no text or no usage")
    details = usage.get("prompt_tokens_details") or {}
    return Turn(
        answer=answer,
        ttft_s=ttft_s,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=details.get("cached_tokens") or 0,
    )


def _chunks(url: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to its [DONE]."""
    with httpx.stream("POST", url, json=request, timeout=300) as response:
        if response.status_code != 200:
            raise DemoFailed(f"HTTP {response.status_code}: {response.read().decode(errors='replace')}")
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                return
            yield json.loads(data)
    raise DemoFailed("the stream ended without [DONE]")


def _show_transfers(log: Path) -> None:
    """What the prefill instance logged about the KV it sent, and how much of it left while it still computed."""
    sent = [event for event in _events(log) if event["event"] == "prefill_sent"]
    for number, event in enumerate(sent, 1):
        share = event["overlapped_bytes"] / max(event["sent_bytes"], 1)
        _say(
            f"turn {number}: {event['sent_bytes'] / 2**20:5.1f} MiB of KV moved to the decode node by "
            f"{event['transport']}, {share:.0%} of it before the prefill had ended"
        )
    if not any(event["sent_bytes"] for event in sent):
        raise DemoFailed("no KV was moved between the nodes")


def _show_status(mesh: RunningMesh) -> None:
    _section("Status")
    command = [str(MOONCAKE), "status", f"--conductor={mesh.facts['conductor']}"]
    _say(f"$ {' '.join(['mooncake', *command[1:]])}")
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        raise DemoFailed(f"mooncake status ended with code {code}")


def _check_leftovers(mesh: RunningMesh, shared_memory_before: frozenset[str]) -> None:
    """Print what is left of the mesh, kind by kind; anything is a failure."""
    _, alive = psutil.wait_procs(mesh.processes, timeout=5)
    sockets = [
        line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if str(mesh.run_dir) in line
    ]
    sockets += [str(path) for path in mesh.run_dir.glob("**/*")] if mesh.run_dir.exists() else []
    left = {
        "processes": [str(process.pid) for process in alive],
        f"socket files in {mesh.run_dir}": sockets,
        f"entries in {SHM}": sorted(_shared_memory() - shared_memory_before),
    }
    for kind, names in left.items():
        _say(f"{kind}: {', '.join(names) or 'none'}")
    if any(left.values()):
        raise DemoFailed("something was left behind")


def _shared_memory() -> frozenset[str]:
    """This user's entries."""
    return frozenset(entry.name for entry in SHM.iterdir() if entry.lstat().st_uid == os.getuid())


def _events(log: Path) -> Iterator[dict[str, Any]]:
    """The JSON lines of a log; what else a process wrote is passed over."""
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def _show_logs(logs: Path) -> None:
    for file in sorted(logs.iterdir()):
        _section(f"Last lines of {file.name}")
        _say("\n".join(file.read_text(errors="replace").splitlines()[-8:]))


def _section(title: str) -> None:
    _say(f"\n== {title}\n")


def _say(text: str, end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
