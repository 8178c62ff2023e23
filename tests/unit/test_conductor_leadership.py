"""Who leads, as lists of events: nobody uses more of a lease than it can be sure of."""

import pytest

from mooncake_mesh.conductor.leadership import (
    BeginTerm,
    Campaign,
    EndTerm,
    GiveBack,
    Leadership,
    Renew,
    Renewed,
    SeatLost,
    StopAsked,
    Taken,
    TimePassed,
    Unreachable,
    Won,
)

LEASE_S = 5.0
SAFE_S = 4.0
RENEW = Renew(lease="l", epoch=7)


def won(asked_s: float) -> Won:
    return Won(asked_s=asked_s, lease="l", ttl_s=LEASE_S, epoch=7)


def _wakes_at_s(leadership: Leadership) -> float | None:
    """Asked anew each time: a type checker would remember what an attribute was a line before."""
    return leadership.wake_at_s


@pytest.fixture
def standby() -> Leadership:
    """One that has just asked for the seat."""
    leadership = Leadership(lease_s=LEASE_S)
    assert leadership.wake_at_s == 0.0
    assert leadership.handle(TimePassed(), 0.0) == [Campaign()]
    return leadership


@pytest.fixture
def leader(standby: Leadership) -> Leadership:
    """One that has led since 0.1, by a lease asked for at 0."""
    assert standby.handle(won(0.0), 0.1) == [BeginTerm(epoch=7)]
    return standby


def test_a_standby_looks_again_and_again_and_says_who_leads(standby: Leadership) -> None:
    assert standby.handle(TimePassed(), 0.0) == [], "one question at a time"
    assert _wakes_at_s(standby) is None
    assert standby.handle(Taken(leader="a at tcp://a"), 1.0) == []
    assert (standby.leader, standby.trouble, standby.epoch, standby.leads(1.0)) == ("a at tcp://a", "", 0, False)
    assert _wakes_at_s(standby) == 1.5
    assert standby.handle(TimePassed(), 1.4) == []
    assert standby.handle(TimePassed(), 1.5) == [Campaign()]


def test_etcd_that_does_not_answer_is_asked_again(standby: Leadership) -> None:
    standby.handle(Taken(leader="a"), 0.5)
    standby.handle(TimePassed(), 1.0)
    assert standby.handle(Unreachable(why="refused"), 1.0) == []
    assert (standby.trouble, standby.leader) == ("refused", ""), "who leads now is not known"
    assert standby.handle(TimePassed(), 1.5) == [Campaign()]
    standby.handle(won(1.5), 1.6)
    assert (standby.trouble, standby.leads(1.6)) == ("", True)


def test_a_lease_counts_from_before_it_was_asked_for(leader: Leadership) -> None:
    assert (leader.epoch, leader.leads(0.1), leader.leads(SAFE_S - 0.01), leader.leads(SAFE_S)) == (
        7,
        True,
        True,
        False,
    )
    assert leader.wake_at_s == 1.0
    assert leader.handle(TimePassed(), 1.0) == [RENEW]
    assert leader.handle(Renewed(asked_s=1.0, ttl_s=LEASE_S), 1.9) == []
    assert (leader.leads(1.0 + SAFE_S - 0.01), leader.leads(1.0 + SAFE_S)) == (True, False)
    assert leader.wake_at_s == 2.0


def test_a_failed_renewal_is_tried_again_while_there_is_time(leader: Leadership) -> None:
    leader.handle(TimePassed(), 1.0)
    assert leader.handle(Unreachable(why="timeout"), 2.0) == []
    assert leader.handle(TimePassed(), 2.5) == [RENEW]
    assert leader.handle(Renewed(asked_s=2.5, ttl_s=LEASE_S), 3.0) == []
    assert leader.leads(2.5 + SAFE_S - 0.01)


def test_a_leader_that_cannot_renew_stops_before_etcd_gives_the_seat_away(leader: Leadership) -> None:
    leader.handle(TimePassed(), 1.0)
    assert leader.wake_at_s == SAFE_S, "the answer may never come"
    assert leader.handle(TimePassed(), SAFE_S) == [
        EndTerm(why="the lease could not be renewed in time"),
        GiveBack(lease="l"),
    ]
    assert (leader.epoch, leader.leads(SAFE_S)) == (0, False)
    assert leader.handle(Renewed(asked_s=1.0, ttl_s=LEASE_S), SAFE_S + 0.1) == [], "too late: others may know already"
    assert not leader.leads(SAFE_S + 0.1)
    assert leader.handle(TimePassed(), SAFE_S + 0.6) == [Campaign()]


def test_a_leader_that_slept_does_not_believe_the_answer_it_wakes_up_to(leader: Leadership) -> None:
    leader.handle(TimePassed(), 1.0)
    assert not leader.leads(60.0), "even before it is told that time has passed"
    commands = leader.handle(Renewed(asked_s=1.0, ttl_s=LEASE_S), 60.0)
    assert commands == [EndTerm(why="the lease could not be renewed in time"), GiveBack(lease="l")]


def test_a_seat_that_was_won_while_it_slept_is_given_back(standby: Leadership) -> None:
    assert standby.handle(won(0.0), SAFE_S) == [GiveBack(lease="l")]
    assert not standby.leads(SAFE_S)


def test_a_seat_that_etcd_says_is_lost_is_lost(leader: Leadership) -> None:
    leader.handle(TimePassed(), 1.0)
    assert leader.handle(SeatLost(), 1.1) == [EndTerm(why="etcd gave the seat up"), GiveBack(lease="l")]
    assert leader.handle(TimePassed(), 1.6) == [Campaign()]


def test_who_stops_gives_the_seat_back_and_asks_no_more(leader: Leadership) -> None:
    assert leader.handle(StopAsked(), 2.0) == [EndTerm(why="the process stops"), GiveBack(lease="l")]
    assert leader.wake_at_s is None
    assert leader.handle(TimePassed(), 9.0) == []


def test_who_wins_while_it_stops_gives_the_seat_back(standby: Leadership) -> None:
    assert standby.handle(StopAsked(), 0.1) == []
    assert standby.handle(won(0.0), 0.2) == [GiveBack(lease="l")]
    assert standby.handle(TimePassed(), 9.0) == []


def test_a_short_lease_is_looked_after_more_often() -> None:
    leadership = Leadership(lease_s=2.0)
    leadership.handle(TimePassed(), 0.0)
    leadership.handle(Taken(leader="a"), 0.0)
    assert leadership.wake_at_s == 0.2
