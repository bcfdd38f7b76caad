"""Publishing: publisher, outbox, direct publisher, relay."""
