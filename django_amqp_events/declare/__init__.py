"""What a service declares: events, handlers, retry policies, contracts. Pure."""
