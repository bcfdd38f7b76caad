"""The message format: what is on the wire, and how it is read. Pure."""
