"""How a guided-decoding backend fares with JSON schemas from the wild.

    python benchmarks/structured_corpus.py SCHEMAS.jsonl --backend xgrammar --output FILE.json

A line of the file is ``{"name": ..., "schema": ..., "tests": [{"valid": ..., "data": ...}]}``.
Each instance is written in the schema's order of keys, cut into the embedded model's tokens and
walked through the compiled schema: no invalid one may pass. Those of the schemas that aren't
refused are also walked through what the library makes of the schema by itself, with the same
options. With ``--generate N`` the embedded model answers to the first N schemas that aren't
refused, and jsonschema judges the answers.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import jsonschema

from hotshoe import LLM, SamplingParams
from hotshoe.api import (
    GrammarSpec,
    GuidedDecodingBackend,
    GuidedDecodingContext,
    RequestError,
    StructuredOutputs,
)
from hotshoe.plugins import PluginRegistry


def main() -> None:
    """Walk, generate, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("schemas", type=Path)
    parser.add_argument("--backend", default="xgrammar")
    parser.add_argument("--generate", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    cases = [json.loads(line) for line in arguments.schemas.read_text().splitlines()]
    with LLM(quantization="gguf", guided_decoding=arguments.backend) as llm:
        figures = walk(cases, llm, arguments.backend)
        refused = set(figures.pop("refused_names"))
        if arguments.generate:
            kept = [case for case in cases if case["name"] not in refused]
            chosen = kept[: arguments.generate]
            figures["generation"] = generate(llm, chosen, arguments.max_tokens)
    print(json.dumps(figures, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps(figures, indent=2) + "\n")


def walk(cases: list[dict[str, Any]], llm: LLM, name: str) -> dict[str, Any]:
    """What is refused, and which instances pass."""
    tokenizer = llm.tokenizer
    context = GuidedDecodingContext(
        vocab_size=llm.engine.vocab_size,
        token_bytes=[
            b"" if token_id in tokenizer.special_token_ids else text
            for token_id, text in enumerate(tokenizer.token_bytes())
        ],
        eos_token_ids=tokenizer.eos_token_ids,
        tokenizer_json=tokenizer.tokenizer_json,
    )
    registry = PluginRegistry()
    loaded = registry.load("guided_decoding", name)
    backend: GuidedDecodingBackend = registry.build(loaded, {}, context, section="guided_decoding")
    alone = LIBRARIES[name](context)
    keywords: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    refused, compile_times_s, wrong = [], [], []
    for case in cases:
        spec = GrammarSpec(kind="json", value=json.dumps(case["schema"]))
        started = time.perf_counter()
        try:
            reasons = backend.unsupported(spec)
            compiled = None if reasons else backend.compile(spec)
        except RequestError as error:
            reasons, compiled = [str(error)], None
        compile_times_s.append(time.perf_counter() - started)
        if compiled is None:
            refused.append(case["name"])
            keywords.update({_keyword(reason) for reason in reasons})
            continue
        takes_alone = alone(json.dumps(case["schema"]))
        for test in case["tests"]:
            is_valid = test["valid"]
            counts["valid" if is_valid else "invalid"] += 1
            written = [
                tokenizer.encode(text, add_special_tokens=False) for text in _written(test, case)
            ]
            if any(map(takes_alone, written)):
                counts["valid_accepted_alone" if is_valid else "invalid_accepted_alone"] += 1
            end = tokenizer.eos_token_ids[0]
            if any(compiled.matcher().accept([*token_ids, end]) for token_ids in written):
                counts["valid_accepted" if is_valid else "invalid_accepted"] += 1
                if not is_valid:
                    wrong.append(f"{case['name']}: {test.get('description')}")
    compile_times_s.sort()
    return {
        "backend": name,
        "num_schemas": len(cases),
        "num_refused": len(refused),
        "refused_for": dict(keywords.most_common()),
        "instances": {
            key: counts[key] for key in ("valid", "valid_accepted", "invalid", "invalid_accepted")
        },
        "library_alone": {
            "valid_accepted": counts["valid_accepted_alone"],
            "invalid_accepted": counts["invalid_accepted_alone"],
        },
        "invalid_accepted": wrong,
        "compile_ms": {
            "median": round(1e3 * compile_times_s[len(compile_times_s) // 2], 2),
            "max": round(1e3 * compile_times_s[-1], 2),
        },
        "refused_names": refused,
    }


def _keyword(reason: str) -> str:
    path = reason.split(": ", 1)[0]
    return re.sub(r"\[\d+\]$", "", path.rsplit(".", 1)[-1])


def _written(test: dict[str, Any], case: dict[str, Any]) -> list[str]:
    """An instance as text, in its own order of keys and in the schema's."""
    schema = case["schema"]
    forms = [test["data"], _ordered(test["data"], schema, schema)]
    return [json.dumps(form, ensure_ascii=False) for form in forms]


def _ordered(value: Any, schema: Any, root: Any) -> Any:
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        schema = root
        for step in reference[2:].split("/") if len(reference) > 1 else ():
            schema = schema.get(step.replace("~1", "/").replace("~0", "~"), {})
    if not isinstance(schema, dict):
        return value
    for head in ("allOf", "anyOf", "oneOf"):
        for part in schema.get(head, ()):
            if isinstance(part, dict) and jsonschema.Draft202012Validator(
                {**part, "$defs": root.get("$defs", {}), "definitions": root.get("definitions", {})}
            ).is_valid(value):
                return _ordered(value, part, root)
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        names = [name for name in properties if name in value]
        names += [name for name in value if name not in properties]
        more = schema.get("additionalProperties", {})
        return {name: _ordered(value[name], properties.get(name, more), root) for name in names}
    if isinstance(value, list):
        items = schema.get("items", {})
        return [_ordered(one, items, root) for one in value]
    return value


Takes = Callable[[list[int]], bool]
"""Whether tokens are a whole instance."""

MAX_WHITESPACE = 2
"""What the backends have unless they are told otherwise."""


def xgrammar_alone(context: GuidedDecodingContext) -> Callable[[str], Takes]:
    """Schemas through nothing but the xgrammar library."""
    import xgrammar

    tokenizer = xgrammar.TokenizerInfo(
        list(context.token_bytes),
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=context.vocab_size,
        stop_token_ids=list(context.eos_token_ids),
    )
    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)

    def compiled(schema: str) -> Takes:
        try:
            found = compiler.compile_json_schema(
                schema, separators=(",", ":"), max_whitespace_cnt=MAX_WHITESPACE, strict_mode=True
            )
        except RuntimeError:
            return lambda token_ids: False

        def takes(token_ids: list[int]) -> bool:
            matcher = xgrammar.GrammarMatcher(found)
            return all(map(matcher.accept_token, [*token_ids, context.eos_token_ids[0]]))

        return takes

    return compiled


def llguidance_alone(context: GuidedDecodingContext) -> Callable[[str], Takes]:
    """Schemas through nothing but the llguidance library."""
    import llguidance

    with NamedTemporaryFile("w", suffix=".json") as file:
        file.write(context.tokenizer_json or "")
        file.flush()
        tokenizer = llguidance.LLTokenizer(
            file.name, n_vocab=context.vocab_size, eos_token=list(context.eos_token_ids)
        )
    overrides = {
        "whitespace_flexible": True,
        "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}",
    }

    def compiled(schema: str) -> Takes:
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=overrides)
        except ValueError:
            return lambda token_ids: False

        def takes(token_ids: list[int]) -> bool:
            matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
            is_taken = matcher.try_consume_tokens(token_ids) == len(token_ids)
            return bool(is_taken and matcher.is_accepting())

        return takes

    return compiled


LIBRARIES = {"xgrammar": xgrammar_alone, "llguidance": llguidance_alone}


def generate(llm: LLM, cases: list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
    """Answers of the model to each schema, judged by jsonschema."""
    prompts, params = [], []
    for case in cases:
        text = json.dumps(case["schema"])[:2000]
        request = f"Write a short example of a JSON document with this schema:\n{text}"
        prompts.append(llm.tokenizer.apply_chat_template([{"role": "user", "content": request}]))
        constraint = StructuredOutputs(json=json.dumps(case["schema"]))
        params.append(
            SamplingParams(temperature=0, max_tokens=max_tokens, structured_outputs=constraint)
        )
    outputs = llm.generate(prompts, params, on_error="return")
    finished, valid, invalid, errors = 0, 0, [], []
    for case, output in zip(cases, outputs, strict=True):
        choice = output.outputs[0]
        if choice.error is not None:
            errors.append(f"{case['name']}: {choice.error}")
        if choice.finish_reason != "stop":
            continue
        finished += 1
        checker = jsonschema.validators.validator_for(
            case["schema"], default=jsonschema.Draft202012Validator
        )
        try:
            answer = json.loads(choice.text)
            problems = [
                error.message
                for error in checker(
                    case["schema"], format_checker=jsonschema.FormatChecker()
                ).iter_errors(answer)
            ]
        except ValueError as error:
            problems = [str(error)]
        valid += not problems
        if problems:
            invalid.append(f"{case['name']}: {problems[0][:200]}")
    return {
        "num_schemas": len(cases),
        "max_tokens": max_tokens,
        "num_finished": finished,
        "num_valid": valid,
        "invalid": invalid,
        "errors": errors,
    }


if __name__ == "__main__":
    main()
