"""``register()`` in fresh processes: what it adds, twice, and every reason why it refuses or stands back."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest

from deepinfer_plugin import envs, variables


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What one call of ``register()`` left behind."""

    error: str | None
    owner: str
    draft_owner: str
    messages: list[str]


Found = dict[str, Attempt]

TIMEOUT_S = 300

# Runs register() under several settings in one process, since importing vLLM takes most of the time.
SCRIPT = """
import importlib, json, logging, os, sys
import deepinfer_plugin

records = []

class Keep(logging.Handler):
    def emit(self, record):
        records.append(record.getMessage())

logging.getLogger("vllm").addHandler(Keep())
found = {}

def owner(architecture):
    from vllm import ModelRegistry
    return ModelRegistry.models[architecture].module_name

def attempt(name, **variables):
    os.environ.update(variables)
    records.clear()
    try:
        deepinfer_plugin.register()
        error = None
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    for key in variables:
        del os.environ[key]
    found[name] = {"error": error, "owner": owner("DeepseekV41ForCausalLM"),
        "draft_owner": owner("DSparkV41DraftModel"), "messages": list(records)}

def hook(name):
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    try:
        MODELS_CONFIG_MAP["DeepseekV41ForCausalLM"].verify_and_update_model_config(None)
        error = None
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    found[name] = {"error": error, "owner": "", "draft_owner": "", "messages": []}

attempt("disabled", DEEPINFER_DISABLE="1")
attempt("handed back", DEEPINFER_BATCH_INVARIANT="0")
attempt("bad value", DEEPINFER_ARITHMETIC="half")
attempt("target device", VLLM_TARGET_DEVICE="cpu")
attempt("wrong machine", DEEPINFER_ACCELERATOR="nvidia")
import deepinfer_plugin.compat as compat
installed, compat.installed_vllm = compat.installed_vllm, lambda: "0.34.1"
attempt("wrong version")
attempt("wrong version, disabled", DEEPINFER_DISABLE="1")
compat.installed_vllm = installed
import deepinfer_plugin.platforms.detect as detect
from deepinfer_plugin.platforms.ascend import AscendStack
machine = detect.find_machine
detect.find_machine = lambda: detect.Machine(num_nvidia=0, other_platforms=("ascend",),
    ascend=AscendStack(num_devices=8, device_name="Ascend950PR", vllm_ascend="0.23.0.post1", is_active=True))
attempt("NPU, handed back", DEEPINFER_BATCH_INVARIANT="0")
attempt("NPU, wish for a GPU", DEEPINFER_ACCELERATOR="nvidia")
compat.installed_vllm = lambda: "0.23.0"
attempt("NPU, old vLLM")
compat.installed_vllm = installed
hook("before")
attempt("NPU")
hook("NPU, our architecture")
detect.find_machine = machine
from vllm import ModelRegistry
ModelRegistry.register_model("DeepseekV41ForCausalLM", "somebody.model:Model")
attempt("foreign", DEEPINFER_TYPO="1")
attempt("first")
attempt("second")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> Found:
    environment = envs.child_environment(
        {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "VLLM_TARGET_DEVICE": None,
            **{variable.name: None for variable in variables.VARIABLES},
        }
    )
    command = [sys.executable, "-c", SCRIPT]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return {name: Attempt(**values) for name, values in json.loads(result.stdout.splitlines()[-1]).items()}


def test_our_model_takes_the_architecture_and_a_second_call_changes_nothing(
    found: Found,
) -> None:
    for name in ("first", "second"):
        assert found[name] == Attempt(
            error=None, owner="deepinfer_plugin.model", draft_owner="deepinfer_plugin.draft", messages=[]
        )


@pytest.mark.parametrize("name", ["disabled", "wrong version, disabled", "handed back"])
def test_the_architecture_stays_with_vllm_where_the_user_says_so(found: Found, name: str) -> None:
    assert found[name].error is None
    assert found[name].owner.startswith("vllm.")
    assert found[name].draft_owner.startswith("vllm.")


def test_handing_back_warns_that_this_machine_cannot_run_vllms_own_model(found: Found) -> None:
    [message] = found["handed back"].messages
    assert "DEEPINFER_BATCH_INVARIANT is 0" in message
    assert "no accelerator was found" in message


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("bad value", ("SettingError", "DEEPINFER_ARITHMETIC is 'half'", "ref, q32 or s32")),
        ("target device", ("PlatformError", "VLLM_TARGET_DEVICE is 'cpu'", "DEEPINFER_ACCELERATOR=cpu")),
        ("wrong machine", ("PlatformError", "DEEPINFER_ACCELERATOR is 'nvidia'", "no NVIDIA GPU")),
        ("wrong version", ("PlatformError", "vLLM is 0.34.1", ">=0.33.0,<0.34")),
    ],
)
def test_a_refusal_stops_the_start_with_one_sentence(found: Found, name: str, texts: tuple[str, ...]) -> None:
    error = str(found[name].error)
    assert [text for text in texts if text not in error] == []
    assert "\n" not in error
    assert found[name].owner.startswith("vllm.")


def test_a_foreign_registration_and_an_unknown_variable_are_warned_about(found: Found) -> None:
    assert found["foreign"].owner == "deepinfer_plugin.model"
    unknown, foreign = found["foreign"].messages
    assert "DEEPINFER_TYPO is not a variable of the plugin" in unknown
    assert "was registered by somebody.model" in foreign


def test_beside_vllm_ascend_only_our_architecture_is_refused(found: Found) -> None:
    for name in ("NPU", "NPU, old vLLM"):
        assert found[name].error is None
        assert found[name].owner.startswith("vllm.")
        [message] = found[name].messages
        assert "vllm-ascend 0.23.0.post1 is for vLLM 0.23" in message
    assert not str(found["before"].error).startswith("PlatformError")
    assert str(found["NPU, our architecture"].error) == f"PlatformError: {found['NPU'].messages[0]}"


def test_beside_vllm_ascend_a_wish_for_a_gpu_names_both(found: Found) -> None:
    error = str(found["NPU, wish for a GPU"].error)
    assert error.startswith("PlatformError: platform: DEEPINFER_ACCELERATOR is 'nvidia'")
    assert "this machine has platform plugin ascend" in error


def test_handing_back_beside_vllm_ascend_leaves_the_architecture_alone(found: Found) -> None:
    assert found["NPU, handed back"].error is None
    assert found["NPU, handed back"].messages == []
