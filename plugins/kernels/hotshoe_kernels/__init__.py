"""Built-in kernels."""
