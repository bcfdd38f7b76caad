"""Optional fast paths of a worker, chosen in ``fast_paths``; each module can be deleted alone."""
