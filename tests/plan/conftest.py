"""What all tests of this folder share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """Waiting for the disk is most of the time that these tests would take, and a killed process does not need it."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    return synced
