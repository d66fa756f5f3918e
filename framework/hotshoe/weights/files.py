"""Plain reads from checkpoint files.

Not memory maps: mapped pages count as resident until the map is dropped, and a load must not need
more memory than the weights plus one tensor.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hotshoe.errors import ModelLoadError


class FileReader:
    """Reads byte ranges of one file straight into tensors. Holds no open file between reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_closed = False

    def read_into(self, target: Tensor, offset: int, *, what: str) -> None:
        """Fill a contiguous CPU tensor with the bytes at an offset.

        Raises:
            ModelLoadError: if the file ends first, can't be read, or has been closed.
        """
        if self._is_closed:
            raise ModelLoadError(f"can't read {what}: checkpoint {str(self.path)!r} is closed")
        if target.numel() == 0:
            return
        view = target.view(-1).view(torch.uint8).numpy().data
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(offset)
                while view:
                    num_bytes = file.readinto(view)
                    if not num_bytes:
                        raise ModelLoadError(
                            f"can't read {what}: {str(self.path)!r} ends {len(view)} bytes short; "
                            "download it again"
                        )
                    view = view[num_bytes:]
        except OSError as error:
            raise ModelLoadError(f"can't read {what} from {str(self.path)!r}: {error}") from error

    def close(self) -> None:
        """Refuse further reads."""
        self._is_closed = True
