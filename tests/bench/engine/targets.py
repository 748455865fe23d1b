"""What the engine is meant to reach, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """`measured` is to be at least `goal`, or at most if `is_ceiling`."""

    what: str
    goal: float
    measured: float
    is_ceiling: bool = False

    @property
    def met(self) -> bool:
        """Whether it was reached."""
        return self.measured <= self.goal if self.is_ceiling else self.measured >= self.goal


def table(targets: Iterable[Target]) -> Iterator[str]:
    """Lines of a table."""
    yield "| target | wanted | measured | met |"
    yield "|---|---|---|---|"
    for target in targets:
        bound = "at most" if target.is_ceiling else "at least"
        yield f"| {target.what} | {bound} {target.goal:g} | {target.measured:.2f} | {'yes' if target.met else 'no'} |"
