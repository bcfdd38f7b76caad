"""`make demo`: both services for real, from an empty broker to a table that has to add up."""
