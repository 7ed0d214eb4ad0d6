"""What every module of the model is built from."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deepinfer_plugin.cache.records import KVRecords
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.side_stream import SideStream
from deepinfer_plugin.settings import Arithmetic

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Configuration of the model, of the engine around it, and the arithmetic mode."""

    vllm_config: "VllmConfig"
    config: ModelConfig
    arithmetic: Arithmetic
    records: KVRecords
    side: SideStream = field(default_factory=SideStream)
