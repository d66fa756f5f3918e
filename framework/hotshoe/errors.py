"""The error tree, one root, so that a caller can catch by meaning.

HotshoeError
├── ConfigError (ValueError)         a config value is wrong, unknown or contradictory
├── PluginError                      a plugin can't be found, loaded or built
│   ├── PluginNotFoundError          unknown kind or name
│   ├── PluginConflictError          two distributions offer one name
│   ├── PluginLoadError              import failed, or the module has no usable component
│   ├── PluginContractError          written for another contract version, or breaks its interface
│   └── PluginDeniedError            excluded by plugins.allow, plugins.deny or safe mode
├── ModelLoadError                   weights or tokenizer missing, truncated, of an unknown kind
├── DeviceMemoryError                a GPU's memory doesn't hold weights, a step or its recordings
├── KVCacheError                     the KV budget can't hold what was asked of it
├── RequestError (ValueError)        this request can't be served; the next one can
│   └── SamplingParamsError          one field of it is out of range
├── UnavailableError                 it can't be served now; later it may
│   ├── QueueFullError               as many requests wait as may
│   ├── CompilersBusyError           no thread is free to compile its constraint
│   └── DrainingError                the server is shutting down
├── SchedulerError                   a scheduler broke its contract
│   └── SchedulerStalledError        nothing runs though something could
├── ShapeError (ValueError)          tensors handed over a contract don't fit together
├── TrainingError                    a draft head can't be trained from what is there
├── NotRecordableError               a forward pass can't be recorded; it is run op by op
└── EngineDeadError                  the engine or a worker has stopped; nothing can be served
"""

from __future__ import annotations


class HotshoeError(Exception):
    """Root of every error that hotshoe raises on purpose."""


class ConfigError(HotshoeError, ValueError):
    """A configuration value is wrong; the message has its path, the value and what is allowed."""


class PluginError(HotshoeError):
    """A plugin can't be used."""


class PluginNotFoundError(PluginError):
    """No plugin of that kind and name is installed."""


class PluginConflictError(PluginError):
    """Two distributions offer the same kind and name."""


class PluginLoadError(PluginError):
    """The plugin's module failed to import, or describes no component."""


class PluginContractError(PluginError):
    """The plugin was written for another contract version, or what it built breaks the contract."""


class PluginDeniedError(PluginError):
    """The plugin is installed but excluded by configuration."""


class TrainingError(HotshoeError):
    """A draft head can't be trained as asked; the message says what stands in the way."""


class NotRecordableError(HotshoeError):
    """A forward pass does something that a recording of it would leave out."""


class ModelLoadError(HotshoeError):
    """Weights, tokenizer or model config are missing, damaged, or of an unsupported kind."""


class DeviceMemoryError(HotshoeError):
    """A GPU has no memory left; the message says for what, and which setting takes less."""


class KVCacheError(HotshoeError):
    """The KV cache budget can't hold what was asked of it."""


class RequestError(HotshoeError, ValueError):
    """One request can't be served as asked; the engine goes on with the others.

    Args:
        message: what is wrong.
        field: the parameter at fault, if it is one.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class SamplingParamsError(RequestError):
    """A sampling parameter is out of range.

    Args:
        field: name of the parameter.
        value: what was given.
        allowed: what would be accepted.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}: got {value!r:.500}, allowed: {allowed}", field=field)
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[type[SamplingParamsError], tuple[str, object, str]]:
        return type(self), (str(self.field), self.value, self.allowed)


class UnavailableError(HotshoeError):
    """A request can't be served now; the same one may be later."""


class QueueFullError(UnavailableError):
    """As many requests wait as ``server.max_queue`` allows."""


class CompilersBusyError(UnavailableError):
    """All of ``guided_decoding.num_compile_threads`` are busy with other constraints."""


class DrainingError(UnavailableError):
    """The server is shutting down and takes no new requests."""


class SchedulerError(HotshoeError):
    """A scheduler broke its contract; the message says which move and why."""


class SchedulerStalledError(SchedulerError):
    """Nothing runs, nothing is in flight, no idling was declared, and yet requests wait."""


class ShapeError(HotshoeError, ValueError):
    """Tensors that cross a contract don't fit together."""


class EngineDeadError(HotshoeError):
    """The engine has stopped and can't serve any more."""
