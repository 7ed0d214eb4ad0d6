"""The DEEPINFER_* variables as one table. A variable is one entry; parsing, bounds, the status, the README and
provenance follow from it. Loads neither torch nor vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepinfer_plugin.replay.settings import (
    ALLOW_VARIABLE,
    BACKTRACKING_VARIABLE,
    DEFAULT_KEEP_TOKENS,
    ENCODER_RULE,
    ENCODER_VARIABLE,
    KEEP_VARIABLE,
    MODE_VARIABLE,
    EncoderPolicy,
)
from deepinfer_plugin.value_kinds import FLAG, ID_RANGES, PATH, Kind, integer, positive_numbers, word

PREFIX = "DEEPINFER_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable[T]:
    """One variable.

    Attributes:
        name: as it stands in the environment.
        kind: how its value is written, and its bounds.
        default: text that stands for an unset variable.
        meaning: one clause for the table of the README.
        feature: row of ``status`` that it belongs to, "" for none.
        not_built: why our model cannot act on it, "" if it does. Then every value but the default is refused where
            our model serves.
        needs_our_model: whether our model alone acts on it. Then every value but the default is refused elsewhere.
        has_vllm_form: whether ``translate`` hands it to vLLM's own model; if not, that model refuses it too.
        changes_answers: whether tokens or log-probabilities may depend on it; it is then part of the settings hash.
    """

    name: str
    kind: Kind[T]
    default: str
    meaning: str
    feature: str = ""
    not_built: str = ""
    needs_our_model: bool = False
    has_vllm_form: bool = False
    changes_answers: bool = True

    def parse(self, text: str) -> T:
        """The value of ``text``; ``ValueError`` outside the rule."""
        return self.kind.parse(text)

    def lack(self, *, is_our_model: bool) -> str:
        """Why the serving model cannot act on it, "" if it does. vLLM's own model serves where ours does not."""
        if is_our_model:
            return self.not_built
        if self.needs_our_model:
            return f"for vLLM's own model, which serves with {BATCH_INVARIANT.name}=0"
        return "" if self.has_vllm_form else self.not_built


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Variables of DeepInfer that share a prefix and belong to a feature that is not built: only "off" is accepted."""

    prefix: str
    feature: str
    not_built: str


ACCELERATOR = Variable(
    name="DEEPINFER_ACCELERATOR",
    kind=word("auto", "nvidia", "ascend", "cpu"),
    default="auto",
    meaning="the kind of machine, for `build.sh` and at run time; `auto`: what is found; `cpu` leaves a GPU unused",
)
BATCH_INVARIANT = Variable(
    name="DEEPINFER_BATCH_INVARIANT",
    kind=FLAG,
    default="1",
    feature="F9",
    meaning="`1`: our model, whose rows do not depend on other requests; `0`: vLLM's own model serves",
)
DISABLE = Variable(
    name="DEEPINFER_DISABLE",
    kind=FLAG,
    default="0",
    meaning="`1`: the plugin adds nothing to vLLM in this process",
)
ARITHMETIC = Variable(
    name="DEEPINFER_ARITHMETIC",
    kind=word("ref", "q32", "s32"),
    default="ref",
    meaning="for tests: `q32` computes activations in fp32, `s32` also quantises none of them",
)
KERNEL_SET = Variable(
    name="DEEPINFER_KERNEL_SET",
    kind=word("triton", "tilelang"),
    default="triton",
    feature="X3",
    needs_our_model=True,
    meaning="kernels on a GPU; `tilelang`: attention, experts, mix logits of the streams and Engram gate in TileLang, "
    "on several ranks the update of the streams, too; the rest in Triton",
)
CERTIFICATE = Variable(
    name="DEEPINFER_CERTIFICATE",
    kind=PATH,
    default="",
    changes_answers=False,
    meaning="determinism certificate of this environment; answers name it on request; one of another environment stops "
    "the start",
)
METRICS_DIR = Variable(
    name="DEEPINFER_METRICS_DIR",
    kind=PATH,
    default="",
    feature="F22",
    changes_answers=False,
    meaning="where the processes of a server leave figures for `/metrics`; unset: a temporary folder of the server",
)
HF_MODEL_DIR = Variable(
    name="DEEPINFER_HF_MODEL_DIR",
    kind=PATH,
    default="",
    feature="F27",
    changes_answers=False,  # the checkpoint is part of provenance by its content
    meaning="folder of the checkpoint for `offline` and `bench`; `--model` must name the same",
)
USE_NEXTN_DECODE = Variable(
    name="DEEPINFER_USE_NEXTN_DECODE",
    kind=integer(0, 5),
    default="0",
    feature="F1",
    changes_answers=False,  # a token is the model's own draw, whatever was drafted in its place
    meaning="tokens that the checkpoint's draft blocks propose in a step; 0: none. Their number changes the speed only",
)
ENABLE_MTP_VARLEN = Variable(
    name="DEEPINFER_ENABLE_MTP_VARLEN",
    kind=FLAG,
    default="0",
    feature="F2",
    has_vllm_form=True,
    changes_answers=False,  # a draft that is not verified is a token that is drawn later
    meaning="`1`: only drafts that are worth their row are verified, by their confidence; needs `dspark` drafts",
)
DFLASH_CONFIDENCE_HEAD_TEMPERATURE = Variable(
    name="DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE",
    kind=positive_numbers(1e-5),
    default="1.0",
    feature="F3",
    needs_our_model=True,
    changes_answers=False,
    meaning="divides the score of a draft before it becomes a confidence; one number, or one per draft",
)
DECODE_PERF_CACHE_DIR = Variable(
    name="DEEPINFER_DECODE_PERF_CACHE_DIR",
    kind=PATH,
    default="",
    feature="F4",
    needs_our_model=True,
    changes_answers=False,
    meaning="folder that keeps the step times that F2 measures at start, by model, graphs, sizes, versions and device",
)
DECODE_PERF_CACHE_TTL_SEC = Variable(
    name="DEEPINFER_DECODE_PERF_CACHE_TTL_SEC",
    kind=integer(1),
    default="3600",
    feature="F4",
    needs_our_model=True,
    changes_answers=False,
    meaning="age in seconds from which they are measured again",
)
YOCO_PREFILL_TRUNCATION_MODE = Variable(
    name=MODE_VARIABLE,
    kind=word("compact", "mask", "off"),
    default="compact",
    feature="F5",
    meaning="decoder layers compute the last prompt rows only (`mask`: all rows, same answers) or all of them (`off`)",
)
YOCO_PREFILL_KEEP_TOKENS = Variable(
    name=KEEP_VARIABLE,
    kind=integer(1),
    default=str(DEFAULT_KEEP_TOKENS),
    feature="F6",
    meaning="how many last prompt rows, at least window + backtracking; another number gives other answers",
)
MAX_BACKTRACKING_TOKENS = Variable(
    name=BACKTRACKING_VARIABLE,
    kind=integer(0),
    default="0",
    feature="F6",
    meaning="backtracking: tokens that a request may be taken back by, if more than drafts + 1",
)
ENCODER_REPLAY = Variable(
    name=ENCODER_VARIABLE,
    kind=Kind(rule=ENCODER_RULE, parse=EncoderPolicy.parse, words=("exact", "segment:N", "bounded")),
    default="exact",
    feature="F7",
    meaning="encoder windows after a hit: cached with the prefix, computed again at each multiple of N, or at the hit",
)
ALLOW_APPROXIMATE_REPLAY = Variable(
    name=ALLOW_VARIABLE,
    kind=FLAG,
    default="0",
    feature="F7",
    changes_answers=False,  # the policy that it allows does
    meaning="`1`: allows `bounded`, with which a prefix hit changes the answer",
)
ZERO_OVERHEAD_SCHEDULING = Variable(
    name="DEEPINFER_ZERO_OVERHEAD_SCHEDULING",
    kind=FLAG,
    default="1",
    feature="F8",
    has_vllm_form=True,
    changes_answers=False,
    meaning="`0`: `--no-async-scheduling`; `1`: vLLM decides",
)
XGRAMMAR_TIMEOUT = Variable(
    name="DEEPINFER_XGRAMMAR_TIMEOUT",
    kind=integer(1),
    default="20",
    feature="F11",
    changes_answers=False,
    meaning="seconds that compiling a grammar may take",
)
XGRAMMAR_CACHE_LIMIT_BYTES = Variable(
    name="DEEPINFER_XGRAMMAR_CACHE_LIMIT_BYTES",
    kind=integer(-1, 10 << 30),
    default="1073741824",
    feature="F11",
    changes_answers=False,
    meaning="bytes of compiled grammars that are kept, at most 10 GiB; 0: none, -1: no limit",
)
EPLB_POLICY = Variable(
    name="DEEPINFER_EPLB_POLICY",
    kind=word("summed_peak", "vllm", "rotate", "uneven"),
    default="summed_peak",
    feature="F13",
    needs_our_model=True,
    changes_answers=False,  # replicas are equal, and results are added by expert id wherever the experts are
    meaning="where `--enable-eplb` moves experts: DeepInfer's policy, vLLM's, or for tests each to the next rank, or "
    "the busiest together",
)
EPLB_COUNT_PREFILL = Variable(
    name="DEEPINFER_EPLB_COUNT_PREFILL",
    kind=FLAG,
    default="0",
    feature="F13",
    needs_our_model=True,
    changes_answers=False,
    meaning="`1`: steps with prompt rows count when experts are placed, too",
)
OVERRIDE_NUM_EXTRA_EXPERTS = Variable(
    name="DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS",
    kind=integer(0),
    default="0",
    feature="F13",
    needs_our_model=True,
    changes_answers=False,
    meaning="least number of replicas of experts in a layer, `num_redundant_experts` of `--eplb-config`; needs "
    "`--enable-eplb`",
)
RANKS_PER_GPU = Variable(
    name="DEEPINFER_RANKS_PER_GPU",
    kind=integer(1, 8),
    default="1",
    needs_our_model=True,
    changes_answers=False,
    meaning="ranks that take turns on a GPU: to prove equal bits where GPUs are few, never for speed; needs "
    "`--kv-cache-memory-bytes` and NCCL 2.30",
)
ENGRAM_FORCE_GPU_STORAGE = Variable(
    name="DEEPINFER_ENGRAM_FORCE_GPU_STORAGE",
    kind=FLAG,
    default="0",
    feature="F15",
    has_vllm_form=True,
    changes_answers=False,
    meaning="`1`: Engram tables in device memory, `--engram-config '{\"cpu_offload\": false}'`; with our model always",
)
SAMPLER_FORCE_TOPK = Variable(
    name="DEEPINFER_SAMPLER_FORCE_TOPK",
    kind=integer(0),
    default="0",
    feature="F17",
    needs_our_model=True,
    meaning="tokens are drawn among this many largest logits, unless the request has `force_top_k`; 0: among all",
)
DECODE_TOKEN_BLACKLIST = Variable(
    name="DEEPINFER_DECODE_TOKEN_BLACKLIST",
    kind=ID_RANGES,
    default="",
    feature="F18",
    needs_our_model=True,
    meaning="token ids that are never produced; `token_blacklist` of a request adds to them",
)
COMPUTE_SUM_SMALLER_PROBS = Variable(
    name="DEEPINFER_COMPUTE_SUM_SMALLER_PROBS",
    kind=FLAG,
    default="0",
    feature="F19",
    needs_our_model=True,
    changes_answers=False,
    meaning="`1`: each token comes with the mass of the less likely ones, unless the request has "
    "`sum_smaller_probs: 0`, streams or has `n` above 1",
)
LOGGING_INTERVAL_STEP = Variable(
    name="DEEPINFER_LOGGING_INTERVAL_STEP",
    kind=integer(0),
    default="100",
    feature="F22",
    changes_answers=False,
    meaning="engine steps from one statistics line of the server to the next; 0: none",
)
PREFILL_MAX_SUM_SEQLEN_K = Variable(
    name="DEEPINFER_PREFILL_MAX_SUM_SEQLEN_K",
    kind=integer(0),
    default="0",
    feature="F25",
    # vLLM's scheduler counts the new tokens of a step (max_num_batched_tokens, long_prefill_token_threshold), waiting
    # ones (max_num_queued_tokens) and requests, never the context that the rows of a step read: no option bounds that.
    not_built="vLLM's scheduler bounds the new tokens of a step, not their context; use --max-num-batched-tokens and "
    "context_cap of a request",
    changes_answers=False,
    meaning="bound of the summed context of a prefill step, in 1024 tokens; 0: none",
)
JIT_CACHE_DIR = Variable(
    name="DEEPINFER_JIT_CACHE_DIR",
    kind=PATH,
    default="",
    feature="F28",
    changes_answers=False,
    meaning="folder of compiled kernels, made if missing; the start then compiles all that it lacks; unset: Triton's "
    "own folder, and a kernel is compiled when it is first needed",
)

VARIABLES: tuple[Variable[Any], ...] = tuple(value for value in list(vars().values()) if isinstance(value, Variable))

# Their full names are not in the public list of features, only these beginnings.
FAMILIES: tuple[Family, ...] = (
    Family(
        prefix="DEEPINFER_EXPERT_",
        feature="F13",
        not_built="--enable-eplb and --eplb-config balance experts",
    ),
    Family(
        prefix="DEEPINFER_PROFILE_HTTP_",
        feature="F23",
        not_built="vLLM takes traces on demand with --profiler-config",
    ),
    Family(
        prefix="DEEPINFER_PREFILL_ATTEMPT_",
        feature="F24",
        not_built="vLLM mixes prefill and decode in one step",
    ),
)
