"""inspect_ai's model interface over our endpoint: its own providers drop token ids and witnesses of an answer."""

from __future__ import annotations

from typing import Any

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    modelapi,
)
from inspect_ai.tool import ToolChoice, ToolInfo
from tenacity import wait_exponential

from deepinfer_evals.endpoint import Answer, BusyError, Endpoint

FIRST_WAIT_S = 1.0
MAX_WAIT_S = 60.0
PROVIDER = "deepinfer"


class EndpointApi(ModelAPI):
    """Sends the last user message; everything else of the request is in ``config.extra_body`` and ``config.seed``."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008, inspect_ai's signature
        **model_args: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        self._slots = int(model_args["slots"])
        self._endpoint = Endpoint(
            str(base_url), str(model_args["served_name"]), api_key=api_key or "", slots=self._slots
        )
        self._endpoint.has_witness = bool(model_args["has_witness"])
        self._answers: dict[int, Answer] = {}

    async def generate(
        self,
        input: list[ChatMessage],  # noqa: A002, inspect_ai's name
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        """One answer."""
        del tools, tool_choice
        assert config.seed is not None
        answer = await self._endpoint.ask(input[-1].text, config.extra_body or {}, config.seed)
        self._answers[config.seed] = answer
        return output_of(answer, self.model_name)

    def take(self, seed: int) -> Answer:
        """The answer to the request with this seed, once; a ModelOutput, which is logged, has no room for token ids."""
        return self._answers.pop(seed)

    def should_retry(self, ex: BaseException) -> bool:
        """A server that is busy or restarts is asked again."""
        return isinstance(ex, BusyError)

    def retry_wait(self) -> Any:
        """Growing waits: a server has some minutes to come back."""
        return wait_exponential(multiplier=FIRST_WAIT_S, max=MAX_WAIT_S)

    def max_connections(self) -> int:
        """As many as the run asked for."""
        return self._slots

    def connection_key(self) -> str:
        """One pool for each server."""
        return str(self.base_url)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._endpoint.__aexit__(None, None, None)


@modelapi(name=PROVIDER)
def _provider() -> type[ModelAPI]:
    return EndpointApi


def output_of(answer: Answer, model: str) -> ModelOutput:
    """An answer as inspect_ai logs it."""
    content = [ContentReasoning(reasoning=answer.reasoning)] if answer.reasoning else []
    message = ChatMessageAssistant(content=[*content, ContentText(text=answer.text)], model=model)
    size = len(answer.token_ids)
    return ModelOutput(
        model=model,
        choices=[ChatCompletionChoice(message=message, stop_reason="max_tokens" if answer.is_truncated else "stop")],
        usage=ModelUsage(
            input_tokens=answer.prompt_tokens, output_tokens=size, total_tokens=answer.prompt_tokens + size
        ),
        metadata={"seed": answer.seed, "witness": dict(answer.witness)},
    )
