"""What every module of the model is built from."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from deepinfer_plugin.cache.records import KVRecords
from deepinfer_plugin.cache.specs import num_drafts
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.parallel import Parallel
from deepinfer_plugin.model.placement import ExpertLoad
from deepinfer_plugin.model.side_stream import SideStream
from deepinfer_plugin.replay.window import ReplayRule
from deepinfer_plugin.settings import Arithmetic, Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Configuration of the model and the engine, the arithmetic mode, the rule of bounded replay, and the ranks.

    ``load`` counts the rows of the backbone's experts, where whole ones are dealt out to several ranks.
    """

    vllm_config: "VllmConfig"
    config: ModelConfig
    arithmetic: Arithmetic
    records: KVRecords
    rule: ReplayRule
    parallel: Parallel = field(default_factory=Parallel)
    load: ExpertLoad | None = None
    side: SideStream = field(default_factory=SideStream)

    @classmethod
    def of_engine(cls, vllm_config: "VllmConfig", config: ModelConfig) -> "BuildContext":
        """The context of the model, or of its draft blocks, in this worker."""
        settings, parallel = Settings.from_envs(), Parallel.from_vllm(vllm_config, config)
        rule = ReplayRule.from_settings(settings.replay, config.sliding_window, num_drafts(vllm_config))
        if parallel.num_replicas > 1:
            rule = replace(rule, drops_rows=False)  # replicas agree on the rows of a step, not on kept ones
        return cls(
            vllm_config=vllm_config,
            config=config,
            arithmetic=settings.arithmetic,
            records=KVRecords.from_model(config, settings.arithmetic),
            rule=rule,
            parallel=parallel,
            load=_load(vllm_config, config, parallel),
        )

    def expert_counts(self, layer: int) -> tuple[int, int]:
        """Routed experts of a layer, and how many a token takes; draft blocks follow the layers of the backbone."""
        config = self.config
        if self.is_backbone(layer):
            return config.n_routed_experts, config.num_experts_per_tok
        return config.dspark_n_routed_experts, config.dspark_num_experts_per_tok

    def is_backbone(self, layer: int) -> bool:
        """Whether a layer is none of the draft blocks, whose experts neither move nor count."""
        return layer < self.config.num_hidden_layers

    def window_rule(self, layer: int) -> ReplayRule | None:
        """The rule by which the window of a layer is computed again after a prefix hit; None: it is cached."""
        if layer >= self.config.kv_source_layer_ids[-1]:
            return self.rule if self.rule.keep_tokens is not None else None
        return None if self.rule.caches_encoder_windows else self.rule


def _load(vllm_config: "VllmConfig", config: ModelConfig, parallel: Parallel) -> ExpertLoad | None:
    if parallel.experts.is_alone:
        return None
    return ExpertLoad.empty(
        config.num_hidden_layers,
        config.n_routed_experts + parallel.num_extra_experts,
        vllm_config.scheduler_config.max_num_batched_tokens,
        config.num_experts_per_tok,
    )
