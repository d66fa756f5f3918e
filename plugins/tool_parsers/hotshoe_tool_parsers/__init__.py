"""Built-in tool parsers."""
