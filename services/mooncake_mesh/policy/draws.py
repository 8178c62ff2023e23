"""Numbers that look random and are a value: the same seed and position give the same number on every machine."""

from typing import Final

_MASK: Final = (1 << 64) - 1


def draw(seed: int, position: int) -> int:
    """The *position*-th number of the sequence of *seed*, uniform over 0 … 2⁶⁴ - 1 (SplitMix64, Steele et al. 2014)."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
