"""Where Triton kernels run: GPUs of NVIDIA, or Triton's interpreter on a CPU.

Imports neither torch nor triton with the module: plugins ask ``is_interpreting`` for their
capabilities.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from hotshoe.api import ConfigError

if TYPE_CHECKING:
    import torch

MIN_CAPABILITY = (8, 0)
"""Compute capability of the oldest GPUs that kernels are compiled for: Ampere, with bfloat16."""

_INSTALL = "pip install triton, or leave the name at auto"


def is_interpreting() -> bool:
    """Whether kernels run on the CPU in Triton's interpreter, as ``TRITON_INTERPRET=1`` asks of
    Triton: for tests, thousands of times slower than compiled.
    """
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def devices() -> tuple[str, ...]:
    """Torch device types that Triton kernels take tensors of."""
    return ("cuda", "cpu") if is_interpreting() else ("cuda",)


def dtypes() -> tuple[str, ...]:
    """Dtypes of activations; the interpreter computes bfloat16 wrongly."""
    return ("float32", "float16") if is_interpreting() else ("float32", "bfloat16", "float16")


def reasons_against_packages() -> tuple[str, ...]:
    """Why nothing can be compiled here; empty = Triton is installed."""
    if find_spec("triton") is None:
        return (f"the package triton is not installed; {_INSTALL}",)
    return ()


def reasons_against_machine() -> list[str]:
    """Why no kernel can be launched here, each with its remedy; empty = one can."""
    if is_interpreting():
        return []
    import torch

    if torch.version.cuda is None:
        return [f"torch {torch.__version__} is built without CUDA; install a build with it"]
    if not torch.cuda.is_available():
        return ["torch finds no GPU; check that nvidia-smi lists one, and CUDA_VISIBLE_DEVICES"]
    against = [
        reasons_against_device(torch.device("cuda", index))
        for index in range(torch.cuda.device_count())
    ]
    return [] if [] in against else against[0]


def reasons_against_device(device: torch.device) -> list[str]:
    """Why kernels can't run on a device, each with its remedy; empty = they can."""
    if device.type == "cpu" and is_interpreting():
        return []
    if device.type != "cuda":
        return [f"Triton kernels run on 'cuda', not on {device.type!r}"]
    import torch

    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        needed, found = (".".join(map(str, one)) for one in (MIN_CAPABILITY, capability))
        return [
            f"{torch.cuda.get_device_name(device)} has compute capability {found}, and kernels "
            f"need {needed}; use kernels 'torch' and attention 'torch_sdpa'"
        ]
    return []


def require_device(device: torch.device) -> None:
    """Check where kernels shall run.

    Raises:
        ConfigError: if they can't.
    """
    if reasons := reasons_against_device(device):
        raise ConfigError(f"Triton kernels can't run on {str(device)!r}: {'; '.join(reasons)}")


def prepare(options: object) -> Sequence[str]:
    """The ``prepare`` of components whose kernels are compiled when they are first launched."""
    return reasons_against_machine()


def diagnose(options: object) -> Mapping[str, str]:
    """The ``diagnose`` of such components."""
    problems = [*reasons_against_packages()] or reasons_against_machine()
    facts = {"triton": _version("triton"), "kernels": "compiled at start-up, and kept by Triton"}
    if is_interpreting():
        facts["kernels"] = "interpreted on the CPU: TRITON_INTERPRET is set"
    return facts | ({"problem": "; ".join(problems)} if problems else {})


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
