"""How a request is brought to a stage of its life, and known to be there.

Nothing in the mesh helps: a stage is seen in what processes log and report, and held, where it would be short, by
stopping (SIGSTOP) a process that the next stage needs. Whoever injects a fault then lets the held ones go on.
"""

import enum
from dataclasses import dataclass, field
from typing import Final

from bench.fault_mesh import CHUNK_TOKENS, MAX_BATCH, Ask, placements, requests_running
from mooncake_proto.control import MemberState
from tests.mesh.harness import Mesh

TOKENS: Final = 24
_N_CHUNKS: Final = 4
_SEED: Final = 7


class Stage(enum.Enum):
    """Of one request of a scene; the others are near it."""

    PLACING = "placing"
    PREFIX = "waiting for its prefix"
    QUEUED = "queued for prefill"
    FIRST_CHUNK = "in the first chunk"
    BETWEEN_CHUNKS = "between chunks"
    TRANSFER = "KV in transfer"
    ADMISSION = "waiting for a place in the batch"
    DECODING = "decoding"
    FINISHING = "finishing"


@dataclass(slots=True)
class Scene:
    """Requests on their way, one of them at its stage. ``held`` are stopped until :meth:`go_on`."""

    mesh: Mesh
    asks: list[Ask] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    prefill: str = "prefill0"
    decode: str = "decode0"
    job_id: str = ""

    def ask(self, prompt: str, max_tokens: int = TOKENS, *, seed: int | None = None) -> None:
        self.asks.append(Ask(prompt=prompt, max_tokens=max_tokens, seed=seed).start(self.mesh.http))

    def place(self, prompt: str, max_tokens: int = TOKENS, *, seed: int | None = None) -> None:
        """Start a request and wait until it is placed; the scene is about it from now on."""
        before = len(placements(self.mesh))
        self.ask(prompt, max_tokens, seed=seed)
        event = self.mesh.wait(lambda: next(iter(placements(self.mesh)[before:]), None), what="a placement")
        self.prefill, self.decode, self.job_id = event["prefill"], event["decode"], event["job_id"]

    def hold(self, name: str) -> None:
        self.mesh.stop(name)
        self.held.append(name)

    def go_on(self, *, but: str = "") -> None:
        """End all holds, *but* that of one process, which the fault has taken over."""
        for name in self.held:
            if name != but and self.mesh.is_running(name):
                self.mesh.cont(name)
        self.held.clear()

    def node_of(self, worker: str) -> str:
        """The messenger beside a worker."""
        return {"prefill0": "messenger0", "prefill1": "messenger1", "decode0": "messenger2", "decode1": "messenger3"}[
            worker
        ]


def bring(mesh: Mesh, stage: Stage, nonce: str) -> Scene:
    """A greedy and a seeded request, one of them at *stage* when this returns: which, changes with *nonce*.

    *nonce* makes their prompts new to the mesh.
    """
    scene = Scene(mesh)
    prompt = _prompt(f"{nonce} {stage.name.lower()}")
    seed, other_seed = (None, _SEED) if len(nonce) % 2 else (_SEED, None)
    settings = _Settings(prompt=prompt, seed=seed, other_prompt="another: " + prompt, other_seed=other_seed)
    _SETTINGS[stage](scene, settings)
    return scene


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """The request whose stage is meant, and the other one, which is there before it where that makes no difference."""

    prompt: str
    seed: int | None
    other_prompt: str
    other_seed: int | None


def _prompt(words: str, n_chunks: int = _N_CHUNKS) -> str:
    """One that takes *n_chunks* chunks; the tokenizer has a token for each byte."""
    length = n_chunks * CHUNK_TOKENS - CHUNK_TOKENS // 2
    return (words + " goes on and on" * length)[:length]


# --- one by one -------------------------------------------------------------------------------------------------------


def _placing(scene: Scene, by: _Settings) -> None:
    scene.hold("conductor")
    scene.ask(by.prompt, seed=by.seed)
    scene.ask(by.other_prompt, seed=by.other_seed)
    scene.mesh.wait(lambda: requests_running(scene.mesh) == 2 or None, what="the gateway to take both requests")


def _prefix(scene: Scene, by: _Settings) -> None:
    """An answer lies where it was decoded; who goes on from it fetches it from there, and that node holds still."""
    mesh, opening = scene.mesh, by.prompt[:20]
    scene.place(opening, 8 * 16)
    history = scene.asks[0]
    end = history.end(timeout_s=30.0)
    assert end.kind == "finished", end
    source = scene.node_of(scene.decode)
    mesh.wait(lambda: mesh.status().indexed_blocks[f"node{source[-1]}"] >= 8 or None, what="the answer to be indexed")
    mesh.wait_idle()
    scene.hold(source)
    scene.place(opening + history.expected() + by.prompt, seed=by.seed)
    fetching = scene.node_of(scene.prefill)
    mesh.wait(lambda: _load(mesh, fetching).load.running_jobs or None, what="a fetch of the prefix to begin")


def _queued(scene: Scene, by: _Settings) -> None:
    for number in range(4):
        scene.place(_prompt(f"{number} before {by.prompt[:16]}", 20), 4)
    scene.place(by.other_prompt, seed=by.other_seed)
    scene.place(by.prompt, seed=by.seed)
    scene.mesh.wait(lambda: _n_jobs(scene.mesh, scene.prefill) >= 3 or None, what="a queue")


def _n_jobs(mesh: Mesh, name: str) -> int:
    load = _load(mesh, name).load
    return load.queued_jobs + load.running_jobs


def _first_chunk(scene: Scene, by: _Settings) -> None:
    scene.place(by.other_prompt, seed=by.other_seed)
    scene.place(by.prompt, seed=by.seed)
    scene.mesh.wait_log(scene.prefill, "prompt_begun", job_id=scene.job_id)


def _between_chunks(scene: Scene, by: _Settings) -> None:
    _first_chunk(scene, by)
    _wait_chunk(scene, 1)


def _transfer(scene: Scene, by: _Settings) -> None:
    """Some slices have landed, and the receiver takes no more while the last chunk is computed."""
    _first_chunk(scene, by)
    _wait_chunk(scene, 0)
    scene.hold(scene.node_of(scene.decode))
    _wait_chunk(scene, _N_CHUNKS - 1)


def _admission(scene: Scene, by: _Settings) -> None:
    """Every place in both batches is taken by sequences that go on for a while."""
    for number in range(2 * MAX_BATCH):
        scene.ask(f"{number} fills a place: {by.prompt[:16]}", 160)
    for ask in scene.asks:
        ask.opened.wait_chunks(2)
    scene.place(by.other_prompt[:CHUNK_TOKENS], seed=by.other_seed)
    scene.place(by.prompt[:CHUNK_TOKENS], seed=by.seed)
    scene.mesh.wait_log(scene.decode, "kv_landed", job_id=scene.job_id)


def _decoding(scene: Scene, by: _Settings) -> None:
    _wait_tokens(scene, by, 5)


def _finishing(scene: Scene, by: _Settings) -> None:
    _wait_tokens(scene, by, TOKENS - 1)


def _wait_tokens(scene: Scene, by: _Settings, n: int) -> None:
    scene.place(by.other_prompt[:CHUNK_TOKENS], 2 * TOKENS, seed=by.other_seed)
    scene.place(by.prompt[:CHUNK_TOKENS], seed=by.seed)
    scene.asks[-1].opened.wait_chunks(n)


def _wait_chunk(scene: Scene, number: int) -> None:
    start = number * CHUNK_TOKENS
    scene.mesh.wait_log(scene.prefill, "chunk_computed", job_id=scene.job_id, start=start)


def _load(mesh: Mesh, name: str) -> MemberState:
    return next(state for state in mesh.status().cluster.members if state.member.instance_id == name)


_SETTINGS: Final = {
    Stage.PLACING: _placing,
    Stage.PREFIX: _prefix,
    Stage.QUEUED: _queued,
    Stage.FIRST_CHUNK: _first_chunk,
    Stage.BETWEEN_CHUNKS: _between_chunks,
    Stage.TRANSFER: _transfer,
    Stage.ADMISSION: _admission,
    Stage.DECODING: _decoding,
    Stage.FINISHING: _finishing,
}
