"""The HTTP application around an engine."""

from __future__ import annotations

from fastapi import FastAPI

from hotshoe.entrypoints.async_llm import AsyncLLM


def create_app(llm: AsyncLLM) -> FastAPI:
    """The application of one API server process."""
    return FastAPI()
