"""``hotshoe run-batch``: answer a file of requests."""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from hotshoe.config import ResolvedConfig
from hotshoe.config.values import config_error
from hotshoe.entrypoints.batch import BatchCounts, Sender, run_batch
from hotshoe.entrypoints.cli.engine_arguments import CommandParser, parse_engine_arguments
from hotshoe.entrypoints.cli.server_arguments import (
    add_server_arguments,
    api_key,
    refuse_engine_settings,
)
from hotshoe.errors import EngineDeadError
from hotshoe.http_client import Answer, HttpClient

_DESCRIPTION = """\
Answer a file of requests in the format of OpenAI's batches: one JSON object per line, with
custom_id, method, url (/v1/chat/completions or /v1/completions) and body.

The model runs in this command, with the same flags as hotshoe serve, or, with --url, on a server.
A line that is no request, or whose request fails, becomes an entry with the error.

Finished lines are collected in OUTPUT.partial, which becomes OUTPUT when all are done. Run again
after an interruption: what has been answered stays, what failed for want of a server is sent
again."""


def run(argv: list[str]) -> int:
    """Run the batch; 1 if a line failed."""
    parser = CommandParser("hotshoe run-batch", _DESCRIPTION)
    parser.add_argument("-i", "--input-file", type=Path, required=True, metavar="FILE")
    parser.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--max-concurrency",
        type=int,
        default=64,
        metavar="N",
        help="most requests under way (default: 64)",
    )
    server = parser.add_argument_group("server")
    add_server_arguments(server, url=None, help="send the requests there, and run no model here")
    resolved, arguments = parse_engine_arguments(parser, argv)
    _check(arguments, resolved)
    counts = asyncio.run(_run(arguments, resolved))
    kept = f", {counts.num_kept} kept from before" if counts.num_kept else ""
    print(
        f"{counts.num_succeeded} answered, {counts.num_failed} failed{kept}: "
        f"{arguments.output_file}",
        file=sys.stderr,
    )
    return 1 if counts.num_failed else 0


def _check(arguments: argparse.Namespace, resolved: ResolvedConfig) -> None:
    if arguments.url is not None:
        refuse_engine_settings(resolved)
    problems = []
    if arguments.max_concurrency < 1:
        problems.append(f"--max-concurrency: got {arguments.max_concurrency}, allowed: 1 or more")
    if not arguments.input_file.is_file():
        problems.append(f"--input-file: {str(arguments.input_file)!r} is no file")
    if arguments.input_file.resolve() == arguments.output_file.resolve():
        problems.append("--output-file: is the input file; name another")
    if not arguments.output_file.parent.is_dir():
        problems.append(f"--output-file: {str(arguments.output_file.parent)!r} is no folder")
    if problems:
        raise config_error(problems)


async def _run(arguments: argparse.Namespace, resolved: ResolvedConfig) -> BatchCounts:
    if arguments.url is not None:
        async with HttpClient(arguments.url, api_key=api_key(arguments)) as client:
            from hotshoe.bench.serve import served_model

            await served_model(client)  # a wrong URL or key ends the run before it begins
            return await _with_progress(client, arguments)
    from hotshoe.entrypoints.async_llm import AsyncLLM
    from hotshoe.log import configure_logging
    from hotshoe.server.app import create_app

    resolved = _for_batch(resolved)
    configure_logging(resolved.config, process="hotshoe")
    async with await AsyncLLM.from_config(resolved) as llm:
        return await _with_progress(_OwnEngine(llm, create_app(llm)), arguments)


async def _with_progress(sender: Sender, arguments: argparse.Namespace) -> BatchCounts:
    from tqdm import tqdm

    with tqdm(unit="request", disable=not sys.stderr.isatty()) as bar:

        def advance() -> None:
            bar.update()

        return await run_batch(
            sender,
            arguments.input_file,
            arguments.output_file,
            max_concurrency=arguments.max_concurrency,
            on_done=advance,
        )


def _for_batch(resolved: ResolvedConfig) -> ResolvedConfig:
    """The config without what guards a server against its clients, and with a quiet log."""
    config = resolved.config
    server = config.server.model_copy(
        update={"api_keys": (), "api_key_file": None, "request_timeout_s": None}
    )
    changes: dict[str, Any] = {"server": server}
    if resolved.origins["log_level"] == "default":
        changes["log_level"] = "warning"
    return replace(resolved, config=config.model_copy(update=changes))


class _OwnEngine:
    """The application over an engine of this command; the engine's death ends the run."""

    def __init__(self, llm: Any, app: Any) -> None:
        from hotshoe.entrypoints.asgi_client import AsgiClient

        self._llm = llm
        self._client = AsgiClient(app)

    async def request(self, method: str, path: str, body: Any = None) -> Answer:
        """Send a request.

        Raises:
            EngineDeadError: if nothing can be answered any more.
        """
        answer = await self._client.request(method, path, body)
        if self._llm.death is not None:
            raise EngineDeadError(self._llm.death)
        return answer
