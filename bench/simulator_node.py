"""The node of a simulated instance: its messenger's core, the link that leaves it, and its word to the conductor."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from bench.nodes import NodeKind
from bench.simulator_clock import Link, VirtualClock
from mooncake_mesh.conductor.core import ConductorCore
from mooncake_mesh.conductor.roster import BEAT_LAG_S
from mooncake_mesh.errors import NoFreeBlocks
from mooncake_mesh.kv.block_hash import join_keys
from mooncake_mesh.kv.block_pool import NoRoom
from mooncake_mesh.kv.eviction import EvictionKind
from mooncake_mesh.messenger.core import MessengerCore
from mooncake_mesh.messenger.landing import SliceSpan
from mooncake_proto.control import Load, Member, ModelCard, Role
from mooncake_proto.ids import Incarnation, InstanceId, JobId, NodeId, TransferId
from mooncake_proto.kvcache import KvEvent, KvEvents
from mooncake_proto.transfer import Acquire, Acquired, PushBlocks

INCARNATION: Final = Incarnation("0" * 16)
MODEL: Final = "simulated"


class SimNode:
    """A messenger and its pool. Jobs that find no room wait for it in order, as with the live messenger."""

    def __init__(
        self,
        name: str,
        kind: NodeKind,
        clock: VirtualClock,
        conductor: ConductorCore,
        *,
        block_tokens: int,
        n_blocks: int,
        eviction: EvictionKind,
        can_switch: bool = False,
    ) -> None:
        self._can_switch = can_switch
        self.kind = kind
        self.clock = clock
        self.node_id = NodeId(name)
        self.endpoint = f"sim://{name}/messenger"
        self.block_bytes = block_tokens * kind.kv_token_bytes
        self.messenger = MessengerCore(n_blocks=n_blocks, block_bytes=self.block_bytes, eviction=eviction)
        self.link = Link(kind.network_bytes_per_s)
        self._conductor = conductor
        self._next_seq = 1
        self._waiting: deque[tuple[Acquire, Callable[[Acquired], None]]] = deque()
        self._load: Load | None = None
        self._worker_load: Load | None = None
        self._beaten_s = 0.0
        self.placed_s = 0.0  # when the conductor last placed something here
        messenger = _member(Role.MESSENGER, InstanceId(f"{name}-messenger"), self.node_id, self.endpoint, None)
        self.messenger_member = messenger
        conductor.register(messenger, Load(), clock.now_s)

    def register_worker(self, role: Role, instance_id: InstanceId, block_tokens: int) -> Member:
        """Register the worker of this node; the member it is."""
        card = ModelCard(
            name=MODEL,
            fingerprint=self.kind.name,
            dtype="bfloat16",
            block_tokens=block_tokens,
            block_bytes=self.block_bytes,
            max_context_tokens=1 << 20,
        )
        endpoint = f"sim://{self.node_id}/worker"
        member = _member(role, instance_id, self.node_id, endpoint, card, can_switch=self._can_switch)
        self._conductor.register(member, Load(), self.clock.now_s)
        return member

    def fetch(self, source: "SimNode", request: Acquire, then: Callable[[], None]) -> bool:
        """Start to copy what is missing here of the prefix that *request* names; whether there is anything to wait for.
        *then* is called when it is here."""
        mine, now_s = self.messenger, self.clock.now_s
        missing = mine.missing_prefix(request)
        if not missing:
            return False
        transfer_id = TransferId(f"prefix-{request.job_id}")
        try:
            landing = mine.open_fetch(transfer_id, request, missing, now_s)
        except NoFreeBlocks:
            return False
        push = PushBlocks(
            transfer_id=transfer_id, target=self.endpoint, keys=join_keys(missing), deadline_s=float("inf")
        )
        n_blocks = source.messenger.start_push(push, request.instance_id, INCARNATION).n_blocks
        sent_s = source.link.send(now_s, n_blocks * self.block_bytes)

        def landed() -> None:
            landing.shorten(n_blocks)
            spans = [SliceSpan(logical=i, layer=0, n_layers=1) for i in range(n_blocks)]
            landing.written(landing.admit(spans, mine.pool), mine.pool, self.clock.now_s)
            mine.settle(landing)
            source.release(JobId(f"push-{transfer_id}"))
            self.release(JobId(transfer_id))
            then()

        self.clock.at(sent_s, landed)
        return True

    def acquire(self, request: Acquire, then: Callable[[Acquired], None]) -> None:
        """Blocks for a job, now or when there is room and everybody who came before has theirs."""
        if self._waiting:
            self._waiting.append((request, then))
            return
        got = self.messenger.acquire(request, self.clock.now_s)
        if isinstance(got, NoRoom):
            self._waiting.append((request, then))
        else:
            self.publish()
            then(got)

    def release(self, job_id: JobId) -> None:
        """End a job; whoever waited for its room gets it."""
        self.messenger.release(job_id, "over")
        while self._waiting:
            request, then = self._waiting[0]
            got = self.messenger.acquire(request, self.clock.now_s)
            if isinstance(got, NoRoom):
                break
            self._waiting.popleft()
            then(got)
        self.publish()

    def withdraw(self, job_id: JobId) -> None:
        """End a job that may still wait for room."""
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0].job_id != job_id)
        self.release(job_id)

    def publish(self) -> None:
        """Tell the conductor which keys this node began and ceased to hold."""
        events = self.messenger.drain_events()
        if not events:
            return
        batch = KvEvents(
            node_id=self.node_id,
            incarnation=INCARNATION,
            first_seq=self._next_seq,
            events=tuple(KvEvent(change=event.change, key=event.key.hex()) for event in events),
        )
        self._next_seq += len(events)
        self._conductor.kv_events(batch)

    def beat(self, member: Member, load: Load) -> None:
        """The heartbeats of the messenger and of the worker, which reports *load*.

        One that says what the last one said is kept back, unless something was placed here shortly before that one or
        since: it would change nothing, and there are hundreds of thousands of them in a run.
        """
        now_s = self.clock.now_s
        pool = self.messenger.pool
        free, cached, evictable = pool.free_blocks, pool.sealed_blocks, pool.evictable_blocks
        mine = self._load
        if mine is None or (mine.blocks_free, mine.blocks_cached, mine.blocks_evictable) != (free, cached, evictable):
            mine = Load(
                blocks_total=pool.n_blocks,
                blocks_free=free,
                blocks_cached=cached,
                blocks_evictable=evictable,
                transferred_bytes=self.link.sent_bytes,
            )
        has_pending = self.placed_s > self._beaten_s - BEAT_LAG_S
        if has_pending or mine is not self._load:
            self._conductor.heartbeat(self.messenger_member.instance_id, INCARNATION, mine, now_s)
        if has_pending or load is not self._worker_load:
            self._conductor.heartbeat(member.instance_id, INCARNATION, load, now_s)
        self._load, self._worker_load, self._beaten_s = mine, load, now_s


def blocks_in_use(nodes: Iterable[SimNode]) -> float:
    """The fullest pool's share of referenced blocks."""
    return max((1 - node.messenger.pool.available_blocks / node.messenger.pool.n_blocks for node in nodes), default=0)


def _member(
    role: Role,
    instance_id: InstanceId,
    node_id: NodeId,
    endpoint: str,
    model: ModelCard | None,
    *,
    can_switch: bool = False,
) -> Member:
    return Member(
        role=role,
        instance_id=instance_id,
        node_id=node_id,
        incarnation=INCARNATION,
        endpoint=endpoint,
        model=model,
        can_switch=can_switch,
    )
