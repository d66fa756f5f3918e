"""The worker: from plans to tokens."""
