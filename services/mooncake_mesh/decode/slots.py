"""What the engine is told of each sequence in a step. Pure."""

from mooncake_mesh.decode.sequences import DecodeSequence
from mooncake_mesh.engine.api import DecodeSlot, SampleRequest
from mooncake_mesh.policy.stopping import banned_tokens
from mooncake_proto.ids import JobId


class DecodeSlots:
    """One slot object for each job: they are brought up to date between all steps."""

    def __init__(self) -> None:
        self._slots: dict[JobId, DecodeSlot] = {}

    def next(self, sequence: DecodeSequence) -> DecodeSlot:
        """The sequence's slot, brought up to its next step."""
        job = sequence.job
        slot = self._slots.get(job.job_id)
        if slot is None:
            sample = SampleRequest(sampling=job.sampling, position=0, history=sequence.tokens, filter=sequence.filter)
            slot = DecodeSlot(sequence=job.job_id, token=0, position=0, blocks=sequence.blocks, sample=sample)
            self._slots[job.job_id] = slot
        slot.blocks = sequence.blocks  # others, once it has been out of the arena
        slot.position = sequence.position
        slot.token = int(sequence.tokens[sequence.position])
        slot.sample.position = sequence.drawn
        slot.sample.history = sequence.tokens[: sequence.length]
        slot.sample.banned = banned_tokens(sequence.drawn, job.stopping)
        return slot

    def forget(self, job_id: JobId) -> None:
        self._slots.pop(job_id, None)
