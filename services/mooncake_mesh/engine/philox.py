"""Counter-based random numbers: Philox4x32-10.

A function of (key, counter) without state. The sampler's key is the request's seed and its counter the number of tokens
drawn before, so a request that moves to another worker continues with the numbers it would have had, and no request's
numbers depend on what else is in the batch.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11.
"""

from typing import Final

_WORD: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10

Words4 = tuple[int, int, int, int]


def philox4x32(counter: Words4, key: tuple[int, int]) -> Words4:
    """Four random 32-bit words for four counter words and two key words, all unsigned."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        low = _MULTIPLIERS[0] * c0
        high = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & _WORD, (low >> 32) ^ c3 ^ k1, low & _WORD
        k0 = (k0 + _KEY_STEPS[0]) & _WORD
        k1 = (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits; of *seed* and *position* the low 64 bits (two's complement) count."""
    words = philox4x32(
        (position & _WORD, (position >> 32) & _WORD, 0, 0),
        (seed & _WORD, (seed >> 32) & _WORD),
    )
    return float((words[0] >> 5) << 26 | words[1] >> 6) / float(1 << 53)
