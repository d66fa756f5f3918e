"""Benchmarks: workloads, how one is run, and what is known of the machine it ran on."""
