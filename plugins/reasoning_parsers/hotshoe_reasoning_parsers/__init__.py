"""Built-in reasoning parsers."""
