"""Native CPU operations: C++ sources, compiled at first use, and what the ``cpu`` plugins call them
with.
"""
