"""The mesh under virtual time: the cores of conductor, prefill, decode and messenger, with a heap for their sockets.

There is no scheduler here. Where a request goes, which job is next, who is in a batch, which block is evicted: the
very objects decide that run in the live processes. What is simulated is their surroundings: messages take no time,
work takes what the node's kind says, bytes leave a node in order at its bandwidth.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

from bench.nodes import NODES, NodeKind
from bench.simulator_clock import VirtualClock
from bench.simulator_decode import DecodeShell
from bench.simulator_flight import Flight
from bench.simulator_node import INCARNATION, MODEL, SimNode, blocks_in_use
from bench.simulator_prefill import PrefillShell
from bench.simulator_results import GiveUp, LoadSample, RequestRecord, RunResult
from bench.simulator_roles import Fleet, RoleSwitches
from bench.traces import BLOCK_TOKENS, TraceRequest
from mooncake_mesh.conductor.core import ConductorCore
from mooncake_mesh.config_scheduling import HybridDecodeKind
from mooncake_mesh.kv.block_hash import join_keys
from mooncake_mesh.kv.eviction import EvictionKind
from mooncake_mesh.kv.prefix_index import PrefixIndex
from mooncake_mesh.mesh.peers import PeerTable
from mooncake_mesh.policy.placement import DEFAULT_SCHEDULING, Scheduling
from mooncake_mesh.policy.queue_order import QueueRules
from mooncake_mesh.policy.views import Objectives
from mooncake_proto.ids import InstanceId, JobId
from mooncake_proto.serving import Rejected, Schedule

_SAMPLE_S: Final = 5.0
_SAMPLES_PER_LOOK: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSetup:
    """One simulated mesh. ``objectives`` without limits admit everything that can be placed.

    ``max_new_tokens`` is what requests ask for: their true lengths are no secret to the engine, but to the scheduler.
    ``decode_shares`` lets the conductor find what decode nodes hold, as in the live system; the papers' algorithm
    looks at prefill nodes only. ``queue_rules`` order the prefill queues, None: first come, first served.
    ``longest_window_steps`` = 1 steps one by one. Where the scheduling lets roles change, every instance can take
    either one, in ``switch_s``; its node's pool is then that of a prefill node, whatever it does.
    """

    prefill: int
    decode: int
    kind: NodeKind = NODES["8xa800"]
    objectives: Objectives = field(default_factory=Objectives)
    scheduling: Scheduling = DEFAULT_SCHEDULING
    seed: int = 0
    queue_rules: QueueRules | None = None
    chunk_tokens: int = 0
    max_batch: int = 1024
    max_new_tokens: int = 2048
    block_tokens: int = BLOCK_TOKENS
    prefill_blocks: int | None = None
    decode_blocks: int | None = None
    eviction: EvictionKind = EvictionKind.LRU
    heartbeat_s: float = 0.5
    decode_shares: bool = False
    longest_window_steps: int = 1 << 20
    switch_s: float = 5.0

    @property
    def pool_blocks(self) -> int:
        return self.prefill_blocks or self.kind.dram_kv_tokens // self.block_tokens

    @property
    def landing_blocks(self) -> int:
        """Blocks in which a decode node takes KV in: of its VRAM, and of its host memory where a gate keeps the batch
        within VRAM, or much less than VRAM holds is decoded, as prompts are computed there as well."""
        if self.scheduling.roles is not None:
            return self.pool_blocks
        tokens = self.kind.vram_kv_tokens + (self.kind.dram_kv_tokens if self._lands_in_host_memory else 0)
        return self.decode_blocks or tokens // self.block_tokens

    @property
    def batch_blocks(self) -> int:
        """Blocks of KV that a decode node runs at a time: what its VRAM holds."""
        if self.decode_blocks or not self._lands_in_host_memory:
            return 0
        return self.kind.vram_kv_tokens // self.block_tokens

    @property
    def _lands_in_host_memory(self) -> bool:
        """Without a TBT objective there is no gate."""
        return self.objectives.tbt_s is not None or self.scheduling.hybrid_decode is HybridDecodeKind.AUTO

    def __post_init__(self) -> None:
        if self.prefill < 1 or self.decode < 0:
            raise ValueError(f"a mesh needs prefill instances, got {self.prefill}P{self.decode}D")


Progress = Callable[[int], None]


def simulate(
    requests: Sequence[TraceRequest],
    setup: MeshSetup,
    *,
    name: str = "",
    progress: Progress | None = None,
    give_up: GiveUp | None = None,
) -> RunResult:
    """Run *requests*, in order of arrival, to the last token. Equal arguments give equal results, everywhere.

    *progress* is called with the number of requests that have arrived. With *give_up* a hopeless run ends early; what
    has not finished by then never did.
    """
    started_s = perf_counter()
    run = _Run(requests, setup, progress, give_up)
    result = run.to_the_end(name or f"{setup.prefill}P{setup.decode}D")
    result.wall_s = perf_counter() - started_s
    return result


class _Run:
    """The shells, and between them what the gateway and the network do in a live mesh."""

    def __init__(
        self, requests: Sequence[TraceRequest], setup: MeshSetup, progress: Progress | None, give_up: GiveUp | None
    ) -> None:
        self._requests = requests
        self._setup = setup
        self._progress = progress
        self._give_up = give_up
        self._clock = VirtualClock()
        self._conductor = ConductorCore(
            incarnation=INCARNATION,
            peers=PeerTable(suspect_after_s=1e9, dead_after_s=2e9, forget_after_s=3e9),
            index=PrefixIndex(max_entries=1 << 40),
            cost=setup.kind,
            objectives=setup.objectives,
            started_s=0.0,
            scheduling=setup.scheduling,
            seed=setup.seed,
        )
        self._holders: dict[str, SimNode] = {}
        prefill = [(self._node(f"p{i:03d}", setup.pool_blocks), f"prefill{i:03d}") for i in range(setup.prefill)]
        self._prefill = [self._prefill_shell(node, name) for node, name in prefill]
        decode = [(self._node(f"d{i:03d}", setup.landing_blocks), f"decode{i:03d}") for i in range(setup.decode or 1)]
        self._decode = [self._decode_shell(node, name) for node, name in decode]
        fleet = Fleet.of(self._prefill, self._decode)
        self._prefill_of, self._decode_of = fleet.prefill_of, fleet.decode_of
        self._roles = RoleSwitches(
            fleet,
            self._clock,
            self._conductor,
            None if setup.scheduling.roles is None else setup.switch_s,
            prefill=self._prefill_shell,
            decode=self._decode_shell,
        )
        self._records = [RequestRecord.of(i, request, setup.block_tokens) for i, request in enumerate(requests)]
        self._samples: list[LoadSample] = []
        self._open = 0
        self._arrived = 0
        self._jobs = 0
        self._preempted = 0

    def to_the_end(self, name: str) -> RunResult:
        self._beat()
        self._sample()
        if self._requests:
            self._clock.at(self._requests[0].arrival_s, self._arrive)
        self._clock.run()
        return RunResult(
            name=name,
            records=self._records,
            samples=self._samples,
            preempted=self._preempted,
            events=self._clock.events,
            transferred_bytes=sum(node.link.sent_bytes for node in self._holders.values()),
            switched=self._roles.total,
        )

    # --- the nodes ----------------------------------------------------------------------------------------------------

    def _node(self, name: str, n_blocks: int) -> SimNode:
        node = SimNode(
            name,
            self._setup.kind,
            self._clock,
            self._conductor,
            block_tokens=self._setup.block_tokens,
            n_blocks=n_blocks,
            eviction=self._setup.eviction,
            can_switch=self._setup.scheduling.roles is not None,
        )
        self._holders[node.endpoint] = node
        return node

    def _prefill_shell(self, node: SimNode, name: str) -> PrefillShell:
        setup = self._setup
        return PrefillShell(
            node,
            name,
            block_tokens=setup.block_tokens,
            chunk_tokens=setup.chunk_tokens,
            holders=self._holders,
            on_computing=self._send,
            on_computed=self._computed,
            on_late=self._late,
            rules=setup.queue_rules,
        )

    def _decode_shell(self, node: SimNode, name: str) -> DecodeShell:
        setup = self._setup
        return DecodeShell(
            node,
            name,
            block_tokens=setup.block_tokens,
            max_batch=setup.max_batch,
            longest_window_steps=setup.longest_window_steps,
            batch_blocks=setup.batch_blocks,
            shares=setup.decode_shares,
            holders=self._holders,
            on_room=self._send,
            on_shown=self._first_token,
            on_prompt_computed=self._prompt_computed,
            on_refused=self._refused,
            on_finished=self._finished,
            on_preempted=self._preempt,
        )

    # --- time that passes ---------------------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self._arrived == len(self._requests) and not self._open

    def _beat(self) -> None:
        self._roles.beat()
        if not self._is_over:
            self._clock.at(self._clock.now_s + self._setup.heartbeat_s, self._beat)

    def _sample(self) -> None:
        self._samples.append(
            LoadSample(
                time_s=self._clock.now_s,
                prefill_busy=sum(shell.is_computing for shell in self._prefill),
                prefill_queued=sum(len(shell.flights) for shell in self._prefill),
                decode_running=sum(shell.running for shell in self._decode),
                decode_share=blocks_in_use([shell.node for shell in self._decode]),
            )
        )
        give_up = self._give_up if len(self._samples) % _SAMPLES_PER_LOOK == 0 else None
        if give_up is not None and give_up.is_hopeless(self._records, self._arrived, self._clock.now_s):
            self._clock.stop()
            return
        if not self._is_over:
            self._clock.at(self._clock.now_s + _SAMPLE_S, self._sample)

    # --- the gateway's part -------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        i = self._arrived
        self._arrived += 1
        if self._progress is not None:
            self._progress(self._arrived)
        if self._arrived < len(self._requests):
            self._clock.at(self._requests[self._arrived].arrival_s, self._arrive)
        request = self._requests[i]
        keys = join_keys(request.keys[: request.input_tokens // self._setup.block_tokens])
        flight = self._place(request, self._records[i], keys, request.input_tokens, 0)
        if flight is not None:
            self._start(flight)

    def _place(
        self,
        request: TraceRequest,
        record: RequestRecord,
        keys: bytes,
        prompt_tokens: int,
        drawn: int,
        refused_by: tuple[InstanceId, ...] = (),
    ) -> Flight | None:
        """Ask the conductor; a refusal ends the request, as the gateway passes it on."""
        self._jobs += 1
        job_id = JobId(f"job{self._jobs}")
        schedule = Schedule(
            job_id=job_id,
            model=MODEL,
            prompt_tokens=prompt_tokens,
            max_new_tokens=max(1, self._setup.max_new_tokens - drawn),
            keys=keys,
            refused_by=refused_by,
        )
        answer = self._conductor.schedule(schedule, self._clock.now_s)
        if isinstance(answer, Rejected):
            record.refused = answer.reason
            return None
        record.prefill = answer.prefill.instance_id
        record.decode = answer.decode.instance_id
        if not drawn:
            record.ttft_est_s = answer.ttft_est_s
        return Flight(
            request=request,
            record=record,
            placement=answer,
            job_id=job_id,
            keys=keys,
            prompt_tokens=prompt_tokens,
            drawn=drawn,
            refused_by=refused_by,
        )

    def _start(self, flight: Flight) -> None:
        self._open += 1
        decode = self._decode_of[flight.placement.decode.instance_id]
        decode.node.placed_s = self._clock.now_s
        if flight.is_inline:
            decode.submit(flight, flight.request.output_tokens)
            return
        self._prefill_of[flight.placement.prefill.instance_id].node.placed_s = self._clock.now_s
        if self._draws_more(flight):
            decode.submit(flight, flight.request.output_tokens)
        prefill = self._prefill_of[flight.placement.prefill.instance_id]
        prefill.submit(flight, self._setup.max_new_tokens)

    @staticmethod
    def _draws_more(flight: Flight) -> bool:
        return flight.request.output_tokens > flight.drawn + 1

    # --- from prefill to decode ---------------------------------------------------------------------------------------

    def _send(self, flight: Flight) -> None:
        """KV streams as soon as it is computed and has a place to land; the link takes it in order."""
        if not (flight.has_decode_blocks and flight.computing_since_s == flight.computing_since_s):
            return
        source = self._prefill_of[flight.placement.prefill.instance_id].node
        flight.sent_s = source.link.send(self._clock.now_s, flight.arriving_blocks * source.block_bytes)
        self._perhaps_land(flight)

    def _computed(self, flight: Flight) -> None:
        flight.is_computed = True
        if not self._draws_more(flight):
            self._first_token(flight)
            self._prefill_of[flight.placement.prefill.instance_id].sent(flight)
            self._finished(flight)
        else:
            if flight.gate is None:
                self._first_token(flight)
            self._perhaps_land(flight)
            self._decode_of[flight.placement.decode.instance_id].computed(flight)

    def _prompt_computed(self, flight: Flight) -> None:
        """On the decode instance: nothing is sent."""
        flight.is_computed = True
        if flight.gate is None:
            self._first_token(flight)

    def _refused(self, flight: Flight, reason: str) -> None:
        """Its KV was there, and no place for it: placed elsewhere, as the gateway does it, if anybody has one now."""
        self._open -= 1
        if not flight.is_inline and flight.sent_s != flight.sent_s:  # it waited for a place to land
            self._prefill_of[flight.placement.prefill.instance_id].sent(flight)
        refused_by = tuple(sorted({*flight.refused_by, flight.placement.decode.instance_id}))
        tokens = flight.request.input_tokens
        again = self._place(flight.request, flight.record, flight.keys, tokens, 0, refused_by)
        if again is None:
            flight.record.refused = reason
        else:
            self._start(again)

    def _late(self, flight: Flight) -> None:
        """It waited for its prefill in vain."""
        self._open -= 1
        flight.record.refused = "ttft_objective_in_queue"
        if self._draws_more(flight):
            self._decode_of[flight.placement.decode.instance_id].dropped(flight)

    def _first_token(self, flight: Flight) -> None:
        if flight.is_first_job:
            flight.record.first_token_s = self._clock.now_s
        flight.token_at(self._clock.now_s)

    def _perhaps_land(self, flight: Flight) -> None:
        if flight.is_computed and flight.sent_s == flight.sent_s:

            def land() -> None:
                self._prefill_of[flight.placement.prefill.instance_id].sent(flight)
                self._decode_of[flight.placement.decode.instance_id].landed(flight)

            self._clock.at(flight.sent_s, land)

    def _finished(self, flight: Flight) -> None:
        self._open -= 1
        flight.finished(self._clock.now_s)

    def _preempt(self, flight: Flight, drawn: int) -> None:
        """As the gateway does it: placed again with prompt and tokens so far. Refused, the request ends unfinished."""
        self._preempted += 1
        self._open -= 1
        tokens = flight.request.input_tokens + drawn
        again = self._place(flight.request, flight.record, flight.keys, tokens, drawn)
        if again is not None:
            again.intervals = flight.intervals
            again.last_token_s = flight.last_token_s
            self._start(again)
