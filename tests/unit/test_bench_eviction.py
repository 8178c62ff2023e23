import json
import random
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from bench import eviction
from bench.eviction import ClairvoyantEviction, replay
from bench.traces import TraceMissing, TraceRequest, read_trace
from mooncake_mesh.kv.eviction import EvictionKind, LruEviction, eviction_policy
from mooncake_proto.ids import BlockKey

LINES = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 1500, "input_length": 1536, "output_length": 6, "hash_ids": [0, 1, 2]},
]


def requests_of(*chains: str) -> list[TraceRequest]:
    """A request for each chain, one letter a block."""
    return [
        TraceRequest(
            arrival_s=float(i),
            input_tokens=512 * len(chain),
            output_tokens=1,
            keys=[BlockKey(chain[: n + 1].encode()) for n in range(len(chain))],
        )
        for i, chain in enumerate(chains)
    ]


def write_traces(folder: Path) -> None:
    for name in eviction.NAMES:
        (folder / f"{name}_trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))


def test_a_trace_is_read_as_it_lies_there(tmp_path: Path) -> None:
    write_traces(tmp_path)
    first, second = read_trace("synthetic", tmp_path)
    assert (first.arrival_s, second.arrival_s) == (0.0, 1.5)
    assert (second.input_tokens, second.output_tokens) == (1536, 6)
    assert second.keys[:2] == first.keys
    assert len({*first.keys, *second.keys}) == 3


def test_a_missing_trace_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(TraceMissing, match=f"no trace at {tmp_path}/synthetic_trace.jsonl.*--traces"):
        read_trace("synthetic", tmp_path)


def test_a_line_that_is_no_request_is_refused(tmp_path: Path) -> None:
    (tmp_path / "synthetic_trace.jsonl").write_text('{"timestamp": 0}\n')
    with pytest.raises(ValueError, match="not a request"):
        read_trace("synthetic", tmp_path)


def test_the_command_ends_with_the_reason_when_there_are_no_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.eviction", "--traces", str(tmp_path)])
    with pytest.raises(SystemExit, match="no trace at"):
        eviction.main()


def test_a_hit_is_a_leading_block() -> None:
    # Of 3 + 3 + 2 blocks, the second request finds a and ab, the third nothing: its root was never there.
    assert replay(requests_of("abc", "abx", "cb"), 8, LruEviction()).hit_rate == 2 / 8


def test_a_request_longer_than_the_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="3 blocks in a pool of 2"):
        replay(requests_of("abc"), 2, LruEviction())


def test_the_clairvoyant_keeps_what_is_used_next() -> None:
    requests = requests_of("a", "b", "c", "a", "b")
    assert replay(requests, 2, LruEviction()).hit_rate == 0
    assert replay(requests, 2, ClairvoyantEviction(requests)).hit_rate == 1 / 5


@pytest.mark.parametrize("seed", range(5))
def test_no_policy_beats_the_clairvoyant(seed: int) -> None:
    draw = random.Random(seed)
    chains = ["".join(draw.choices("abc", k=draw.randint(1, 5))) for _ in range(200)]
    requests = requests_of(*chains)
    for n_blocks in (5, 9, 20, 50):
        best = replay(requests, n_blocks, ClairvoyantEviction(requests)).hit_rate
        for kind in EvictionKind:
            assert replay(requests, n_blocks, eviction_policy(kind)).hit_rate <= best
    n_unique = len({key for request in requests for key in request.keys})
    assert best <= replay(requests, n_unique, LruEviction()).hit_rate


def test_more_room_never_hurts_the_clairvoyant() -> None:
    draw = random.Random(7)
    requests = requests_of(*("".join(draw.choices("abcd", k=draw.randint(1, 4))) for _ in range(300)))
    rates = [replay(requests, n, ClairvoyantEviction(requests)).hit_rate for n in (4, 8, 16, 32, 400)]
    assert all(less <= more for less, more in pairwise(rates))


def test_the_clairvoyant_order_is_what_it_evicts() -> None:
    requests = requests_of("ab", "c", "d", "ab", "c")
    policy = ClairvoyantEviction(requests)
    replay(requests[:3], 4, policy)
    order = list(policy.order())
    assert len(order) == len(policy) == 4
    assert [policy.evict() for _ in order] == order


def test_the_report_holds_each_policy_beside_the_published_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_traces(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["bench.eviction", "--quick", "--traces", str(tmp_path), "--json", str(tmp_path / "rows.json")]
    )
    eviction.main()
    rows = {row["metric"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    for name in eviction.NAMES:
        for policy in [*(kind.value for kind in EvictionKind), "clairvoyant"]:
            assert rows[f"{name} 10,000 {policy}"]["value"] == pytest.approx(2 / 5)
        assert rows[f"{name} without limit"]["met"] is False, "these are not the published traces"
    assert "MISSED" in capsys.readouterr().out
