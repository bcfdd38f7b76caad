"""The example's own bookkeeping of what was published and run; the demo counts it."""
