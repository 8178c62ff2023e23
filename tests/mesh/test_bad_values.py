"""Well-formed messages that ask for what cannot be: refused, and nobody else's work is touched."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from mooncake_proto import codec
from mooncake_proto.control import Failure, Ok, Ping, Pong
from mooncake_proto.envelope import Envelope
from mooncake_proto.grammar import Grammar, GrammarKind
from mooncake_proto.ids import BlockKey, Incarnation, InstanceId, JobId, MessageId, NodeId, TransferId
from mooncake_proto.kvcache import KvEvents, KvSnapshot
from mooncake_proto.serving import CancelJob, DecodeJob, PrefillDone, PrefillJob, Rejected, Sampling, Schedule, Stopping
from mooncake_proto.transfer import (
    AbortTransfer,
    Acquire,
    Acquired,
    ArenaInfo,
    Attach,
    FinishSend,
    Grow,
    Grown,
    OfferedSlice,
    OpenTransfer,
    PushBlocks,
    Pushing,
    Release,
    Seal,
    SliceOffer,
    SliceReady,
    StartSend,
    TransferPlan,
)
from tests.mesh import clients
from tests.mesh.bad_messages import good
from tests.mesh.harness import Mesh

pytestmark = pytest.mark.mesh

_ANSWER_S = 30.0
_LAYERS = 2
_ABSURD = 2**62


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """A mesh that must be unhurt after all that the tests of this module ask of it."""
    with Mesh() as mesh:
        lives = {name: mesh.incarnation(name) for name in mesh.names if name != "decode0"}
        yield mesh
        mesh.wait_idle()
        assert clients.complete(mesh.http, "after all that", 30) == clients.expected_text("after all that", 30)
        assert {name: mesh.incarnation(name) for name in lives} == lives  # decode0 is killed by a test
        crashes = [event for name in mesh.names for event in mesh.logs(name) if "crashed" in event["event"]]
        assert crashes == []


@pytest.fixture(autouse=True)
def _answers_afterwards(mesh: Mesh) -> Iterator[None]:
    """After each bad message the next good request is answered."""
    yield
    assert clients.complete(mesh.http, "next", 3) == clients.expected_text("next", 3)


def _ask(mesh: Mesh, name: str, body: object, *, deadline_s: float | None = 15.0) -> Any:
    with clients.dealer(mesh.endpoint(name)) as plug:
        plug.send_multipart(good(body, deadline_s=deadline_s))
        return clients.receive(plug, timeout_s=_ANSWER_S)[1]


def _refused(answer: object, code: str, path: str = "") -> None:
    assert isinstance(answer, Failure), answer
    assert (answer.code, answer.path) == (code, path), answer


def _worker(mesh: Mesh) -> dict[str, Any]:
    """In whose name blocks are asked for: the decode instance, so that they would be its own."""
    return {"instance_id": InstanceId("decode0"), "incarnation": Incarnation(mesh.incarnation("decode0"))}


_numbers = itertools.count()


def _fresh(name: str) -> str:
    """An id for one job alone: one that was released is over for good."""
    return f"{name}{next(_numbers)}"


def _acquire(mesh: Mesh, job_id: str, **fields: Any) -> Acquire:
    given = {"keys": b"", "n_blocks": 2, "max_cached_blocks": 0, **_worker(mesh), **fields}
    return Acquire(job_id=JobId(job_id), **given)


def _release(mesh: Mesh, *job_ids: str) -> None:
    for job_id in job_ids:
        assert _ask(mesh, "messenger1", Release(job_id=JobId(job_id))) == Ok()


# --- blocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"n_blocks": _ABSURD}, "n_blocks"),
        ({"n_blocks": 32769}, "n_blocks"),
        ({"landing": "bad-landing", "landing_blocks": 1, "landing_layers": 0}, "landing_layers"),
        ({"landing": "bad-landing", "landing_blocks": 1, "landing_layers": 3}, "landing_layers"),
        ({"landing": "bad-landing", "landing_blocks": 1, "landing_layers": _ABSURD}, "landing_layers"),
    ],
    ids=["absurd", "one too many", "no layers", "layers that do not divide", "absurd layers"],
)
def test_impossible_acquisitions_keep_nothing(mesh: Mesh, fields: dict[str, Any], path: str) -> None:
    _refused(_ask(mesh, "messenger1", _acquire(mesh, "impossible", **fields)), "invalid_request", path)
    mesh.wait_idle()


def test_a_job_that_acquires_twice(mesh: Mesh) -> None:
    assert isinstance(_ask(mesh, "messenger1", _acquire(mesh, "twice")), Acquired)
    _refused(_ask(mesh, "messenger1", _acquire(mesh, "twice")), "invalid_request", "job_id")
    _release(mesh, "twice", "twice")


def test_two_jobs_cannot_have_the_same_landing(mesh: Mesh, landing: TransferId) -> None:
    thief = _acquire(mesh, "thief", landing=landing, landing_blocks=1, landing_layers=_LAYERS)
    _refused(_ask(mesh, "messenger1", thief), "invalid_request", "landing")
    _release(mesh, "thief")


def test_a_worker_that_died_gets_no_blocks(mesh: Mesh) -> None:
    """Its last message may overtake the news of its death, or wait for room meanwhile."""
    dead = mesh.incarnation("decode0")
    mesh.kill("decode0")
    mesh.wait_log("messenger1", "holder_gone", holder="decode0")
    mesh.start("decode0")
    mesh.wait_healthy()
    late = Acquire(
        job_id=JobId("late"),
        instance_id=InstanceId("decode0"),
        incarnation=Incarnation(dead),
        keys=b"",
        n_blocks=1,
        max_cached_blocks=0,
    )
    _refused(_ask(mesh, "messenger1", late), "peer_unreachable")
    mesh.wait_idle()


@pytest.mark.parametrize("wanted", [{"nobody": 1}, {"nobody": _ABSURD}, {}], ids=["unknown", "absurd", "nothing"])
def test_growth_for_nobody(mesh: Mesh, wanted: dict[str, int]) -> None:
    assert _ask(mesh, "messenger1", Grow(wanted=wanted)) == Grown(blocks={})


def test_seals_of_blocks_that_a_job_does_not_have(mesh: Mesh) -> None:
    assert isinstance(_ask(mesh, "messenger1", _acquire(mesh, "sealer")), Acquired)
    keys = bytes(range(16))
    _refused(_ask(mesh, "messenger1", Seal(job_id=JobId("sealer"), first_block=2, keys=keys)), "invalid_request")
    _refused(_ask(mesh, "messenger1", Seal(job_id=JobId("sealer"), first_block=_ABSURD, keys=keys)), "invalid_request")
    _release(mesh, "sealer")


# --- transfers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        FinishSend(transfer_id=TransferId("nowhere")),
        SliceOffer(
            transfer_id=TransferId("nowhere"),
            slices=(OfferedSlice(logical=0, layer=0, n_layers=1, source_block=0, checksum=None),),
        ),
        StartSend(
            job_id=JobId("nobody"),
            transfer_id=TransferId("nowhere"),
            target="ipc:///nowhere",
            n_blocks=1,
            layers=_LAYERS,
            deadline_s=1.0,
        ),
    ],
    ids=lambda body: type(body).__name__,
)
def test_transfers_that_do_not_exist(mesh: Mesh, body: object) -> None:
    _refused(_ask(mesh, "messenger1", body), "slice_lost")


def test_aborting_what_does_not_exist_is_fine(mesh: Mesh) -> None:
    assert _ask(mesh, "messenger1", AbortTransfer(transfer_id=TransferId("nowhere"), reason="")) == Ok()


def _info(mesh: Mesh, name: str, **fields: Any) -> ArenaInfo:
    """The arena of *name* as its messenger describes it, with *fields* changed."""
    attach = Attach(instance_id=InstanceId("t"), incarnation=Incarnation("t" * 16), block_bytes=2048)
    info = _ask(mesh, name, attach)
    assert isinstance(info, ArenaInfo), info
    given = {field: getattr(info, field) for field in ArenaInfo.__dataclass_fields__}
    return ArenaInfo(**{**given, **fields})


def _open(
    mesh: Mesh, transfer_id: TransferId, source: ArenaInfo, *transports: str, deadline_s: float = _ANSWER_S
) -> Any:
    body = OpenTransfer(transfer_id=transfer_id, source=source, transports=transports)
    return _ask(mesh, "messenger1", body, deadline_s=deadline_s)


@pytest.fixture
def landing(mesh: Mesh) -> Iterator[TransferId]:
    """A landing for two blocks at messenger1 that nobody sends to."""
    job_id = _fresh("open")
    transfer_id = TransferId(f"to {job_id}")
    fields = {"landing": transfer_id, "landing_blocks": 2, "landing_layers": _LAYERS}
    with clients.dealer(mesh.endpoint("messenger1")) as plug:
        plug.send_multipart(good(_acquire(mesh, job_id, **fields), deadline_s=_ANSWER_S))
        # Answered when the other is under way: nobody may come before it.
        plug.send_multipart(codec.encode(Ping(), Envelope(id=MessageId("8"))))
        assert isinstance(clients.receive(plug, timeout_s=_ANSWER_S)[1], Pong)
        yield transfer_id
        _release(mesh, job_id)
        _refused(clients.receive(plug, timeout_s=_ANSWER_S)[1], "slice_lost")
    mesh.wait_idle()


def test_opening_what_nobody_expects_ends_with_the_deadline(mesh: Mesh) -> None:
    info = _info(mesh, "messenger0")
    _refused(_open(mesh, TransferId("unexpected"), info, "tcp", deadline_s=0.5), "call_timeout")


@pytest.mark.parametrize("transports", [(), ("carrier-pigeon",), ("shm",)], ids=["none", "unknown", "shm elsewhere"])
def test_opening_without_a_common_transport(mesh: Mesh, landing: TransferId, transports: tuple[str, ...]) -> None:
    _refused(_open(mesh, landing, _info(mesh, "messenger0", host_id="another host"), *transports), "transfer_error")


def test_opening_with_blocks_of_another_size(mesh: Mesh, landing: TransferId) -> None:
    _refused(_open(mesh, landing, _info(mesh, "messenger0", block_bytes=4096), "shm"), "transfer_error")


def test_opening_with_an_arena_that_is_not_there(mesh: Mesh, landing: TransferId) -> None:
    source = _info(mesh, "messenger0", socket_path="/nowhere", incarnation=Incarnation("n" * 16))
    _refused(_open(mesh, landing, source, "shm"), "transfer_error")


def test_a_transfer_has_one_sender(mesh: Mesh, landing: TransferId) -> None:
    assert isinstance(_open(mesh, landing, _info(mesh, "messenger0"), "shm"), TransferPlan)
    _refused(_open(mesh, landing, _info(mesh, "messenger0"), "shm"), "slice_lost")


@pytest.mark.parametrize(
    "fields",
    [
        {"logical": 2},
        {"logical": _ABSURD},
        {"layer": _LAYERS},
        {"n_layers": 0},
        {"n_layers": _LAYERS + 1},
        {"n_layers": _ABSURD},
        {"layer": _ABSURD, "n_layers": _ABSURD},
        {"source_block": _ABSURD},
        {"source_block": 32768},
    ],
    ids=str,
)
def test_offered_slices_outside_the_landing(mesh: Mesh, landing: TransferId, fields: dict[str, int]) -> None:
    assert isinstance(_open(mesh, landing, _info(mesh, "messenger0"), "shm"), TransferPlan)
    inside = {"logical": 0, "layer": 0, "n_layers": 1, "source_block": 0}
    offer = SliceOffer(transfer_id=landing, slices=(OfferedSlice(**{**inside, **fields}, checksum=None),))
    _refused(_ask(mesh, "messenger1", offer), "slice_lost")


def test_an_offered_slice_with_a_wrong_checksum_fails_its_transfer(mesh: Mesh, landing: TransferId) -> None:
    assert isinstance(_open(mesh, landing, _info(mesh, "messenger0"), "shm"), TransferPlan)
    slices = (OfferedSlice(logical=0, layer=0, n_layers=1, source_block=0, checksum=-7),)
    _refused(_ask(mesh, "messenger1", SliceOffer(transfer_id=landing, slices=slices)), "checksum_mismatch")


@pytest.mark.parametrize("layers", [0, 3, _ABSURD])
def test_sending_in_layers_that_do_not_divide_a_block(mesh: Mesh, layers: int) -> None:
    job_id = _fresh("sender")
    assert isinstance(_ask(mesh, "messenger1", _acquire(mesh, job_id)), Acquired)
    start = StartSend(
        job_id=JobId(job_id),
        transfer_id=TransferId("odd"),
        target=mesh.endpoint("messenger0"),
        n_blocks=1,
        layers=layers,
        deadline_s=1.0,
    )
    _refused(_ask(mesh, "messenger1", start), "invalid_request", "layers")
    _release(mesh, job_id)


@pytest.mark.parametrize("target", ["", "nonsense", "tcp://127.0.0.1:99999", "ipc:///nowhere/at/all", "tcp://\x00"])
def test_sending_to_nowhere_fails_the_transfer_alone(mesh: Mesh, target: str) -> None:
    job_id = _fresh("sender")
    assert isinstance(_ask(mesh, "messenger1", _acquire(mesh, job_id)), Acquired)
    transfer_id = TransferId(f"to {target}")
    with clients.dealer(mesh.endpoint("messenger1")) as plug:
        start = StartSend(
            job_id=JobId(job_id),
            transfer_id=transfer_id,
            target=target,
            n_blocks=2,
            layers=_LAYERS,
            deadline_s=0.2,
        )
        plug.send_multipart(good(start))
        outside = SliceReady(transfer_id=transfer_id, layer=1, n_layers=_ABSURD, first_block=0, n_blocks=2)
        plug.send_multipart(good(outside))
        _refused(clients.receive(plug, timeout_s=_ANSWER_S)[1], "slice_lost")
        plug.send_multipart(good(FinishSend(transfer_id=transfer_id), deadline_s=5.0))
        answer = clients.receive(plug, timeout_s=_ANSWER_S)[1]
        assert isinstance(answer, Failure), answer
        assert answer.code in ("transfer_error", "slice_lost")
    _release(mesh, job_id)


def test_pushing_a_prefix_that_is_not_here(mesh: Mesh) -> None:
    push = PushBlocks(transfer_id=TransferId("p"), target="ipc:///nowhere", keys=b"k" * 32, deadline_s=1.0)
    assert _ask(mesh, "messenger0", push) == Pushing(transfer_id=TransferId("p"), n_blocks=0)


@pytest.mark.parametrize("block_bytes", [0, 1, 4096, _ABSURD])
def test_attaching_with_another_block_size(mesh: Mesh, block_bytes: int) -> None:
    attach = Attach(instance_id=InstanceId("x"), incarnation=Incarnation("x" * 16), block_bytes=block_bytes)
    _refused(_ask(mesh, "messenger0", attach), "invalid_request", "block_bytes")


# --- jobs -------------------------------------------------------------------------------------------------------------


def _job(mesh: Mesh, name: str, **fields: Any) -> dict[str, Any]:
    return {
        "job_id": JobId("stranger"),
        "transfer_id": TransferId("stranger.kv"),
        "incarnation": Incarnation(mesh.incarnation(name)),
        "tokens": b"\1\0\0\0",
        "keys": b"",
        "sampling": Sampling(temperature=0.0),
        "stopping": Stopping(max_new_tokens=4),
        "drawn_tokens": 0,
        "stream_endpoint": mesh.tokens,
        "deadline_s": 1.0,
        **fields,
    }


def _prefill_job(mesh: Mesh, **fields: Any) -> PrefillJob:
    return PrefillJob(**_job(mesh, "prefill0", **{"decode": None, **fields}))


def _decode_job(mesh: Mesh, **fields: Any) -> DecodeJob:
    return DecodeJob(**_job(mesh, "decode0", **{"key_root": BlockKey(b"r" * 16), **fields}))


@pytest.mark.parametrize("name", ["prefill0", "decode0"])
def test_jobs_for_another_life_of_the_instance(mesh: Mesh, name: str) -> None:
    make = _prefill_job if name == "prefill0" else _decode_job
    _refused(_ask(mesh, name, make(mesh, incarnation=Incarnation("0" * 16))), "peer_unreachable")


@pytest.mark.parametrize("name", ["prefill0", "decode0"])
@pytest.mark.parametrize(
    ("endpoint", "code"),
    [("", "mesh_error"), ("nonsense", "mesh_error"), ("ipc:///nowhere", "peer_unreachable")],
)
def test_jobs_whose_tokens_can_go_nowhere(mesh: Mesh, name: str, endpoint: str, code: str) -> None:
    make = _prefill_job if name == "prefill0" else _decode_job
    _refused(_ask(mesh, name, make(mesh, stream_endpoint=endpoint)), code)


@pytest.mark.parametrize("max_new_tokens", [70_000, 2**31, _ABSURD])
def test_decode_jobs_longer_than_the_context(mesh: Mesh, max_new_tokens: int) -> None:
    job = _decode_job(mesh, stopping=Stopping(max_new_tokens=max_new_tokens))
    _refused(_ask(mesh, "decode0", job), "invalid_request", "stopping.max_new_tokens")
    mesh.wait_idle()


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": b""},
        {"tokens": b"\xff" * 8},
        {"keys": b"k" * 160},
        {"drawn_tokens": _ABSURD},
        {"deadline_s": -1.0},
        {"deadline_s": 0.0},
        {"fetch_from": "nonsense", "fetch_prefix_blocks": _ABSURD, "tokens": b"\1\0\0\0" * 40, "keys": b"k" * 32},
        {"sampling": Sampling(temperature=-5.0, top_p=-1.0, top_k=_ABSURD, seed=-(2**62), top_logprobs=_ABSURD)},
        {"sampling": Sampling(grammar=Grammar(kind=GrammarKind.REGEX, text="(", end_tokens=(257,)))},
        {"sampling": Sampling(grammar=Grammar(kind=GrammarKind.REGEX, text="\0", end_tokens=(_ABSURD,)))},
    ],
    ids=lambda fields: " ".join(fields),
)
def test_prefill_jobs_of_strangers_end_by_themselves(mesh: Mesh, fields: dict[str, Any]) -> None:
    """Whatever becomes of such a job, it leaves nothing; its gateway does not know it and ignores its tokens."""
    _ask(mesh, "prefill0", _prefill_job(mesh, **fields))
    mesh.wait_idle()


def test_decode_jobs_that_no_prefill_follows_end_with_their_deadline(mesh: Mesh) -> None:
    job = _decode_job(mesh, deadline_s=1.0)
    with clients.dealer(mesh.endpoint("decode0")) as plug:
        for number in "12":  # one right behind the other: the first has not ended when the second is read
            plug.send_multipart(codec.encode(job, Envelope(id=MessageId(number), deadline_s=_ANSWER_S)))
        answers = [clients.receive(plug, timeout_s=_ANSWER_S)[1] for _ in "12"]
    [refusal] = [answer for answer in answers if answer != Ok()]
    _refused(refusal, "invalid_transition")
    mesh.wait_idle()


@pytest.mark.parametrize("name", ["prefill0", "decode0"])
def test_cancelling_what_does_not_exist_is_fine(mesh: Mesh, name: str) -> None:
    assert _ask(mesh, name, CancelJob(job_id=JobId("nobody"))) == Ok()


def test_first_tokens_for_nobody_are_ignored(mesh: Mesh) -> None:
    with clients.dealer(mesh.endpoint("decode0")) as plug:
        for number in range(3000):
            plug.send_multipart(good(PrefillDone(job_id=JobId(f"nobody {number}"), token=_ABSURD)))
    assert isinstance(_ask(mesh, "decode0", CancelJob(job_id=JobId("nobody 1"))), Ok | Pong)


# --- the conductor ----------------------------------------------------------------------------------------------------


def test_schedules_that_nobody_can_serve(mesh: Mesh) -> None:
    for fields, reason in (
        ({"model": "no-such"}, "no_worker"),
        ({"prompt_tokens": _ABSURD}, None),
    ):
        given: dict[str, Any] = {"model": "fake", "prompt_tokens": 5, "max_new_tokens": 5, **fields}
        answer = _ask(mesh, "conductor", Schedule(job_id=JobId("j"), keys=b"", **given))
        assert isinstance(answer, Rejected), answer
        assert reason is None or answer.reason == reason


def test_blocks_told_by_a_stranger(mesh: Mesh) -> None:
    for node, code in (("nowhere", "unknown_messenger"), ("node0", "old_incarnation")):
        node_id, incarnation = NodeId(node), Incarnation("0" * 16)
        events = KvEvents(node_id=node_id, incarnation=incarnation, first_seq=1, events=())
        _refused(_ask(mesh, "conductor", events), code)
        snapshot = KvSnapshot(node_id=node_id, incarnation=incarnation, seq=1, keys=b"k" * 16)
        _refused(_ask(mesh, "conductor", snapshot), code)
