"""Where compiled libraries are kept: files that prove themselves, written by one process at a time.

A file's name has the checksum of its content, and a file appears by a rename. So whatever is found
under a fitting name with a fitting checksum is complete, whoever was killed or wrote at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

_CHECKSUM_CHARS = 32
_LOCK_POLL_S = 0.05
_UNFINISHED = "unfinished-"


def cache_folders(environment: Mapping[str, str] | None = None) -> list[Path]:
    """Folders for compiled libraries, the preferred one first.

    That is ``hotshoe/native`` in the user's cache (``$XDG_CACHE_HOME``, by default ``~/.cache``),
    and a private folder among the temporary files for machines where that can't be written. The
    variable belongs to the desktop standard and is about the machine: it's no setting of the
    engine.

    Args:
        environment: None = that of the process.
    """
    variables = os.environ if environment is None else environment
    temporary = _temporary_root() / "native"
    # relative paths are invalid there, says the standard
    if (base := Path(variables.get("XDG_CACHE_HOME", ""))).is_absolute():
        return [base / "hotshoe" / "native", temporary]
    try:
        return [Path.home() / ".cache" / "hotshoe" / "native", temporary]
    except RuntimeError:
        return [temporary]


class LibraryCache:
    """The libraries of one recipe, by the compiler that made them.

    Args:
        folder: one of its own; made when first written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, tag: str | None) -> Path | None:
        """A library that is complete.

        Args:
            tag: of the compiler; None = of whichever.
        """
        return next((path for path in self._entries(tag) if _is_intact(path)), None)

    def discard_damaged(self) -> None:
        """Delete libraries that are not what was written, and what killed processes have left; the
        lock must be held.
        """
        for path in self._entries(None):
            if not _is_intact(path):
                logger.warning("%s is damaged: compiling it again", path)
                path.unlink(missing_ok=True)
        for leftover in self.folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only process that writes here; waits for another one, and says so. It ends with
        the process, however that ends.

        Raises:
            OSError: if nothing can be written here.
        """
        _make(self.folder)
        with (self.folder / "lock").open("ab") as file:
            if not _try_lock(file.fileno()):
                logger.warning("waiting for another process that compiles the native kernels")
                while not _try_lock(file.fileno()):
                    time.sleep(_LOCK_POLL_S)
            yield

    @contextlib.contextmanager
    def workspace(self) -> Iterator[Path]:
        """A folder for what is being made; deleted afterwards. The lock must be held."""
        folder = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, built: Path, tag: str) -> Path:
        """Take a finished library from the workspace; the lock must be held."""
        with built.open("rb") as file:
            os.fsync(file.fileno())
        target = self.folder / f"{tag}-{_checksum(built)}.so"
        return built.rename(target)

    def _entries(self, tag: str | None) -> list[Path]:
        if not _is_trusted(self.folder):
            return []
        return sorted(self.folder.glob(f"{tag or '*'}-*.so"))


def _temporary_root() -> Path:
    return Path(tempfile.gettempdir()) / f"hotshoe-{os.getuid()}"


def _make(folder: Path) -> None:
    """Make a folder, and the one for temporary files so that nobody else can write there."""
    root = _temporary_root()
    if folder.is_relative_to(root):
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        if not _is_private(root):
            raise PermissionError(f"{root} belongs to somebody else, or others can write to it")
    folder.mkdir(parents=True, exist_ok=True)


def _is_trusted(folder: Path) -> bool:
    """Whether what lies there is this user's: a library is code that runs."""
    root = _temporary_root()
    return not folder.is_relative_to(root) or _is_private(root)


def _is_private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    is_ours = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return stat.S_ISDIR(status.st_mode) and is_ours


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:_CHECKSUM_CHARS]


def _is_intact(path: Path) -> bool:
    try:
        return path.stem.rpartition("-")[2] == _checksum(path)
    except OSError:
        return False
