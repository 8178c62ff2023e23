"""A recorded list of (time, event) for a conductor, and the digest of all that it decides. Run: prints the digest."""

import hashlib
import random
import sys
from collections.abc import Callable

from mooncake_mesh.conductor.core import ConductorCore
from mooncake_mesh.config_scheduling import AdmissionKind, HybridDecodeKind, PlacementKind
from mooncake_mesh.kv.block_hash import join_keys
from mooncake_mesh.kv.prefix_index import PrefixIndex
from mooncake_mesh.mesh.peers import PeerTable
from mooncake_mesh.policy.admission import Admission
from mooncake_mesh.policy.cost_model import LinearCost
from mooncake_mesh.policy.placement import Scheduling
from mooncake_mesh.policy.views import Objectives
from mooncake_proto.control import Goodbye, Heartbeat, Load, Member, ModelCard, Register, Role
from mooncake_proto.ids import BlockKey, Incarnation, InstanceId, JobId, NodeId
from mooncake_proto.kvcache import KvChange, KvEvent, KvEvents, KvSnapshot
from mooncake_proto.serving import Schedule

Event = Register | Heartbeat | Goodbye | KvEvents | KvSnapshot | Schedule
Trace = list[tuple[float, Event]]

REQUESTS = 80
LIFE = Incarnation("life")
CARD = ModelCard(name="m", fingerprint="f", dtype="float32", block_tokens=4, block_bytes=1000, max_context_tokens=4096)
COST = LinearCost(
    prefill_base_s=0.01,
    prefill_token_s=0.01,
    cached_token_s=0.0001,
    step_base_s=0.01,
    step_sequence_s=0.002,
    step_context_token_s=0.0001,
    transfer_base_s=0.001,
    transfer_bytes_per_s=1e6,
)


def recorded(n_requests: int) -> Trace:
    """Five nodes that join, report, hold blocks and lose some; one of them leaves; requests that share prefixes."""
    draw = random.Random(11)
    trace: Trace = []
    members: list[Member] = []
    for number in range(5):
        for role in (Role.MESSENGER, Role.PREFILL, Role.DECODE):
            member = Member(
                role=role,
                instance_id=InstanceId(f"{role.value}{number}"),
                node_id=NodeId(f"n{number}"),
                incarnation=LIFE,
                endpoint=f"ipc://{role.value}{number}",
                model=None if role is Role.MESSENGER else CARD,
            )
            members.append(member)
            trace.append((0.0, Register(member=member, load=Load())))
            trace.append((0.0, _beat(draw, member)))
    families = [[BlockKey(draw.randbytes(16)) for _ in range(80)] for _ in range(6)]
    for number in range(5):
        keys = [key for family in families for key in family[: draw.randrange(81)]]
        trace.append((0.0, KvSnapshot(node_id=NodeId(f"n{number}"), incarnation=LIFE, seq=0, keys=join_keys(keys))))
    seqs = dict.fromkeys(range(5), 1)
    for number in range(n_requests):
        now_s = 0.1 * number
        if number == n_requests // 2:
            trace.append((now_s, Goodbye(instance_id=InstanceId("prefill4"), incarnation=LIFE)))
        member = draw.choice(members)
        trace.append((now_s, _beat(draw, member)))
        node = draw.randrange(5)
        change = draw.choice(list(KvChange))
        event = KvEvent(change=change, key=draw.choice(draw.choice(families)).hex())
        trace.append(
            (now_s, KvEvents(node_id=NodeId(f"n{node}"), incarnation=LIFE, first_seq=seqs[node], events=(event,)))
        )
        seqs[node] += 1
        keys = draw.choice(families)[: draw.randrange(81)]
        request = Schedule(
            job_id=JobId(f"r{number}"),
            model="m",
            prompt_tokens=4 * len(keys) + draw.randrange(1, 40),
            max_new_tokens=32,
            keys=join_keys(keys),
        )
        trace.append((now_s, request))
    return trace


def replayed(trace: Trace, scheduling: Scheduling) -> str:
    """Digest of every answer of a new core to *trace*."""
    core = ConductorCore(
        incarnation=Incarnation("conductor"),
        peers=PeerTable(suspect_after_s=1e3, dead_after_s=2e3, forget_after_s=3e3),
        index=PrefixIndex(max_entries=1_000),
        cost=COST,
        objectives=Objectives(ttft_s=4.0, tbt_s=0.15),
        started_s=0.0,
        scheduling=scheduling,
        seed=5,
    )
    digest = hashlib.sha256()
    for now_s, event in trace:
        digest.update(repr(applied(core, now_s, event)).encode())
    digest.update(repr(core.status(1e3)).encode())
    return f"{digest.hexdigest()} placed {core.placed_total} refused {core.rejected_total}"


def all_policies(replay: Callable[[Scheduling], str]) -> list[str]:
    placements = [replay(Scheduling(placement=kind)) for kind in PlacementKind]
    admissions = [replay(Scheduling(admission=Admission(kind=kind))) for kind in AdmissionKind]
    return [*placements, *admissions, replay(Scheduling(hybrid_decode=HybridDecodeKind.AUTO))]


def _beat(draw: random.Random, member: Member) -> Heartbeat:
    if member.role is Role.MESSENGER:
        load = Load(blocks_total=400, blocks_free=draw.randrange(100, 400))
    elif member.role is Role.PREFILL:
        prompts = tuple((draw.randrange(1, 200), draw.randrange(100)) for _ in range(draw.randrange(4)))
        sample = (100, 10, draw.uniform(0.5, 2.0))
        load = Load(queued_prompts=prompts, prefills=draw.randrange(100), recent_prefills=(sample,))
    else:
        sequences = tuple((draw.randrange(50, 300), draw.randrange(90)) for _ in range(draw.randrange(3, 12)))
        running_tokens = sum(tokens for tokens, _ in sequences)
        load = Load(
            running_jobs=len(sequences),
            running_tokens=running_tokens,
            sequences=sequences,
            step_s=draw.uniform(0.05, 0.2),
            steps=draw.randrange(1000),
            recent_steps=((len(sequences), running_tokens, draw.uniform(0.05, 0.2)),),
            decoded_tokens=60.0,
        )
    return Heartbeat(instance_id=member.instance_id, incarnation=LIFE, load=load)


def applied(core: ConductorCore, now_s: float, event: Event) -> object:
    match event:
        case Register():
            return core.register(event.member, event.load, now_s)
        case Heartbeat():
            return core.heartbeat(event.instance_id, event.incarnation, event.load, now_s)
        case Goodbye():
            return core.goodbye(event.instance_id, event.incarnation)
        case KvEvents():
            return core.kv_events(event)
        case KvSnapshot():
            return core.kv_snapshot(event)
        case Schedule():
            return core.schedule(event, now_s)


if __name__ == "__main__":
    recording = recorded(REQUESTS)
    sys.stdout.write("\n".join(all_policies(lambda scheduling: replayed(recording, scheduling))))
