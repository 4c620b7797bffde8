"""Errors of disks that are full. Does not import torch."""

import errno
import os

from specserve.errors import ConfigError

FULL = errno.ENOSPC, errno.EDQUOT


def is_full(error: BaseException) -> bool:
    """Whether a disk, or a user's share of one, is full. Some libraries tell only the reason."""
    if isinstance(error, OSError) and error.errno in FULL:
        return True
    return any(os.strerror(number) in str(error) for number in FULL)


def not_written(path: object, error: Exception) -> ConfigError:
    """The error of a file or a folder that cannot be written, with what to do about it."""
    why = error.strerror if isinstance(error, OSError) else error
    remedy = "free space there, or name one on another disk" if is_full(error) else "name another"
    return ConfigError(f"{path}: cannot be written ({why}); {remedy}")
