"""A virtual GPU: runs the PTX that numba-cuda compiles, under unmodified host code.

    import vgpu
    vgpu.install()          # before the first use of the device
    ...                     # any numba.cuda program

See README.md for what is checked and what is not there.
"""

from .options import Options, options
from .presence import prepare
from .report import PtxError, UnknownOpcode, VirtualGPUError

__all__ = ["Options", "PtxError", "UnknownOpcode", "VirtualGPUError", "forget_launches", "install",
           "installed", "launches", "leaks", "options", "prepare", "refusals", "run_ptx"]


def install(**options) -> None:
    """Put the virtual GPU in the place of the CUDA driver, for this process.

    Options are those of `Options`; calling it again changes options, except `cc` and `memory`.
    Raises VirtualGPUError if numba-cuda is not installed or lacks an internal that is replaced;
    warns about versions that were not tested. Raises ValueError for a wrong option.
    """
    from . import patches

    patches.install(**options)


def installed() -> bool:
    """Whether `install` was called in this process."""
    from . import patches

    return patches.installed


def run_ptx(text: str, name: str, grid, block, arguments, dynamic_shared: int = 0):
    """Assemble PTX text with the real ptxas and run one kernel of it; needs no `install`.

    grid, block: an int or up to three; arguments: NumPy arrays, copied in and copied back after
    the launch, and NumPy scalars of the parameters' sizes. Returns machine.LaunchStatistics.
    Raises VirtualGPUError.
    """
    from . import launch

    return launch.run_ptx(text, name, grid, block, arguments, dynamic_shared)


def launches() -> list:
    """The executed launches as launch.LaunchRecord, the newest last (at most 1000)."""
    from . import launch

    return list(launch.launches)


def forget_launches() -> None:
    """Begin `launches` anew, for those who count them."""
    from . import launch

    launch.launches.clear()


def refusals() -> list[str]:
    """Why driver calls returned an error code, "CODE: reason", the newest last."""
    from .device import device

    return list(device.refusals)


def leaks() -> list:
    """The program's device memory that is still referenced, as memory.Allocation."""
    from .device import device

    return device.leaks()
