"""Replay batches: archived events replayed in the background."""
