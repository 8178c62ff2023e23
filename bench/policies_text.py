"""Texts for live load: sentences of about fourteen tokens each."""

from random import Random
from typing import Final

_SENTENCES: Final = (
    "The harbour was quiet when the first boats came in with the tide. ",
    "Nobody had expected the letter to arrive before the end of winter. ",
    "A small engine can pull a long train if the track is level. ",
    "She counted the steps twice and wrote the number on the wall. ",
)


def sentences(random: Random, n: int) -> str:
    """*n* of them, drawn."""
    return "".join(random.choice(_SENTENCES) for _ in range(n))
