"""What bench.tools asks load tools for, and how it reads their reports and those of the gateway."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.report import Report
from bench.tools import TOOLS, Tool, ToolFailed, run, tell
from bench.tools_load import (
    Load,
    RandomLoad,
    Served,
    TraceLoad,
    aiperf_command,
    guidellm_command,
    own_command,
    scaled_lines,
    vllm_command,
)
from bench.tools_results import Figures, read_aiperf, read_gateway, read_guidellm, read_vllm
from bench.tools_tokenizer import byte_letters, into_hub_cache, write_byte_tokenizer
from mooncake_mesh.gateway.tokenizer import ByteTokenizer, SpecialTokens
from mooncake_mesh.loadtest.trace_file import TraceLine

_SERVED = Served(base_url="http://127.0.0.1:1", model="m", tokenizer=Path("/t"), hub_tokenizer="o/t")
_RANDOM = RandomLoad(requests=16, streams=4, input_tokens=128, output_tokens=8)
_TRACE = TraceLoad(requests=12, trace=Path("/whole.jsonl"), scaled=Path("/scaled.jsonl"), block_tokens=16)
_PROGRAMS, _OUT = Path("/peer/bin"), Path("/out")


def _flags(command: list[str]) -> dict[str, str]:
    """Flags with the word behind each."""
    return {word: after for word, after in zip(command, [*command[1:], ""], strict=True) if word.startswith("--")}


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_aiperf_takes_one_worker_and_the_tokenizer_by_its_name() -> None:
    flags = _flags(aiperf_command(_PROGRAMS, _SERVED, _RANDOM, _OUT))
    assert (flags["--workers-max"], flags["--record-processor-service-count"], flags["--ui"]) == ("1", "1", "none")
    assert (flags["--tokenizer"], flags["--endpoint-type"]) == ("o/t", "chat")
    assert (flags["--request-count"], flags["--concurrency"]) == ("16", "4")
    assert (flags["--prompt-input-tokens-mean"], flags["--prompt-output-tokens-mean"]) == ("128", "8")
    replay = _flags(aiperf_command(_PROGRAMS, _SERVED, _TRACE, _OUT))
    assert (replay["--custom-dataset-type"], replay["--input-file"]) == ("mooncake_trace", "/scaled.jsonl")
    assert "--fixed-schedule" in replay
    assert replay["--prompt-input-tokens-block-size"] == "16"


def test_guidellm_is_told_its_load_as_kinds() -> None:
    flags = _flags(guidellm_command(_PROGRAMS, _SERVED, _RANDOM, _OUT))
    assert flags["--profile"] == "kind=concurrent,streams=4"
    assert flags["--data"] == "kind=synthetic_text,prompt_tokens=128,output_tokens=8"
    assert flags["--constraint"] == "kind=max_requests,count=16"
    assert flags["--output"] == "kind=json,path=/out/guidellm.json"
    replay = _flags(guidellm_command(_PROGRAMS, _SERVED, _TRACE, _OUT))
    data = json.loads(replay["--data"])
    assert replay["--profile"] == "kind=replay"
    assert (data["kind"], data["source"]["path"], data["hash_id_block_size"]) == ("mooncake", "/scaled.jsonl", 16)
    assert data["time_scale"] == 0.001, "its timestamps are in seconds"


def test_vllm_is_started_by_the_script_beside_its_installer() -> None:
    command = vllm_command(_PROGRAMS, _SERVED, _RANDOM, _OUT)
    assert command[0] == "/peer/bin/python"
    assert Path(command[1]).is_file()
    flags = _flags(command)
    assert (flags["--dataset-name"], flags["--random-input-len"], flags["--max-concurrency"]) == ("random", "128", "4")
    assert "--ignore-eos" in flags
    replay = _flags(vllm_command(_PROGRAMS, _SERVED, _TRACE, _OUT))
    assert (replay["--timed-trace-chunk-hash-size"], replay["--timed-trace-sec-multiplier"]) == ("16", "0.001")
    assert "--max-concurrency" not in replay, "a trace is sent when it is due"


def test_our_own_client_scales_the_whole_trace_itself() -> None:
    flags = _flags(own_command(_PROGRAMS, _SERVED, _TRACE, _OUT))
    assert (flags["--trace"], flags["--length-scale"], flags["--requests"]) == ("/whole.jsonl", "0.03125", "12")
    assert _flags(own_command(_PROGRAMS, _SERVED, _RANDOM, _OUT))["--max-concurrency"] == "4"


def test_every_tool_can_be_asked_for_every_load() -> None:
    loads: list[Load] = [_RANDOM, _TRACE]
    for tool in TOOLS:
        for load in loads:
            assert _SERVED.base_url in " ".join(tool.command(_PROGRAMS, _SERVED, load, _OUT))


def test_a_scaled_trace_keeps_its_blocks() -> None:
    lines = [
        TraceLine(arrival_s=0.0, input_tokens=1024, output_tokens=1, block_ids=(0, 1)),
        TraceLine(arrival_s=2.5, input_tokens=1025, output_tokens=320, block_ids=(0, 1, 2)),
        TraceLine(arrival_s=3.0, input_tokens=511, output_tokens=64, block_ids=(0,)),
    ]
    scaled = [json.loads(line) for line in scaled_lines(lines, 16)]
    assert [line["input_length"] for line in scaled] == [32, 33, 16]
    assert [line["output_length"] for line in scaled] == [2, 10, 2]
    assert [line["timestamp"] for line in scaled] == [0, 2500, 3000]
    assert all(len(line["hash_ids"]) == -(-line["input_length"] // 16) for line in scaled), "as the tools demand"


# --- tokenizers -------------------------------------------------------------------------------------------------------


def test_the_byte_tokenizer_s_folder_gives_the_ids_of_the_fake_engine(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(write_byte_tokenizer(tmp_path / "bytes"))
    text = "Hé llo\n  x<|im_end|>ÿ€ \x00"
    assert loaded.encode(text) == ByteTokenizer().encode(text, SpecialTokens.KEEP)
    assert loaded.decode(loaded.encode(text)) == text
    assert len(loaded) == ByteTokenizer.vocab_size


def test_each_byte_has_a_letter_of_its_own() -> None:
    letters = byte_letters()
    assert len(set(letters)) == 256
    assert letters[ord("a")] == "a"
    assert all(letter.isprintable() and not letter.isspace() for letter in letters)


def test_a_tokenizer_in_a_hub_cache_is_found_without_a_hub(tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    into_hub_cache(write_byte_tokenizer(tmp_path / "bytes"), tmp_path / "home", "some/one")
    found = snapshot_download("some/one", cache_dir=tmp_path / "home" / "hub", local_files_only=True)
    assert {path.name for path in Path(found).iterdir()} == {"tokenizer.json", "tokenizer_config.json"}


# --- what is answered -------------------------------------------------------------------------------------------------

_AIPERF = {
    "aiperf_version": "0.13.0",
    "request_count": {"unit": "requests", "avg": 12.0},
    "time_to_first_token": {"unit": "ms", "avg": 1004.7443898333333, "p50": 734.5035845, "count": 12},
    "inter_token_latency": {"unit": "ms", "avg": 24.6070579251998, "p50": 23.69205861111111, "count": 11},
    "total_output_tokens": {"unit": "tokens", "avg": 157.0},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 28.620597424432873},
    "overall_usage_prompt_cache_read_pct": {"unit": "%", "avg": 3.042146403295659},
}
_GUIDELLM = {
    "benchmarks": [
        {
            "duration": 4.65,
            "metrics": {
                "request_totals": {"successful": 12, "errored": 1, "incomplete": 2, "total": 15},
                "time_to_first_token_ms": {"successful": {"mean": 746.2383906046548, "count": 12}},
                "inter_token_latency_ms": {"successful": {"mean": 25.289295337818288, "count": 135}},
                "output_token_count": {"successful": {"mean": 12.25, "total_sum": 147.0}},
                "output_tokens_per_second": {"successful": {"mean": 31.610926845294426, "median": 11.5}},
            },
        }
    ]
}
_VLLM = {
    "duration": 4.653779052000004,
    "completed": 12,
    "failed": 0,
    "total_output_tokens": 147,
    "output_throughput": 31.587232302493046,
    "mean_ttft_ms": 804.2393882499917,
    "mean_tpot_ms": 26.084841744927342,
}


def test_aiperf_s_report() -> None:
    figures = read_aiperf(json.dumps(_AIPERF))
    assert (figures.answered, figures.failed, figures.output_tokens) == (12, 0, 157)
    assert (figures.ttft_s, figures.tpot_s) == pytest.approx((1.0047, 0.024607), rel=1e-3)
    assert figures.hit_rate == pytest.approx(0.0304, rel=1e-2)
    failing = read_aiperf(json.dumps({**_AIPERF, "error_request_count": {"unit": "requests", "avg": 3.0}}))
    assert failing.failed == 3


def test_guidellm_s_report_counts_what_it_cut_off_as_failed() -> None:
    figures = read_guidellm(json.dumps(_GUIDELLM))
    assert (figures.answered, figures.failed, figures.output_tokens, figures.hit_rate) == (12, 3, 147, None)
    assert (figures.ttft_s, figures.tpot_s) == pytest.approx((0.7462, 0.02529), rel=1e-3)
    assert figures.output_tokens_per_s == pytest.approx(31.61, rel=1e-3)


def test_vllm_s_report_and_ours_under_its_names() -> None:
    figures = read_vllm(json.dumps(_VLLM))
    assert (figures.answered, figures.failed, figures.hit_rate) == (12, 0, None)
    assert figures.ttft_s == pytest.approx(0.8042, rel=1e-3)
    own = read_vllm(json.dumps({**_VLLM, "refused": 2, "hit_rate": 0.25}))
    assert (own.failed, own.hit_rate) == (2, 0.25)


_METRICS = """\
# TYPE mooncake_requests counter
mooncake_requests_total{endpoint="completion",outcome="ok"} OK
mooncake_requests_total{endpoint="chat",outcome="ok"} 2.0
mooncake_requests_total{endpoint="chat",outcome="refused"} 1.0
# TYPE mooncake_time_to_first_token_seconds histogram
mooncake_time_to_first_token_seconds_bucket{le="+Inf"} 12.0
mooncake_time_to_first_token_seconds_count 12.0
mooncake_time_to_first_token_seconds_sum TTFT
# TYPE mooncake_time_between_tokens_seconds histogram
mooncake_time_between_tokens_seconds_bucket{le="+Inf"} 100.0
mooncake_time_between_tokens_seconds_count 100.0
mooncake_time_between_tokens_seconds_sum 2.5
# TYPE mooncake_prompt_tokens counter
mooncake_prompt_tokens_total 400.0
# TYPE mooncake_cached_tokens counter
mooncake_cached_tokens_total 100.0
# TYPE mooncake_generated_tokens counter
mooncake_generated_tokens_total 110.0
"""


def test_the_gateway_s_counters_of_a_run() -> None:
    before = read_gateway("")
    after = read_gateway(_METRICS.replace("OK", "10.0").replace("TTFT", "6.0"))
    tool = read_vllm(json.dumps({**_VLLM, "total_output_tokens": 220, "output_throughput": 44.0}))
    figures = (after - before).figures(tool)
    assert (figures.answered, figures.failed) == (12, 1)
    assert (figures.ttft_s, figures.tpot_s, figures.hit_rate) == (0.5, 0.025, 0.25)
    assert figures.output_tokens_per_s == 22.0, "half as many tokens in the tool's time"
    assert (after - after).figures(tool).ttft_s == 0.0


def test_the_table_has_the_gateway_s_figures_as_baselines() -> None:
    report = Report("tools", "")
    gateway = Figures(answered=4, failed=0, ttft_s=0.2, tpot_s=0.02, output_tokens=40, output_tokens_per_s=10.0)
    tell(report, "x", replace(gateway, ttft_s=0.3), gateway)
    rows = {row.metric: row for row in report.rows}
    assert rows["x: TTFT"].ratio == pytest.approx(1.5)
    assert (rows["x: answered"].value, rows["x: answered"].baseline) == (4, 4)
    assert "x: hit rate" not in rows


# --- running ----------------------------------------------------------------------------------------------------------


def _tool() -> Tool:
    return Tool(
        name="x", programs=lambda: Path(), command=vllm_command, result="r.json", read=read_vllm, variables={"V": "1"}
    )


def test_a_tool_that_leaves_its_report(tmp_path: Path) -> None:
    script = f"import os, pathlib; pathlib.Path({str(tmp_path / 'r.json')!r}).write_text(os.environ['TOLD'])"
    tool = _tool()
    tool.variables["TOLD"] = json.dumps(_VLLM)
    assert run(tool, [sys.executable, "-c", script], tmp_path, tmp_path).answered == 12


def test_a_tool_that_leaves_none_is_quoted(tmp_path: Path) -> None:
    script = "import sys; sys.exit('no such model')"
    with pytest.raises(ToolFailed, match=r"exit code 1.*no such model"):
        run(_tool(), [sys.executable, "-c", script], tmp_path, tmp_path)
