"""What the ``triton`` plugins share: where their kernels can run, and how they are launched."""
