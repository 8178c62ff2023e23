"""Decode steps as CUDA graphs.

A step of a small model is hundreds of kernels, which a CPU asks for more slowly than the device works them off. A graph
is asked for as a whole. It has its inputs in the same memory each time, so one is made for each size of batch, when it
is first needed, and a batch takes the next larger one; what is left over computes with a context that nobody reads.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog
import torch

from mooncake_mesh.engine.attention import attention_pass
from mooncake_mesh.engine.attention_kernels import LayerCall
from mooncake_mesh.engine.cuda.attention import ContextTable, TokenAttention
from mooncake_mesh.kv.layout import KvLayout

_WARM_UPS: Final = 2
"""Steps before a graph is made: kernels are compiled, and libraries take their memory, outside of it."""

log = structlog.get_logger()

Compute = Callable[[], None]


class FixedStep:
    """A step of *batch* sequences with its inputs, and its results, in the same memory each time.

    Results are ``logits`` (batch, vocabulary), and ``newest`` K and V (batch, layers, 2, kv_heads, head_dim). Whoever
    is missing from the batch is at position 0 of *spare*, a context of one position.
    """

    def __init__(self, model: Any, layout: KvLayout, spare: torch.Tensor, batch: int, options: dict[str, int]) -> None:
        self._model, self._options = model, options
        self._nobody = (0, 0, spare.data_ptr(), spare.shape[3])
        self._batch, self._spare = batch, spare
        self._inputs = torch.empty((4, batch), dtype=torch.long, device=spare.device)
        self._tokens, self._positions, addresses, capacities = self._inputs
        self._table = ContextTable(addresses=addresses, capacities=capacities, positions=self._positions)
        groups = model.config.num_attention_heads // layout.kv_heads
        self._attention = TokenAttention(batch, layout.kv_heads, groups, layout.head_dim, spare.device)
        shape = (batch, layout.layers, 2, layout.kv_heads, layout.head_dim)
        self.newest = torch.empty(shape, dtype=spare.dtype, device=spare.device)
        self.logits = torch.empty(0)
        self.take([], [], [])

    def take(self, tokens: Sequence[int], positions: Sequence[int], contexts: Sequence[torch.Tensor]) -> None:
        """The next step's: the token of each sequence, its position, and its context (layers, 2, kv_heads, capacity,
        head_dim) on the device, with all positions before in it."""
        rows = [
            (token, position, context.data_ptr(), context.shape[3])
            for token, position, context in zip(tokens, positions, contexts, strict=True)
        ]
        rows += [self._nobody] * (self._batch - len(rows))
        self._inputs.copy_(torch.tensor(rows).T)

    def compute(self) -> None:
        """K and V of the tokens go to their contexts, results to their memory."""
        with attention_pass(self):
            output = self._model(
                input_ids=self._tokens[:, None], position_ids=self._positions[:, None], use_cache=False, **self._options
            )
        self.logits = output.logits[:, -1]

    def attend(self, call: LayerCall) -> torch.Tensor:
        q, new = call.q[:, :, 0].contiguous(), torch.stack((call.k[:, :, 0], call.v[:, :, 0]), dim=1)
        self.newest[:, call.layer] = new
        scaling = q.shape[2] ** -0.5 if call.scaling is None else call.scaling
        return self._attention(q, new, self._table, call.layer, window=call.window or 0, scaling=scaling)[:, None]

    def places(self, layer: int, end: int) -> None:
        """Layers are those of transformers."""


class StepGraphs:
    """The steps of a whole *model*, one for each power of two of sequences. *recorded* makes a graph of a computation,
    and returns what runs it."""

    def __init__(
        self,
        model: Any,
        layout: KvLayout,
        dtype: torch.dtype,
        options: dict[str, int],
        recorded: Callable[[Compute], Compute],
    ) -> None:
        self._model, self._layout, self._options = model, layout, options
        self._recorded = recorded
        shape = (layout.layers, 2, layout.kv_heads, 1, layout.head_dim)
        self._spare = torch.zeros(shape, dtype=dtype, device=model.device)
        self._made: dict[int, tuple[FixedStep, Compute]] = {}

    def run(
        self, tokens: Sequence[int], positions: Sequence[int], contexts: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`FixedStep.take` and :meth:`FixedStep.compute`: logits and newest K and V, valid until the next."""
        n = len(tokens)
        step, compute = self._of(1 << (n - 1).bit_length())
        step.take(tokens, positions, contexts)
        compute()
        return step.logits[:n], step.newest[:n]

    def _of(self, batch: int) -> tuple[FixedStep, Compute]:
        if batch not in self._made:
            step = FixedStep(self._model, self._layout, self._spare, batch, self._options)
            self._made[batch] = step, self._recorded(step.compute)
        return self._made[batch]


def recorded(compute: Compute) -> Compute:
    """*compute* as a CUDA graph; itself where it is no fixed row of kernels, as with experts that are chosen."""
    stream: Any = torch.cuda.current_stream()
    aside: Any = torch.cuda.Stream()
    aside.wait_stream(stream)
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UPS):
            compute()
    stream.wait_stream(aside)
    graph: Any = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # another thread copies meanwhile
            compute()
    except RuntimeError as error:
        log.warning("step_graph_unavailable", reason=str(error), instead="kernel by kernel")
        return compute
    run: Compute = graph.replay
    return run
