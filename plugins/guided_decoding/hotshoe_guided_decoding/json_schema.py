"""JSON schemas: brought into a form that a library enforces, or refused by the keyword's path.

A library may accept a keyword and drop it, alone or beside others. So nothing is handed over that
isn't known here. Where a schema can be said in other words that mean the same, or less, it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotshoe.api import RequestError
from hotshoe_guided_decoding import texts
from hotshoe_guided_decoding.formats import PATTERN_OF
from hotshoe_guided_decoding.schema_relations import are_disjoint, is_pointer, pointed_at
from hotshoe_guided_decoding.schema_rules import (
    ANNOTATIONS,
    KIND_OF,
    SHAPES,
    SIZES,
    Rules,
    has_type,
    malformed,
    same,
)

MAX_DEPTH = 64
"""Deepest nesting of a schema."""

MAX_NODES = 4000
"""Most subschemas, and values of enum, in a schema: libraries take a time that grows with the
square.
"""


def parse(text: str) -> Any:
    """A JSON text, checked strictly.

    Raises:
        RequestError: if it isn't JSON, is nested too deep, or repeats a key.
    """
    # what nests deeper would end the parser, or the process
    depth = texts.max_depth(text)
    if depth > 4 * MAX_DEPTH:
        raise RequestError(f"is nested {depth} deep, allowed: up to {4 * MAX_DEPTH}")
    try:
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("holds half of a surrogate pair; send valid Unicode") from None
    except ValueError as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"is no JSON: {error}") from None
    return value


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"has the key {repeated!r} more than once in an object")
    return found


def _no_constant(name: str) -> Any:
    raise RequestError(f"holds {name}, which is no JSON number")


def enforceable(schema: Any, rules: Rules) -> tuple[Any, list[str]]:
    """A schema as a library enforces it.

    Args:
        schema: from ``parse``; not changed.
        rules: of the library.

    Returns:
        A schema whose instances are instances of the given one, and why it can't be enforced:
        reasons with the path of the keyword, empty = it can.

    Raises:
        RequestError: if it is malformed.
    """
    rewriter = _Rewriter(schema, rules)
    rewritten = rewriter.rewrite(schema, "", 0)
    while rewriter.pending:
        name, target, path = rewriter.pending.pop()
        rewriter.defs[name] = rewriter.rewrite(target, path, 0)
    if rewriter.defs and isinstance(rewritten, dict):
        rewritten = {**rewritten, "$defs": rewriter.defs}
    return rewritten, rewriter.reasons


@dataclass(slots=True)
class _Rewriter:
    root: Any
    rules: Rules
    reasons: list[str] = field(default_factory=list)
    defs: dict[str, Any] = field(default_factory=dict)
    pending: list[tuple[str, Any, str]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    num_nodes: int = 0

    def refuse(self, path: str, keyword: str, why: str = "") -> None:
        reason = why or f"not enforced by {self.rules.library}"
        self.reasons.append(f"{_join(path, keyword)}: {reason}")

    def rewrite(self, schema: Any, path: str, depth: int) -> Any:
        self.count(1)
        if depth > MAX_DEPTH:
            raise RequestError(f"is nested more than {MAX_DEPTH} schemas deep")
        if isinstance(schema, bool):
            return {} if schema else False
        if not isinstance(schema, dict):
            raise malformed(path, schema, "a schema: an object, true or false")
        if path and "$id" in schema and '"$ref"' in json.dumps(schema):
            self.refuse(path, "$id", "references inside another document's part aren't followed")
        schema = self.modern({k: v for k, v in schema.items() if k not in ANNOTATIONS}, path)
        if not self.check_keywords(schema, path):
            return {}
        for head in ("$ref", "enum", "const", "allOf", "anyOf", "oneOf"):
            if head in schema:
                return getattr(self, f"_{head.strip('$')}")(schema, path, depth)
        return self.plain(schema, path, depth)

    def count(self, number: int) -> None:
        self.num_nodes += number
        if self.num_nodes > MAX_NODES:
            raise RequestError(
                f"has more than {MAX_NODES} subschemas and enum values together; shorten it"
            )

    def modern(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """Older spellings in the words of draft 2020-12, and what says nothing left out."""
        items = schema.get("items")
        if isinstance(items, list):
            schema["prefixItems"] = schema.pop("items")
            if "additionalItems" in schema:
                schema["items"] = schema.pop("additionalItems")
        elif schema.get("additionalItems") is not None and "prefixItems" not in schema:
            del schema["additionalItems"]  # means nothing without a list of items
        if schema.get("uniqueItems") is False:
            del schema["uniqueItems"]
        for bound, strict in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if isinstance(schema.get(strict), bool):
                is_strict = schema.pop(strict)
                if is_strict and bound in schema:
                    schema[strict] = schema.pop(bound)
        names = schema.get("propertyNames")
        if names is True or names in ({}, {"type": "string"}):
            del schema["propertyNames"]
        if path == "":
            schema.pop("id", None)
        return {k: v for k, v in schema.items() if not k.startswith("x-")}

    def check_keywords(self, schema: Mapping[str, Any], path: str) -> bool:
        unknown = [keyword for keyword in schema if keyword not in self.rules.keywords]
        for keyword in unknown:
            self.refuse(path, keyword)
        for keyword, value in schema.items():
            if keyword in SHAPES and not SHAPES[keyword][1](value):
                raise malformed(_join(path, keyword), value, SHAPES[keyword][0])
        return not unknown

    def alone(self, schema: Mapping[str, Any], path: str, *allowed: str) -> bool:
        """Refuse what stands beside a keyword that hides its neighbours."""
        if self.rules.combines:
            return True
        beside = [keyword for keyword in schema if keyword not in allowed]
        for keyword in beside:
            self.refuse(path, keyword, f"not enforced by {self.rules.library} beside {allowed[0]}")
        return not beside

    # -- choices ----------------------------------------------------------------------------

    def _ref(self, schema: dict[str, Any], path: str, depth: int) -> Any:
        self.alone(schema, path, "$ref")
        reference = schema["$ref"]
        target = self.resolve(reference, path)
        if target is None:
            return {}
        if reference not in self.names:
            self.names[reference] = f"r{len(self.names)}"
            where = "" if reference == "#" else reference.removeprefix("#/").replace("/", ".")
            self.pending.append((self.names[reference], target[0], where or "#"))
        rest = self.siblings(schema, "$ref", path, depth)
        return {"$ref": f"#/$defs/{self.names[reference]}", **rest}

    def resolve(self, reference: str, path: str) -> tuple[Any] | None:
        """What a reference names, in a tuple; None if it is refused."""
        if not is_pointer(reference):
            self.refuse(path, "$ref", f"only pointers into the schema are followed: {reference!r}")
            return None
        found = pointed_at(reference, self.root)
        if found is None:
            raise RequestError(f"{_join(path, '$ref')}: nothing is at {reference!r}")
        return found

    def siblings(self, schema: dict[str, Any], head: str, path: str, depth: int) -> dict[str, Any]:
        rest = {keyword: value for keyword, value in schema.items() if keyword != head}
        if not rest or not self.rules.combines:
            return {}
        rewritten: dict[str, Any] = self.rewrite(rest, path, depth)
        return rewritten

    def _enum(self, schema: dict[str, Any], path: str, depth: int) -> Any:
        self.count(len(schema["enum"]))
        values = [value for value in schema["enum"] if has_type(value, schema.get("type"))]
        if "const" in schema:
            values = [value for value in values if same(value, schema["const"])]
        if not values:
            raise RequestError(
                f"{_join(path, 'enum')}: no value is left, so nothing can satisfy it"
            )
        self.alone(schema, path, "enum", "type", "const")
        rest = {k: v for k, v in schema.items() if k not in ("type", "const")}
        return {"enum": values, **self.siblings(rest, "enum", path, depth)}

    def _const(self, schema: dict[str, Any], path: str, depth: int) -> Any:
        rest = {k: v for k, v in schema.items() if k != "const"}
        return self._enum({"enum": [schema["const"]], **rest}, path, depth)

    def _allOf(self, schema: dict[str, Any], path: str, depth: int) -> Any:
        parts = schema["allOf"]
        if len(parts) == 1 and len(schema) == 1:
            return self.rewrite(parts[0], _join(path, "allOf[0]"), depth + 1)
        if not self.rules.combines:
            self.refuse(path, "allOf")
            return {}
        return self.branches(schema, "allOf", path, depth)

    def _anyOf(self, schema: dict[str, Any], path: str, depth: int) -> Any:
        self.alone(schema, path, "anyOf")
        return self.branches(schema, "anyOf", path, depth)

    def _oneOf(self, schema: dict[str, Any], path: str, depth: int) -> Any:
        self.alone(schema, path, "oneOf")
        parts = schema["oneOf"]
        if len(parts) > 100:
            self.refuse(path, "oneOf", "has more than 100 branches")
            return {}
        for second, part in enumerate(parts):
            for first in range(second):
                if not are_disjoint(parts[first], part, self.root):
                    self.refuse(
                        path,
                        "oneOf",
                        f"branches {first} and {second} may both hold, which nothing enforces "
                        "against; make them exclude each other by type or by a required constant, "
                        "or use anyOf",
                    )
                    return {}
        rest = {("anyOf" if k == "oneOf" else k): v for k, v in schema.items()}
        if len(rest) < len(schema):
            self.refuse(path, "oneOf", "not enforced beside anyOf")
            return {}
        return self.branches(rest, "anyOf", path, depth, "oneOf")

    def branches(
        self, schema: dict[str, Any], head: str, path: str, depth: int, called: str = ""
    ) -> dict[str, Any]:
        parts = [
            self.rewrite(part, _join(path, f"{called or head}[{index}]"), depth + 1)
            for index, part in enumerate(schema[head])
        ]
        if head == "anyOf":
            parts = [part for part in parts if part is not False]
            if not parts:
                raise RequestError(f"{_join(path, called or head)}: nothing can satisfy it")
        return {head: parts, **self.siblings(schema, head, path, depth)}

    # -- types ------------------------------------------------------------------------------

    def plain(self, schema: dict[str, Any], path: str, depth: int) -> Any:
        """A schema without choices."""
        named = schema.get("type")
        types = [named] if isinstance(named, str) else list(named or ())
        if not types:
            # keywords of a type say nothing about values of others: narrower, but simple
            kinds = {KIND_OF[keyword] for keyword in schema if keyword in KIND_OF}
            types = sorted(kinds)
        if not types:
            return {}
        parts = [self.typed(one, schema, path, depth) for one in types]
        return parts[0] if len(parts) == 1 else {"anyOf": parts}

    def typed(self, name: str, schema: Mapping[str, Any], path: str, depth: int) -> dict[str, Any]:
        kind = "number" if name == "integer" else name
        own = {k: v for k, v in schema.items() if KIND_OF.get(k) == kind}
        make = {
            "string": self.string,
            "number": self.number,
            "array": self.array,
            "object": self.object,
        }.get(kind)
        return {"type": name, **(make(name, own, path, depth) if make else {})}

    def string(self, _: str, own: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        lengths = {k: v for k, v in own.items() if k in ("minLength", "maxLength")}
        if lengths.get("minLength") == 0:
            del lengths["minLength"]
        if lengths.get("minLength", 0) > lengths.get("maxLength", 2**63):
            raise RequestError(f"{_join(path, 'minLength')}: above maxLength")
        patterns = [own["pattern"]] if "pattern" in own else []
        named = own.get("format")
        found: dict[str, Any] = {}
        if named in PATTERN_OF and named not in self.rules.formats:
            patterns.append(PATTERN_OF[named])
        elif named in self.rules.formats:
            found["format"] = named
        elif named is not None:
            known = ", ".join(sorted({*self.rules.formats, *PATTERN_OF}))
            self.refuse(path, "format", f"{named!r} is not enforced, only {known} are")
        if "pattern" in own and (why := texts.against_pattern(own["pattern"])):
            self.refuse(path, "pattern", why)
        if not self.rules.combines:
            keywords = [k for k in ("pattern", "format") if k in own] + sorted(lengths)
            strong = "pattern" in own or "format" in own
            if strong and len(keywords) > 1:
                self.refuse(
                    path, keywords[1], f"not enforced by {self.rules.library} beside {keywords[0]}"
                )
            return {**found, **lengths, **({"pattern": patterns[-1]} if patterns else {})}
        more = {"allOf": [{"pattern": one} for one in patterns[1:]]} if patterns[1:] else {}
        first = {"pattern": patterns[0]} if patterns else {}
        return {**found, **lengths, **first, **more}

    def number(self, name: str, own: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        multiple = own.get("multipleOf")
        if multiple is not None:
            is_whole = isinstance(multiple, int) or float(multiple).is_integer()
            if multiple <= 0:
                raise malformed(_join(path, "multipleOf"), multiple, "a number above 0")
            if is_whole and name == "integer" and multiple <= 1000:
                own["multipleOf"] = int(multiple)
                if multiple == 1:
                    del own["multipleOf"]
                elif not self.rules.combines and len(own) > 1:
                    self.refuse(path, "multipleOf", "not enforced beside bounds")
            elif not self.rules.combines or multiple > 1000:
                self.refuse(path, "multipleOf")
        if any(abs(value) > 2**53 for value in own.values()):
            large = next(k for k, v in own.items() if abs(v) > 2**53)
            self.refuse(path, large, "beyond 2^53, where numbers lose digits")
        for bound, strict in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if bound in own and strict in own:
                loose = own[bound] > own[strict] if bound == "minimum" else own[bound] < own[strict]
                del own[strict if loose else bound]
        if name == "integer":
            _round_bounds(own)
        return own

    def array(self, _: str, own: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        most = own.get("maxItems")
        if own.pop("uniqueItems", False) and (most is None or most > 1):
            self.refuse(path, "uniqueItems")
        if own.get("minItems", 0) > (2**63 if most is None else most):
            raise RequestError(f"{_join(path, 'minItems')}: above maxItems")
        first = [
            self.rewrite(one, _join(path, f"prefixItems[{index}]"), depth + 1)
            for index, one in enumerate(own.pop("prefixItems", []))
        ]
        if most is not None:
            first = first[:most]
        items = self.rewrite(own.pop("items", True), _join(path, "items"), depth + 1)
        if False in first:
            items, first = False, first[: first.index(False)]
        if first:
            own["prefixItems"] = first
        if items is False and not first:
            items = {}
            most = 0
            own["maxItems"] = 0
        limit = len(first) if items is False else most
        if limit is not None and own.get("minItems", 0) > limit:
            raise RequestError(f"{_join(path, 'minItems')}: more items than the schema allows")
        return {**own, "items": items}

    def object(self, _: str, own: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        properties = {}
        is_closed = own.get("additionalProperties") is False
        for name, one in own.get("properties", {}).items():
            rewritten = self.rewrite(one, _join(path, f"properties.{name}"), depth + 1)
            if rewritten is not False:
                properties[name] = rewritten
            elif is_closed or self.rules.combines:
                properties[name] = False
            else:
                self.refuse(path, f"properties.{name}", "can't be kept out where others may come")
        properties = {
            name: one for name, one in properties.items() if one is not False or not is_closed
        }
        found: dict[str, Any] = {k: own[k] for k in SIZES if k in own}
        more = own.get("additionalProperties", True)
        if "additionalProperties" in own:
            where = _join(path, "additionalProperties")
            found["additionalProperties"] = self.rewrite(more, where, depth + 1)
            if more is True:
                found["additionalProperties"] = True
        required = list(dict.fromkeys(own.get("required", ())))
        patterns = own.get("patternProperties", {})
        if own.get("minProperties", 0) > max(1, len(required)) and not (
            properties and (is_closed or self.is_closing(own))
        ):
            self.refuse(path, "minProperties", "not enforced where names are free: they may repeat")
        undeclared = [name for name in required if name not in properties]
        if undeclared and patterns:
            self.refuse(path, "required", "names of patternProperties can't be required")
        elif undeclared and is_closed:
            raise RequestError(
                f"{_join(path, 'required')}: {undeclared[0]!r} is required but not allowed"
            )
        for name in undeclared if not self.rules.combines else ():
            properties[name] = found.get("additionalProperties", {})
            if properties[name] is True:
                properties[name] = {}
        if properties:
            found["properties"] = properties
        if required:
            found["required"] = required
        if patterns:
            found["patternProperties"] = self.pattern_properties(own, path, depth)
        if "propertyNames" in own:
            found["propertyNames"] = self.property_names(own, path)
        return found

    def is_closing(self, own: Mapping[str, Any]) -> bool:
        """Whether the library keeps out what a schema neither names nor speaks of."""
        return self.rules.library == "xgrammar" and not set(own) & {
            *("additionalProperties", "patternProperties", "propertyNames")
        }

    def pattern_properties(self, own: Mapping[str, Any], path: str, depth: int) -> dict[str, Any]:
        patterns = own["patternProperties"]
        for pattern in patterns:
            if why := texts.against_pattern(pattern):
                self.refuse(path, f"patternProperties.{pattern}", why)
        if not self.rules.combines:
            names = own.get("properties", {})
            if len(patterns) > 1:
                self.refuse(path, "patternProperties", "more than one pattern isn't enforced")
            hits = [name for name in names for pattern in patterns if _may_match(pattern, name)]
            if hits:
                self.refuse(path, "patternProperties", f"not enforced on property {hits[0]!r}")
            if any(own.get(size) for size in SIZES):
                self.refuse(path, "patternProperties", "not enforced beside limits of number")
            if isinstance(own.get("additionalProperties"), dict):
                self.refuse(path, "additionalProperties", "not enforced beside patternProperties")
        return {
            pattern: self.rewrite(one, _join(path, f"patternProperties.{pattern}"), depth + 1)
            for pattern, one in patterns.items()
        }

    def property_names(self, own: Mapping[str, Any], path: str) -> Any:
        names = own["propertyNames"]
        beside = set(own) & {"properties", "required", "patternProperties", *SIZES}
        kept = {k: v for k, v in names.items() if k not in ANNOTATIONS and k != "type"}
        if (
            beside
            or set(kept) not in ({"pattern"}, {"enum"})
            or names.get("type") not in (None, "string")
        ):
            self.refuse(path, "propertyNames")
        elif "pattern" in kept and (why := texts.against_pattern(kept["pattern"])):
            self.refuse(path, "propertyNames.pattern", why)
        elif "enum" in kept and not all(isinstance(one, str) for one in kept["enum"]):
            self.refuse(path, "propertyNames.enum", "has values that are no texts")
        return {"type": "string", **kept}


def _round_bounds(own: dict[str, Any]) -> None:
    """Bounds of integers as integers."""
    for keyword, value in list(own.items()):
        if keyword == "multipleOf" or isinstance(value, int):
            continue
        whole = int(value // 1)
        is_lower = keyword in ("minimum", "exclusiveMinimum")
        if whole != value:
            # no integer is at the bound itself
            del own[keyword]
            own["minimum" if is_lower else "maximum"] = whole + 1 if is_lower else whole
        else:
            own[keyword] = whole


def _join(path: str, part: str) -> str:
    return f"{path}.{part}" if path else part


def _may_match(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True
