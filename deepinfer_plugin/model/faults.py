"""A planted fault between the stages of a pipeline, a worker class (``--worker-cls``), see ``FaultyWorker``."""

from __future__ import annotations

from typing import Any
from unittest import mock

from vllm.sequence import IntermediateTensors

from deepinfer_plugin.engine_child.faulty_worker import FaultyWorker
from deepinfer_plugin.model.flash import PRE_MIX, STREAMS, DeepseekV41ForCausalLM
from deepinfer_plugin.model.hyper_connection import identity_pre_mix


class LostPreMix(FaultyWorker):
    """Streams go on to the next stage, and the mix that collapses them there is the one of the model's entry."""

    def plant(self) -> None:
        """Replace what a stage hands on."""
        forward = DeepseekV41ForCausalLM.forward

        def lose(model: DeepseekV41ForCausalLM, *args: Any, **kwargs: Any) -> Any:
            result = forward(model, *args, **kwargs)
            if isinstance(result, IntermediateTensors):
                LostPreMix.acts()
                result[PRE_MIX] = identity_pre_mix(result[STREAMS])
            return result

        mock.patch.object(DeepseekV41ForCausalLM, "forward", lose).start()
