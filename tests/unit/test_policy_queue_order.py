"""The order of a prefill queue: who overtakes whom, and who waits in vain."""

from math import inf

import pytest

from mooncake_mesh.policy.fair_share import FairShares
from mooncake_mesh.policy.queue_order import (
    QueueRules,
    WaitingPrompt,
    begin_s,
    insertion_index,
    is_late,
    queue_up,
    waiting_prompt,
)
from mooncake_mesh.policy.views import InstanceView, QueuedPrompt
from mooncake_proto.ids import InstanceId, NodeId

RULES = QueueRules(stretch=10.0, safety=0.5, aging_s=10.0)


def prompt(
    service_s: float,
    arrival_s: float = 0.0,
    *,
    ttft_s: float | None = 30.0,
    priority: int = 0,
    tenant: str = "",
    share_start: float = 0.0,
) -> WaitingPrompt:
    return WaitingPrompt(
        arrival_s=arrival_s,
        service_s=service_s,
        ttft_s=ttft_s,
        priority=priority,
        tenant=tenant,
        share_start=share_start,
    )


def test_an_empty_queue_has_one_place() -> None:
    assert insertion_index(prompt(1.0), [], free_s=0.0, rules=RULES) == 0


def test_a_short_prompt_overtakes_those_with_slack() -> None:
    queue = [prompt(2.0), prompt(3.0), prompt(4.0)]  # computed by 2, 5 and 9 s; half of the objective is 15 s
    assert insertion_index(prompt(1.0, 1.0), queue, free_s=0.0, rules=RULES) == 0


def test_nobody_with_an_earlier_due_time_is_overtaken() -> None:
    queue = [prompt(1.0), prompt(4.0)]  # due at 10 and 40 s
    assert insertion_index(prompt(2.0, 1.0), queue, free_s=0.0, rules=RULES) == 1


@pytest.mark.parametrize(("service_s", "index"), [(1.0, 0), (1.5, 2)])
def test_overtaking_ends_at_the_first_one_that_would_lose_its_objective(service_s: float, index: int) -> None:
    """The second is computed by 14 s and may be by 15 s: it has room for one second, not for more."""
    queue = [prompt(4.0), prompt(10.0)]
    assert insertion_index(prompt(service_s, 1.0), queue, free_s=0.0, rules=RULES) == index


def test_what_the_instance_computes_now_counts_against_the_slack() -> None:
    queue = [prompt(4.0)]
    assert insertion_index(prompt(1.0, 1.0), queue, free_s=10.0, rules=RULES) == 0
    assert insertion_index(prompt(1.0, 1.0), queue, free_s=10.5, rules=RULES) == 1


def test_a_prompt_without_an_objective_can_always_wait() -> None:
    queue = [prompt(500.0, ttft_s=None)]
    assert insertion_index(prompt(1.0, 1.0), queue, free_s=0.0, rules=RULES) == 0


def test_infinite_safety_is_earliest_deadline_first() -> None:
    rules = QueueRules(safety=inf)
    queue = [prompt(4.0), prompt(100.0)]
    assert insertion_index(prompt(3.0, 1.0), queue, free_s=0.0, rules=rules) == 0


def test_the_urgent_overtake_regardless_of_slack_and_the_less_urgent_never() -> None:
    queue = [prompt(20.0, priority=0), prompt(20.0, priority=1)]
    assert insertion_index(prompt(9.0, 1.0, priority=-1), queue, free_s=0.0, rules=RULES) == 0
    assert insertion_index(prompt(30.0, 1.0, priority=0), queue, free_s=0.0, rules=RULES) == 1
    assert insertion_index(prompt(0.1, 1.0, priority=2), queue, free_s=0.0, rules=RULES) == 2


@pytest.mark.parametrize(("arrival_s", "index"), [(19.0, 0), (21.0, 1)])
def test_who_has_waited_long_enough_is_not_overtaken_by_the_urgent(arrival_s: float, index: int) -> None:
    queue = [prompt(1.0, priority=2)]
    assert insertion_index(prompt(1.0, arrival_s), queue, free_s=20.0, rules=RULES) == index


def test_a_tenant_that_floods_the_queue_is_overtaken_whatever_its_slack() -> None:
    shares = FairShares()
    flood = [prompt(14.0, tenant="a", share_start=shares.start("a", 14.0)) for _ in range(4)]
    shares.served(flood[0].share_start)
    other = prompt(14.0, 1.0, tenant="b", share_start=shares.start("b", 14.0))
    assert insertion_index(other, flood[1:], free_s=14.0, rules=RULES) == 0
    short = prompt(0.1, 2.0, tenant="a", share_start=shares.start("a", 0.1))
    assert insertion_index(short, [other], free_s=14.0, rules=RULES) == 1


def test_shares_are_equal_where_tenants_keep_the_instance_busy() -> None:
    shares = FairShares()
    queue: list[WaitingPrompt] = []
    for tenant, count in (("a", 6), ("b", 3)):
        for _ in range(count):
            new = prompt(10.0, ttft_s=None, tenant=tenant, share_start=shares.start(tenant, 10.0))
            queue.insert(insertion_index(new, queue, free_s=0.0, rules=RULES), new)
    assert "".join(waiting.tenant for waiting in queue) == "ababab" + "aaa"


def test_a_tenant_that_was_idle_has_no_claim_to_the_past() -> None:
    shares = FairShares()
    for _ in range(5):
        shares.served(shares.start("a", 10.0))
    assert shares.start("b", 10.0) == 40.0
    assert shares.start("a", 10.0) == 50.0
    shares.idle()
    assert shares.start("a", 10.0) == shares.start("c", 10.0)


@pytest.mark.parametrize(("start_s", "late"), [(28.0, False), (29.5, True)])
def test_a_prompt_is_late_when_it_would_end_after_its_objective(start_s: float, late: bool) -> None:
    assert is_late(prompt(1.0), start_s) is late
    assert not is_late(prompt(1.0, ttft_s=None), start_s)


def test_rules_are_valid_once_built() -> None:
    with pytest.raises(ValueError, match="safety"):
        QueueRules(safety=-0.1)


# --- as far as a conductor knows a queue ------------------------------------------------------------------------------


def known(prefill_s: float, *, arrival_s: float = 0.0, ttft_s: float | None = 30.0, priority: int = 0) -> QueuedPrompt:
    return waiting_prompt(QueuedPrompt(tokens=1, prefill_s=prefill_s, priority=priority), arrival_s, ttft_s)


def instance(*queue: QueuedPrompt) -> InstanceView:
    return InstanceView(
        instance_id=InstanceId("p0"),
        node_id=NodeId("n0"),
        blocks_total=10,
        blocks_available=10,
        queue=queue,
        busy_until_s=sum(waiting.prefill_s for waiting in queue),
    )


BEGUN = QueuedPrompt(tokens=1, prefill_s=5.0)


@pytest.mark.parametrize(
    ("view", "service_s", "begins"),
    [
        (instance(BEGUN, known(4.0), known(6.0)), 1.0, (5.0, 2)),
        (instance(BEGUN, known(4.0), known(6.0)), 5.0, (9.0, 1)),  # due between them
        (instance(BEGUN, known(4.0), known(6.0)), 7.0, (15.0, 0)),
        (instance(BEGUN, known(4.0, ttft_s=10.0)), 1.0, (9.0, 0)),  # 9.5 s are all it has
        (instance(BEGUN, known(4.0, ttft_s=None)), 1.0, (5.0, 1)),
        (instance(BEGUN, known(4.0, priority=-1)), 1.0, (9.0, 0)),
        (instance(BEGUN, BEGUN), 1.0, (10.0, 0)),  # first come, first served
        (instance(), 1.0, (0.0, 0)),
    ],
)
def test_a_conductor_knows_whom_a_prompt_will_overtake(
    view: InstanceView, service_s: float, begins: tuple[float, int]
) -> None:
    assert begin_s(view, service_s, now_s=0.0) == begins


def test_it_expects_the_order_that_the_instance_will_have() -> None:
    queue = [known(4.0), known(6.0)]
    waiting = [prompt(4.0), prompt(6.0)]
    for service_s in (1.0, 5.0, 9.0, 2.0, 0.5):
        index = insertion_index(prompt(service_s), waiting, free_s=0.0)
        waiting.insert(index, prompt(service_s))
        queue_up(known(service_s), queue, sum(one.prefill_s for one in queue))
    assert [one.prefill_s for one in queue] == [one.service_s for one in waiting] == [0.5, 1.0, 2.0, 4.0, 5.0, 6.0, 9.0]
