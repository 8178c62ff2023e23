"""Priority and fairness of a request: from its body, from a proxy's headers, and on the way to the mesh."""

from typing import Any

import pytest

from mooncake_mesh.policy.request_class import BATCH_PRIORITY
from mooncake_proto.control import ClassReport, ClusterState, EstimateQuality, Latency, StatusReport
from mooncake_proto.ids import Incarnation, InstanceId
from tests.unit.gateway_doubles import Exchange, Gateway, ask, get, says

PATH = "/v1/completions"


def asked(fields: dict[str, Any], **headers: str) -> tuple[Gateway, Exchange]:
    gateway = Gateway(says("hi"))
    return gateway, ask(gateway, PATH, {"prompt": "p", **fields}, **headers)


@pytest.mark.parametrize(
    ("fields", "headers", "priority", "fairness_id"),
    [
        ({}, {}, 0, ""),
        ({"priority": -3, "user": "ann"}, {}, -3, "ann"),
        ({"service_tier": "flex"}, {}, BATCH_PRIORITY, ""),
        ({"service_tier": "auto", "priority": 2}, {}, 2, ""),
        (
            {"priority": 5, "user": "ann"},
            {"x_mooncake_priority": "-7", "x_mooncake_fairness_id": "team b"},
            -7,
            "team b",
        ),
    ],
)
def test_what_a_request_says_of_its_standing_reaches_the_mesh(
    fields: dict[str, Any], headers: dict[str, str], priority: int, fairness_id: str
) -> None:
    gateway, exchange = asked(fields, **headers)
    assert exchange.status == 200
    [request] = gateway.mesh.requests
    assert (request.priority, request.fairness_id) == (priority, fairness_id)


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"priority": 101}, {}, "priority"),
        ({"priority": "high"}, {}, "priority"),
        ({"priority": 1.5}, {}, "priority"),
        ({"service_tier": "gold"}, {}, "service_tier"),
        ({"service_tier": "flex", "priority": 1}, {}, "service_tier"),
        ({}, {"x_mooncake_priority": "101"}, "x-mooncake-priority"),
        ({}, {"x_mooncake_priority": "--1"}, "x-mooncake-priority"),
        ({}, {"x_mooncake_priority": "9" * 5000}, "x-mooncake-priority"),
        ({}, {"x_mooncake_priority": ""}, "x-mooncake-priority"),
        ({}, {"x_mooncake_fairness_id": "f" * 257}, "x-mooncake-fairness-id"),
    ],
)
def test_nonsense_is_refused_by_name(fields: dict[str, Any], headers: dict[str, str], param: str) -> None:
    gateway, exchange = asked(fields, **headers)
    assert (exchange.status, exchange.json()["error"]["param"]) == (400, param)
    assert not gateway.mesh.requests


def test_a_text_that_ends_with_a_stop_string_is_told_to_be_whole() -> None:
    gateway, exchange = asked({"stop": "i", "max_tokens": 9})
    assert exchange.status == 200
    assert gateway.mesh.content == {gateway.mesh.requests[0].request_id}


def test_metrics_tell_what_the_conductor_knows_while_it_answers() -> None:
    gateway = Gateway(says("hi"))
    assert b"mooncake_slo" not in get(gateway, "/metrics").body
    latency = Latency(p50_s=0.5, p90_s=0.9, p99_s=1.25, objective_s=None)
    gateway.mesh.known = StatusReport(
        cluster=ClusterState(conductor=Incarnation("c"), revision=1, members=()),
        healthy=True,
        reasons=(),
        indexed_blocks={},
        placed_total=7,
        rejected_total=2,
        uptime_s=1.0,
        estimates=(EstimateQuality(instance_id=InstanceId("p0"), factor=1.5, error=0.25, samples=3),),
        classes=(
            ClassReport(
                name="standard",
                requests=9,
                finished=6,
                refused=2,
                failed=1,
                cancelled=0,
                good=5,
                good_per_s=0.5,
                tokens=900,
                good_tokens=500,
                wasted_tokens=40,
                ttft=latency,
                tbt=latency,
                refusals={"ttft_objective": 2},
            ),
        ),
    )
    lines = get(gateway, "/metrics").body.decode().splitlines()
    for line in (
        "mooncake_placements_total 7.0",
        'mooncake_estimate_error_ratio{instance="p0"} 0.25',
        'mooncake_slo_requests_total{class="standard",ending="refused"} 2.0',
        'mooncake_slo_refusals_total{class="standard",reason="ttft_objective"} 2.0',
        'mooncake_slo_good_requests_total{class="standard"} 5.0',
        'mooncake_wasted_prefill_tokens_total{class="standard"} 40.0',
        'mooncake_slo_ttft_seconds{class="standard",quantile="0.99"} 1.25',
        "# TYPE mooncake_slo_goodput gauge",
    ):
        assert line in lines
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "no family is told twice"
