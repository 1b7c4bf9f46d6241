"""Runs the proof of a generated package."""
