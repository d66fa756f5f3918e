"""Built-in spec_decode."""
