"""Declared events and handlers, retry policies, contracts. Pure."""
