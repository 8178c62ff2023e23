"""The counter-based generator against its published vectors."""

import json
from pathlib import Path

import pytest

from mooncake_mesh.engine.philox import philox4x32, uniform

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sampler.json").read_text())


@pytest.mark.parametrize("vector", GOLDEN["philox4x32_10"], ids=lambda v: v["counter"][0])
def test_published_vectors(vector: dict[str, list[str]]) -> None:
    c0, c1, c2, c3 = (int(word, 16) for word in vector["counter"])
    k0, k1 = (int(word, 16) for word in vector["key"])
    assert [f"{word:08x}" for word in philox4x32((c0, c1, c2, c3), (k0, k1))] == vector["words"]


@pytest.mark.parametrize("frozen", GOLDEN["uniform"], ids=lambda f: f"{f['seed']}@{f['position']}")
def test_uniform_is_frozen(frozen: dict[str, float]) -> None:
    assert uniform(int(frozen["seed"]), int(frozen["position"])) == frozen["value"]


def test_uniform_is_uniform() -> None:
    n = 20_000
    counts = [0] * 20
    for position in range(n):
        counts[int(uniform(42, position) * 20)] += 1
    expected = n / 20
    chi_square = sum((count - expected) ** 2 / expected for count in counts)
    assert chi_square < 43.8  # 99.9 % quantile at 19 degrees of freedom


def test_negative_and_wide_seeds_are_legal_and_differ() -> None:
    values = {uniform(seed, 0) for seed in (0, -1, 2**63 - 1, -(2**63), 1 << 32, 1)}
    assert len(values) == 6
    assert all(0.0 <= value < 1.0 for value in values)
