"""What a decode worker asks its messenger for when a job comes, or comes back. Pure."""

from dataclasses import replace

from mooncake_mesh.decode.growth import blocks_back
from mooncake_mesh.decode.preemption import swap_keys
from mooncake_mesh.decode.sequences import DecodeSequence
from mooncake_mesh.kv.layout import KvLayout
from mooncake_mesh.mesh.arena import Holder
from mooncake_proto.transfer import Acquire


def blocks_request(sequence: DecodeSequence, layout: KvLayout, me: Holder) -> Acquire:
    """Blocks for the prompt and the first token: with the prompt's KV in them once it has landed, or, where the prompt
    is computed here, as much of it as there is."""
    job, inline = sequence.job, sequence.job.inline_prefill
    request = Acquire(
        job_id=sequence.arena_job,
        instance_id=me.instance_id,
        incarnation=me.incarnation,
        keys=job.keys,
        n_blocks=layout.blocks_for(sequence.prompt_tokens + 1),
        max_cached_blocks=sequence.sealed_blocks,
        tenant=job.tenant,
    )
    if inline is not None:
        return replace(
            request,
            max_cached_blocks=(sequence.prompt_tokens - 1) // layout.block_tokens,
            fetch_from=inline.fetch_from,
            fetch_blocks=inline.fetch_prefix_blocks,
            read_limit_blocks=inline.read_limit_blocks,
        )
    return replace(
        request,
        landing=job.transfer_id,
        landing_blocks=layout.blocks_for(sequence.prompt_tokens),
        landing_layers=layout.layers,
        landing_from=job.kv_from,
    )


def return_request(sequence: DecodeSequence, layout: KvLayout, me: Holder) -> Acquire:
    """Blocks for a sequence that comes back: those of its whole blocks that are in the arena, and fresh ones.

    Nothing is read from SSD: the worker has it in memory.
    """
    keys = swap_keys(sequence, layout.block_tokens)
    return Acquire(
        job_id=sequence.arena_job,
        instance_id=me.instance_id,
        incarnation=me.incarnation,
        keys=b"".join(keys),
        n_blocks=blocks_back(sequence, layout.block_tokens),
        max_cached_blocks=len(keys),
        tenant=sequence.job.tenant,
        read_limit_blocks=0,
    )
