"""Linear: one Hugging Face linear of a layer: its sizes, and how tensor-parallel ranks divide it. Plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from lilo_definitions.lora import TargetGroup

from lilo_miles_backend.shards import Section

Cut: TypeAlias = Literal["out", "in"]
"""Whether ranks divide a linear's output (each has rows of its weight) or its input (columns)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """y = W x, W [out_features, in_features]; no linear of these families has a bias."""

    out_features: int
    in_features: int
    group: TargetGroup
    """Whose adapters act on it."""
    cut: Cut
    sections: tuple[Section, ...]
    """Of the side that is cut: what a rank holds, in the order in which it computes."""
    adaptable: bool = True
    """Whether adapters act on it at all."""


def rows(count: int) -> tuple[Section, ...]:
    """A side without heads."""
    return (Section(start=0, width=1, count=count),)


def output_side(
    group: TargetGroup, in_features: int, sections: tuple[Section, ...], *, adaptable: bool = True
) -> Linear:
    """A linear whose output is cut into these sections."""
    return Linear(
        out_features=sum(section.size for section in sections),
        in_features=in_features,
        group=group,
        cut="out",
        sections=sections,
        adaptable=adaptable,
    )


def input_side(group: TargetGroup, out_features: int, sections: tuple[Section, ...]) -> Linear:
    """A linear whose input is cut into these sections."""
    return Linear(
        out_features=out_features,
        in_features=sum(section.size for section in sections),
        group=group,
        cut="in",
        sections=sections,
    )
