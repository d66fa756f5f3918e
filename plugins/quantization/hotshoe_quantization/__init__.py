"""Built-in quantization."""
