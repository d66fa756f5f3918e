"""Built-in guided-decoding backends."""
