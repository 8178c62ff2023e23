"""What the live comparison of policies asks, and how it counts; the runs themselves need a mesh."""

import tomllib
from pathlib import Path

import pytest

from bench.load import StreamTimes
from bench.policies import Placement, conversations
from bench.policies_mesh import failed, refused, write_conductor
from bench.policies_overload import Overload, is_good
from bench.report import Report
from mooncake_mesh.config_scheduling import AdmissionKind, PlacementKind


def test_every_policy_has_the_same_conversations_in_texts_of_its_own() -> None:
    ours, theirs = conversations(8, 1, "ours"), conversations(8, 1, "else")
    assert [tuple(map(len, a.turns)) for a in ours] == [tuple(map(len, b.turns)) for b in theirs]
    firsts = [talk.turns[0].split("Question")[0] for talk in ours + theirs]
    assert len(set(firsts)) == 4, "two topics each"
    assert all(first.startswith("ours, ") for first in firsts[:8]), "no block in common with anybody else's"


@pytest.mark.parametrize(
    ("tokens_s", "error", "good"),
    [((1.0, 1.1, 1.2), "", True), ((2.1, 2.2), "", False), ((1.0, 1.6), "", False), ((), "429", False)],
)
def test_good_requests_are_whole_and_in_time(tokens_s: tuple[float, ...], error: str, good: bool) -> None:
    assert is_good(StreamTimes(tokens_s=list(tokens_s), error=error), ttft_s=2.0, tbt_s=0.5) is good


def test_refusals_are_no_failures() -> None:
    for error, was_refused in (("HTTP/1.1 429 Too Many Requests", True), ("HTTP/1.1 500 Oops", False)):
        assert (refused(StreamTimes(error=error)), failed(StreamTimes(error=error))) == (was_refused, not was_refused)
    assert not failed(StreamTimes(tokens_s=[1.0]))


def test_a_conductor_is_configured_by_its_table(tmp_path: Path) -> None:
    write_conductor(tmp_path / "mesh.toml", {"placement": "local", "ttft_slo_s": 2.5})
    assert tomllib.loads((tmp_path / "mesh.toml").read_text()) == {
        "conductor": {"placement": "local", "ttft_slo_s": 2.5}
    }


def test_what_was_finished_is_told() -> None:
    report = Report("policies", "test")
    placement, overload = Placement(), Overload()
    placement.rows(report)
    overload.rows(report)
    assert report.rows == []
    for policy, ttft_s in ((PlacementKind.RANDOM, 2.0), (PlacementKind.LOAD_BALANCE, 3.0)):
        placement.times[policy].append(StreamTimes(sent_s=1.0, tokens_s=[1.0 + ttft_s]))
    overload.times[AdmissionKind.HOLD] = [StreamTimes(tokens_s=[0.5, 0.6])]
    overload.seconds[AdmissionKind.HOLD], overload.good[AdmissionKind.HOLD] = 2.0, 1
    placement.rows(report)
    overload.rows(report)
    met = {row.metric: row.met for row in report.rows}
    assert met["mean TTFT, load_balance (baseline: random)"] is False
    assert met["2x overload, hold: goodput (baseline: baseline)"] is None, "the others had no turn"
    overload.seconds = dict.fromkeys(AdmissionKind, 2.0)
    overload.rows(report)
    assert {row.metric: row.met for row in report.rows}["2x overload, hold: goodput (baseline: baseline)"] is True
