"""A process is killed before and after each of its effects, and started again."""
