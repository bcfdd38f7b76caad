"""Tests of the pure modules and of the checks; no broker, no network."""
