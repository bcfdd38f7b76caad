"""Real worker processes on a real broker, killed and cut: what DESIGN §4 promises."""
