"""Errors a caller can cause.

Their text reads ``<operation>: <argument> is <what came>, expected <rule>; <what to do>``.
"""


class DeepInferError(Exception):
    """Base of every error this project raises on purpose."""


class ShapeError(DeepInferError):
    """A tensor does not fit the shape that the operation documents."""


class UnsupportedError(DeepInferError):
    """A dtype, device or option that no implementation covers."""
