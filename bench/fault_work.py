"""What clients ask under random faults, and of which mesh.

One of fake engines, whose answers are worked out, or of real ones, whose answers are recorded before the first fault.
"""

import random
import time
from typing import Final, Protocol

from bench.fault_mesh import LEASES, Ask, Books, fault_mesh
from mooncake_mesh.engine.model_files import DEFAULT_MODEL, resolve_model
from tests.mesh.harness import Mesh

DEADLINE_S: Final = 60.0
_GATEWAY: Final = [f"--request-deadline-s={DEADLINE_S:g}"]
_CONDUCTOR: Final = ["--ttft-slo-s=600", "--tbt-slo-s=60", *LEASES]
_FAMILIES: Final = 6
_FAKE: Final = {
    "gateway": _GATEWAY,
    "conductor": _CONDUCTOR,
    "prefill": ["--fake-prefill-s-per-token=0.0005", "--chunk-tokens=64"],
    "decode": ["--fake-decode-s-base=0.03", "--max-batch=8"],
}
_WARM_UP: Final = 40
_UNMET_DESCRIPTORS: Final = 24
"""Of a process that the requests before the first fault may not have had talk to all others: two sockets and more."""


class Work(Protocol):
    """``clients`` ask at a time; ``engine`` names the fork server that the mesh needs."""

    @property
    def clients(self) -> int: ...

    @property
    def engine(self) -> str: ...

    def mesh(self) -> Mesh:
        """Not started yet."""

    def begin(self, mesh: Mesh, books: Books) -> None:
        """Before the first fault: open the books."""

    def ask(self, rng: random.Random) -> Ask:
        """The next request of a client, whose numbers *rng* gives. Called on threads."""

    def end(self, books: Books) -> list[str]:
        """After the last fault: what is not as at the start, in words."""


class FakeWork:
    """Short texts, many with a common beginning, greedy and seeded, and up to 80 tokens of each."""

    clients = 10
    engine = "fake"

    def mesh(self) -> Mesh:
        return fault_mesh(_FAKE)

    def begin(self, mesh: Mesh, books: Books) -> None:
        books.open()

    def ask(self, rng: random.Random) -> Ask:
        family = f"family {rng.randrange(_FAMILIES)} tells " * rng.randrange(1, 12)
        return Ask(
            prompt=f"{family}{rng.randrange(10**9)}",
            max_tokens=rng.choice((1, 2, 8, 30, 80)),
            seed=rng.choice((None, rng.randrange(1, 10**6))),
        )

    def end(self, books: Books) -> list[str]:
        return books.close()


class OneNodeWork(FakeWork):
    """The same with all workers on one node, where KV changes hands, and prompts and their decoding share an arena that
    is full all the time. There is no other messenger: while it is away, nobody can be served."""

    def mesh(self) -> Mesh:
        return Mesh(prefill_nodes=(0, 0), decode_nodes=(0, 0), arena_bytes="1MiB", flags=_FAKE)

    def begin(self, mesh: Mesh, books: Books) -> None:
        rng = random.Random("before the first fault")
        for ask in [self.ask(rng).start(mesh.http) for _ in range(_WARM_UP)]:
            ask.opened.wait_over(timeout_s=DEADLINE_S)
        books.note(_UNMET_DESCRIPTORS)

    def end(self, books: Books) -> list[str]:
        return books.differences(time.monotonic())


class RealWork:
    """A few prompts with recorded answers, in float32: rounding must not decide between tokens. Half of the requests
    find their prompt in the pool; the others have a salt of their own, and so compute it.

    An answer counts that is the same alone and in a crowd: elsewhere two tokens are nearly as likely as each other.
    """

    clients = 3
    engine = "transformers"

    def __init__(self) -> None:
        self._model = str(resolve_model(DEFAULT_MODEL))
        self._asks: list[Ask] = []

    def mesh(self) -> Mesh:
        return Mesh(
            engine=self.engine,
            model=self._model,
            dtype="float32",
            prefill_nodes=(0, 1),
            decode_nodes=(2, 3),
            flags={"gateway": _GATEWAY, "conductor": _CONDUCTOR, "prefill": ["--chunk-tokens=64"]},
        )

    def begin(self, mesh: Mesh, books: Books) -> None:
        """Raises AssertionError when fewer than half of the answers can count."""
        asks = [
            Ask(
                prompt=f"Story {number}. "
                + "Once upon a time there was a king who had three sons. " * (1 + 3 * number % 8),
                max_tokens=(2, 8, 24)[number % 3],
                seed=number if number % 2 else None,
                more={"model": self._model, "ignore_eos": True},
            )
            for number in range(12)
        ]
        alone = [self._answer(ask.start(mesh.http)) for ask in asks]
        crowd = [self._answer(ask) for ask in [ask.start(mesh.http) for ask in asks]]
        self._asks = [ask for ask, one, other in zip(asks, alone, crowd, strict=True) if one == other]
        for ask in self._asks:
            ask.answer = ask.opened.text
        assert 2 * len(self._asks) >= len(asks), f"{len(self._asks)} of {len(asks)} answers are the same in a crowd"
        books.note()

    def _answer(self, ask: Ask) -> str:
        ask.opened.wait_over(timeout_s=DEADLINE_S)
        assert not ask.opened.errors, ask.opened.errors
        return ask.opened.text

    def ask(self, rng: random.Random) -> Ask:
        known = rng.choice(self._asks)
        salt = {"cache_salt": f"salt {rng.randrange(10**9)}"} if rng.random() < 0.5 else {}
        return Ask(
            prompt=known.prompt,
            max_tokens=known.max_tokens,
            seed=known.seed,
            answer=known.answer,
            more={**known.more, **salt},
        )

    def end(self, books: Books) -> list[str]:
        return []
