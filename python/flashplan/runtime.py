# SPDX-License-Identifier: Apache-2.0
"""Shows how flashplan was built and what it runs on, and sets the number of threads on the CPU."""

from flashplan import _core
from flashplan.values import to_int


def set_num_threads(num_threads: int) -> None:
    """Sets how many threads all runs on the CPU use, the calling thread included.

    Results do not depend on it. The default is the environment variable FLASHPLAN_NUM_THREADS, else
    OMP_NUM_THREADS, else the number of processors that the process may use, by its affinity mask
    and by the quota of its cgroup. The new number takes effect at the next run().

    Raises:
        ValueError: num_threads is below 1.
        TypeError: num_threads is no integer.
    """
    _core.set_num_threads(to_int("num_threads", num_threads))


def get_num_threads() -> int:
    """How many threads runs on the CPU use, the calling thread included: see set_num_threads."""
    return _core.get_num_threads()


def show_config() -> str:
    """Version, compiled kernels, instruction set, threads and GPUs, as lines of `key: value`.

    Examples:
        >>> print(fp.show_config().splitlines()[0])
        version: ...
    """
    return _core.show_config()
