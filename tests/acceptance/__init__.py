"""Real worker processes on a real broker, killed and cut: what docs/guarantees.md promises."""
