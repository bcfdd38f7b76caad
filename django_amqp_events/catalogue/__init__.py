"""What a service publishes and subscribes to, as documents, and what changed between two. Pure."""
