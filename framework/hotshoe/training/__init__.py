"""Training of draft heads: from conversations that the model writes itself to a checkpoint that the
spec_decode plugins read.

The stages, one module each: ``conversations`` (what to learn from), ``features`` (the target's
hidden states over them), ``eagle`` and ``medusa`` (the heads and their losses), ``trainer`` (the
loop), ``checkpoint`` (the files).
"""
