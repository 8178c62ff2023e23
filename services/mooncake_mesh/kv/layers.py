"""Which layers of a model a pipeline stage has, and how a model is split over stages. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRange:
    """Layers ``first`` .. ``end - 1`` of a model of ``total`` layers."""

    first: int
    end: int
    total: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end <= self.total:
            raise ValueError(f"layers {self.first}..{self.end - 1} are no part of a model of {self.total}")

    @classmethod
    def whole(cls, total: int) -> "LayerRange":
        return cls(first=0, end=total, total=total)

    @property
    def count(self) -> int:
        return self.end - self.first

    @property
    def has_embedding(self) -> bool:
        """Whether tokens come in here, not activations."""
        return self.first == 0

    @property
    def has_head(self) -> bool:
        """Whether tokens are drawn here."""
        return self.end == self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """Stage ``stage`` of ``stages``. ``split`` counts the layers of each stage; empty splits them evenly."""

    stage: int
    stages: int
    split: tuple[int, ...] = ()

    def of(self, total: int) -> LayerRange:
        """This stage's layers of a model of *total* layers. Raises ValueError when the split does not fit it."""
        return layer_ranges(total, self.split or even_split(total, self.stages))[self.stage]


def even_split(total: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, as equal as can be; the first stages have one more. Raises ValueError for too many."""
    if not 1 <= stages <= total:
        raise ValueError(f"a model of {total} layers makes 1 to {total} stages, not {stages}")
    least, more = divmod(total, stages)
    return tuple(least + (stage < more) for stage in range(stages))


def layer_ranges(total: int, split: Sequence[int]) -> tuple[LayerRange, ...]:
    """The layers of each stage. Raises ValueError unless every stage has some and all have *total*."""
    if not split or min(split) < 1 or sum(split) != total:
        raise ValueError(f"a split into {', '.join(map(str, split)) or 'nothing'} is none of {total} layers")
    ranges = []
    first = 0
    for count in split:
        ranges.append(LayerRange(first=first, end=first + count, total=total))
        first += count
    return tuple(ranges)
