"""vLLM still has every name that we import from it, and the signatures that our classes and calls rely on."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import deepinfer_plugin
from deepinfer_plugin import compat, envs

TIMEOUT_S = 300

# module:name -> the first parameters of a method, in order, or fields of a dataclass or struct
SIGNATURES: dict[str, list[str]] = {
    "vllm.model_executor.models.registry:_ModelRegistry.register_model": ["self", "model_arch", "model_cls"],
    "vllm.model_executor.models.registry:_LazyRegisteredModel": ["module_name", "class_name"],
    "vllm.platforms.cpu:CpuPlatform.check_and_update_config": ["vllm_config"],
    "vllm.platforms.cpu:CpuPlatform.update_block_size_for_backend": ["vllm_config"],
    "vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls": ["selected_backend", "attn_selector_config", "num_heads"],
    "vllm.platforms.cpu:CpuPlatform.import_kernels": [],
    "vllm.v1.worker.cpu_worker:CPUWorker.__init__": [
        "self",
        "vllm_config",
        "local_rank",
        "rank",
        "distributed_init_method",
        "is_driver_worker",
    ],
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState.__init__": [
        "self",
        "vllm_config",
        "model",
        "encoder_cache",
        "device",
    ],
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_inputs": ["self", "input_batch", "req_states"],
    "vllm.v1.worker.gpu.sample.logits_processor:LogitsProcessor.__init__": ["self", "vllm_config", "req_states"],
    "vllm.v1.worker.gpu.sample.logits_processor:LogitsProcessor.add_request": ["self", "req_idx", "sampling_params"],
    "vllm.v1.worker.gpu.sample.logits_processor:LogitsProcessor.apply": ["self", "logits", "ctx"],
    "vllm.v1.worker.gpu.sample.logits_processor:LogitsProcessor.validate_params": ["sampling_params"],
    "vllm.v1.worker.gpu.sample.logits_processor:LogitsContext": ["expanded_idx_mapping", "idx_mapping_np", "pos"],
    "vllm.v1.worker.gpu.sample.logits_processor:LogitsProcRequestState": [
        "device",
        "max_num_reqs",
        "vocab_size",
        "prompt_len",
    ],
    "vllm.v1.worker.gpu.eplb_utils:EPLBController.__init__": ["self", "parallel_config", "device"],
    "vllm.v1.worker.gpu.eplb_utils:EPLBController.maybe_register_model": ["self", "model", "model_config"],
    "vllm.v1.worker.gpu.eplb_utils:EPLBController.step": ["self", "is_dummy", "is_profile"],
    "vllm.v1.worker.gpu.eplb_utils:EPLBController.prepare_forward": ["self", "model_config", "num_unpadded_tokens"],
    "vllm.distributed.parallel_state:GroupCoordinator.make_sibling_device_group": ["self", "group_desc"],
    "vllm.distributed.eplb.policy:DefaultEplbPolicy.rebalance_experts": [
        "weight",
        "num_replicas",
        "num_groups",
        "num_nodes",
        "num_ranks",
        "old_global_expert_indices",
    ],
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState.add_request": ["self", "req_index", "new_req_data"],
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState.custom_sampler": ["self", "sampler"],
    "vllm.v1.core.sched.output:NewRequestData": ["prompt_token_ids"],
    "vllm.v1.worker.gpu.sample.sampler:Sampler.add_request": ["self", "req_idx", "sampling_params"],
    "vllm.v1.worker.gpu.sample.sampler:Sampler.apply_staged_writes": ["self"],
    "vllm.v1.worker.gpu.sample.sampler:Sampler.get_logprobs_dims": ["self", "idx_mapping_np", "include_token_ids"],
    "vllm.v1.worker.gpu.sample.sampler:Sampler.__call__": ["self", "logits", "input_batch"],
    "vllm.v1.worker.gpu.sample.sampler:Sampler.apply_sampling_params": [
        "self",
        "logits",
        "expanded_idx_mapping",
        "idx_mapping",
        "idx_mapping_np",
        "pos",
        "input_ids",
        "expanded_local_pos",
        "seq_lens_upper_bound_np",
        "skip_top_k_top_p",
    ],
    "vllm.v1.worker.gpu.sample.output:SamplerOutput": [
        "sampled_token_ids",
        "logprobs_tensors",
        "num_nans",
        "num_sampled",
        "num_rejected",
        "sampling_mask_tensors",
    ],
    "vllm.v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker.compute_prompt_logprobs": [
        "self",
        "logits_fn",
        "hidden_states",
        "input_batch",
        "all_token_ids",
        "num_computed_tokens",
        "prompt_lens",
    ],
    "vllm.v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker.compute_prompt_token_id_logprobs": [
        "self",
        "logits_fn",
        "hidden_states",
        "input_batch",
        "prompt_lens",
    ],
    "vllm.v1.outputs:LogprobsTensors": [
        "logprob_token_ids",
        "logprobs",
        "selected_token_ranks",
        "cu_num_generated_tokens",
    ],
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs": ["self", "request_id", "prompt", "params"],
    "vllm.v1.engine.output_processor:RequestState.from_new_request": ["tokenizer", "request", "prompt", "parent_req"],
    "vllm.v1.engine.output_processor:RequestState._new_request_output": ["self", "external_req_id", "outputs"],
    "vllm.platforms.interface:Platform.pre_register_and_update": ["parser"],
    "vllm.v1.engine.llm_engine:LLMEngine.add_request": ["self", "request_id", "prompt", "params"],
    "vllm.v1.engine.llm_engine:LLMEngine.step": ["self"],
    "vllm.v1.engine.llm_engine:LLMEngine.from_engine_args": ["engine_args"],
    "vllm:SamplingParams": [
        "temperature",
        "ignore_eos",
        "max_tokens",
        "logprobs",
        "prompt_logprobs",
        "prompt_logprob_token_ids",
        "flat_logprobs",
        "detokenize",
        "output_kind",
        "extra_args",
        "skip_reading_prefix_cache",
    ],
    "vllm.logprobs:FlatLogprobs": ["start_indices", "end_indices", "token_ids", "logprobs"],
    "vllm:EngineArgs": ["model", "max_logprobs", "logprobs_mode", "logits_processors", "kv_cache_memory_bytes"],
}

# Imports every name and prints the parameters of each signature; unknown names come back as null.
SCRIPT = """
import importlib, inspect, json, sys
names, signatures = json.load(sys.stdin)
from vllm.platforms import current_platform
str(current_platform)
missing = []
for module, name in names:
    try:
        exec(f"from {module} import {name}", {})  # as our code says it: a name may also be a module nobody imported yet
    except ImportError:
        missing.append(f"{module}:{name}")
parameters = {}
for path in signatures:
    module, _, qualname = path.partition(":")
    try:
        value = importlib.import_module(module)
        for part in qualname.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        parameters[path] = None
        continue
    fields = getattr(value, "__struct_fields__", None) or getattr(value, "__dataclass_fields__", None)
    parameters[path] = list(fields) if fields else list(inspect.signature(value).parameters)
print(json.dumps([missing, parameters]))
"""


def imported_from_vllm() -> list[tuple[str, str]]:
    names: set[tuple[str, str]] = set()
    for path in Path(deepinfer_plugin.__file__).parent.rglob("*.py"):
        if path.name == "cuda.py":  # vLLM's CUDA platform imports its compiled extension, which needs a driver
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "vllm":
                names.update((str(node.module), alias.name) for alias in node.names)
    return sorted(names)


def test_vllm_has_the_names_and_signatures_that_we_rely_on() -> None:
    compat.check_vllm_version(compat.installed_vllm())
    names = imported_from_vllm()
    assert len(names) > 20
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps([names, list(SIGNATURES)]),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=envs.child_environment({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}),
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    missing, parameters = json.loads(result.stdout.splitlines()[-1])
    assert missing == []
    for path, expected in SIGNATURES.items():
        found = parameters[path]
        assert found is not None, f"{path} is gone"
        is_method = "." in path.partition(":")[2]
        begin = found[: len(expected)] if is_method else [name for name in expected if name in found]
        assert begin == expected, path


def test_every_patch_says_what_why_where_and_until_when() -> None:
    for patch in compat.PATCHES:
        assert all((patch.what, patch.why, patch.upstream, patch.removal))
