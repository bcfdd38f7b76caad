"""The measured programs: each module runs in its own process, as a program or a worker's app."""
