"""What API servers and the engine core say to each other: typed msgpack records over ZeroMQ.

A message is three frames: the sender's identity (set by the socket), the session key, the record.
Nothing is unpickled; what doesn't decode is dropped and counted.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hotshoe.engine.request import EngineRequest, RequestUpdate


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A client is there. Repeated until ``Welcome`` arrives."""


class KeepAlive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """A client is still there."""


class AddRequests(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Queue the choices of one prompt: all of them, or none."""

    requests: list[EngineRequest]


class AbortRequests(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """End requests early.

    Attributes:
        finish_reason: ``stop`` if a stop string ended them, else ``abort``.
    """

    request_ids: list[str]
    finish_reason: str = "abort"


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """A control-plane call; the ``Reply`` has the same number.

    Attributes:
        method: one of those that ``CoreServer`` lists, such as ``reset_prefix_cache``.
    """

    number: int
    method: str
    arguments: list[Any] = []


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """A client leaves; its requests are aborted."""


ToCore = Hello | KeepAlive | AddRequests | AbortRequests | Call | Goodbye


class Plugin(msgspec.Struct, frozen=True, array_like=True):
    """One plugin that the core has loaded; both sides must have the same."""

    kind: str
    name: str
    distribution: str
    version: str
    contract: str


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The core is ready; what its clients need to know.

    Attributes:
        plugins: the plugin set, to be checked against what the client sees installed.
        components: chosen plugin by config section, for people to read.
        num_blocks: of the KV pool, ``block_size`` tokens each.
        pid: of the core's process, which runs on this machine.
    """

    plugins: list[Plugin]
    components: dict[str, str]
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    dtype: str
    device: str
    generation_config: dict[str, Any]
    pid: int


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """The requests of an ``AddRequests`` are queued.

    Attributes:
        seeds: what each one's tokens are drawn with.
    """

    request_ids: list[str]
    seeds: list[int]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The requests of an ``AddRequests`` are not queued.

    Attributes:
        reason: ``bad_request``, ``queue_full`` or ``draining``.
        field: the sampling parameter that is at fault, if it is one.
    """

    request_ids: list[str]
    reason: str
    message: str
    field: str | None = None


class Updates(msgspec.Struct, frozen=True, array_like=True, tag="updates"):
    """What a step did for the requests of this client."""

    updates: list[RequestUpdate]


class Reply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """The result of a ``Call``, or the error it raised."""

    number: int
    result: Any = None
    error: str | None = None


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """The core is alive.

    Attributes:
        num_unfinished: requests alive over all clients.
        is_draining: whether new requests are refused.
        step_age_s: how long the running step has taken so far; 0 between steps.
    """

    num_running: int
    num_waiting: int
    is_draining: bool
    step_age_s: float


class Fatal(msgspec.Struct, frozen=True, array_like=True, tag="fatal"):
    """The core is about to stop, and why."""

    message: str


FromCore = Welcome | Accepted | Refused | Updates | Reply | Heartbeat | Fatal

HEARTBEAT_INTERVAL_S = 0.25
HEARTBEAT_TIMEOUT_S = 5.0
"""A core that lives but is silent for so long hangs, and is taken for dead."""

KEEP_ALIVE_INTERVAL_S = 1.0
KEEP_ALIVE_TIMEOUT_S = 15.0
"""A client that is silent for so long has died without a word: its requests are aborted."""

_encoder = msgspec.msgpack.Encoder()
_to_core = msgspec.msgpack.Decoder(ToCore)
_from_core = msgspec.msgpack.Decoder(FromCore)


def encode(message: ToCore | FromCore) -> bytes:
    """A record as msgpack."""
    return _encoder.encode(message)


def decode_to_core(data: bytes) -> ToCore:
    """A record that a client sent.

    Raises:
        msgspec.DecodeError: if it is none.
    """
    return _to_core.decode(data)


def decode_from_core(data: bytes) -> FromCore:
    """A record that the core sent.

    Raises:
        msgspec.DecodeError: if it is none.
    """
    return _from_core.decode(data)
