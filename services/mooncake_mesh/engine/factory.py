"""Makes the engine a worker was configured with; torch is imported only for one that needs it."""

import enum

from mooncake_mesh.engine.api import Engine
from mooncake_mesh.engine.fake import FakeConfig, FakeEngine, FakeTiming
from mooncake_mesh.errors import ModelError
from mooncake_mesh.kv.layout import KvDtype, KvLayout


class EngineKind(enum.Enum):
    TRANSFORMERS = "transformers"
    FAKE = "fake"


def make_engine(
    *,
    kind: EngineKind,
    model: str,
    dtype: KvDtype,
    block_tokens: int,
    device: str = "cpu",
    threads: int | None = None,
    fake_timing: FakeTiming | None = None,
) -> Engine:
    """A loaded engine, not yet bound to an arena.

    *model* is a local folder, a hub id or the name of the default model; for the fake engine only the name it reports.
    *threads* is the number of compute threads of this process, None leaves torch's choice. Raises ModelError.
    """
    match kind:
        case EngineKind.FAKE:
            layout = KvLayout(layers=4, kv_heads=1, head_dim=8, dtype=dtype, block_tokens=block_tokens)
            return FakeEngine(FakeConfig(name=model, layout=layout, timing=fake_timing or FakeTiming()))
        case EngineKind.TRANSFORMERS:
            try:
                from mooncake_mesh.engine.runner import TransformersEngine
            except ImportError as error:
                raise ModelError(
                    f"{error}; the transformers engine needs: pip install 'mooncake-mesh[engine]'"
                ) from error
            return TransformersEngine.load(
                model, dtype=dtype, block_tokens=block_tokens, device=device, threads=threads
            )
