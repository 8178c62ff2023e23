"""The engine: a transformers model that computes on the pages of an arena."""

import inspect
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import structlog
import torch

from mooncake_mesh.config_layerwise import LayerwiseConfig
from mooncake_mesh.engine.api import Cores, DecodeSlot, Drawn, ModelSpec, PrefillChunk, TokenArray, TokenizerFile
from mooncake_mesh.engine.attention import (
    AttentionPass,
    PrefillPass,
    SharingPass,
    attention_pass,
    decode_pass,
    token_places,
)
from mooncake_mesh.engine.contexts import Context, ContextCache, KeptContext, kept_contexts
from mooncake_mesh.engine.copying import CopyThread
from mooncake_mesh.engine.kv_storage import ArenaPages, Span, torch_dtype
from mooncake_mesh.engine.layer_loading import ChunkContexts
from mooncake_mesh.engine.model import LoadedModel, load_model
from mooncake_mesh.engine.model_files import fingerprint, resolve_model, weight_files
from mooncake_mesh.engine.native.loading import host_kernels
from mooncake_mesh.engine.preloading import Preloads
from mooncake_mesh.engine.sampling import draw
from mooncake_mesh.engine.staging import Staging
from mooncake_mesh.engine.streams import streams_of
from mooncake_mesh.errors import InvariantViolated, ModelError
from mooncake_mesh.kv.layers import StagePart
from mooncake_mesh.kv.layout import KvDtype
from mooncake_proto.ids import BlockKey

if TYPE_CHECKING:
    from mooncake_mesh.engine.cuda.steps import StepGraphs

DEFAULT_CONTEXT_BYTES: Final = 1 << 30
DEFAULT_LAYERWISE: Final = LayerwiseConfig()

log = structlog.get_logger()

_T = TypeVar("_T")


class TransformersEngine:
    """Engine of :mod:`mooncake_mesh.engine.api` over a loaded model.

    ``context_bytes`` bounds the device memory for contiguous K and V of sequences in work (see
    :mod:`mooncake_mesh.engine.contexts`); a sequence beyond it is slower, not wrong. ``layerwise`` says how prefill
    copies KV between arena and device. With ``cores`` a CPU engine has as many threads, in each layer, as they say.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        name: str,
        fingerprint: str,
        folder: Path,
        context_bytes: int = DEFAULT_CONTEXT_BYTES,
        layerwise: LayerwiseConfig = DEFAULT_LAYERWISE,
        cores: Cores | None = None,
    ) -> None:
        self._model: Any = loaded.forward
        self._hidden_size: int = loaded.model.config.hidden_size
        self._folder = folder
        self._kernels = loaded.kernels
        self._device = loaded.device  # a stage's packed model has no parameter to tell it
        self._cores = cores if self._device.type == "cpu" else None
        self._layers = loaded.layers
        self._dtype = torch_dtype(loaded.layout.dtype)
        self._spec = ModelSpec(
            name=name,
            fingerprint=fingerprint,
            layout=loaded.layout,
            vocab_size=loaded.vocab_size,
            max_context_tokens=loaded.max_context_tokens,
            layers=loaded.layers,
            hidden_bytes=loaded.model.config.hidden_size * loaded.layout.dtype.item_bytes,
        )
        streams, is_cpu = streams_of(self._device), self._device.type == "cpu"
        self._arena = ArenaPages(loaded.layout, loaded.kernels or host_kernels(loaded.layout), Staging(streams))
        self._contexts = ContextCache(self._arena, self._device, context_bytes, loaded.layers)
        copies = CopyThread(layerwise.overlap, layerwise.least_bytes if is_cpu else 0, streams)
        self._preloads = Preloads(self._arena, self._contexts, loaded.layers, copies)
        self._chunks = ChunkContexts(
            self._arena, self._contexts, loaded.layers, self._device, copies, layer_budget=layerwise.budget
        )
        keeps_last = "logits_to_keep" in inspect.signature(loaded.model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if keeps_last else {}
        self._graphs = _step_graphs(loaded, self._dtype, self._last_only)
        head = loaded.model.get_output_embeddings()
        if head is not None:
            head.register_forward_pre_hook(_packed)

    @classmethod
    def load(
        cls,
        model: str,
        *,
        dtype: KvDtype,
        block_tokens: int,
        device: str = "cpu",
        threads: int | None = None,
        context_bytes: int = DEFAULT_CONTEXT_BYTES,
        part: StagePart | None = None,
        layerwise: LayerwiseConfig = DEFAULT_LAYERWISE,
        cores: Cores | None = None,
    ) -> Self:
        """Find, check and load *model* (a folder, a hub id or the default model's name), or its *part* for a stage.

        Raises ModelError, or ConfigError for a part that the model does not have.
        *threads* sets torch's threads for the whole process; None leaves torch's choice.
        """
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ModelError(f"device {device!r} was asked for, but torch sees no CUDA device")
        if threads is not None:
            torch.set_num_threads(threads)
        began_s = time.monotonic()
        folder = resolve_model(model)
        weight_files(folder)
        loaded = load_model(folder, dtype=dtype, block_tokens=block_tokens, device=torch.device(device), part=part)
        log.info("model_loaded", model=model, dtype=dtype.value, seconds=round(time.monotonic() - began_s, 2))
        return cls(
            loaded,
            name=model,
            fingerprint=fingerprint(folder),
            folder=folder,
            context_bytes=context_bytes,
            layerwise=layerwise,
            cores=cores,
        )

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def kv_bytes(self) -> int:
        """KV on the device: contexts of sequences in work, and the window of a layer budget."""
        return self._contexts.kept_bytes + self._chunks.window_bytes

    @property
    def vocabulary(self) -> TokenizerFile:
        return TokenizerFile(path=self._folder / "tokenizer.json", size=self._spec.vocab_size)

    def bind(self, arena: memoryview) -> None:
        self._contexts.clear()
        self._arena.bind(arena)

    def unbind(self) -> None:
        self._contexts.clear()
        self._arena.unbind()

    def prefill(self, chunk: PrefillChunk, on_layer: Callable[[int], None]) -> Drawn | None:
        with torch.inference_mode():
            inputs, n_tokens = self._inputs(chunk)
            span = Span(
                sequence=chunk.sequence,
                blocks=chunk.blocks,
                start=chunk.start,
                end=chunk.start + n_tokens,
                keys=chunk.keys,
            )
            positions = torch.arange(span.start, span.end)[None]
            draws = chunk.sample is not None and self._layers.has_head
            model, options = (self._model, self._last_only) if draws else (self._model.base_model, {})
            with self._chunks.open(span, on_layer) as opened:
                attention = PrefillPass(span, opened.context, opened.stores.store, self._kernels)
                output = self._forward(model, attention, [span], positions, inputs, **options)
            if not self._layers.has_head:
                self._hidden(chunk.hidden_out).copy_(output.last_hidden_state[0])
            return draw(output.logits[:, -1], [chunk.sample])[0] if chunk.sample is not None and draws else None

    def preload(self, sequence: str, blocks: Sequence[int], n_tokens: int, keys: Sequence[BlockKey]) -> "Future[None]":
        with torch.inference_mode():
            return self._preloads.begin(Span(sequence=sequence, blocks=blocks, start=n_tokens, end=n_tokens, keys=keys))

    def retire(self, sequence: str, keys: Sequence[BlockKey]) -> None:
        self._contexts.retire(sequence, keys)

    def _inputs(self, chunk: PrefillChunk) -> tuple[dict[str, torch.Tensor], int]:
        """What the model takes, and how many tokens that is."""
        if self._layers.has_embedding:
            return {"input_ids": _as_tensor(chunk.tokens)[None]}, len(chunk.tokens)
        hidden = self._hidden(chunk.hidden_in)
        return {"inputs_embeds": hidden[None]}, len(hidden)

    def _hidden(self, buffer: memoryview | None) -> torch.Tensor:
        """(tokens, hidden_size), a view of *buffer*."""
        if buffer is None:
            raise InvariantViolated("a stage was given no place for activations")
        return torch.frombuffer(buffer, dtype=self._dtype).view(-1, self._hidden_size)

    def decode(self, batch: Sequence[DecodeSlot]) -> list[Drawn]:
        if not batch:
            return []
        spans = [
            Span(sequence=slot.sequence, blocks=slot.blocks, start=slot.position, end=slot.position + 1)
            for slot in batch
        ]
        with torch.inference_mode():
            contexts = self._contexts.open(spans)
            if self._graphs is not None and (kept := kept_contexts(contexts)) is not None:
                logits = self._graph_step(self._graphs, batch, spans, kept)
            else:
                logits = self._step(batch, spans, contexts)
            return draw(logits, [slot.sample for slot in batch])

    def _step(self, batch: Sequence[DecodeSlot], spans: Sequence[Span], contexts: Sequence[Context]) -> torch.Tensor:
        """(batch, vocabulary)"""
        tokens = torch.tensor([[slot.token] for slot in batch])
        positions = torch.tensor([[slot.position] for slot in batch])
        attention = decode_pass(self._arena, spans, contexts, self._kernels)
        output = self._forward(self._model, attention, spans, positions, {"input_ids": tokens}, **self._last_only)
        attention.store()
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _graph_step(
        self, graphs: "StepGraphs", batch: Sequence[DecodeSlot], spans: Sequence[Span], kept: Sequence[KeptContext]
    ) -> torch.Tensor:
        """As :meth:`_step`."""
        tokens, positions = [slot.token for slot in batch], [slot.position for slot in batch]
        logits, newest = self._done(spans, lambda: graphs.run(tokens, positions, [context.kv for context in kept]))
        self._arena.write_tokens(*token_places(self._arena, spans), newest)
        return logits

    def _forward(
        self,
        module: Any,
        attention: AttentionPass,
        spans: Sequence[Span],
        positions: torch.Tensor,
        inputs: dict[str, torch.Tensor],
        **options: int,
    ) -> Any:
        """Run *module* over *inputs*."""
        if self._cores is not None:
            attention = SharingPass(attention, self._cores)
        on_device = {name: tensor.to(self._device) for name, tensor in inputs.items()}

        def run() -> Any:
            with attention_pass(attention):
                return module(**on_device, position_ids=positions.to(self._device), use_cache=False, **options)

        return self._done(spans, run)

    def _done(self, spans: Sequence[Span], run: Callable[[], _T]) -> _T:
        """What *run* returns; the spans' contexts grow when it comes to its end, and are dropped when it does not."""
        try:
            output = run()
        except BaseException:
            self._contexts.abandon(spans)
            raise
        finally:
            if self._cores is not None:
                self._cores.end()
        self._contexts.commit(spans)
        return output


def _step_graphs(loaded: LoadedModel, dtype: torch.dtype, options: dict[str, int]) -> "StepGraphs | None":
    """Those of a whole model on a CUDA device; None elsewhere, and without Triton."""
    if loaded.device.type != "cuda" or loaded.layers.count < loaded.layers.total:
        return None
    try:
        from mooncake_mesh.engine.cuda.steps import StepGraphs, recorded
    except ImportError as error:
        log.warning("step_graphs_unavailable", reason=str(error), instead="kernel by kernel")
        return None
    return StepGraphs(loaded.model, loaded.layout, dtype, options, recorded)


def _packed(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The last token's activations without the strides of the chunk they were cut from.

    torch counts them as contiguous, but oneDNN's bf16 product goes by the strides and takes 20 times as long.
    """
    return (args[0].clone(memory_format=torch.contiguous_format), *args[1:])


def _as_tensor(tokens: TokenArray) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.long)
