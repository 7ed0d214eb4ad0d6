"""Enter and leave batch-invariant mode in a process."""

from collections.abc import Mapping, MutableMapping

from deepinfer_batch_invariant.pins import ENVIRONMENT_PINS, TORCH_PINS, PinError

_active_device: str | None = None
_pinned_device: str | None = None  # whose environment pins this process has set; the libraries read them once


def active_device() -> str | None:
    """Device type the mode is entered for, or None while it is off."""
    return _active_device


def environment_for(device: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that the mode adds to an environment on this kind of device.

    Args:
        device: ``cpu``, ``cuda`` or ``npu``.
        environment: the present variables.

    Raises:
        PinError: a variable is set to another value; names it, both values and the reason.
    """
    added: dict[str, str] = {}
    for pin in ENVIRONMENT_PINS:
        if device not in pin.devices:
            continue
        found = environment.get(pin.name)
        if found is None:
            added[pin.name] = pin.value
        elif found != pin.value:
            raise PinError(
                f"batch-invariant mode: {pin.name} is {found!r}, expected {pin.value!r} ({pin.why}); "
                "unset it, or set DEEPINFER_BATCH_INVARIANT=0"
            )
    return added


def check_environment(device: str, environment: Mapping[str, str]) -> None:
    """Refuse an environment from which a pin has gone, as after code that set other values for a while.

    Args:
        device: ``cpu``, ``cuda`` or ``npu``.
        environment: the present variables.

    Raises:
        PinError: a pin is missing or has another value; names it.
    """
    missing = environment_for(device, environment)
    if missing:
        name, value = sorted(missing.items())[0]
        raise PinError(f"batch-invariant mode: {name} is not set, expected {value!r}; leave it as the mode set it")


def enter(device: str, environment: MutableMapping[str, str]) -> None:
    """Set every pin of this kind of device. Entering twice changes nothing.

    Args:
        device: ``cpu``, ``cuda`` or ``npu``.
        environment: the process environment; variables are added to it.

    Raises:
        PinError: a pin cannot be set, or the mode is on for another device.
    """
    global _active_device, _pinned_device
    if _active_device not in (None, device):
        raise PinError(f"batch-invariant mode: device is {device!r}, expected {_active_device!r}; leave it first")
    if _pinned_device == device:
        # a second engine of this process: vLLM's initialisation writes its own CUBLAS_WORKSPACE_CONFIG before it
        # builds the model, and corrects it in the first engine only
        environment.update({pin.name: pin.value for pin in ENVIRONMENT_PINS if device in pin.devices})
    else:
        environment.update(environment_for(device, environment))
        _pinned_device = device
    for pin in TORCH_PINS:
        if device not in pin.devices:
            continue
        if pin.read() != pin.value:
            pin.write()
        if pin.read() != pin.value:
            raise PinError(
                f"batch-invariant mode: {pin.name} is {pin.read()!r}, expected {pin.value!r} ({pin.why}); "
                "it was set and did not take effect"
            )
    _active_device = device


def leave() -> None:
    """Forget that the mode is on. Pins stay: nothing else needs the other values, and results keep their meaning."""
    global _active_device
    _active_device = None
