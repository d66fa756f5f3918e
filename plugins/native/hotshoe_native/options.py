"""Options of the components that call the native library."""

from __future__ import annotations

from pydantic import Field

from hotshoe.api import PluginOptions
from hotshoe_native.isa import Isa


class NativeOptions(PluginOptions):
    """Threads and instructions."""

    num_threads: int | None = Field(
        default=None,
        ge=1,
        description="Threads that share a call: one number for kernels and attention, which torch "
        "uses then too; 1 or the same number for a sampler. By default as many as torch uses.",
    )
    isa: Isa = Field(
        default="auto", description="Instruction set; auto is the widest that the CPU has."
    )

    def share_threads(self) -> int:
        """Have torch use as many threads: both run on those of one runtime, which keeps a team of
        one size.

        Returns:
            The number that both use.
        """
        import torch  # not with the module: it takes a second

        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        return torch.get_num_threads()
