"""Never two leaders, whatever is lost, late or asleep, as long as no clock is wrong by more than a tenth."""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mooncake_mesh.conductor.leadership import (
    BeginTerm,
    Campaign,
    Command,
    EndTerm,
    Event,
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

TTL_S = 5.0
N = 3
WRONG = 0.1
rates = st.floats(1 - WRONG, 1 + WRONG)
who = st.integers(0, N - 1)


@dataclass
class Etcd:
    """Leases that end TTL_S after their last renewal by its own clock, and one key with the lease of its holder."""

    rate: float
    leases: dict[str, float] = field(default_factory=dict)
    holder: tuple[str, int] | None = None
    revision: int = 0

    def answer(self, command: Command, asked_s: float, now_s: float) -> Event:
        self.expire(now_s)
        match command:
            case Campaign() if self.holder is None:
                self.revision += 1
                lease = f"lease{self.revision}"
                self.holder, self.leases[lease] = (lease, self.revision), now_s + TTL_S / self.rate
                return Won(asked_s=asked_s, lease=lease, ttl_s=TTL_S, epoch=self.revision)
            case Campaign():
                return Taken(leader="another")
            case Renew(lease=lease, epoch=epoch) if lease in self.leases and self.holder == (lease, epoch):
                self.leases[lease] = now_s + TTL_S / self.rate
                return Renewed(asked_s=asked_s, ttl_s=TTL_S)
            case Renew():
                return SeatLost()
            case GiveBack(lease=lease):
                self.leases.pop(lease, None)
                self.expire(now_s)
        return Unreachable(why="nobody asked")

    def expire(self, now_s: float) -> None:
        self.leases = {lease: end_s for lease, end_s in self.leases.items() if now_s < end_s}
        if self.holder is not None and self.holder[0] not in self.leases:
            self.holder = None


@dataclass
class Question:
    command: Command
    asked_s: float
    answer: Event | None = None


@dataclass
class Conductor:
    rate: float
    core: Leadership = field(default_factory=lambda: Leadership(lease_s=TTL_S))
    question: Question | None = None
    epoch: int = 0
    is_stopped: bool = False

    def now_s(self, true_s: float) -> float:
        return 1000.0 + self.rate * true_s


class OneLeader(RuleBasedStateMachine):
    """Requests reach etcd, and answers their conductor, when a rule says so; a conductor that no rule names sleeps."""

    @initialize(rate=rates, clocks=st.lists(rates, min_size=N, max_size=N))
    def begin(self, rate: float, clocks: list[float]) -> None:
        self.true_s = 0.0
        self.etcd = Etcd(rate)
        self.conductors = [Conductor(clock) for clock in clocks]
        self.epochs: list[int] = []

    @rule(by_s=st.sampled_from([0.05, 0.3, 0.9, 3.3, TTL_S - 0.01, TTL_S, TTL_S * 3]))
    def time_passes(self, by_s: float) -> None:
        self.true_s += by_s

    @rule(n=who)
    def wakes(self, n: int) -> None:
        self._feed(self.conductors[n], TimePassed())

    @rule(n=who)
    def etcd_hears(self, n: int) -> None:
        question = self.conductors[n].question
        if question is not None and question.answer is None:
            question.answer = self.etcd.answer(question.command, question.asked_s, self.true_s)

    @rule(n=who)
    def is_answered(self, n: int) -> None:
        conductor = self.conductors[n]
        if conductor.question is not None and conductor.question.answer is not None:
            answer, conductor.question = conductor.question.answer, None
            self._feed(conductor, answer)

    @rule(n=who)
    def gives_up_waiting(self, n: int) -> None:
        """The question or its answer is lost; what etcd did stays done."""
        conductor = self.conductors[n]
        if conductor.question is not None:
            conductor.question = None
            self._feed(conductor, Unreachable(why="timeout"))

    @rule(n=who)
    def goes_on_as_usual(self, n: int) -> None:
        """So that seats are won and kept for long."""
        self.wakes(n)
        self.etcd_hears(n)
        self.is_answered(n)

    @precondition(lambda self: sum(each.is_stopped for each in self.conductors) < N - 1)
    @rule(n=who)
    def stops(self, n: int) -> None:
        self.conductors[n].is_stopped = True
        self._feed(self.conductors[n], StopAsked())

    @invariant()
    def one_leads(self) -> None:
        leading = [each for each in self.conductors if each.core.leads(each.now_s(self.true_s))]
        assert len(leading) <= 1
        self.etcd.expire(self.true_s)
        for leader in leading:
            assert not leader.is_stopped
            assert self.etcd.holder is not None
            assert leader.core.epoch == self.etcd.holder[1] == self.epochs[-1]

    @invariant()
    def terms_are_told_of(self) -> None:
        for each in self.conductors:
            assert each.core.epoch == each.epoch
            assert self.epochs == sorted(set(self.epochs))

    def _feed(self, conductor: Conductor, event: Event) -> None:
        now_s = conductor.now_s(self.true_s)
        for command in conductor.core.handle(event, now_s):
            match command:
                case BeginTerm(epoch=epoch):
                    assert conductor.epoch == 0
                    conductor.epoch = epoch
                    self.epochs.append(epoch)
                case EndTerm():
                    conductor.epoch = 0
                case GiveBack():
                    self.etcd.answer(command, now_s, self.true_s)
                case _:
                    assert conductor.question is None, "one question at a time"
                    conductor.question = Question(command, now_s)


TestOneLeader = OneLeader.TestCase
