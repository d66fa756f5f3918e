"""Finds, compiles and loads the library of an instruction set."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from hotshoe.api import PluginOptions
from hotshoe_native.build import Build, Recipe
from hotshoe_native.cache import cache_folders
from hotshoe_native.compiler import Compiler, find_compiler
from hotshoe_native.errors import CompileError, NativeError
from hotshoe_native.isa import available, choose
from hotshoe_native.openmp import find_openmp_runtime, load_openmp_runtime
from hotshoe_native.ops import NativeLibrary

__all__ = ["NativeLibrary", "diagnose", "load", "prepare"]

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "src"


def load(isa: str = "auto") -> NativeLibrary:
    """The library for an instruction set, the same object each time; compiled if it has to be.

    Args:
        isa: ``auto`` is the widest that this CPU has.

    Raises:
        NativeError: if the CPU lacks it, or there's no library and no compiler to make it.
    """
    return _load(choose(isa).name)


def prepare(options: PluginOptions) -> Sequence[str]:
    """``Component.prepare`` of the plugins that call the library: compile it, or say why not.

    Args:
        options: of the plugin; its option ``isa`` counts if it has one.
    """
    try:
        load(_isa_of(options))
    except NativeError as error:
        return [str(error)]
    return []


def diagnose(options: PluginOptions) -> Mapping[str, str]:
    """``Component.diagnose`` of the plugins that call the library.

    Args:
        options: of the plugin; its options ``isa`` and ``num_threads`` count if it has them.
    """
    facts = {"instruction sets": ", ".join(isa.name for isa in available())}
    compiler = None
    problem = ""
    try:
        compiler = find_compiler()
        facts["compiler"] = f"{compiler.label} ({compiler.command[0]})"
    except NativeError as error:
        facts["compiler"] = "none"
        problem = str(error)
    try:
        build = _build(choose(_isa_of(options)).name)
    except NativeError as error:
        return facts | {"problem": str(error)}
    facts["instruction set"] = build.recipe.isa.name
    if num_threads := getattr(options, "num_threads", None):
        facts["threads"] = f"{num_threads} (option num_threads)"
    facts["OpenMP runtime"] = str(build.recipe.runtime)
    facts["cache"] = str(build.folder)
    if found := build.find(compiler):
        return facts | {"library": str(found)}
    if problem:
        return facts | {"library": "none", "problem": problem}
    return facts | {"library": "none", "pending": "the native kernels are not compiled yet"}


def open_library(build: Build) -> NativeLibrary:
    """Load a library, compiled first if it has to be, and compiled again if it can't be loaded.

    Raises:
        NativeError: if there's no library and no compiler to make it, or it can't be loaded.
    """
    isa = build.recipe.isa.name
    load_openmp_runtime(build.recipe.runtime)
    path = _provide(build)
    try:
        return NativeLibrary(isa, path)
    except OSError as error:
        logger.warning("%s can't be loaded (%s): compiling it again", path, error)
        with contextlib.suppress(OSError):
            path.unlink()
        path = _provide(build)
    try:
        return NativeLibrary(isa, path)
    except OSError as error:
        raise NativeError(
            f"the native kernels can't be loaded from {path}: {error}; if that file system is "
            f"mounted noexec, set XDG_CACHE_HOME to a folder on another one"
        ) from error


@functools.cache
def _load(isa: str) -> NativeLibrary:
    return open_library(_build(isa))


def _build(isa: str) -> Build:
    return Build(Recipe(_SOURCES, choose(isa), find_openmp_runtime()), cache_folders())


def _provide(build: Build) -> Path:
    """The file of a library."""
    missing = None
    compiler = None
    try:
        compiler = find_compiler()
    except NativeError as error:
        missing = error
    if found := build.find(compiler):
        return found
    if compiler is None:
        assert missing is not None
        raise missing
    if refusal := _refusal(build.recipe, build.folders, compiler):
        raise CompileError(refusal)
    # there now, unless it was deleted since
    return build.find(compiler) or build.make(compiler)


@functools.cache
def _refusal(recipe: Recipe, folders: Sequence[Path], compiler: Compiler) -> str | None:
    """Compile; why it failed. What is refused once would be refused for the next plugin too."""
    try:
        Build(recipe, folders).make(compiler)
    except CompileError as error:
        return str(error)
    return None


def _isa_of(options: PluginOptions) -> str:
    return str(getattr(options, "isa", "auto"))
