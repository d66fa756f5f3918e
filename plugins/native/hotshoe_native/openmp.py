"""torch's OpenMP runtime: the library that the native ops get their threads from."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from hotshoe_native.errors import NativeError

# below the folder that has the package torch; wheels of some platforms keep libraries beside it
_PATTERNS = (
    *("torch/lib/libgomp*.so*", "torch.libs/libgomp*.so*"),
    *("torch/lib/libiomp5*.so*", "torch/lib/libomp*.so*"),
)
_RUNTIME = re.compile(r"lib(gomp|iomp5|omp)\b[^/]*\.so[^/]*")


def find_openmp_runtime() -> Path:
    """The shared object, found without importing torch where torch ships it.

    Raises:
        NativeError: if torch is missing, or has loaded none.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise NativeError("torch is not installed, and its OpenMP runtime runs the native kernels")
    for folder in map(Path, spec.submodule_search_locations):
        for pattern in _PATTERNS:
            if found := sorted(folder.parent.glob(pattern)):
                return found[0]
    import torch  # built against the system's runtime, which is known once it's loaded

    for path in _mapped():
        return path
    raise NativeError(
        f"torch {torch.__version__} has no OpenMP runtime: none in {Path(torch.__file__).parent} "
        "and none in this process; install a build of torch that has one, as the wheels of "
        "pytorch.org do"
    )


def load_openmp_runtime(runtime: Path) -> None:
    """See to it that the process has the runtime before a library that needs it is loaded.

    Whichever file of that name comes first serves torch and all others.

    Raises:
        OSError: if it can't be loaded.
    """
    if all(path.name != runtime.name for path in _mapped()):
        ctypes.CDLL(str(runtime))


def _mapped() -> Iterator[Path]:
    """OpenMP runtimes that this process has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, slash, rest = line.partition("/")
        path = Path(slash + rest)
        if slash and _RUNTIME.fullmatch(path.name):
            yield path
