"""Reads Prometheus' text format: what a process of this machine shows of itself right now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import httpx
from prometheus_client.parser import text_string_to_metric_families

from pdd.local.loopback import client

SCRAPE_TIMEOUT_S = 2.0


class Samples:
    """The samples of one scrape. What is not there counts as 0."""

    def __init__(self, text: str) -> None:
        """Raises `ValueError` if `text` is not in Prometheus' format."""
        self._samples = [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def total(self, name: str, /, **labels: str) -> float:
        """Sum over all samples of `name` that have `labels`."""
        return sum(value for _, value in self._chosen(name, labels))

    def by(self, name: str, label: str, /, **labels: str) -> dict[str, float]:
        """The same for each value of `label`."""
        sums: defaultdict[str, float] = defaultdict(float)
        for own, value in self._chosen(name, labels):
            sums[own.get(label, "")] += value
        return dict(sums)

    def mean(self, histogram: str) -> float | None:
        """Mean of a histogram's observations; None without any."""
        count = self.total(f"{histogram}_count")
        return self.total(f"{histogram}_sum") / count if count else None

    def _chosen(self, name: str, labels: dict[str, str]) -> Iterator[tuple[dict[str, str], float]]:
        for own_name, own, value in self._samples:
            if own_name == name and labels.items() <= own.items():
                yield own, value


def scrape(url: str) -> Samples | None:
    """The metrics at `url`; None if nobody answers with any."""
    try:
        answer = client().get(url, timeout=SCRAPE_TIMEOUT_S)
        answer.raise_for_status()
        return Samples(answer.text)
    except (httpx.HTTPError, ValueError):
        return None
