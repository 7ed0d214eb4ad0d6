"""What every worker of ours adds to vLLM's: the plan of a step is cut to the drafts that are worth their rows."""

import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from deepinfer_plugin import metrics, variables
from deepinfer_plugin.cache.specs import num_drafts
from deepinfer_plugin.settings import Settings
from deepinfer_plugin.speculative import ragged_graphs, schedule_series
from deepinfer_plugin.speculative.schedule import ByConfidence, Confidences, LengthRule, VerificationSchedule
from deepinfer_plugin.speculative.step_time import Learned, StepTimeLearner
from deepinfer_plugin.worker.model_state import DeepInferModelState
from deepinfer_plugin.worker.step_profile import step_time_curve

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

LEARN_EVERY = 32  # steps from one look at the learned times to the next; the ranks agree on them then


class StepClock:
    """Times of the device at three points of a step: its begin, behind its forward pass, behind its drafts."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]
        self._times_s = [0.0] * 3

    def mark(self, point: int) -> None:
        """Note that a point is reached; on an accelerator once the work before it is done."""
        if self._events is not None:
            self._events[point].record()
        else:
            self._times_s[point] = time.perf_counter()

    def intervals_s(self) -> tuple[float, float]:
        """Seconds from each point to the next, of a step that is over."""
        if self._events is not None:
            begin, middle, end = self._events
            return begin.elapsed_time(middle) / 1e3, middle.elapsed_time(end) / 1e3
        begin_s, middle_s, end_s = self._times_s
        return middle_s - begin_s, end_s - middle_s


class ScheduledVerification:
    """Stands before a worker class of vLLM in the bases."""

    model_runner: Any
    vllm_config: Any
    device: torch.device

    verification: VerificationSchedule | None = None
    _learner: StepTimeLearner | None = None
    _clock: StepClock
    _timed: tuple[int, int] | None = None  # rows and requests of the step that the clock has seen
    _num_timed = 0

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load; graphs are captured later, and then for requests that differ in length."""
        if Settings.from_envs()[variables.ENABLE_MTP_VARLEN]:
            ragged_graphs.install()
        super().load_model(load_dummy_weights=load_dummy_weights)  # type: ignore[misc]

    def compile_or_warm_up_model(self) -> Any:
        """Warm up and capture, then measure step times and begin to choose."""
        found = super().compile_or_warm_up_model()  # type: ignore[misc]
        settings = Settings.from_envs()
        is_ours = isinstance(self.model_runner.model_state, DeepInferModelState)
        if is_ours and settings[variables.ENABLE_MTP_VARLEN]:
            curve = step_time_curve(self.vllm_config, self.model_runner, settings)
            self.choose_lengths(ByConfidence(curve=curve))
            self._learner, self._clock = StepTimeLearner(curve), StepClock(self.device)
        return found

    def choose_lengths(self, rule: LengthRule) -> None:
        """Cut the plan of every step by a rule from now on."""
        count = num_drafts(self.vllm_config)
        confidences = Confidences(self.vllm_config.scheduler_config.max_num_seqs, count, self.device)
        self.verification = VerificationSchedule(rule, confidences)
        self._learner, self._timed = None, None
        metrics.PUBLISHER.register(schedule_series.SERIES, schedule_series.figures)

    def execute_model(self, scheduler_output: "SchedulerOutput") -> Any:
        """The forward pass of what is left of the plan."""
        if self.verification is None:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        states, record = self.model_runner.req_states, self.model_runner.sampler.drafts
        drafts = scheduler_output.scheduled_spec_decode_tokens
        record.note_drafted({request: len(tokens) for request, tokens in drafts.items()})
        with gpu_sync_allowed():
            output = self.verification.cut(
                scheduler_output, lambda request: int(states.prefill_len.np[states.req_id_to_index[request]])
            )
        if self._learner is not None:
            self._learn(self._learner, self.verification)
            self._timed = _verification_only(output)
            self._clock.mark(0)
        found = super().execute_model(output)  # type: ignore[misc]
        if self._timed is not None:
            self._clock.mark(1)
        return found

    def sample_tokens(self, grammar_output: "GrammarOutput | None") -> Any:
        """Draw, verify, draft; then send the confidences of the drafts on their way."""
        state = self.model_runner.execute_model_state
        found = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self.verification is not None and state is not None:
            if self._timed is not None:
                self._clock.mark(2)  # before the copy: once that is here, the mark is
            confidence = self.model_runner.speculator.draft_token_confidence_probs
            self.verification.confidences.send(state.input_batch.req_ids, confidence)
        return found

    def _learn(self, learner: StepTimeLearner, verification: VerificationSchedule) -> None:
        """Take the times of the step before, which is over: its confidences are here."""
        if self._timed is None:
            return
        learner.add(*self._timed, *self._clock.intervals_s())
        self._num_timed += 1
        if self._num_timed % LEARN_EVERY == 0 and isinstance(verification.rule, ByConfidence):
            learned: Learned = get_tp_group().broadcast_object(learner.learned())
            verification.rule.learned = learned


def _verification_only(output: "SchedulerOutput") -> tuple[int, int] | None:
    """Rows and requests of a step in which every request decodes; None for another one, whose times say nothing."""
    tokens, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    if not tokens or output.scheduled_new_reqs:
        return None
    if any(count - len(drafts.get(request, ())) != 1 for request, count in tokens.items()):
        return None
    return output.total_num_scheduled_tokens, len(tokens)
