"""Plain reads from checkpoint files.

Not memory maps: mapped pages count as resident until the map is dropped, and a load must not need
more memory than the weights plus one tensor.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from hotshoe.errors import ModelLoadError


class FileReader:
    """Reads byte ranges of one file straight into tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] = path.open("rb", buffering=0)

    def read_into(self, target: Tensor, offset: int, *, what: str) -> None:
        """Fill a contiguous CPU tensor with the bytes at an offset.

        Raises:
            ModelLoadError: if the file ends first, can't be read, or has been closed.
        """
        if target.numel() == 0:
            return
        if self._file.closed:
            raise ModelLoadError(f"can't read {what}: checkpoint {str(self.path)!r} is closed")
        view = target.view(-1).view(torch.uint8).numpy().data
        try:
            while view:
                num_bytes = os.preadv(self._file.fileno(), [view], offset)
                if num_bytes == 0:
                    raise ModelLoadError(
                        f"can't read {what}: {str(self.path)!r} ends at byte {offset}, "
                        f"{len(view)} short; download it again"
                    )
                view = view[num_bytes:]
                offset += num_bytes
        except OSError as error:
            raise ModelLoadError(f"can't read {what} from {str(self.path)!r}: {error}") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()
