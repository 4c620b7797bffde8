"""What the ops raise for the operator to mend."""


class DeviceError(RuntimeError):
    """The device cannot be used, and what to do about it."""
