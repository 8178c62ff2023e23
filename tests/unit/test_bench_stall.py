"""How the benchmark of stalled parties judges what it measured."""

from bench.fault_stall import BASE_BYTES, MIB, Party, StallPlan, StallResult, table

PLAN = StallPlan(unread=4, tokens=100)


def result(party: Party, **growth: int) -> StallResult:
    judged = StallResult(party=party, plan=PLAN, growth=growth, ends={})
    judged.judge()
    return judged


def test_what_grows_more_than_its_ceiling_is_named() -> None:
    stalled = result(Party.CONDUCTOR, gateway0=BASE_BYTES + MIB, decode0=BASE_BYTES)
    assert stalled.violations == ["conductor stopped: gateway0 grew by 25.0 MiB, over 24.0"]


def test_the_gateway_may_keep_what_clients_do_not_read_and_nobody_else_may() -> None:
    assert result(Party.CLIENTS, gateway0=BASE_BYTES + MIB // 2).violations == []
    assert len(result(Party.CLIENTS, decode0=BASE_BYTES + MIB // 2).violations) == 1
    assert len(result(Party.CLIENTS, gateway0=BASE_BYTES + 2 * MIB).violations) == 1


def test_a_table_has_a_line_for_each_process_and_a_column_for_each_party() -> None:
    results = [result(party, gateway0=3 * MIB, conductor=MIB) for party in (Party.GATEWAY, Party.CONDUCTOR)]
    head, *lines = table(results).splitlines()
    assert head.split("  ")[0] == "process"
    assert [line.split()[0] for line in lines] == ["gateway0", "conductor"]
    assert lines[0].count("3.0 of 24.0 MiB") == 2
