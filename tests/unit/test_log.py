"""Lines of the log, as an operator's tools read them."""

from __future__ import annotations

import io
import json
import logging
import re

import pytest

from hotshoe.config import EngineConfig, load_config
from hotshoe.log import configure_logging
from hotshoe.plugins.registry import PluginRegistry


def config(**settings: object) -> EngineConfig:
    return load_config(None, overrides=settings).config


def log_to(stream: io.StringIO, **settings: object) -> None:
    configure_logging(config(**settings), process="core", stream=stream)


def test_a_line_of_text_has_time_level_process_and_logger() -> None:
    stream = io.StringIO()
    log_to(stream)
    logging.getLogger("hotshoe.engine.core").info("step %d took %.1f ms", 7, 2.5)
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO core hotshoe\.engine\.core: "
        r"step 7 took 2\.5 ms\n",
        stream.getvalue(),
    )


def test_a_message_can_not_forge_a_line() -> None:
    stream = io.StringIO()
    log_to(stream)
    evil = "x\n2026-01-01 00:00:00.000 ERROR core hotshoe: forged\r\x1b[2J\u2028y"
    logging.getLogger("hotshoe").warning("unknown field %s", evil, extra={"model": "a\nb"})
    assert (
        stream.getvalue()
        .splitlines()[0]
        .endswith(
            r"unknown field x\n2026-01-01 00:00:00.000 ERROR core hotshoe: forged\r\x1b[2J\u2028y "
            r"model=a\nb"
        )
    )
    assert len(stream.getvalue().splitlines()) == 1


def test_json_lines_carry_fields_and_tracebacks() -> None:
    stream = io.StringIO()
    log_to(stream, server={"log_format": "json"})
    logger = logging.getLogger("hotshoe.server")
    logger.info("line\nbreak ü", extra={"request_id": "r1", "level": "not mine"})
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("failed")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first["message"] == "line\nbreak ü"
    assert (first["level"], first["process"], first["logger"]) == ("info", "core", "hotshoe.server")
    assert first["request_id"] == "r1"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert "exception" not in first
    assert second["exception"].endswith("ValueError: broken")
    assert second["exception"].startswith("Traceback")


def test_a_traceback_follows_its_line_of_text() -> None:
    stream = io.StringIO()
    log_to(stream)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("hotshoe").exception("failed")
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("ERROR core hotshoe: failed")
    assert lines[-1] == "ValueError: broken"


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("debug", ["hotshoe debug", "hotshoe info", "other warning", "access"]),
        ("info", ["hotshoe info", "other warning"]),
        ("error", []),
    ],
)
def test_others_are_heard_from_warning_on_and_the_access_log_at_debug(
    level: str, expected: list[str]
) -> None:
    stream = io.StringIO()
    log_to(stream, log_level=level)
    logging.getLogger("hotshoe.x").debug("hotshoe debug")
    logging.getLogger("hotshoe.x").info("hotshoe info")
    logging.getLogger("somebody.else").info("other info")
    logging.getLogger("somebody.else").warning("other warning")
    logging.getLogger("uvicorn.access").info("access")
    messages = [line.partition(": ")[2] for line in stream.getvalue().splitlines()]
    assert messages == expected


def test_uvicorn_logs_in_the_same_format_once() -> None:
    stream = io.StringIO()
    logging.getLogger("uvicorn").addHandler(logging.StreamHandler(stream))
    log_to(stream, server={"log_format": "json"})
    logging.getLogger("uvicorn.error").warning(
        "port %d", 80, extra={"color_message": "\x1b[1mport\x1b[0m"}
    )
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["message"] == "port 80"
    assert "color_message" not in json.loads(line)


def test_configuring_twice_does_not_double_the_lines() -> None:
    stream = io.StringIO()
    log_to(stream)
    log_to(stream)
    logging.getLogger("hotshoe").info("once")
    assert len(stream.getvalue().splitlines()) == 1


@pytest.mark.parametrize(("level", "is_shown"), [("info", True), ("warning", False)])
def test_a_plugin_that_is_used_logs_as_hotshoe_does(level: str, is_shown: bool) -> None:
    stream = io.StringIO()
    logging.getLogger("hotshoe_schedulers").setLevel(logging.NOTSET)
    log_to(stream, log_level=level)
    PluginRegistry().load("schedulers", "fcfs")
    logging.getLogger("hotshoe_schedulers.fcfs").info("a plugin's line")
    assert ("a plugin's line" in stream.getvalue()) == is_shown
