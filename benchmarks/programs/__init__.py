"""What is measured: each module is a program, or a worker's application, of its own process."""
