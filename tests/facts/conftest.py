"""Fixtures of the tests that read from a Hub."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .local_hub import LocalHub


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with LocalHub() as server:
        yield server
