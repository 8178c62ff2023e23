"""From logits to tokens."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mooncake_mesh.engine.api import Drawn, SampleRequest  # noqa: E402
from mooncake_mesh.engine.sampling import draw, draw_row, kept_logits, penalised  # noqa: E402
from mooncake_mesh.errors import InvalidRequest, ModelError  # noqa: E402
from mooncake_proto.serving import Sampling  # noqa: E402

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sampler.json").read_text())
NEG_INF = float("-inf")


def request(
    position: int = 0, *, history: tuple[int, ...] = (), banned: tuple[int, ...] = (), **rules: float
) -> SampleRequest:
    sampling = Sampling(**rules)  # type: ignore[arg-type]
    return SampleRequest(sampling=sampling, position=position, history=np.array(history, dtype=np.int32), banned=banned)


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> Any:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def kept(logits: list[float], **rules: float) -> list[int]:
    """Token ids that the rules leave."""
    result = kept_logits(torch.tensor(logits), Sampling(**rules))  # type: ignore[arg-type]
    tokens: list[int] = torch.nonzero(torch.isfinite(result)).flatten().tolist()
    return tokens


def test_temperature_zero_takes_the_largest() -> None:
    logits = random_logits(4, 100)
    assert [d.token for d in draw(logits, [request(temperature=0.0)] * 4)] == logits.argmax(-1).tolist()


def test_greedy_honours_penalties_and_bans() -> None:
    logits = torch.tensor([5.0, 4.9, 1.0, 0.0])
    assert draw_row(logits, request(temperature=0.0, banned=(0,))).token == 1
    assert draw_row(logits, request(1, history=(2, 0), temperature=0.0, presence_penalty=0.5)).token == 1
    assert draw_row(logits, request(0, history=(0,), temperature=0.0, repetition_penalty=1.2)).token == 1
    assert draw_row(logits, request(0, history=(0,), temperature=0.0, presence_penalty=0.5)).token == 0


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]))
    n = 4000
    counts = np.bincount([draw_row(logits, request(i, seed=7)).token for i in range(n)], minlength=5)
    expected = n * np.array([0.5, 0.25, 0.15, 0.07, 0.03])
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # 99.9 % quantile at 4 degrees of freedom


def test_temperature_flattens_the_distribution() -> None:
    logits = torch.log(torch.tensor([0.9, 0.1]))
    n = 2000
    share = sum(draw_row(logits, request(i, seed=3, temperature=2.0)).token for i in range(n)) / n
    assert share == pytest.approx(0.25, abs=0.04)  # sqrt(0.1) / (sqrt(0.1) + sqrt(0.9))


def test_draws_do_not_depend_on_the_batch() -> None:
    logits = random_logits(6, 5000)
    requests = [
        request(i, seed=i, temperature=0.3 * i, top_p=1 - 0.1 * i, top_k=100 * i, top_logprobs=i % 3) for i in range(6)
    ]
    together = draw(logits, requests)
    alone = [draw(logits[i : i + 1], [requests[i]])[0] for i in range(6)]
    reverse = draw(logits.flip(0), requests[::-1])[::-1]
    assert together == alone == reverse


def test_frozen_draws() -> None:
    golden = GOLDEN["draws"]
    logits = torch.tensor([math.sin(1.7 * i) * 4 for i in range(golden["vocabulary"])])
    drawn = [draw_row(logits, request(i, seed=golden["seed"], temperature=0.8)).token for i in range(16)]
    assert drawn == golden["temperature_0.8"]
    drawn = [draw_row(logits, request(i, seed=golden["seed"], top_p=0.9, top_k=40)).token for i in range(16)]
    assert drawn == golden["top_p_0.9_top_k_40"]


def test_seed_and_position_both_matter() -> None:
    logits = torch.zeros(10_000)
    tokens = {draw_row(logits, request(p, seed=s)).token for p in range(5) for s in range(5)}
    assert len(tokens) > 20


def test_top_k() -> None:
    assert kept([1.0, 3.0, 2.0, 0.0], top_k=2) == [1, 2]
    assert kept([1.0, 3.0, 2.0, 0.0], top_k=9) == [0, 1, 2, 3]
    assert kept([1.0, 2.0, 2.0, 2.0, 2.0], top_k=2) == [1, 2]


def test_top_p() -> None:
    logits = np.log([0.1, 0.5, 0.3, 0.1]).tolist()
    assert kept(logits, top_p=0.4) == [1]
    assert kept(logits, top_p=0.55) == [1, 2]
    assert kept(logits, top_p=0.85) == [0, 1, 2]
    assert kept(logits, top_p=0.0) == [1]


@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0])
def test_top_p_over_a_wide_vocabulary_agrees_with_a_whole_sort(spread: float) -> None:
    logits = spread * random_logits(1, 4000)[0]
    order = sorted(range(4000), key=lambda i: (-float(logits[i]), i))
    probabilities = torch.softmax(logits.double(), -1)
    mass, nucleus = 0.0, []
    for token in order:
        if mass >= 0.7:
            break
        nucleus.append(token)
        mass += float(probabilities[token])
    ours = torch.nonzero(torch.isfinite(kept_logits(logits, Sampling(top_p=0.7)))).flatten().tolist()
    assert len(set(ours) ^ set(nucleus)) <= 1  # the last one may fall either way by rounding


def test_min_p() -> None:
    logits = np.log([0.6, 0.3, 0.09, 0.01]).tolist()
    assert kept(logits, min_p=0.4) == [0, 1]
    assert kept(logits, min_p=0.1) == [0, 1, 2]
    assert kept(logits, min_p=1.0) == [0]


def test_top_p_works_on_what_top_k_left() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert kept(logits, top_p=0.6) == [0, 1]
    assert kept(logits, top_p=0.56, top_k=2) == [0]  # 0.4 of 0.7 is 0.571


def test_repetition_counts_prompt_and_drawn_tokens() -> None:
    logits = torch.tensor([2.0, -2.0, 2.0, -2.0])
    result = penalised(logits, request(1, history=(0, 0, 1), repetition_penalty=2.0))
    assert result.tolist() == [1.0, -4.0, 2.0, -2.0]
    assert logits.tolist() == [2.0, -2.0, 2.0, -2.0]


def test_frequency_and_presence_count_drawn_tokens_only() -> None:
    logits = torch.zeros(4)
    result = penalised(logits, request(3, history=(3, 3, 0, 1, 1), frequency_penalty=0.5, presence_penalty=0.25))
    assert result.tolist() == [-0.75, -1.25, 0.0, 0.0]
    result = penalised(logits, request(0, history=(3, 3, 0), frequency_penalty=0.5, presence_penalty=0.25))
    assert result.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_banned_tokens_are_never_drawn() -> None:
    logits = torch.tensor([9.0, 1.0, 9.0])
    assert {draw_row(logits, request(i, banned=(0, 2))).token for i in range(50)} == {1}


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.125]))
    rules: dict[str, Any] = {"temperature": 0.1, "top_k": 1, "repetition_penalty": 3.0}
    drawn = draw_row(logits, request(banned=(0,), history=(1,), top_logprobs=3, **rules))
    assert drawn.logprob is not None
    assert math.exp(drawn.logprob.logprob) == pytest.approx(float(torch.softmax(logits, -1)[drawn.token]))
    assert [token for token, _ in drawn.logprob.top] == [0, 1, 2]
    assert [math.exp(value) for _, value in drawn.logprob.top] == pytest.approx([0.5, 0.25, 0.125])


def test_logprobs_only_when_asked_for() -> None:
    logits = torch.zeros(4)
    assert draw_row(logits, request(temperature=0.0)) == Drawn(token=0)
    only_drawn = draw_row(logits, request(temperature=0.0, top_logprobs=0)).logprob
    assert only_drawn is not None
    assert only_drawn.top == ()
    assert only_drawn.logprob == pytest.approx(math.log(0.25))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error(bad: float) -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = bad
    with pytest.raises(ModelError, match="not finite"):
        draw(logits, [request(), request()])


def test_bfloat16_logits_are_taken() -> None:
    logits = random_logits(2, 50).bfloat16()
    drawn = draw(logits, [request(temperature=0.0), request(top_p=0.5)])
    assert drawn[0].token == int(logits[0].argmax())


class _Only:
    """A filter that allows the same tokens everywhere."""

    failure: InvalidRequest | None = None

    def __init__(self, *tokens: int, vocabulary: int) -> None:
        self._mask = np.zeros(vocabulary, np.bool_)
        self._mask[list(tokens)] = True

    def allowed(self, drawn: np.ndarray) -> np.ndarray:
        return self._mask


@pytest.mark.parametrize(
    "rules", [{"temperature": 0.0}, {"top_p": 0.3}, {"top_k": 2}, {"min_p": 0.5}, {"temperature": 2.0}], ids=str
)
def test_only_what_the_filter_allows_is_drawn_whatever_is_likely(rules: dict[str, float]) -> None:
    """The other rules work on what the filter leaves: tokens 3 and 5 are the least likely ones. A vocabulary of whole
    words of bits is longer than the logits."""
    logits = torch.tensor([9.0, 8.0, 7.0, -3.0, 6.0, -4.0, 5.0])
    tokens = set()
    for seed in range(30):
        sampling = Sampling(seed=seed, **rules)  # type: ignore[arg-type]
        request = SampleRequest(
            sampling=sampling, position=0, history=np.zeros(0, np.int32), filter=_Only(3, 5, vocabulary=32)
        )
        tokens.add(draw(logits[None], [request])[0].token)
    assert tokens <= {3, 5}
    assert 3 in tokens


def test_log_probabilities_do_not_know_of_the_filter() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0])
    request = SampleRequest(
        sampling=Sampling(temperature=0.0, top_logprobs=1),
        position=0,
        history=np.zeros(0, np.int32),
        filter=_Only(2, vocabulary=3),
    )
    [drawn] = draw(logits[None], [request])
    assert drawn.token == 2
    assert drawn.logprob is not None
    assert drawn.logprob.top[0][0] == 0
    assert drawn.logprob.logprob == pytest.approx(float(torch.log_softmax(logits, 0)[2]))


def test_biases_move_logits() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0])

    def greedy(*biases: tuple[int, float]) -> int:
        sampling = Sampling(temperature=0.0, logit_bias=biases)
        return draw(logits[None], [SampleRequest(sampling=sampling, position=0, history=np.zeros(0, np.int32))])[
            0
        ].token

    assert greedy() == 0
    assert greedy((0, -100.0)) == 1
    assert greedy((0, -1.5), (2, 1.5)) == 2
    assert greedy((0, -1.5), (2**62, 100.0)) == 1  # no token of this model: nobody else in the batch is to suffer
    assert logits.tolist() == [2.0, 1.0, 0.0]
