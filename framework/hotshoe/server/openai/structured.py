"""The constraint on the output that a request asks for, in any of the forms that clients know."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hotshoe.api import SamplingParamsError, StructuredOutputs
from hotshoe.server.openai.errors import ApiError, invalid
from hotshoe.server.openai.schemas import (
    ConstrainedRequest,
    GenerateRequest,
    ResponseFormat,
    ResponsesRequest,
    TextFormat,
)

_FIELD = "structured_outputs"
_BACKEND = f"{_FIELD}.backend"
_ENGINE_FIELD = re.compile(rf"{_FIELD}(?P<is_backend>\.backend)?(\.\w+)?(: )?")
_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_TAG_MEMBERS = ("format", "structures", "triggers")
_TYPE_OF_MEMBER = {"json_schema": "json_schema"} | dict.fromkeys(_TAG_MEMBERS, "structural_tag")

_Given = tuple[str, str, Any]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the output must be like, and what the client calls it.

    Attributes:
        outputs: for the engine.
        param: the request's field that it is from.
        backend_param: the request's field that names the backend.
    """

    outputs: StructuredOutputs
    param: str
    backend_param: str = _BACKEND

    @classmethod
    def of(
        cls,
        kind: str,
        value: Any,
        *,
        param: str,
        backend: str | None = None,
        backend_param: str = _BACKEND,
    ) -> Constraint:
        """A constraint of a kind that ``StructuredOutputs`` has.

        Raises:
            ApiError: if it is malformed as far as that can be told without a backend.
        """
        try:
            outputs = StructuredOutputs(**{kind: value, "backend": backend})
        except SamplingParamsError as error:
            raise _explained(str(error), param, backend_param) from error
        return cls(outputs, param, backend_param)

    def explained(self, message: str) -> ApiError:
        """What the engine says against it, with the client's name for the field at fault."""
        return _explained(message, self.param, self.backend_param)


def constraint_of(request: ConstrainedRequest) -> Constraint | None:
    """The constraint of a request; None if its output is free.

    Raises:
        ApiError: if there are several, or it is malformed.
    """
    given = _constraints(request)
    constraints = [one for one in given if one[2] is not None and one[2] is not False]
    backends = [*_backends(request)]
    _check_is_alone([param for param, _, _ in constraints], "constraint")
    _check_is_alone([param for param, _ in backends], "backend")
    backend_param, backend = backends[0] if backends else (_BACKEND, None)
    if constraints:
        param, kind, value = constraints[0]
        return Constraint.of(kind, value, param=param, backend=backend, backend_param=backend_param)
    if backends:
        raise _bad(backend_param, "is for a constraint, and the request has none; drop it")
    if request.structured_outputs is not None:
        raise _bad(_FIELD, f"has no constraint; give one of {', '.join(_KINDS)}")
    return None


def _constraints(request: ConstrainedRequest) -> Iterator[_Given]:
    """The client's field, the kind and the value of every constraint."""
    given = request.structured_outputs
    if given is not None:
        yield f"{_FIELD}.json", "json", given.json_
        for kind in _KINDS[1:]:
            yield f"{_FIELD}.{kind}", kind, getattr(given, kind)
    if isinstance(request, GenerateRequest):
        for kind in _KINDS[:-1]:
            yield f"guided_{kind}", kind, getattr(request, f"guided_{kind}")
        if request.response_format is not None:
            yield from _of_response_format(request.response_format)
    if isinstance(request, ResponsesRequest) and request.text is not None:
        yield from _of_text_format(request.text.format)


def _of_response_format(wanted: ResponseFormat) -> Iterator[_Given]:
    for name, kind in _TYPE_OF_MEMBER.items():
        if getattr(wanted, name) is not None and kind != wanted.type:
            raise _bad(f"response_format.{name}", f"is only for type {kind!r}, not {wanted.type!r}")
    if wanted.type == "json_object":
        yield "response_format", "json_object", True
    elif wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise _missing("response_format.json_schema")
        if wanted.json_schema.schema_ is None:
            raise _missing("response_format.json_schema.schema")
        yield "response_format", "json", wanted.json_schema.schema_
    elif wanted.type == "structural_tag":
        tag = wanted.model_dump(include={"type", *_TAG_MEMBERS}, exclude_none=True)
        yield "response_format", "structural_tag", tag


def _of_text_format(wanted: TextFormat | None) -> Iterator[_Given]:
    if wanted is None:
        return
    if wanted.type == "json_object":
        yield "text.format", "json_object", True
    elif wanted.type == "json_schema":
        if wanted.schema_ is None:
            raise _missing("text.format.schema")
        yield "text.format", "json", wanted.schema_


def _backends(request: ConstrainedRequest) -> Iterator[tuple[str, str]]:
    """The client's field and the name of every backend that is asked for."""
    given = request.structured_outputs
    if given is not None and given.backend is not None:
        yield _BACKEND, given.backend
    if isinstance(request, GenerateRequest) and request.guided_decoding_backend is not None:
        yield "guided_decoding_backend", request.guided_decoding_backend


def _check_is_alone(params: list[str], what: str) -> None:
    if len(params) > 1:
        raise _bad(params[1], f"is given, and so is {params[0]}; send one {what}")


def _explained(message: str, param: str, backend_param: str) -> ApiError:
    match = _ENGINE_FIELD.match(message)
    if match is None:
        return _bad(param, message)
    return _bad(backend_param if match["is_backend"] else param, message[match.end() :])


def _bad(param: str, message: str) -> ApiError:
    return invalid(f"{param}: {message}", param=param, code="invalid_value")


def _missing(param: str) -> ApiError:
    return invalid(f"{param}: is missing", param=param, code="missing_required_parameter")
