"""The ``hotshoe`` command; ``main`` says how a subcommand is added."""
