"""What a plugin has to get right before it's trusted: one component, a contract version that this
core speaks, and an object that implements the interface.
"""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import pluggy

from hotshoe import __version__
from hotshoe.api.component import Component, PluginOptions
from hotshoe.api.contracts import KINDS, PluginKind
from hotshoe.api.hooks import create_plugin_manager
from hotshoe.errors import HotshoeError, PluginContractError, PluginLoadError
from hotshoe.plugins.discovery import INSTANCE_DISTRIBUTION, PluginInfo


def import_plugin(info: PluginInfo) -> object:
    """The module or object that the entry point names.

    Raises:
        PluginLoadError: with distribution, version, module and traceback.
    """
    module_name, _, attribute = info.module.partition(":")
    try:
        found: object = importlib.import_module(module_name.strip())
        for part in filter(None, attribute.strip().split(".")):
            found = getattr(found, part)
    # a module that ends the process at import must not end ours
    except (Exception, SystemExit) as error:
        raise PluginLoadError(f"{info.label} failed to import:\n{trace(error)}") from error
    return found


def ask_component(info: PluginInfo, module: object) -> Component:
    """Call the module's ``hotshoe_component`` hook, and no other module's.

    Raises:
        PluginContractError: if a hook has an unknown name or argument, or the answer is of the
            wrong type.
        PluginLoadError: if the hook is missing or raises.
    """
    manager = create_plugin_manager()
    try:
        manager.register(module, name=info.key)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginContractError(
            f"{info.label} implements a hook that hotshoe {__version__} doesn't have: {error}; "
            f"compare it with hotshoe.api.hooks"
        ) from error
    if not manager.hook.hotshoe_component.get_hookimpls():
        raise PluginLoadError(
            f"{info.label} describes no component; define a function "
            f"hotshoe_component() -> Component in it and decorate it with hotshoe.api.hookimpl"
        )
    try:
        answers: list[Any] = manager.hook.hotshoe_component()
    except (Exception, SystemExit) as error:
        raise PluginLoadError(
            f"{info.label} failed in hotshoe_component():\n{trace(error)}"
        ) from error
    return check_component(info, answers[0] if answers else None)


def check_component(info: PluginInfo, component: object) -> Component:
    """Check type, contract and options model of what ``hotshoe_component`` returned, and return it.

    Raises:
        PluginContractError: with what to change or upgrade.
    """
    if not isinstance(component, Component):
        raise PluginContractError(
            f"{info.label} returned {component!r} from hotshoe_component(); "
            f"allowed: an instance of hotshoe.api.Component"
        )
    options: object = component.options
    if not (isinstance(options, type) and issubclass(options, PluginOptions)):
        raise PluginContractError(
            f"{info.label} has options={options!r}; "
            f"allowed: a subclass of hotshoe.api.PluginOptions"
        )
    if not callable(component.factory):
        raise PluginContractError(
            f"{info.label} has factory={component.factory!r}; "
            f"allowed: a function of (options, context)"
        )
    for name in ("prepare", "diagnose"):
        function: object = getattr(component, name)
        if function is not None and not callable(function):
            raise PluginContractError(
                f"{info.label} has {name}={function!r}; allowed: a function of (options), or None"
            )
    check_contract(info, component.contract, KINDS[info.kind])
    return component


def check_contract(info: PluginInfo, contract: str, kind: PluginKind) -> None:
    """Refuse a contract of another kind or version.

    Raises:
        PluginContractError: says which side to upgrade.
    """
    match = re.fullmatch(r"(\w+)/(\d+)", str(contract))
    if match is None or match[1] != kind.contract:
        raise PluginContractError(
            f"{info.label} states contract {contract!r} but is offered in the entry-point group "
            f"{kind.group!r}; allowed: {kind.current!r}"
        )
    version = int(match[2])
    if version == kind.version:
        return
    upgrade = f"{info.distribution}, or use an older hotshoe"
    if version > kind.version:
        upgrade = f"hotshoe, or use an older {info.distribution}"
    raise PluginContractError(
        f"{info.label} was written for contract {contract!r} but hotshoe {__version__} speaks "
        f"{kind.current!r}; upgrade {upgrade}"
    )


def call_prepare(info: PluginInfo, component: Component, options: object) -> list[str]:
    """Let the plugin do its heavy start-up work; why it can't work here.

    Raises:
        HotshoeError: whatever of this tree it raises.
        PluginLoadError: if it raises anything else, with its traceback.
        PluginContractError: if the answer is no sequence of reasons.
    """
    if component.prepare is None:
        return []
    answer: object = _call(info, "prepare", component.prepare, options)
    if isinstance(answer, list | tuple) and all(isinstance(one, str) for one in answer):
        return list(answer)
    raise PluginContractError(
        f"{info.label} returned {answer!r} from prepare(options); allowed: a list of reasons, each "
        f"of them text; empty = ready"
    )


def call_diagnose(info: PluginInfo, component: Component, options: object) -> dict[str, str]:
    """What the plugin tells about that work.

    Raises:
        HotshoeError: whatever of this tree it raises.
        PluginLoadError: if it raises anything else, with its traceback.
        PluginContractError: if the answer is no mapping of texts.
    """
    if component.diagnose is None:
        return {}
    answer: object = _call(info, "diagnose", component.diagnose, options)
    if isinstance(answer, Mapping) and all(
        isinstance(one, str) for pair in answer.items() for one in pair
    ):
        return dict(answer)
    raise PluginContractError(
        f"{info.label} returned {answer!r} from diagnose(options); allowed: text by name"
    )


def _call(
    info: PluginInfo, name: str, function: Callable[[Any], object], options: object
) -> object:
    try:
        return function(options)
    except HotshoeError:
        raise
    except (Exception, SystemExit) as error:
        if _is_refused_call(error):
            raise PluginContractError(
                f"{info.label} has a {name} that can't be called as {name}(options) with "
                f"{type(options).__name__}: {error}"
            ) from error
        raise PluginLoadError(f"{info.label} failed in {name}:\n{trace(error)}") from error


def call_factory(info: PluginInfo, component: Component, options: object, context: object) -> Any:
    """Build the plugin's object and check that it implements its interface.

    Raises:
        HotshoeError: whatever of this tree the factory raises.
        PluginLoadError: if the factory raises anything else, with its traceback.
        PluginContractError: if the factory takes other arguments, or the object has the wrong base
            class or lacks methods.
    """
    try:
        built = component.factory(options, context)
    except HotshoeError:
        raise
    except (Exception, SystemExit) as error:
        lacking = _abstract_methods_named_in(error, info.kind)
        if lacking:
            raise PluginContractError(
                f"{info.label} built an object without the methods {', '.join(lacking)} "
                f"of {KINDS[info.kind].interface}: {error}"
            ) from error
        if _is_refused_call(error):
            raise PluginContractError(
                f"{info.label} has a factory that can't be called as factory(options, context) "
                f"with {type(options).__name__} and {type(context).__name__}: {error}"
            ) from error
        raise PluginLoadError(f"{info.label} failed to build:\n{trace(error)}") from error
    check_interface(info, built)
    return built


def check_interface(info: PluginInfo, built: object) -> None:
    """Check that an object implements the interface of its kind.

    Raises:
        PluginContractError: names the base class, and the methods that are missing.
    """
    interface = load_interface(info.kind)
    required = sorted(interface.__abstractmethods__)
    missing = [name for name in required if not callable(getattr(built, name, None))]
    if isinstance(built, interface) and not missing:
        return
    described = f"an object of type {type(built).__module__}.{type(built).__qualname__}"
    if isinstance(built, type):
        described = f"the class {built.__qualname__} and not an instance of it"
    lacks = f"; methods missing: {', '.join(missing)}" if missing else ""
    verb = "is" if info.distribution == INSTANCE_DISTRIBUTION else "built"
    raise PluginContractError(
        f"{info.label} {verb} {described}; allowed: an instance of a subclass of "
        f"hotshoe.api.{interface.__name__}{lacks}"
    )


def load_interface(kind: str) -> Any:
    """The abstract base class of a kind (typed Any: it's chosen at run time)."""
    module_name, _, attribute = KINDS[kind].interface.partition(":")
    return getattr(importlib.import_module(module_name), attribute)


def trace(error: BaseException) -> str:
    """Traceback text of an error that plugin code raised."""
    return "".join(traceback.format_exception(error)).rstrip()


def _is_refused_call(error: BaseException) -> bool:
    """Whether the arguments didn't fit: then no frame of the callee was ever entered."""
    ours = error.__traceback__
    return isinstance(error, TypeError) and ours is not None and ours.tb_next is None


def _abstract_methods_named_in(error: BaseException, kind: str) -> list[str]:
    """Methods that Python missed when it refused to make an instance of an abstract class."""
    if not isinstance(error, TypeError) or "abstract class" not in str(error):
        return []
    words = set(re.findall(r"\w+", str(error).partition("abstract method")[2]))
    return sorted(words & load_interface(kind).__abstractmethods__)
