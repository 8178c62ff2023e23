"""A prefill instance that has nothing to compute leaves the cores it shares, and one that has does not."""

from types import SimpleNamespace
from typing import cast

from mooncake_mesh.prefill.core import PrefillCore
from mooncake_mesh.prefill.service import PrefillService
from tests.unit.test_decode_forming import Cores
from tests.unit.test_prefill_core import core, submitted


def looks(jobs: PrefillCore, cores: Cores | None) -> object:
    """What the service's loop looks for when it has its turn."""
    service = SimpleNamespace(_core=jobs, _station=SimpleNamespace(cores=cores))
    return PrefillService._next_to_compute(cast(PrefillService, service))


def test_the_cores_are_left_when_nothing_is_to_be_computed() -> None:
    jobs, cores = core(), Cores()
    assert looks(jobs, cores) is None
    assert cores.rests == 1
    assert looks(jobs, None) is None


def test_they_are_kept_for_the_next_prompt() -> None:
    jobs, cores = core(), Cores()
    entry = submitted(jobs, "a")
    jobs.next_to_acquire()
    jobs.acquired(entry, (1, 2), 0)
    assert looks(jobs, cores) is entry
    assert cores.rests == 0
