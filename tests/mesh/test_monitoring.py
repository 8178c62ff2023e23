"""The dashboard and the scrape configuration that are shipped, against what a gateway really tells."""

import json
import re
import subprocess
import sys
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.mesh.harness import MODEL, Mesh

pytestmark = pytest.mark.mesh

_ROOT: Final = Path(__file__).resolve().parents[2]
_MONITORING: Final = _ROOT / "deploy/monitoring"
_NAME: Final = re.compile(r"\bmooncake_[a-z_]+")
_LABEL: Final = re.compile(r"(\w+)=\"|by \(([\w, ]+)\)")


def _dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((_MONITORING / "grafana/dashboards/mooncake.json").read_text())
    return loaded


def _expressions() -> list[str]:
    return [target["expr"] for panel in _dashboard()["panels"] for target in panel.get("targets", [])]


def test_the_dashboard_shows_what_a_mesh_tells(fake_mesh: Mesh) -> None:
    question = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    with urllib.request.urlopen(f"{fake_mesh.http}/v1/chat/completions", json.dumps(question).encode(), timeout=20):
        pass
    with urllib.request.urlopen(f"{fake_mesh.http}/metrics", timeout=20) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    told = {sample.name for family in families for sample in family.samples} | {
        f"{family.name}_total"
        for family in families
        if family.type == "counter"  # no class of requests has ended yet
    }
    told |= {family.name for family in families}
    asked = {name for expression in _expressions() for name in _NAME.findall(expression)}
    assert asked - told == set()
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    grouped = {
        label.strip()
        for expression in _expressions()
        for one, several in _LABEL.findall(expression)
        for label in (one or several).split(",")
    }
    assert grouped - labels <= {"reason", "class", "quantile"}  # of what the conductor hears of later, or never here


def test_a_scheduler_made_for_vllm_finds_what_it_asks_for(fake_mesh: Mesh) -> None:
    question = {"model": MODEL, "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
    before = _vllm(fake_mesh)
    with urllib.request.urlopen(f"{fake_mesh.http}/v1/completions", json.dumps(question).encode(), timeout=20):
        pass
    after = _vllm(fake_mesh)
    grown = {name: after[name] - before[name] for name in before if after[name] != before[name]}
    for name in ("queue", "prefill", "decode"):
        assert grown[f"vllm:request_{name}_time_seconds_count"] == 1
    assert grown["vllm:generation_tokens_total"] == 3
    assert grown["vllm:prompt_tokens_total"] == grown["vllm:prefix_cache_queries_total"] > 3
    assert grown["vllm:request_success_total"] == 1
    assert (after["vllm:num_requests_running"], after["vllm:num_requests_waiting"]) == (0, 0)
    assert 0 <= after["vllm:kv_cache_usage_perc"] <= 1
    assert after["vllm:cache_config_info"] == 1
    assert "vllm:num_preemptions_total" in after


def _vllm(mesh: Mesh) -> dict[str, float]:
    """Sums over the series of each of vLLM's names."""
    with urllib.request.urlopen(f"{mesh.http}/metrics", timeout=20) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    sums: dict[str, float] = defaultdict(float)
    for family in families:
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                assert sample.labels["model_name"] == MODEL
                sums[sample.name] += sample.value
    return sums


def test_the_members_are_told(fake_mesh: Mesh) -> None:
    with urllib.request.urlopen(f"{fake_mesh.http}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    assert 'mooncake_instance_takes_work{instance="decode0",node="node1",role="decode"} 1.0' in text
    assert re.search(r'mooncake_pool_blocks\{node="node0",state="total"\} [1-9]', text)


@pytest.mark.parametrize(("name", "code"), [("prefill0", 0), ("nobody", 1)])
def test_a_process_is_asked_whether_it_answers(fake_mesh: Mesh, name: str, code: int) -> None:
    asked = [sys.executable, "-m", "mooncake_mesh", "ping", f"--endpoint=ipc://{fake_mesh.folder}/{name}.ipc"]
    done = subprocess.run([*asked, "--timeout-s=5"], capture_output=True, text=True)
    assert done.returncode == code
    said = done.stderr if code else done.stdout
    assert said.startswith("mooncake ping: no answer" if code else f"prefill {name} incarnation=")


def test_the_dashboard_is_one_that_grafana_loads() -> None:
    dashboard = _dashboard()
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
