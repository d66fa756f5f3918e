"""``EngineConfig``: every setting of an engine, checked and frozen before anything is loaded.

The command line, the JSON schema and the reference are generated from the fields below.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

ENV_PREFIX = "HOTSHOE_"

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVDType = Literal["auto", "float32", "bfloat16", "float16", "int8"]
Name = Annotated[str, Field(min_length=1)]
Options = Annotated[
    dict[str, Any], Field(description="Options of the selected plugin, checked by the plugin.")
]


def _power_of_two(value: int) -> int:
    if value < 1 or value & (value - 1):
        raise ValueError("a power of two, 1 or more")
    return value


def _tcp_address(value: str) -> str:
    host, _, port = value.removeprefix("tcp://").rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65535
    if not value.startswith("tcp://") or not host or not is_port:
        raise ValueError("tcp://HOST:PORT, with a port from 1 to 65534")
    return value


class Section(BaseModel):
    """Base of the config sections: frozen, strict about types, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    """Which model is loaded, and how its tokenizer and limits are chosen."""

    path: Name = Field(
        default="embedded",
        description="A model folder, a .gguf or .safetensors file, a hub id, or 'embedded' for the "
        "model that ships with hotshoe.",
    )
    name: Name = Field(default="auto", description="Model plugin; 'auto' picks it by architecture.")
    options: Options = {}
    weights: Literal["checkpoint", "random"] = Field(
        default="checkpoint",
        description="'random': weights are drawn instead of read, the same on every machine; the "
        "model then needs no more than its config.json.",
    )
    dtype: DType = Field(default="auto", description="Type of activations and unquantized weights.")
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of a request, prompt and output together; none: what the model "
        "was trained for.",
    )
    tokenizer: Name | None = Field(
        default=None,
        description="Folder, file or hub id of the tokenizer; none: the one of the model.",
    )
    revision: Name | None = Field(
        default=None, description="Branch, tag or commit of a hub id; none: its default branch."
    )
    use_generation_config: bool = Field(
        default=True,
        description="Take sampling defaults from the model's generation_config.json if it has one.",
    )
    chat_template: Name | None = Field(
        default=None,
        description="Jinja chat template, or a file with one; none: the one of the model.",
    )


class EvictionConfig(Section):
    """Who chooses the cached blocks to give up."""

    name: Name = Field(default="lru", description="KV eviction plugin.")
    options: Options = {}


class CacheConfig(Section):
    """The KV cache: its size, its pages, what is kept in it."""

    block_size: Annotated[int, AfterValidator(_power_of_two)] = Field(
        default=16,
        description="Tokens per KV block.",
        json_schema_extra={"allowed": "a power of two, 1 or more"},
    )
    num_blocks: int | None = Field(
        default=None,
        ge=1,
        description="Number of KV blocks; none: as many as the memory below holds.",
    )
    memory_gb: float | None = Field(
        default=None,
        gt=0,
        description="Memory for KV blocks in GiB; none: memory_fraction decides, or on a GPU "
        "gpu_memory_utilization.",
    )
    memory_fraction: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of the memory that is free after loading, used on a CPU if neither "
        "num_blocks nor memory_gb is given.",
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Share of a GPU's whole memory that may be in use, by other programs too; what "
        "weights and the largest step leave of it is for KV blocks, if neither num_blocks nor "
        "memory_gb is given.",
    )
    dtype: KVDType = Field(
        default="auto",
        description="Type of the KV pages; 'auto': as the model's. What the attention offers: of "
        "hotshoe's own 'cpu' and 'triton' have int8 pages, scaled by token and head.",
    )
    enable_prefix_caching: bool = Field(
        default=True,
        description="Reuse the KV blocks of prompt prefixes that were computed before.",
    )
    eviction: EvictionConfig = Field(
        default=EvictionConfig(), description="Eviction of cached blocks."
    )


class SchedulerConfig(Section):
    """Which requests run in a step, and how many tokens of each."""

    name: Name = Field(default="fcfs", description="Scheduler plugin.")
    options: Options = {}
    max_num_seqs: int = Field(
        default=128, ge=1, description="Most requests that run at the same time."
    )
    max_num_batched_tokens: int = Field(default=2048, ge=1, description="Most tokens of one step.")
    long_prefill_token_threshold: int | None = Field(
        default=None,
        ge=1,
        description="Most prompt tokens of one request in one step; none: up to "
        "max_num_batched_tokens.",
    )
    max_preemptions_without_progress: int = Field(
        default=3,
        ge=1,
        description="Preemptions after which a request is left running until it has a new token.",
    )


class AttentionConfig(Section):
    """The attention backend."""

    name: Name = Field(
        default="auto", description="Attention plugin; 'auto' picks the best that fits."
    )
    options: Options = {}


class KernelsConfig(Section):
    """The fused operations that model layers call."""

    name: Name = Field(
        default="auto", description="Kernels plugin; 'auto' picks the best that fits."
    )
    options: Options = {}
    record: bool = Field(
        default=True,
        description="Record steps and replay them without Python, where kernels and attention "
        "can: on a GPU as CUDA graphs.",
    )
    record_batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        default=None,
        strict=False,
        description="Numbers of requests for which a GPU's steps are recorded at start-up; steps "
        "of other numbers are padded to the next of them, larger ones are not recorded. None: 1, "
        "2, 4, 8, 16, 24, 32 and so on in steps of 16, up to 256 or max_num_seqs.",
    )


class QuantizationConfig(Section):
    """How checkpoint tensors become weights."""

    name: Name = Field(
        default="none", description="Quantization plugin; 'none' keeps plain weights."
    )
    options: Options = {}


class ExecutorConfig(Section):
    """Where the workers run."""

    name: Name = Field(default="uniproc", description="Executor plugin.")
    options: Options = {}


class LogitsProcessorConfig(Section):
    """One logits processor."""

    name: Name = Field(description="Logits processor plugin.")
    options: Options = {}
    apply: Literal["always", "on_request"] = Field(
        default="on_request",
        description="Run it for every request, or only for those that ask for it.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class SamplerConfig(Section):
    """How logits become tokens."""

    name: Name = Field(
        default="auto", description="Sampler plugin; 'auto' picks the best that fits."
    )
    options: Options = {}
    logits_processors: tuple[LogitsProcessorConfig, ...] = Field(
        default=(), strict=False, description="Logits processors in the order in which they run."
    )


class DraftQuantizationConfig(Section):
    """How a drafter's own weights are stored."""

    name: Name = Field(default="none", description="Quantization plugin.")
    options: Options = {}

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class SpecDecodeConfig(Section):
    """Speculative decoding."""

    name: Name | None = Field(default=None, description="Speculative decoding plugin; none: off.")
    options: Options = {}
    quantization: DraftQuantizationConfig = Field(
        default=DraftQuantizationConfig(), description="How a drafter's own weights are stored."
    )
    adaptive: bool = Field(
        default=True,
        description="Draft as much as pays, for each request, by the measured time of steps and "
        "the share of drafts that are kept. The number of drafts varies from run to run; with the "
        "default acceptance tokens don't depend on it.",
    )
    acceptance: Literal["drafter_invariant", "leviathan", "typical"] = Field(
        default="drafter_invariant",
        description="Which drafts of sampled tokens are kept. 'drafter_invariant': those that the "
        "seed draws anyway, so that it means the same tokens with any drafts and without; "
        "'leviathan': by rejection sampling, the same distribution with a few more drafts kept, "
        "but what a seed means depends on the drafts; 'typical': likely ones, which CHANGES the "
        "distribution. Greedy tokens are the same with each.",
    )
    typical_epsilon: float = Field(
        default=0.09,
        gt=0,
        le=1,
        description="With acceptance 'typical': a draft that the model finds likelier than that is "
        "kept.",
    )
    typical_delta: float = Field(
        default=0.3,
        gt=0,
        le=1,
        description="With acceptance 'typical': so is a draft that is likelier than that share of "
        "exp(-entropy), where the model finds many tokens likely.",
    )
    max_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="No drafts in steps with more requests than that; none: any number.",
    )


class GuidedBackendConfig(Section):
    """One more guided-decoding backend: a name, or a name with options."""

    name: Name = Field(description="Guided decoding plugin.")
    options: Options = {}

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class GuidedDecodingConfig(Section):
    """Grammars and JSON schemas for outputs."""

    name: Name | None = Field(
        default="auto",
        description="Guided decoding plugin; 'auto' picks the best that is installed, and imports "
        "it when a request needs it; none: off.",
    )
    options: Options = {}
    others: tuple[GuidedBackendConfig, ...] = Field(
        default=(),
        strict=False,
        description="More backends to load, which a request can ask for by name.",
    )
    fallback: bool = Field(
        default=False,
        description="Hand a constraint that the first backend can't enforce to the next of the "
        "loaded ones, unless the request names its backend.",
    )
    jump_forward: bool | None = Field(
        default=None,
        description="Offer the tokens that a constraint forces as drafts: fewer steps, the same "
        "output. None: on a CPU; on a GPU no step is then prepared while another one runs.",
    )
    max_spec_bytes: int = Field(
        default=2**20, ge=1, description="Largest constraint of a request, in bytes of UTF-8."
    )
    compile_timeout_s: float = Field(
        default=10.0,
        gt=0,
        description="Longest time that compiling a constraint may take; the request is refused "
        "then. The thread can't be stopped: it counts against num_compile_threads until it ends.",
    )
    num_compile_threads: int = Field(
        default=2, ge=1, description="Most constraints that are compiled at the same time."
    )
    cache_size: int = Field(
        default=256, ge=0, description="Compiled constraints that are kept for later requests."
    )


class ToolParserConfig(Section):
    """How calls of functions are read from a model's text."""

    name: Name | None = Field(
        default="auto",
        description="Tool parser plugin; 'auto' picks it by the chat template, 'hermes' if that "
        "says nothing; none: requests with tools are refused.",
    )
    options: Options = {}


class ReasoningParserConfig(Section):
    """How a model's reasoning is told from its answer."""

    name: Name | None = Field(
        default="auto",
        description="Reasoning parser plugin; 'auto' picks it by the chat template, none if that "
        "says nothing; none: everything is the answer.",
    )
    options: Options = {}


class ServerConfig(Section):
    """The OpenAI-compatible server."""

    host: Name = Field(
        default="127.0.0.1", description="Address to listen on; 0.0.0.0 for every interface."
    )
    port: int = Field(default=8000, ge=0, le=65535, description="Port; 0 picks a free one.")
    workers: int = Field(
        default=1, ge=1, description="API server processes that share the port and the engine."
    )
    served_model_name: tuple[Name, ...] = Field(
        default=(),
        strict=False,
        description="Names that clients may use for the model; none: model.path.",
    )
    api_keys: tuple[Name, ...] = Field(
        default=(),
        strict=False,
        description="Keys of which a client must send one; none: no authentication.",
    )
    api_key_file: Name | None = Field(
        default=None, description="File with further keys, one a line."
    )
    max_queue: int = Field(
        default=1024, ge=1, description="Most waiting requests; more are refused with 429."
    )
    max_body_mb: float = Field(default=16.0, gt=0, description="Largest request body in MiB.")
    request_timeout_s: float | None = Field(
        default=None, gt=0, description="Longest time a request may take; none: no limit."
    )
    drain_timeout_s: float = Field(
        default=30.0, ge=0, description="How long SIGTERM waits for running requests."
    )
    unknown_fields: Literal["refuse", "warn"] = Field(
        default="refuse",
        description="What happens to request fields that the API doesn't know.",
    )
    max_choices: int = Field(default=128, ge=1, description="Largest n of a request.")
    max_prompts: int = Field(default=512, ge=1, description="Most prompts in one request.")
    max_logprobs: int = Field(
        default=20, ge=0, description="Most log probabilities per token that a request may ask for."
    )
    max_stop: int = Field(default=64, ge=0, description="Most stop strings of a request.")
    client_chat_templates: bool = Field(
        default=False,
        description="Let requests bring a chat template of their own. It runs in a sandbox, but "
        "can take any amount of time.",
    )
    tool_parser: ToolParserConfig = Field(default=ToolParserConfig(), description="Tool calls.")
    reasoning_parser: ReasoningParserConfig = Field(
        default=ReasoningParserConfig(), description="Reasoning."
    )
    dev_endpoints: bool = Field(
        default=False, description="Offer endpoints that reset caches and start profiles."
    )
    page: bool = Field(default=True, description="Show the built-in page at /.")
    cors_origins: tuple[str, ...] = Field(
        default=(), strict=False, description="Origins that browsers may call from; none: CORS off."
    )
    tls_cert_file: Name | None = Field(default=None, description="TLS certificate chain (PEM).")
    tls_key_file: Name | None = Field(default=None, description="TLS private key (PEM).")
    log_format: Literal["text", "json"] = Field(default="text", description="Format of the log.")
    log_prompts: bool = Field(
        default=False, description="Write prompts and outputs to the log at debug level."
    )
    status_interval_s: float = Field(
        default=10.0, ge=0, description="Seconds between status lines in the log; 0: none."
    )
    vllm_metric_names: bool = Field(
        default=False, description="Export metrics under vllm: names too, for existing dashboards."
    )
    otlp_endpoint: Name | None = Field(
        default=None,
        description="Where traces are sent, an OTLP/HTTP address such as http://127.0.0.1:4318; "
        "'environment': where the standard OTEL_ variables say; none: no tracing.",
    )
    profile_dir: Name | None = Field(
        default=None,
        description="Folder for profiles of the step loop; none: the one for temporary files.",
    )
    core_address: Annotated[str, AfterValidator(_tcp_address)] | None = Field(
        default=None,
        description="TCP address of the engine core on this machine (tcp://127.0.0.1:5557; the "
        "next port is used too), for hosts that only trusted programs reach; none: local sockets.",
        json_schema_extra={"allowed": "tcp://HOST:PORT, with a port from 1 to 65534, or none"},
    )


class PluginsConfig(Section):
    """Which installed plugins may be loaded."""

    allow: tuple[str, ...] | None = Field(
        default=None,
        strict=False,
        description="Distributions whose plugins may be imported, hotshoe's own aside; none: all.",
    )
    deny: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Distributions whose plugins may not be imported, even if allow lists them.",
    )
    safe_mode: bool = Field(default=False, description="Load only plugins that ship with hotshoe.")


class EngineConfig(BaseSettings):
    """Every setting of one engine. ``load_config`` builds it from all sources."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
    )

    model: ModelConfig = Field(default=ModelConfig(), description="The model.")
    cache: CacheConfig = Field(default=CacheConfig(), description="The KV cache.")
    scheduler: SchedulerConfig = Field(default=SchedulerConfig(), description="Scheduling.")
    attention: AttentionConfig = Field(default=AttentionConfig(), description="Attention.")
    kernels: KernelsConfig = Field(default=KernelsConfig(), description="Kernels.")
    quantization: QuantizationConfig = Field(
        default=QuantizationConfig(), description="Quantization."
    )
    executor: ExecutorConfig = Field(default=ExecutorConfig(), description="Workers.")
    sampler: SamplerConfig = Field(default=SamplerConfig(), description="Sampling.")
    spec_decode: SpecDecodeConfig = Field(
        default=SpecDecodeConfig(), description="Speculative decoding."
    )
    guided_decoding: GuidedDecodingConfig = Field(
        default=GuidedDecodingConfig(), description="Guided decoding."
    )
    server: ServerConfig = Field(default=ServerConfig(), description="The server.")
    plugins: PluginsConfig = Field(default=PluginsConfig(), description="Plugin loading.")
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="Seed of requests that bring none, with their number.",
    )
    deterministic: bool = Field(
        default=False,
        description="Only use kernels and attention whose result for a request is the same, bit "
        "for bit, whatever else runs: batch, chunks, prefix cache and preemption then change no "
        "token, in bfloat16 and with quantized weights too.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the model runs; 'auto': CUDA if there is a GPU."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe log messages that are shown."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read nothing but arguments: ``load_config`` hands over its merged layers as such.

        The stock sources ignore unknown variables and merge the options of one plugin into those
        of another; the ones in ``hotshoe.config.sources`` don't.
        """
        return (init_settings,)

    @model_validator(mode="after")
    def _check_contradictions(self) -> EngineConfig:
        if found := _contradictions(self):
            raise ValueError("\n".join(found))
        return self


def _contradictions(config: EngineConfig) -> list[str]:
    """What is wrong between fields that are each right, naming both paths."""
    found = []
    cache, scheduler, max_model_len = config.cache, config.scheduler, config.model.max_model_len
    if cache.num_blocks is not None and cache.memory_gb is not None:
        found.append(
            f"cache.num_blocks is {cache.num_blocks} and cache.memory_gb is {cache.memory_gb}, but "
            "either alone sets the size of the KV cache; set the other to none"
        )
    if cache.num_blocks is not None and max_model_len is not None:
        capacity = cache.num_blocks * cache.block_size
        if capacity < max_model_len:
            found.append(
                f"model.max_model_len is {max_model_len} but cache.num_blocks of cache.block_size "
                f"hold {capacity} tokens; lower the first or raise cache.num_blocks"
            )
    threshold, budget = scheduler.long_prefill_token_threshold, scheduler.max_num_batched_tokens
    if threshold is not None and threshold > budget:
        found.append(
            f"scheduler.long_prefill_token_threshold is {threshold} but scheduler."
            f"max_num_batched_tokens is {budget}, so it would never apply; lower the first or "
            "raise the second"
        )
    kernels = config.kernels
    if not kernels.record and kernels.record_batch_sizes is not None:
        found.append(
            f"kernels.record_batch_sizes is {list(kernels.record_batch_sizes)} but kernels.record "
            "is false, so nothing is recorded; remove the first or set the second to true"
        )
    found += _contradictions_of_acceptance(config)
    server = config.server
    if (server.tls_cert_file is None) != (server.tls_key_file is None):
        found.append(
            f"server.tls_cert_file is {server.tls_cert_file!r} and server.tls_key_file is "
            f"{server.tls_key_file!r}, but TLS needs both; set the other or none"
        )
    guided = config.guided_decoding
    if guided.name is None and guided.others:
        found.append(
            f"guided_decoding.others names {[one.name for one in guided.others]} but "
            "guided_decoding.name is none, so nothing is guided; set the name or remove the others"
        )
    names = [guided.name, *(one.name for one in guided.others)]
    if repeated := sorted({name for name in names if name is not None and names.count(name) > 1}):
        found.append(
            f"guided_decoding.name and guided_decoding.others name {repeated} more than once; "
            "name each backend once"
        )
    selections: dict[str, Any] = {
        "spec_decode": config.spec_decode,
        "guided_decoding": config.guided_decoding,
        "server.tool_parser": server.tool_parser,
        "server.reasoning_parser": server.reasoning_parser,
    }
    for section, selected in selections.items():
        if selected.name is None and selected.options:
            found.append(
                f"{section}.options is {selected.options!r} but {section}.name is none, so nothing "
                f"reads it; set {section}.name or remove the options"
            )
    return found


def _contradictions_of_acceptance(config: EngineConfig) -> list[str]:
    section = config.spec_decode
    found = []
    if config.deterministic and section.acceptance != "drafter_invariant":
        found.append(
            f"deterministic is true but spec_decode.acceptance is {section.acceptance!r}, with "
            "which tokens depend on how many drafts there are, and so on what else runs; set the "
            "first to false or the second to 'drafter_invariant'"
        )
    for name in ("typical_epsilon", "typical_delta"):
        value = getattr(section, name)
        if section.acceptance != "typical" and value != SpecDecodeConfig.model_fields[name].default:
            found.append(
                f"spec_decode.{name} is {value} but spec_decode.acceptance is "
                f"{section.acceptance!r}, so nothing reads it; set the second to 'typical' or "
                "remove the first"
            )
    return found
