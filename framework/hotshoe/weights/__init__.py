"""Checkpoints: finding them, reading their config, and their tensors one at a time."""
