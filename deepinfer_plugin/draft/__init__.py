"""The draft model. vLLM resolves the registered name here; the class loads only when a worker asks for it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer_plugin.draft.drafter import DSparkV41DraftModel

__all__ = ["DSparkV41DraftModel"]


def __getattr__(name: str) -> Any:
    if name == "DSparkV41DraftModel":
        from deepinfer_plugin.draft.drafter import DSparkV41DraftModel

        return DSparkV41DraftModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
