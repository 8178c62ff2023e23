"""Clients, the gateway and the conductor stall: nobody's memory grows beyond its ceiling, and then all goes on.

A short round of `python -m bench.faults --stalled`.
"""

import pytest

from bench.fault_stall import Party, StallPlan, run_stalls, table

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(240)]

PLAN = StallPlan(unread=16, tokens=300, stall_s=6.0, per_s=10.0, warm_s=2.0, recover_s=3.0)


@pytest.mark.parametrize("party", list(Party), ids=lambda party: party.name.lower())
def test_whoever_stalls_the_memory_of_every_process_stays_under_its_ceiling(party: Party) -> None:
    (result,) = run_stalls(PLAN, [party])
    said = f"{table([result])}\n{result.ends}"
    assert result.violations == [], said
    assert result.ends.get("finished"), said  # there was load, and it was served
