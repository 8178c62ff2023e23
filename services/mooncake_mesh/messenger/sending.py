"""The sending side of a transfer, pure: which slices are ready, on their way, and done.

Slices become ready while prefill computes. What is ready when the path is free goes out as one batch, neighbouring
layers of one block merged into one span, so that a slow path sends fewer and larger pieces.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mooncake_mesh.errors import SliceLost
from mooncake_mesh.messenger.landing import SliceSpan
from mooncake_proto.ids import BlockId, JobId, TransferId
from mooncake_proto.transfer import SliceReady, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingSlice:
    """A span of one of the sender's blocks: bytes ``offset`` .. ``offset + size_bytes`` of its arena."""

    span: SliceSpan
    block: BlockId
    offset: int
    size_bytes: int


class Outbound:
    """One transfer on its way out. Mutated only by its methods."""

    def __init__(
        self, transfer_id: TransferId, job_id: JobId, blocks: Sequence[BlockId], *, layers: int, slice_bytes: int
    ) -> None:
        self.transfer_id = transfer_id
        self.job_id = job_id
        self.sent_bytes = 0
        self.overlapped_bytes = 0
        self.is_finishing = False
        self._blocks = tuple(blocks)
        self._layers = layers
        self._slice_bytes = slice_bytes
        self._wanted: frozenset[int] | None = None
        self._ready: dict[int, int] = defaultdict(int)
        self._announced: dict[int, int] = defaultdict(int)

    @property
    def n_blocks(self) -> int:
        return len(self._blocks)

    @property
    def skipped_blocks(self) -> int:
        """Blocks that the receiver had already."""
        return 0 if self._wanted is None else len(self._blocks) - len(self._wanted)

    def planned(self, slots: Sequence[Slot]) -> None:
        """The receiver said which blocks it wants."""
        self._wanted = frozenset(slot.logical for slot in slots if slot.logical < len(self._blocks))

    def ready(self, announced: SliceReady) -> None:
        """Layers of some blocks are written.

        Announcing a slice twice has no effect; raises SliceLost outside the job.
        """
        if not (
            0 <= announced.layer < announced.layer + announced.n_layers <= self._layers
            and 0 <= announced.first_block <= announced.first_block + announced.n_blocks <= len(self._blocks)
        ):
            raise SliceLost(f"transfer {self.transfer_id} has no slices {announced}")
        mask = ((1 << announced.n_layers) - 1) << announced.layer
        for logical in range(announced.first_block, announced.first_block + announced.n_blocks):
            self._ready[logical] |= mask & ~self._announced[logical]
            self._announced[logical] |= mask

    def has_all(self, logicals: Iterable[int]) -> bool:
        """Whether all layers of these blocks were announced."""
        whole = (1 << self._layers) - 1
        return all(self._announced.get(logical) == whole for logical in logicals)

    def finish(self) -> None:
        """Nothing more will become ready; what goes out from now on no longer overlaps with compute."""
        self.is_finishing = True

    def take(self, max_bytes: int) -> list[OutgoingSlice]:
        """Next batch of about *max_bytes*, oldest block first.

        Empty when nothing is ready (or the plan is not here).
        """
        batch: list[OutgoingSlice] = []
        if self._wanted is None:
            return batch
        size = 0
        for logical in sorted(self._ready):
            mask = self._ready.pop(logical)
            if logical not in self._wanted:
                continue
            for span in _runs(logical, mask):
                piece = self._piece(span)
                batch.append(piece)
                size += piece.size_bytes
            if size >= max_bytes:
                break
        return batch

    def acknowledged(self, batch: Sequence[OutgoingSlice]) -> None:
        size = sum(piece.size_bytes for piece in batch)
        self.sent_bytes += size
        if not self.is_finishing:
            self.overlapped_bytes += size

    def _piece(self, span: SliceSpan) -> OutgoingSlice:
        block = self._blocks[span.logical]
        return OutgoingSlice(
            span=span,
            block=block,
            offset=(block * self._layers + span.layer) * self._slice_bytes,
            size_bytes=span.n_layers * self._slice_bytes,
        )


def _runs(logical: int, mask: int) -> list[SliceSpan]:
    """Runs of set bits of *mask* as spans."""
    runs = []
    layer = 0
    while mask >> layer:
        if not mask >> layer & 1:
            layer += 1
            continue
        end = layer
        while mask >> end & 1:
            end += 1
        runs.append(SliceSpan(logical=logical, layer=layer, n_layers=end - layer))
        layer = end
    return runs
