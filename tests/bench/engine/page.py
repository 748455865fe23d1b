"""Writes the measured part of a page, between its marks."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
_PAGE = DOCS / "benchmarks.md"
_BEGIN, _END = "<!-- engine: begin -->", "<!-- engine: end -->"


def write(measured: str) -> None:
    """Put `measured` where the last run's stands. Raises `ValueError` if the page has lost its marks."""
    page = _PAGE.read_text()
    begin, end = page.index(_BEGIN) + len(_BEGIN), page.index(_END)
    _PAGE.write_text(f"{page[:begin]}\n\n{measured}\n\n{page[end:]}")
