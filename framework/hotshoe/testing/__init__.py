"""Conformance suites, tiny models and throw-away plugins, for plugin authors and our own tests."""
