"""The page's files and its state: what is said to whom, and what never is."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mooncake_mesh.gateway import api_keys, page
from mooncake_mesh.gateway.doorkeeper import Doorkeeper
from mooncake_proto.control import ClusterState, Health, Load, Member, MemberState, Role, StatusReport
from mooncake_proto.decisions import Decision, DecisionsReport
from mooncake_proto.ids import Incarnation, InstanceId, JobId, NodeId
from tests.golden.samples import sample
from tests.unit.gateway_doubles import MODEL, Gateway, get, says

FOLDER = Path(page.__file__).parent
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.js"))
FILES = ("/", "/page/style.css", *(f"/page/{name}" for name in SCRIPTS))


def decision(number: int, tenant: str) -> Decision:
    known: DecisionsReport = sample(DecisionsReport)
    fields = {name: getattr(known.decisions[0], name) for name in Decision.__slots__}
    return Decision(**{**fields, "number": number, "tenant": tenant, "job_id": JobId(f"job-{number}")})


def known(*, load: Load) -> StatusReport:
    def state(role: Role, name: str) -> MemberState:
        member = Member(
            role=role,
            instance_id=InstanceId(name),
            node_id=NodeId("n0"),
            incarnation=Incarnation("i"),
            endpoint="ipc://secret-endpoint",
        )
        return MemberState(member=member, health=Health.ALIVE, load=load, takes_work=True, last_beat_s=0.5)

    members = (state(Role.DECODE, "d0"), state(Role.MESSENGER, "m0"), state(Role.PREFILL, "p0"))
    return StatusReport(
        cluster=ClusterState(conductor=Incarnation("c"), revision=1, members=members),
        healthy=False,
        reasons=("no gateway",),
        indexed_blocks={"n0": 7},
        placed_total=3,
        rejected_total=1,
        uptime_s=9.0,
    )


class _Outside(HTMLParser):
    """Everything that a document would have a browser load or run."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.ids: list[str] = []
        self.labelled: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            assert not name.startswith("on"), f"<{tag} {name}>: no policy would let it run"
            assert name != "style", f"<{tag} style>: no policy would let it count"
            if name in ("src", "href") and value and not value.startswith(("#", "data:")):
                self.loaded.append(value)
            if name == "id" and value:
                self.ids.append(value)
            if name in ("aria-labelledby", "for") and value:
                self.labelled.append(value)


def test_the_files_load_nothing_from_anywhere_else() -> None:
    gateway = Gateway(says("ok"))
    for path in FILES:
        answer = get(gateway, path)
        assert answer.status == 200
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        found = re.findall(rb"(?:https?:)?//[a-z0-9.-]+\.[a-z]+", answer.body)
        assert set(found) <= {b"http://www.w3.org"}, path  # the name of SVG, which nobody fetches
    document = _Outside()
    document.feed(get(gateway, "/").body.decode())
    assert sorted(document.loaded) == ["/page/page.js", "/page/style.css"]
    assert set(document.labelled) <= set(document.ids)


def test_all_that_the_script_asks_the_document_for_is_there() -> None:
    document = _Outside()
    document.feed((FOLDER / "index.html").read_text())
    wanted = re.findall(r'byId\("([a-z-]+)"\)', "".join((FOLDER / name).read_text() for name in SCRIPTS))
    assert len(wanted) > 20
    assert set(wanted) <= set(document.ids)


def test_scripts_import_only_each_other() -> None:
    for name in SCRIPTS:
        for imported in re.findall(r'from "([^"]+)"', (FOLDER / name).read_text()):
            assert imported.removeprefix("./") in SCRIPTS


def test_the_document_says_whether_a_key_is_needed(tmp_path: Path) -> None:
    file = tmp_path / api_keys.FILE_NAME
    api_keys.add(file, "app", "acme", None)
    assert b'data-api-keys="none"' in get(Gateway(says("ok")), "/").body
    guarded = Gateway(says("ok"), doorkeeper=Doorkeeper(file))
    assert b'data-api-keys="asked"' in get(guarded, "/").body
    assert [path for path in FILES if get(guarded, path).status != 200] == []  # a browser sends none for a script
    assert get(guarded, "/page/state").status == 401


def state(gateway: Gateway, **headers: str) -> Any:
    answer = get(gateway, "/page/state", **headers)
    assert answer.status == 200
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


def test_the_state_tells_workers_and_the_pool_by_tier() -> None:
    gateway = Gateway(says("ok"))
    load = Load(
        queued_jobs=2, running_jobs=3, blocks_total=9, blocks_free=4, ssd_blocks=5, ssd_slots=8, tenants={"acme": 3}
    )
    gateway.mesh.known = known(load=load)
    told = state(gateway)
    assert told["models"] == [MODEL]
    mesh = told["mesh"]
    assert (mesh["healthy"], mesh["reasons"], mesh["placed"], mesh["rejected"]) == (False, ["no gateway"], 3, 1)
    assert [(one["id"], one["queued_jobs"], one["running_jobs"]) for one in mesh["instances"]] == [
        ("p0", 2, 3),
        ("d0", 2, 3),
    ]
    (node,) = mesh["pool"]
    assert (node["node"], node["blocks"], node["free"], node["indexed"]) == ("n0", 9, 4, 7)
    assert (node["ssd_blocks"], node["ssd_slots"]) == (5, 8)
    assert b"acme" not in get(gateway, "/page/state").body
    assert b"secret-endpoint" not in get(gateway, "/page/state").body


def test_a_tenant_is_told_of_its_own_decisions_only(tmp_path: Path) -> None:
    file = tmp_path / api_keys.FILE_NAME
    key = api_keys.add(file, "app", "acme", None)
    gateway = Gateway(says("ok"), doorkeeper=Doorkeeper(file))
    gateway.mesh.decided = DecisionsReport(
        conductor=Incarnation("c"), decisions=tuple(decision(n, "acme" if n % 2 else "umbrella") for n in range(1, 5))
    )
    told = state(gateway, authorization=f"Bearer {key}")
    assert [one["job_id"] for one in told["decisions"]] == ["job-1", "job-3"]
    assert (told["conductor"], told["decided"]) == ("c", 4)
    assert all("tenant" not in one for one in told["decisions"])


def test_the_state_says_so_where_the_conductor_is_silent() -> None:
    told = state(Gateway(says("ok")))
    assert told == {"models": [MODEL], "conductor": None, "mesh": None, "decisions": [], "decided": None}


@pytest.mark.parametrize("after", ["x", "-1", "1.5", "", "9007199254740992", "٣", "1" * 400])
def test_a_number_that_is_none_is_refused(after: str) -> None:
    gateway = Gateway(says("ok"))
    answer = get(gateway, f"/page/state?after={after}")
    assert (answer.status, answer.json()["error"]["param"]) == (400, "after")
