"""The server: an engine core in a process of its own, and API server processes that talk to it."""
