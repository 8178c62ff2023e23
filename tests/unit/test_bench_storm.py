"""How the benchmark of abort storms judges what it measured."""

from bench.fault_storm import StormResult, judged


def result(first_s: float, others_s: float) -> StormResult:
    return StormResult(
        before_s=(0.1, 0.1, 0.2), after_s=(first_s, *[others_s] * 6), states={"in the answer": 3, "refused": 1}
    )


def test_the_first_request_counts_by_itself() -> None:
    (violation,) = judged([result(0.2, 0.1)])
    assert "the first request is 2.00 times" in violation


def test_the_others_count_together() -> None:
    (violation,) = judged([result(0.1, 0.2)])
    assert "the median request is 2.00 times" in violation


def test_the_median_storm_decides() -> None:
    good, bad = result(0.1, 0.1), result(0.9, 0.9)
    assert judged([good, bad, good]) == []
    assert len(judged([bad, good, bad])) == 2


def test_up_to_half_as_much_again_is_allowed() -> None:
    assert judged([result(0.15, 0.15)]) == []


def test_a_storm_tells_both_ratios() -> None:
    assert str(result(0.12, 0.11)).endswith("the first 1.20x, medians 1.10x")
    assert str(result(0.1, 0.1)).startswith("4 streams left: 3 in the answer, 1 refused")
