"""Compiling and keeping the native library: whatever happens, what is loaded is whole."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hotshoe.api import PluginOptions
from hotshoe_native.build import Build, Recipe
from hotshoe_native.cache import cache_folders
from hotshoe_native.compiler import Compiler, find_compiler
from hotshoe_native.errors import CompileError, NativeError
from hotshoe_native.isa import INSTRUCTION_SETS, Isa, available, choose
from hotshoe_native.library import diagnose, open_library, prepare
from hotshoe_native.openmp import find_openmp_runtime

SOURCE = """
#include "answer.h"
extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }
"""
OTHER_SOURCE = """
extern "C" __attribute__((visibility("default"))) int other() { return 7; }
"""

BUILD_IN_A_PROCESS = """
import sys
from pathlib import Path
from hotshoe_native.build import Build, Recipe
from hotshoe_native.compiler import find_compiler
from hotshoe_native.isa import choose
from hotshoe_native.openmp import find_openmp_runtime

sources, folder = map(Path, sys.argv[1:])
build = Build(Recipe(sources, choose("portable"), find_openmp_runtime()), [folder])
print(build.make(find_compiler()))
"""


class Options(PluginOptions):
    """Options of a plugin that calls the library."""

    isa: Isa = "auto"
    num_threads: int | None = None


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with two C++ files and a header, which compile at once."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "answer.cpp").write_text(SOURCE)
    (folder / "other.cpp").write_text(OTHER_SOURCE)
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A folder for libraries, not made yet."""
    return tmp_path / "cache"


@pytest.fixture
def make_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Let ``$CXX`` be a script; it gets what it's called with, and ``$REAL``, a compiler. Returns a
    file with a line for each source file that it was to compile.
    """
    real = find_compiler().command[0]

    def make(body: str) -> Path:
        log = tmp_path / "compiled.txt"
        log.touch()
        script = tmp_path / "cxx"
        script.write_text(
            f"#!/bin/sh\nREAL={real}\n"
            f'case "$*" in *--version*) echo "cxx 1.2.3"; exit 0;; esac\n'
            f'case "$*" in *" -c "*) echo "$$" >> {log};; esac\n{body}\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return log

    return make


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without one."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)


def build_of(sources: Path, *folders: Path) -> Build:
    return Build(Recipe(sources, choose("portable"), find_openmp_runtime()), folders)


def answer_of(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).answer())


def start_build(sources: Path, cache: Path) -> subprocess.Popen[str]:
    """The same in another process, which leads a process group."""
    return subprocess.Popen(
        [sys.executable, "-c", BUILD_IN_A_PROCESS, str(sources), str(cache)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_library_is_compiled_once_and_found_afterwards(
    sources: Path,
    cache: Path,
    make_compiler: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = make_compiler('exec "$REAL" "$@"')
    build = build_of(sources, cache)
    assert build.find(find_compiler()) is None
    path = build.make(find_compiler())
    assert answer_of(path) == 42
    assert len(log.read_text().splitlines()) == 2
    assert build_of(sources, cache).find(find_compiler()) == path
    assert build_of(sources, cache).make(find_compiler()) == path
    assert len(log.read_text().splitlines()) == 2
    started, ended = [record.message for record in caplog.records]
    assert started.startswith(
        "compiling the native kernels for portable with cxx 1.2.3: takes about"
    )
    assert ended.startswith("compiled the native kernels in ")


@pytest.mark.parametrize("changed", ["answer.cpp", "answer.h", "new.cpp"])
def test_changed_sources_make_another_library(sources: Path, cache: Path, changed: str) -> None:
    path = build_of(sources, cache).make(find_compiler())
    with (sources / changed).open("a") as file:
        file.write("\n// changed\n")
    assert build_of(sources, cache).find(find_compiler()) is None
    assert build_of(sources, cache).make(find_compiler()).parent != path.parent


def test_another_compiler_makes_its_own_library_and_without_one_any_will_do(
    sources: Path, cache: Path
) -> None:
    build = build_of(sources, cache)
    path = build.make(find_compiler())
    newer = Compiler(find_compiler().command, "g++ 99.0")
    assert build.find(newer) is None
    assert build.find(None) == path


def test_library_from_elsewhere_is_loaded_where_no_compiler_is(
    sources: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = build_of(sources, cache)
    path = build.make(find_compiler())
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert open_library(build).path == path


def test_processes_that_start_at_once_compile_once_and_those_that_wait_say_so(
    sources: Path, cache: Path, make_compiler: Callable[[str], Path]
) -> None:
    log = make_compiler('sleep 2; exec "$REAL" "$@"')
    processes = [start_build(sources, cache) for _ in range(4)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert len({printed for printed, _ in outputs}) == 1
    assert answer_of(Path(outputs[0][0].strip())) == 42
    assert len(log.read_text().splitlines()) == 2
    told = "".join(errors for _, errors in outputs)
    assert told.count("compiling the native kernels") == 1
    assert "waiting for another process that compiles the native kernels" in told


def test_build_that_is_killed_leaves_nothing_that_harms(
    sources: Path, cache: Path, make_compiler: Callable[[str], Path]
) -> None:
    log = make_compiler('"$REAL" "$@"; exec sleep 60')
    process = start_build(sources, cache)
    deadline = time.monotonic() + 60
    while not list(cache.glob("*/unfinished-*/*.o")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert log.read_text()
    build = build_of(sources, cache)
    assert list(build.folder.glob("unfinished-*"))
    assert build.find(find_compiler()) is None
    make_compiler('exec "$REAL" "$@"')
    path = build.make(find_compiler())
    assert answer_of(path) == 42
    assert sorted(build.folder.iterdir()) == sorted([path, build.folder / "lock"])


@pytest.mark.parametrize("damage", [b"", b"\x7fELF and then nothing", None])
def test_damaged_library_is_compiled_again(
    sources: Path, cache: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    build = build_of(sources, cache)
    path = build.make(find_compiler())
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if damage is None else damage)
    assert build.find(find_compiler()) is None
    healed = build.make(find_compiler())
    assert answer_of(healed) == 42
    assert f"{path} is damaged: compiling it again" in caplog.messages


def test_file_that_is_no_library_is_compiled_again_though_its_checksum_fits(
    sources: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build = build_of(sources, cache)
    path = build.make(find_compiler())
    garbage = b"no library at all"
    tag = path.stem.partition("-")[0]
    path.unlink()
    fake = path.with_name(f"{tag}-{hashlib.sha256(garbage).hexdigest()[:32]}.so")
    fake.write_bytes(garbage)
    assert build.find(find_compiler()) == fake
    assert open_library(build).function("answer")() == 42
    assert not fake.exists()
    assert any("can't be loaded" in message for message in caplog.messages)


def test_sources_that_do_not_compile_are_an_error_with_the_compilers_words_and_leave_nothing(
    sources: Path, cache: Path
) -> None:
    (sources / "answer.cpp").write_text("int answer() { return undeclared_thing; }\n")
    build = build_of(sources, cache)
    with pytest.raises(CompileError, match="undeclared_thing") as caught:
        build.make(find_compiler())
    assert str(caught.value).startswith("the C++ compiler failed (exit code 1); use g++ 10")
    assert list(build.folder.iterdir()) == [build.folder / "lock"]


def test_compiler_that_fails_is_not_asked_again_by_the_next_plugin(
    sources: Path, cache: Path, make_compiler: Callable[[str], Path]
) -> None:
    log = make_compiler("echo internal compiler error; exit 4")
    (sources / "other.cpp").unlink()
    for _ in range(2):
        with pytest.raises(CompileError, match=r"exit code 4\).*internal compiler error"):
            open_library(build_of(sources, cache))
    assert len(log.read_text().splitlines()) == 1


def test_full_disk_is_named_and_the_compiler_not_blamed(
    sources: Path, cache: Path, make_compiler: Callable[[str], Path]
) -> None:
    make_compiler("echo 'Assembler messages: can not write: No space left on device'; exit 1")
    build = build_of(sources, cache)
    with pytest.raises(NativeError, match="KiB are free there; free some more, or") as caught:
        open_library(build)
    assert not isinstance(caught.value, CompileError)
    make_compiler('exec "$REAL" "$@"')
    assert open_library(build).function("answer")() == 42


def test_machine_without_a_compiler_is_told_what_to_install(
    sources: Path, cache: Path, no_compiler: None
) -> None:
    with pytest.raises(NativeError) as caught:
        open_library(build_of(sources, cache))
    assert str(caught.value) == (
        "no C++ compiler found; install g++ (Debian, Ubuntu: apt install g++) for kernels that are "
        "several times faster"
    )
    assert not cache.exists()


def test_compiler_variable_that_names_no_program_is_an_error() -> None:
    with pytest.raises(NativeError, match="CXX is '/nonexistent', which is no program"):
        find_compiler({"CXX": "/nonexistent", "PATH": os.environ["PATH"]})


def test_compiler_variable_may_hold_arguments() -> None:
    real = find_compiler().command[0]
    found = find_compiler({"CXX": f"{real} -g", "PATH": ""})
    assert found.command == (real, "-g")
    assert found.version == find_compiler().version


def test_cache_that_cannot_be_written_gives_way_to_the_next_folder(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    blocked, other = tmp_path / "file" / "cache", tmp_path / "other"
    build = build_of(sources, blocked, other)
    path = build.make(find_compiler())
    assert answer_of(path) == 42
    assert path.is_relative_to(other)
    assert build.find(find_compiler()) == path
    assert caplog.messages[0].startswith(f"the cache {blocked}")
    assert caplog.messages[0].endswith(f"keeping it in {path.parent}")


def test_no_folder_at_all_is_an_error_with_the_remedy(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NativeError, match="set XDG_CACHE_HOME to a folder that can be written"):
        build_of(sources, tmp_path / "file" / "cache").make(find_compiler())


def test_folder_among_temporary_files_must_be_nobody_elses(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fallback = cache_folders({"XDG_CACHE_HOME": "/nowhere"})[-1]
    assert fallback.is_relative_to(tmp_path)
    build = build_of(sources, fallback)
    path = build.make(find_compiler())
    assert build.find(find_compiler()) == path
    assert fallback.parent.stat().st_mode & 0o777 == 0o700
    fallback.parent.chmod(0o777)
    assert build.find(find_compiler()) is None
    with pytest.raises(NativeError, match="others can write to it"):
        build.make(find_compiler())


def test_cache_is_where_the_desktop_standard_says() -> None:
    assert cache_folders({"XDG_CACHE_HOME": "/var/cache"})[0] == Path("/var/cache/hotshoe/native")
    assert cache_folders({})[0] == Path.home() / ".cache" / "hotshoe" / "native"
    assert cache_folders({"XDG_CACHE_HOME": "not/absolute"}) == cache_folders({})


def test_widest_instruction_set_of_a_cpu_is_chosen() -> None:
    avx512, avx2, portable = INSTRUCTION_SETS
    assert choose("auto", {*avx512.cpu_flags, "sse2"}) is avx512
    assert choose("auto", set(avx512.cpu_flags) - {"avx512_bf16"}) is avx2
    assert choose("auto", set()) is portable
    assert choose("avx2", set(avx512.cpu_flags)) is avx2
    assert available({"avx2", "fma"}) == [portable]


def test_instruction_set_that_the_cpu_lacks_is_an_error() -> None:
    flags = {"avx2", "fma", "f16c", "avx512f"}
    with pytest.raises(
        NativeError, match=r"lacks avx512bw, .*set isa to auto or one of: avx2, port"
    ):
        choose("avx512", flags)
    with pytest.raises(NativeError, match="named 'sse9'; this CPU has: avx2, portable"):
        choose("sse9", flags)


def test_openmp_runtime_is_found_without_importing_torch() -> None:
    code = (
        "import sys; from hotshoe_native.openmp import find_openmp_runtime as find; "
        "print(find()); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    maps = Path("/proc/self/maps").read_text()
    assert done.stdout.strip() in maps, "torch has loaded another one"


def test_plugin_modules_can_name_the_library_without_importing_torch() -> None:
    code = "import sys, hotshoe_native.library; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_real_library_is_prepared_and_diagnosed() -> None:
    assert prepare(Options()) == []
    facts = diagnose(Options())
    assert facts["instruction set"] == available()[0].name
    assert Path(facts["library"]).is_relative_to(facts["cache"])
    assert not {"problem", "pending", "threads"} & set(facts)
    assert diagnose(Options(num_threads=3))["threads"] == "3 (option num_threads)"


def test_diagnosis_of_what_is_missing_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    assert diagnose(Options())["pending"] == "the native kernels are not compiled yet"
    monkeypatch.setenv("CXX", "/nonexistent")
    facts = diagnose(Options(isa="portable"))
    assert facts["instruction set"] == "portable"
    assert facts["compiler"] == "none"
    assert facts["problem"].startswith("the environment variable CXX is '/nonexistent'")
    assert list(tmp_path.iterdir()) == []
    assert logging.WARNING not in {record.levelno for record in caplog.records}
