"""File locks, by the library filelock, which is imported at first use.

Since filelock 4.3, its import makes ``os.fork`` raise in Python 3.12 and later while another thread
forks. A serving process never imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from filelock import BaseFileLock


def file_lock(*arguments: Any, **named: Any) -> BaseFileLock:
    """Make the lock of a file; arguments and errors, such as `TimeoutError`, are ``filelock.FileLock``'s."""
    import filelock

    return filelock.FileLock(*arguments, **named)
