"""Kinds of simulated node, as data: how long work takes there, how much KV it holds, how fast bytes leave it.

Two kinds describe the papers' machine. ``8xa800`` follows from the hardware's numbers and one efficiency for each
resource, fitted to no throughput result of the papers; the targets of the experiments are stated for it.
``8xa800-fit`` is a regression on the latencies that FAST'25 publishes (Figure 14).
"""

from dataclasses import dataclass, replace
from typing import Final

GB: Final = 10**9
TERA: Final = 10**12

_LAYERS: Final = 80
_WIDTH: Final = 8192
_PARAMETERS: Final = 70e9
_GPUS: Final = 8
LLAMA_70B_KV_BYTES: Final = 327_680
"""Bytes of KV of one token: 80 layers, K and V, 8 heads of 128, two bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """A node and the model it serves; implements the scheduler's ``CostModel``.

    prefill  ``base + max(weights, token · (n - p + pad)) + pair · (n² - p²) + cached · p``, and never less than
             loading p tokens of KV from host memory (layer by layer, beside the computation)
    decode   ``base + max(weights, sequence · batch) + context · tokens``
    mixed    a step that does both, for chunked prefill
    """

    name: str
    kv_token_bytes: int
    prefill_base_s: float
    prefill_token_s: float
    prefill_pair_s: float
    prefill_pad_tokens: int
    cached_token_s: float
    weights_s: float
    step_base_s: float
    step_sequence_s: float
    step_context_token_s: float
    load_bytes_per_s: float
    network_bytes_per_s: float
    vram_kv_tokens: int
    dram_kv_tokens: int
    ssd_bytes_per_s: float = 3 * GB

    def prefill_s(self, uncached_tokens: int, cached_tokens: int) -> float:
        length = uncached_tokens + cached_tokens
        dense_s = max(self.weights_s, self.prefill_token_s * (uncached_tokens + self.prefill_pad_tokens))
        computed_s = self.prefill_base_s + dense_s + self.cached_token_s * cached_tokens
        computed_s += self.prefill_pair_s * (length * length - cached_tokens * cached_tokens)
        return max(computed_s, cached_tokens * self.kv_token_bytes / self.load_bytes_per_s)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        dense_s = max(self.weights_s, self.step_sequence_s * batch)
        return self.step_base_s + dense_s + self.step_context_token_s * context_tokens

    def transfer_s(self, n_bytes: int) -> float:
        return n_bytes / self.network_bytes_per_s

    def ssd_read_s(self, n_bytes: int) -> float:
        return n_bytes / self.ssd_bytes_per_s

    def mixed_step_s(self, batch: int, context_tokens: int, chunk_tokens: int, chunk_start: int) -> float:
        """One iteration of *batch* decoding sequences and *chunk_tokens* prompt tokens behind *chunk_start* others."""
        dense_s = max(self.weights_s, self.prefill_token_s * (chunk_tokens + batch + self.prefill_pad_tokens))
        end = chunk_start + chunk_tokens
        attention_s = self.prefill_pair_s * (end * end - chunk_start * chunk_start)
        return self.step_base_s + dense_s + attention_s + self.step_context_token_s * (context_tokens + chunk_start)


def gpu_node(
    name: str, *, flops: float, hbm_bytes_per_s: float, mfu: float, step_base_s: float = 0.010, hbm_share: float = 0.70
) -> NodeKind:
    """Eight GPUs that serve a 70 B model: costs from what the hardware can do and the share of it that is reached.

    *flops* and *hbm_bytes_per_s* are of one GPU; *mfu* is the share of the arithmetic that prefill reaches, *hbm_share*
    that of the memory bandwidth which decoding reaches.
    """
    all_flops = _GPUS * flops
    hbm = _GPUS * hbm_bytes_per_s * hbm_share
    return NodeKind(
        name=name,
        kv_token_bytes=LLAMA_70B_KV_BYTES,
        prefill_base_s=0.010,
        prefill_token_s=2 * _PARAMETERS / (all_flops * mfu),
        prefill_pair_s=2 * _LAYERS * _WIDTH / (all_flops * mfu),
        prefill_pad_tokens=128,  # the inefficiency of small chunks: 512 tokens cost 1.25 times their share
        cached_token_s=0.0,
        weights_s=2 * _PARAMETERS / hbm,
        step_base_s=step_base_s,
        step_sequence_s=2 * _PARAMETERS / (all_flops * 0.5),
        step_context_token_s=LLAMA_70B_KV_BYTES / hbm,
        load_bytes_per_s=100 * GB,
        network_bytes_per_s=87 * GB,
        vram_kv_tokens=1_280_000,  # 0.9 · 640 GB less weights and activations
        dram_kv_tokens=5_960 * 512,  # 1 TB
    )


_A800: Final = gpu_node("8xa800", flops=312 * TERA, hbm_bytes_per_s=2.0 * TERA, mfu=0.55)
_H800: Final = gpu_node("8xh800", flops=990 * TERA, hbm_bytes_per_s=3.35 * TERA, mfu=0.45)

NODES: Final = {
    "8xa800": _A800,
    "8xa800-fit": replace(
        _A800,
        name="8xa800-fit",
        prefill_base_s=0.0677,
        prefill_token_s=1.098e-4,
        prefill_pair_s=7.42e-10,
        prefill_pad_tokens=0,
        cached_token_s=2.57e-6,
        weights_s=0.0,
        step_base_s=0.0263,
        step_sequence_s=0.0,
        step_context_token_s=5e-8,
        load_bytes_per_s=127 * GB,
    ),
    "8xh800": replace(_H800, network_bytes_per_s=190 * GB),
    "this-machine": NodeKind(
        name="this-machine",
        kv_token_bytes=46_080,
        prefill_base_s=0.01,
        prefill_token_s=0.0012,
        prefill_pair_s=0.0,
        prefill_pad_tokens=0,
        cached_token_s=2e-6,
        weights_s=0.0,
        step_base_s=0.03,
        step_sequence_s=0.003,
        step_context_token_s=5e-6,
        load_bytes_per_s=2 * GB,
        network_bytes_per_s=2 * GB,
        vram_kv_tokens=20_480,
        dram_kv_tokens=20_480,
    ),
}
"""``this-machine``: a 135 M model on one CPU core, as measured (see ``conductor/service.py``), KV over loopback TCP."""
