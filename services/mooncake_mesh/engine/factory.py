"""Makes the engine a worker was configured with; torch is imported only for one that needs it."""

import os
from typing import Final

from mooncake_mesh import config as settings
from mooncake_mesh.config_layerwise import LayerwiseConfig
from mooncake_mesh.engine.api import Cores, Engine
from mooncake_mesh.engine.fake import FakeConfig, FakeEngine, FakeOutput, FakeTiming
from mooncake_mesh.errors import ConfigError, ModelError
from mooncake_mesh.kv.layers import StagePart
from mooncake_mesh.kv.layout import KvLayout

WorkerConfig = settings.PrefillConfig | settings.DecodeConfig

_OUTPUTS: Final = {
    settings.FakeOutput.HASH: FakeOutput.ECHO_HASH,
    settings.FakeOutput.UTF8: FakeOutput.UTF8,
}


def make_engine(config: WorkerConfig, part: StagePart | None = None, cores: Cores | None = None) -> Engine:
    """A loaded engine, or the *part* of it that a pipeline stage has, not yet bound to an arena; *cores* are shared.

    Raises ModelError, or ConfigError for an impossible fake one or part.
    """
    if config.engine is settings.EngineKind.FAKE:
        return _fake_engine(config, part)
    try:
        from mooncake_mesh.engine.runner import TransformersEngine
    except ImportError as error:
        raise ModelError(f"{error}; the transformers engine needs: pip install 'mooncake-mesh[engine]'") from error
    return TransformersEngine.load(
        config.model,
        dtype=config.dtype,
        block_tokens=config.block_tokens,
        device=config.device,
        threads=config.threads or len(os.sched_getaffinity(0)),
        part=part,
        layerwise=config.layerwise if isinstance(config, settings.PrefillConfig) else LayerwiseConfig(),
        cores=cores,
    )


def _fake_engine(config: WorkerConfig, part: StagePart | None) -> FakeEngine:
    fake = config.fake
    layout = KvLayout(
        layers=fake.layers,
        kv_heads=fake.kv_heads,
        head_dim=fake.head_dim,
        dtype=config.dtype,
        block_tokens=config.block_tokens,
    )
    timing = FakeTiming(
        prefill_s_base=fake.prefill_s_base,
        prefill_s_per_token=fake.prefill_s_per_token,
        decode_s_base=fake.decode_s_base,
        decode_s_per_slot=fake.decode_s_per_slot,
    )
    try:
        made = FakeConfig(name=config.model, layout=layout, output=_OUTPUTS[fake.output], timing=timing)
    except ValueError as error:
        raise ConfigError(str(error), path="fake") from error
    try:
        return FakeEngine(made, layers=None if part is None else part.of(layout.layers))
    except ValueError as error:
        raise ConfigError(str(error), path="prefill.split") from error
