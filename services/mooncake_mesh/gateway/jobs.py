"""The two jobs of a placed request, as the workers get them. Pure."""

from typing import Final

from mooncake_mesh.gateway.api import TokenRequest
from mooncake_mesh.gateway.request_events import StartJobs
from mooncake_proto.ids import BlockKey, TransferId
from mooncake_proto.serving import DecodeGate, DecodeJob, InlinePrefill, Placement, PrefillJob, QueueTurn

_LEAST_LEFT_S: Final = 0.001


def start_jobs(
    request: TokenRequest,
    placement: Placement,
    *,
    tokens: bytes,
    keys: bytes,
    key_root: BlockKey,
    drawn_tokens: int,
    stream_endpoint: str,
    gate: DecodeGate | None,
    elapsed_s: float,
) -> StartJobs:
    """Both jobs of *placement*, or only that of prefill where one token is all that is wanted, or only that of decode
    where one instance does both.

    *tokens* are prompt and drawn tokens, *keys* the chain of their whole blocks. Times on the wire are what is left,
    *elapsed_s* after the request came: no two processes share a clock. Only the first token of the whole request has an
    objective.
    """
    left_s = max(_LEAST_LEFT_S, request.deadline_s - elapsed_s)
    transfer_id = TransferId(f"{placement.job_id}.kv")
    is_single = request.stopping.max_new_tokens - drawn_tokens <= 1
    ttft_s = None if drawn_tokens else placement.ttft_slo_s
    first_token_within_s = None if ttft_s is None else max(0.0, ttft_s - elapsed_s)
    inline = None
    if placement.inline_step is not None:
        inline = InlinePrefill(
            step=placement.inline_step,
            fetch_from=placement.fetch_from,
            fetch_prefix_blocks=placement.fetch_prefix_blocks,
            read_limit_blocks=placement.read_limit_blocks,
        )
    decode = DecodeJob(
        job_id=placement.job_id,
        transfer_id=transfer_id,
        incarnation=placement.decode.incarnation,
        tokens=tokens,
        keys=keys,
        key_root=key_root,
        sampling=request.sampling,
        stopping=request.stopping,
        drawn_tokens=drawn_tokens,
        stream_endpoint=stream_endpoint,
        deadline_s=left_s,
        gate=gate,
        first_token_within_s=None if gate is None else first_token_within_s,
        tenant=request.tenant,
        inline_prefill=inline,
        priority=request.priority,
        kv_from="" if inline is not None else placement.prefill.messenger_endpoint,
    )
    if inline is not None:
        return StartJobs(placement=placement, prefill=None, decode=decode)
    prefill = PrefillJob(
        job_id=placement.job_id,
        transfer_id=transfer_id,
        incarnation=placement.prefill.incarnation,
        tokens=tokens,
        keys=keys,
        sampling=request.sampling,
        stopping=request.stopping,
        drawn_tokens=drawn_tokens,
        stream_endpoint=stream_endpoint,
        decode=None if is_single else placement.decode,
        deadline_s=left_s,
        fetch_from=placement.fetch_from,
        fetch_prefix_blocks=placement.fetch_prefix_blocks,
        local_prefix_blocks=placement.local_prefix_blocks,
        turn=QueueTurn(
            service_s=placement.prefill_est_s,
            waited_s=elapsed_s,
            first_token_within_s=first_token_within_s,
            priority=request.priority,
            fairness_id=request.tenant or request.fairness_id,
        ),
        tenant=request.tenant,
        read_limit_blocks=placement.read_limit_blocks,
    )
    return StartJobs(placement=placement, prefill=prefill, decode=None if is_single else decode)
