"""From C++ sources to a shared object: what it depends on, where it's kept, and how it's made."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotshoe_native.cache import LibraryCache
from hotshoe_native.compiler import Compiler, run_all
from hotshoe_native.errors import NativeError
from hotshoe_native.isa import InstructionSet

logger = logging.getLogger(__name__)

# what isn't written as one operation isn't fused to one: else results could differ between tiles
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden")

_TIMEOUT_S = 600.0
_SECONDS_PER_KIB = 0.4
_FORMAT = "1"  # of the cache; another one doesn't see what this one wrote


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything but the compiler that a library follows from.

    The model of the CPU is no part of it: the instruction set is named in full, so a library that
    was compiled for an image runs wherever that image does.

    Attributes:
        sources: folder of ``*.cpp``, each compiled on its own, and ``*.h``.
        runtime: OpenMP runtime that the library is linked with.
    """

    sources: Path
    isa: InstructionSet
    runtime: Path

    def key(self) -> str:
        """Name of the folder that libraries of this recipe are kept in."""
        parts = [_FORMAT, self.runtime.name, *FLAGS, *self.isa.compiler_flags]
        for path in sorted([*self.sources.glob("*.cpp"), *self.sources.glob("*.h")]):
            parts += [path.name, path.read_text()]
        return f"{self.isa.name}-{_digest(parts)}"

    def cpp_files(self) -> list[Path]:
        """What is to be compiled, the largest first: it takes longest."""
        return sorted(self.sources.glob("*.cpp"), key=lambda path: (-path.stat().st_size, path))


class Build:
    """One library: finds it, or makes it.

    Args:
        folders: where libraries are kept; the first that can be written is written to.
    """

    def __init__(self, recipe: Recipe, folders: Sequence[Path]) -> None:
        self.recipe = recipe
        self.folders = tuple(folders)
        self._key = recipe.key()
        self._caches = [LibraryCache(folder / self._key) for folder in folders]

    @property
    def folder(self) -> Path:
        """Where it would be kept."""
        return self._caches[0].folder

    def find(self, compiler: Compiler | None) -> Path | None:
        """The library as this compiler made it, if there is one.

        Args:
            compiler: None = whichever: where no compiler is, one that came from elsewhere is fine.
        """
        tag = _tag(compiler) if compiler else None
        return next(filter(None, (cache.find(tag) for cache in self._caches)), None)

    def make(self, compiler: Compiler) -> Path:
        """The library; compiled by this process unless another one is quicker.

        Raises:
            CompileError: if the compiler refuses the sources.
            NativeError: if nothing can be written, or the disk is full.
        """
        refusals: list[str] = []
        for cache in self._caches:
            try:
                with cache.lock():
                    if refusals:
                        logger.warning("%s; keeping it in %s", refusals[-1], cache.folder)
                    return self._make(cache, compiler)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise NativeError(
                        f"the native kernels can't be written to {cache.folder}: {error.strerror}; "
                        f"free space there, or set XDG_CACHE_HOME to another folder"
                    ) from error
                refusals.append(f"the cache {cache.folder} can't be written ({error})")
        raise NativeError(
            f"the native kernels can't be kept anywhere: {'; '.join(refusals)}; "
            f"set XDG_CACHE_HOME to a folder that can be written"
        )

    def _make(self, cache: LibraryCache, compiler: Compiler) -> Path:
        cache.discard_damaged()
        tag = _tag(compiler)
        if found := cache.find(tag):
            return found
        recipe = self.recipe
        logger.warning(
            "compiling the native kernels for %s with %s: takes about %d s, once",
            recipe.isa.name,
            compiler.label,
            _estimated_seconds(recipe),
        )
        start = time.monotonic()
        with cache.workspace() as folder:
            library = _compile(recipe, compiler, folder)
            if recipe.key() != self._key:
                raise NativeError(
                    f"the sources in {recipe.sources} changed while they were compiled; try again"
                )
            published = cache.publish(library, tag)
        logger.warning("compiled the native kernels in %.1f s", time.monotonic() - start)
        return published


def _compile(recipe: Recipe, compiler: Compiler, folder: Path) -> Path:
    files = recipe.cpp_files()
    objects = [str(folder / f"{path.stem}.o") for path in files]
    library = folder / "library.so"
    flags = [*FLAGS, *recipe.isa.compiler_flags]
    compile_each = [
        [*compiler.command, *flags, "-c", str(path), "-o", target]
        for path, target in zip(files, objects, strict=True)
    ]
    link = [*compiler.command, "-shared", "-o", str(library), *objects, str(recipe.runtime)]
    for commands in (compile_each, [link]):
        run_all(commands, folder=folder, num_jobs=_num_cores(), timeout_s=_TIMEOUT_S)
    return library


def _estimated_seconds(recipe: Recipe) -> int:
    sizes = [path.stat().st_size / 1024 * _SECONDS_PER_KIB for path in recipe.cpp_files()]
    return round(max(sum(sizes) / _num_cores(), *sizes, 1.0))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _tag(compiler: Compiler) -> str:
    return _digest([*compiler.command, compiler.version])


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(_sized(parts)).encode()).hexdigest()[:16]


def _sized(parts: Iterable[str]) -> Iterator[str]:
    """No two lists of parts may look alike once they're joined."""
    for part in parts:
        yield f"{len(part)}:{part}"
