"""Archived events in the database: mirror, states, replay, editing, batches, groups."""
