"""OpenAI's API: wire schemas and handlers over an ``AsyncLLM``."""
