"""A Django app with the one table that handlers write to."""
