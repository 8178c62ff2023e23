"""``mooncake doctor``: the right verdict and the right remedy for made-up machines, and a look at this one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mooncake_mesh.cli import doctor
from mooncake_mesh.cli.checkup import Facts, Finding, Verdict, examine
from mooncake_mesh.config import DoctorConfig, PagesKind, TransportKind
from mooncake_mesh.config_rdma import RdmaConfig
from mooncake_mesh.messenger.transports.rdma.devices import read_devices
from tests.unit.rdma_sysfs import LINK_LOCAL, V2, add_device, add_numa_node, mapped

GiB = 1 << 30


@pytest.fixture
def fit(tmp_path: Path) -> Facts:
    """A machine that has everything."""
    add_device(tmp_path, "mlx5_0", {3: (mapped("10.0.0.1"), V2)})
    return Facts(
        available_bytes=8 * GiB,
        shm_bytes=4 * GiB,
        huge_pages="advise",
        free_huge_pages=0,
        memlock_bytes=None,
        numa_nodes=1,
        devices=read_devices(tmp_path),
        verbs_error=None,
    )


def findings(
    facts: Facts,
    transport: TransportKind = TransportKind.RDMA,
    rdma: RdmaConfig | None = None,
    pages: PagesKind = PagesKind.AUTO,
) -> dict[str, Finding]:
    report = examine(facts, transport=transport, arena_bytes=1 * GiB, pages=pages, rdma=rdma or RdmaConfig())
    return {finding.subject: finding for finding in report}


def test_a_machine_that_has_everything_is_told_so(fit: Facts) -> None:
    report = findings(fit)
    assert {finding.verdict for finding in report.values()} == {Verdict.GOOD}
    assert "GID 3: ::ffff:10.0.0.1" in report["mlx5_0"].text


@pytest.mark.parametrize(
    ("subject", "lack", "remedy"),
    [
        ("memory", {"available_bytes": 512 << 20}, "--arena-bytes=256MiB"),
        ("locked memory", {"memlock_bytes": 64 << 10}, "ulimit -l unlimited"),
        ("pyverbs", {"verbs_error": "No module named 'pyverbs'"}, "python3-pyverbs"),
        ("RDMA devices", {"devices": ()}, "rdma link add"),
    ],
)
def test_each_lack_is_a_problem_with_a_remedy(fit: Facts, subject: str, lack: dict[str, object], remedy: str) -> None:
    finding = findings(replace(fit, **lack))[subject]  # type: ignore[arg-type]
    assert finding.verdict is Verdict.PROBLEM
    assert remedy in finding.remedy


@pytest.mark.parametrize("lack", [{"memlock_bytes": 0}, {"verbs_error": "no"}, {"devices": ()}])
def test_what_only_rdma_needs_is_a_hint_for_others(fit: Facts, lack: dict[str, object]) -> None:
    report = findings(replace(fit, **lack), TransportKind.AUTO)  # type: ignore[arg-type]
    assert Verdict.PROBLEM not in {finding.verdict for finding in report.values()}
    assert Verdict.HINT in {finding.verdict for finding in report.values()}


@pytest.mark.parametrize(
    ("pages", "policy", "free", "verdict", "remedy"),
    [
        (PagesKind.AUTO, None, 0, Verdict.HINT, "vm.nr_hugepages=512"),
        (PagesKind.AUTO, "never", 511, Verdict.HINT, "shmem_enabled"),
        (PagesKind.AUTO, "never", 512, Verdict.GOOD, ""),
        (PagesKind.AUTO, "always", 0, Verdict.GOOD, ""),
        (PagesKind.HUGETLB, "always", 511, Verdict.PROBLEM, "vm.nr_hugepages=512"),
        (PagesKind.HUGETLB, "never", 512, Verdict.GOOD, ""),
        (PagesKind.TRANSPARENT, "never", 512, Verdict.PROBLEM, "echo advise"),
        (PagesKind.TRANSPARENT, "advise", 0, Verdict.GOOD, ""),
        (PagesKind.SMALL, None, 0, Verdict.GOOD, ""),
    ],
)
def test_a_lack_of_large_pages_is_a_problem_only_where_they_are_asked_for_by_name(
    fit: Facts, pages: PagesKind, policy: str | None, free: int, verdict: Verdict, remedy: str
) -> None:
    finding = findings(replace(fit, huge_pages=policy, free_huge_pages=free), pages=pages)["2 MiB pages"]
    assert finding.verdict is verdict
    assert remedy in finding.remedy
    assert bool(finding.remedy) == (verdict is not Verdict.GOOD)


def test_several_numa_nodes_are_worth_a_hint(fit: Facts) -> None:
    assert "numactl" in findings(replace(fit, numa_nodes=2))["NUMA"].remedy


def test_a_device_that_cannot_be_used_says_why(fit: Facts, tmp_path: Path) -> None:
    add_device(tmp_path, "mlx5_1", {0: (LINK_LOCAL, V2)})
    report = findings(replace(fit, devices=read_devices(tmp_path)))
    assert report["mlx5_1"].verdict is Verdict.HINT  # the other one will do
    assert "no address that is routed" in report["mlx5_1"].text
    report = findings(replace(fit, devices=read_devices(tmp_path)), rdma=RdmaConfig(devices="mlx5_1"))
    assert report["RDMA devices"].verdict is Verdict.PROBLEM


def test_a_machine_is_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_verbs_error", lambda: None)
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    pages = tmp_path / "kernel/mm/transparent_hugepage"
    pages.mkdir(parents=True)
    (pages / "shmem_enabled").write_text("always within_size advise [never] deny force\n")
    reserved = tmp_path / "kernel/mm/hugepages/hugepages-2048kB"
    reserved.mkdir(parents=True)
    (reserved / "free_hugepages").write_text("7\n")
    (reserved / "resv_hugepages").write_text("2\n")
    for number in (0, 1):
        add_numa_node(tmp_path, number, "0")
    add_device(tmp_path, "mlx5_0", {})
    facts = doctor.probe(sysfs=tmp_path, proc=tmp_path, shm=tmp_path)
    assert (facts.available_bytes, facts.huge_pages, facts.numa_nodes) == (2 << 20, "never", 2)
    assert facts.free_huge_pages == 5
    assert [device.name for device in facts.devices] == ["mlx5_0"]
    assert facts.shm_bytes > 0


def test_the_report_and_the_exit_code(
    fit: Facts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "probe", lambda: replace(fit, devices=()))
    assert doctor.run(DoctorConfig(transport=TransportKind.RDMA)) == 1
    assert "→ sudo rdma link add" in capsys.readouterr().out
    assert doctor.run(DoctorConfig(json=True)) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"subject": "NUMA", "verdict": "good", "text": "one node", "remedy": ""} in report
