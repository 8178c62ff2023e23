"""Cost models from measurements, as data, and kept true by what is observed."""

import json
import random
from dataclasses import replace

import pytest

from mooncake_mesh.policy.correction import Correction
from mooncake_mesh.policy.cost_fit import (
    PolynomialCost,
    PrefillSample,
    StepSample,
    TransferSample,
    fit_cost,
    prefill_error,
)
from mooncake_mesh.policy.cost_model import CopyCorrected, kind_factors
from mooncake_mesh.policy.cost_profile import DEFAULT_KIND, dump_kinds, dump_profile, load_kinds, load_profile

PUBLISHED = [
    PrefillSample(uncached_tokens=n * 1024 - cached, cached_tokens=cached, elapsed_s=elapsed_s)
    for share, times in ((0.0, (1.002, 2.056, 4.479, 10.588, 27.514)), (0.95, (0.135, 0.226, 0.407, 0.881, 2.329)))
    for n, elapsed_s in zip((8, 16, 32, 64, 128), times, strict=True)
    for cached in [int(n * 1024 * share)]
]
"""Figure 14 of the FAST'25 paper: one LLaMA3-70B prompt on eight A800, nothing and 95 % of it cached."""

STEPS = [StepSample(batch=b, context_tokens=b * n, elapsed_s=0.02 + 0.001 * b + 1e-6 * b * n) for b, n in
         ((1, 100), (4, 1_000), (8, 500), (16, 4_000))]  # fmt: skip
TRANSFERS = [TransferSample(n_bytes=n, elapsed_s=0.001 + n / 5e9) for n in (1_000, 10**6, 10**8)]


def test_the_published_prefill_times_fit_a_polynomial() -> None:
    cost = fit_cost(PUBLISHED, STEPS, TRANSFERS)
    worst = max(abs(cost.prefill_s(s.uncached_tokens, s.cached_tokens) / s.elapsed_s - 1) for s in PUBLISHED)
    assert worst < 0.05
    assert prefill_error(cost, PUBLISHED) < 0.03
    assert cost.prefill_token_s == pytest.approx(1.1e-4, rel=0.1)
    assert cost.prefill_pair_s == pytest.approx(7.4e-10, rel=0.1)


def test_exact_samples_give_their_model_back() -> None:
    cost = fit_cost(PUBLISHED, STEPS, TRANSFERS)
    assert cost.decode_step_s(10, 20_000) == pytest.approx(0.02 + 0.01 + 0.02)
    assert cost.transfer_s(5 * 10**9) == pytest.approx(1.001)


def test_noise_makes_no_coefficient_negative() -> None:
    draw = random.Random(3)
    noisy = [
        PrefillSample(uncached_tokens=n, cached_tokens=c, elapsed_s=(0.01 + 0.001 * n) * draw.uniform(0.8, 1.2))
        for n in (10, 100, 400)
        for c in (0, 50, 1_000)
    ]
    cost = fit_cost(noisy, STEPS, TRANSFERS)
    assert prefill_error(cost, noisy) < 0.2
    assert min(cost.prefill_base_s, cost.prefill_token_s, cost.prefill_pair_s, cost.cached_token_s) >= 0


def test_one_sample_is_enough_and_none_or_an_impossible_one_is_refused() -> None:
    cost = fit_cost(PUBLISHED[:1], STEPS[:1], TRANSFERS[:1])
    assert cost.prefill_s(8 * 1024, 0) == pytest.approx(1.002)
    with pytest.raises(ValueError, match="samples"):
        fit_cost([], STEPS, TRANSFERS)
    with pytest.raises(ValueError, match="positive"):
        fit_cost([replace(PUBLISHED[0], elapsed_s=0.0)], STEPS, TRANSFERS)


# --- as data ----------------------------------------------------------------------------------------------------------


def test_a_profile_survives_being_written_and_read() -> None:
    cost = fit_cost(PUBLISHED, STEPS, TRANSFERS)
    assert load_profile(dump_profile(cost)) == cost


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "no JSON"),
        ("[]", "format"),
        ('{"format": "mooncake-mesh/cost/1"}', "prefill_base_s"),
    ],
)
def test_a_profile_says_what_is_wrong_with_it(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        load_profile(text)


@pytest.mark.parametrize("value", [-1.0, "1", True, None, float("nan")])
def test_a_coefficient_is_a_number_and_not_negative(value: object) -> None:
    data = json.loads(dump_profile(fit_cost(PUBLISHED, STEPS, TRANSFERS)))
    with pytest.raises(ValueError, match="step_base_s"):
        load_profile(json.dumps(data | {"step_base_s": value}))


def test_a_cost_has_no_negative_coefficient() -> None:
    cost = fit_cost(PUBLISHED, STEPS, TRANSFERS)
    with pytest.raises(ValueError, match="transfer_byte_s"):
        replace(cost, transfer_byte_s=-1.0)
    assert isinstance(cost, PolynomialCost)


# --- correction -------------------------------------------------------------------------------------------------------


def test_a_machine_that_is_twice_as_slow_is_found_out_at_once() -> None:
    known = Correction().observed(1.0, 2.0)
    assert known.factor == pytest.approx(2.0)
    assert known.error == pytest.approx(0.5)
    assert known.samples == 1
    for _ in range(50):
        known = known.observed(3.0, 6.0)
    assert known.factor == pytest.approx(2.0)
    assert known.error < 0.01


def test_it_follows_a_machine_that_changes() -> None:
    known = Correction()
    for _ in range(20):
        known = known.observed(1.0, 1.0)
    for _ in range(40):
        known = known.observed(1.0, 3.0)
    assert known.factor == pytest.approx(3.0, rel=0.05)


def test_twice_and_half_cancel_out_and_one_outlier_counts_for_little() -> None:
    known = Correction()
    for _ in range(200):
        known = known.observed(1.0, 2.0).observed(1.0, 0.5)
    assert 0.8 < known.factor < 1.25
    assert known.observed(1.0, 1e9).factor < 2.5


def test_the_pace_stays_where_it_is_until_the_factor_is_surely_another() -> None:
    known = Correction()
    for number in range(100):
        known = known.observed(1.0, 1.12 if number % 3 else 0.9)
        assert known.pace == 1.0
    for _ in range(30):
        known = known.observed(1.0, 1.3)
    assert known.pace == pytest.approx(1.21) or known.pace == pytest.approx(1.331)
    for _ in range(60):
        known = known.observed(1.0, 1.0)
    assert known.pace == 1.0, "back to exactly what was guessed"


def test_the_pace_of_a_machine_that_is_far_off_is_known_at_once_and_that_of_one_a_little_off_is_not() -> None:
    assert Correction().observed(1.0, 3.0).pace == pytest.approx(3.0, rel=0.05)
    assert Correction(factor=2.0, guess=2.0).observed(1.0, 2.3).pace == 2.0


def test_a_hiccup_does_not_change_the_pace() -> None:
    known = Correction()
    for _ in range(30):
        known = known.observed(1.0, 1.02)
    for _ in range(3):
        known = known.observed(1.0, 5.0)
    for _ in range(60):
        known = known.observed(1.0, 1.02)
        assert known.pace == 1.0


def test_who_was_not_seen_for_a_while_gets_another_chance() -> None:
    known = Correction().observed(1.0, 3.0)
    again = known.unseen()
    assert (again.pace, again.factor) == (1.0, known.factor)
    for _ in range(2):
        again = again.observed(1.0, 3.0)
    assert again.pace == pytest.approx(3.0, rel=0.05), "and does not get it for long"


@pytest.mark.parametrize(("modelled_s", "observed_s"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)])
def test_times_that_say_nothing_change_nothing(modelled_s: float, observed_s: float) -> None:
    assert Correction().observed(modelled_s, observed_s) == Correction()


# --- kinds ------------------------------------------------------------------------------------------------------------


def test_profiles_of_several_kinds_come_back_and_an_older_one_is_that_of_the_default_kind() -> None:
    cost = fit_cost(PUBLISHED, STEPS, TRANSFERS)
    slow = replace(cost, prefill_base_s=1.0)
    assert load_kinds(dump_kinds({"old": slow, DEFAULT_KIND: cost})) == {"old": slow, DEFAULT_KIND: cost}
    assert load_kinds(dump_profile(cost)) == {DEFAULT_KIND: cost}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "no JSON"),
        ('{"format": "mooncake-mesh/cost/2"}', "kinds"),
        ('{"format": "mooncake-mesh/cost/2", "kinds": {}}', "kinds"),
        ('{"format": "mooncake-mesh/cost/2", "kinds": {"a": 3}}', "a"),
        ('{"format": "mooncake-mesh/cost/2", "kinds": {"a": {"prefill_base_s": "x"}}}', "a.prefill_base_s"),
        ('{"format": "mooncake-mesh/cost/3"}', "format"),
    ],
)
def test_a_profile_of_kinds_is_refused_by_what_is_wrong_with_it(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        load_kinds(text)


def test_a_kind_is_priced_by_how_much_slower_it_is() -> None:
    cost = fit_cost(PUBLISHED, STEPS, TRANSFERS)
    prefills = {name: 3 * getattr(cost, name) for name in cost.__slots__ if name.startswith(("prefill", "cached"))}
    steps = {name: 0.5 * getattr(cost, name) for name in cost.__slots__ if name.startswith("step")}
    factors = kind_factors(replace(cost, **prefills, **steps), cost)
    assert factors.prefill == pytest.approx(3.0)
    assert factors.step == pytest.approx(0.5)


def test_corrected_copies_leave_the_rest_as_it_is() -> None:
    cost = fit_cost(PUBLISHED, STEPS, TRANSFERS)
    corrected = CopyCorrected(cost, 2.5)
    assert corrected.transfer_s(10**8) == pytest.approx(2.5 * cost.transfer_s(10**8))
    assert corrected.prefill_s(1000, 500) == cost.prefill_s(1000, 500)
    assert corrected.decode_step_s(4, 4000) == cost.decode_step_s(4, 4000)
