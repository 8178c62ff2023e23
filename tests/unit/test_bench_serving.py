"""What bench.serving and bench.interference make of samples, the command lines they start, and that nothing is left."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import psutil
import pytest

from bench import interference
from bench.interference import Offered, Window, summarised, tbt_s
from bench.peers.environments import NotInstalled
from bench.report import Report
from bench.serving import rotated
from bench.serving_client import Reply, Target, _EventStream
from bench.serving_measures import Aim, Measure, compare, is_met, measures, tell
from bench.serving_servers import (
    OURS,
    Server,
    endless_copy,
    llamacpp_plan,
    our_plan,
    peer_plan,
    transformers_plan,
    vllm_plan,
)
from mooncake_mesh.cli.settings import flags_of
from mooncake_mesh.config import UpConfig


def _reply(*events_s: float, sent_s: float = 0.0) -> Reply:
    return Reply(sent_s=sent_s, events_s=events_s, output_tokens=len(events_s))


# --- samples and aims -------------------------------------------------------------------------------------------------


def test_a_ratio_is_taken_within_rounds_and_a_failed_round_counts_for_nobody() -> None:
    found = compare([[10.0], [30.0, 50.0], [7.0], []], [[20.0], [10.0], [], [5.0]])
    assert found is not None
    assert found.ratios == (0.5, 4.0)
    assert found.ratio == 2.25
    assert (found.value, found.baseline) == (25.0, 15.0)
    assert compare([[1.0], []], [[], [1.0]]) is None


def test_who_did_nothing_is_infinitely_surpassed() -> None:
    found = compare([[3.0]], [[0.0]])
    assert found is not None
    assert found.ratio == float("inf")


def test_aims_are_those_that_were_set() -> None:
    aims = {
        measure.name: {(aim.peer, aim.ratio, measure.more_is_better) for aim in measure.aims}
        for measure in measures((32, 6000), (1, 4, 16))
    }
    ttft = {("vllm", 1.0, False), ("llamacpp", 0.7, False)}
    assert aims == {
        "TTFT, 32 tokens": ttft,
        "TTFT, 6000 tokens": ttft,
        "TPOT, concurrency 1": {("vllm", 0.9, False), ("llamacpp", 1.5, False)},
        "output, concurrency 1": set(),
        "output, concurrency 4": {("vllm", 1.0, True)},
        "output, concurrency 16": {("vllm", 1.0, True)},
        "TTFT of a second turn, 2048 tokens cached": {("vllm", 0.6, False)},
    }


async def _never(*_: object) -> list[float]:
    raise AssertionError("not measured here")


@pytest.mark.parametrize(("more_is_better", "met"), [(True, [False, True, True]), (False, [True, True, False])])
def test_more_or_less_is_better(more_is_better: bool, met: list[bool]) -> None:
    measure = Measure(name="m", unit="ms", take=_never, more_is_better=more_is_better)
    assert [is_met(measure, Aim(peer="vllm", ratio=1.0), ratio) for ratio in (0.9, 1.0, 1.1)] == met


def test_a_missed_aim_is_told_as_missed(tmp_path: Path) -> None:
    (measure,) = (one for one in measures((32,), ()) if one.name.startswith("TTFT, 32"))
    report = Report("serving", "a test")
    samples = {OURS: [[20.0], [22.0]], "vllm": [[10.0], [20.0]], "transformers": [[40.0], [44.0]]}
    tell(report, measure, samples, OURS)
    report.finish(Namespace(json=tmp_path / "report.json"))
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [(row["metric"], row["ratio"], row["aim"], row["met"]) for row in rows] == [
        ("TTFT, 32 tokens, beside vllm", 1.55, "≤ 1×", False),
        ("TTFT, 32 tokens, beside transformers", 0.5, "", None),
    ]
    assert rows[0]["spread"] == [1.1, 2.0]


def test_without_peers_our_own_figure_is_told() -> None:
    report = Report("serving", "a test")
    tell(report, measures((32,), ())[0], {OURS: [[20.0], [], [30.0]]}, OURS)
    assert [(row.value, row.baseline, row.n) for row in report.rows] == [(25.0, None, 2)]


def test_nobody_is_always_first() -> None:
    servers = [Server(name=n, target=Target(host="h", port=1, model="m", extra={}), guard_pid=1) for n in "abc"]
    assert ["".join(one.name for one in rotated(servers, turn)) for turn in range(4)] == ["abc", "bca", "cab", "abc"]


# --- the client -------------------------------------------------------------------------------------------------------


def test_events_are_put_together_from_pieces() -> None:
    stream = _EventStream()
    text = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
    stream.feed(text[:20], 1.0)
    stream.feed(text[20:] + b'data: {"choices":[{"text":"","finish_reason":null}]}\r\n\r\n', 2.0)
    stream.feed(b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n', 3.0)  # says only that it is over
    stream.feed(b'data: {"choices":[],"usage":{"completion_tokens":7}}\n\ndata: [DONE]\n\n', 4.0)
    assert stream.events_s == [2.0, 2.0]
    assert stream.output_tokens == 7


def test_times_of_a_reply() -> None:
    reply = Reply(sent_s=1.0, events_s=(1.5, 2.0, 3.5), output_tokens=5)
    assert (reply.ttft_s, reply.tpot_s, reply.intervals_s) == (0.5, 0.5, [0.5, 1.5])


# --- interference -----------------------------------------------------------------------------------------------------


def test_tbt_is_the_mean_of_the_longest_tenth() -> None:
    assert tbt_s([0.1] * 18 + [1.0, 3.0]) == 2.0
    assert tbt_s([0.2, 0.1]) == 0.2
    assert tbt_s([]) == 0.0


def test_a_window_counts_as_good_only_streams_that_kept_to_the_objective() -> None:
    offered = Offered(streams=2, stream_tokens=3, long_tokens=10, every_s=1.0, window_s=2.0, objective_s=0.25)
    window = summarised([_reply(1.0, 1.1, 1.2), _reply(1.0, 1.1, 2.1)], [_reply(4.0, sent_s=1.0)], offered, 2.0)
    assert window == Window(tbt_s=1.0, tokens_per_s=3.0, goodput_tokens_per_s=1.5, long_ttft_s=3.0)


def test_interference_is_told_beside_each_peer() -> None:
    good = Window(tbt_s=0.1, tokens_per_s=50.0, goodput_tokens_per_s=50.0, long_ttft_s=9.0)
    bad = Window(tbt_s=1.0, tokens_per_s=50.0, goodput_tokens_per_s=0.0, long_ttft_s=6.0)
    report = Report("interference", "a test")
    interference.tell(report, {OURS: [good, None], "vllm, whole prompts": [bad, bad]})
    assert [(row.metric.partition(",")[0], row.ratio, row.met) for row in report.rows] == [
        ("TBT of the streams", 0.1, True),
        ("goodput", float("inf"), True),
        ("output of the streams", 1.0, None),
        ("TTFT of the long prompts", 1.5, None),
    ]


# --- servers ----------------------------------------------------------------------------------------------------------


def test_command_lines(tmp_path: Path) -> None:
    model, home = Path("/models/m"), Path("/peers/p")
    ours = our_plan(8001, model, tmp_path / "c.toml", ["--threads=2"])
    assert ours.command[:4] == (sys.executable, "-m", "mooncake_mesh", "up")
    assert set(flags_of(UpConfig, {"port": 8001, "model": str(model), "threads": 2})) <= set(ours.command)
    assert ours.model == str(model)
    vllm = vllm_plan(8002, model, home, name="vllm, whole", flags=["--no-enable-chunked-prefill"])
    assert vllm.command[0] == "/peers/p/bin/python"
    assert {"--port=8002", f"--model={model}", "--dtype=bfloat16", "--no-enable-chunked-prefill"} <= set(vllm.command)
    assert vllm.variables["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    llamacpp = llamacpp_plan(8003, home).command
    assert llamacpp[llamacpp.index("--port") + 1] == "8003"
    assert llamacpp[llamacpp.index("--model") + 1] == "/peers/p/bf16.gguf"
    transformers = transformers_plan(8004, model, home)
    assert "--continuous-batching" in transformers.command
    assert transformers.extra == {}  # it refuses what it does not know


def test_a_model_without_its_stop_token(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"eos_token_id": 2, "vocab_size": 9}')
    (model / "generation_config.json").write_text('{"eos_token_id": [2]}')
    (model / "tokenizer_config.json").write_text('{"eos_token": "<e>"}')
    (model / "model.safetensors").write_bytes(b"weights")
    copy = endless_copy(model, tmp_path / "endless")
    assert json.loads((copy / "config.json").read_text()) == {"vocab_size": 9}
    assert json.loads((copy / "generation_config.json").read_text()) == {}
    assert (copy / "tokenizer_config.json").read_text() == '{"eos_token": "<e>"}'
    assert (copy / "model.safetensors").resolve() == model / "model.safetensors"


def test_a_peer_that_cannot_be_installed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="…\nERROR: no such wheel\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(NotInstalled, match="no such wheel"):
        peer_plan("vllm", tmp_path, tmp_path, heard.append)
    assert heard
    assert heard[0].startswith("vllm: installing")
    with pytest.raises(NotInstalled, match="no peer 'tgi'"):
        peer_plan("tgi", tmp_path, tmp_path, heard.append)


def test_the_guard_ends_daemons_too_when_it_is_let_go() -> None:
    """One process in a session of its own, whose parent is gone."""
    script = "(setsid sh -c 'echo $$; exec sleep 600' &); exec sleep 600"
    command = [sys.executable, "-m", "bench.guard", "sh", "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as guard:
        assert guard.stdin is not None
        assert guard.stdout is not None
        sleeper = psutil.Process(int(guard.stdout.readline()))
        assert sleeper.is_running()
        guard.stdin.close()
        assert guard.wait(timeout=30) == 0
    assert not sleeper.is_running()


def test_the_guard_ends_with_its_command() -> None:
    command = [sys.executable, "-m", "bench.guard", "sh", "-c", "exit 7"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as guard:
        assert guard.wait(timeout=30) == 7
