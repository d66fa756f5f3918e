"""``hotshoe serve``: an OpenAI-compatible server."""

from __future__ import annotations

import sys

EXAMPLES = """\
examples:
  hotshoe serve                                        the embedded model on 127.0.0.1:8000
  hotshoe serve ./my-model --config server.yaml
  hotshoe serve --server.port 8080 --workers 2 --max-model-len 2048
"""


def run(argv: list[str]) -> int:
    """Run the server until it is stopped."""
    from hotshoe.entrypoints.cli.engine_arguments import CommandParser, parse_engine_arguments

    parser = CommandParser(
        "hotshoe serve",
        f"Serve a model over an OpenAI-compatible API; MODEL is short for --model.\n\n{EXAMPLES}",
        usage="hotshoe serve [MODEL] [--config FILE] [flags]",
    )
    if argv and not argv[0].startswith("-"):
        argv = ["--model", *argv]
    resolved, _ = parse_engine_arguments(parser, argv)
    config = resolved.config
    from hotshoe.log import configure_logging
    from hotshoe.server.serve import serve

    configure_logging(config, process="api")

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    return serve(config, say)
