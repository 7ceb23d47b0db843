"""A deployment of ours under the load of `bench serve`, by gRPC."""

from __future__ import annotations

from contextlib import aclosing

from outrider.client import (
    ChatMessage,
    Client,
    Finished,
    GenerateRequest,
    RoundReport,
    SamplingParams,
    Tokens,
)
from outrider.errors import OutriderError

from .prompts import BenchPrompt
from .serving import ServingOptions
from .serving_records import Answer, Heard, RequestFailed, RoundTimes, Speculation

BACKEND = "outrider-grpc"


class GrpcServingClient:
    """Implements `ServingClient` over a client, which stays its owner's."""

    def __init__(self, client: Client, options: ServingOptions) -> None:
        self._client = client
        self._options = options

    async def answer(self, prompt: BenchPrompt, max_tokens: int, heard: Heard) -> Answer:
        """See `ServingClient.answer`."""
        rounds: list[RoundReport] = []
        finished: Finished | None = None
        try:
            async with aclosing(self._client.generate(self._request(prompt, max_tokens))) as events:
                async for event in events:
                    if isinstance(event, Tokens):
                        heard.chunk(len(event.token_ids))
                    elif isinstance(event, RoundReport):
                        rounds.append(event)
                    elif isinstance(event, Finished):
                        heard.end()
                        finished = event
        except OutriderError as error:
            raise RequestFailed(f"{type(error).__name__}: {error.message}") from error
        if finished is None:
            raise RequestFailed("the stream ended before its last event")
        metrics = finished.metrics
        return Answer(
            finished.usage.prompt_tokens,
            finished.usage.completion_tokens,
            Speculation(
                metrics.num_rounds, metrics.num_draft_tokens, metrics.num_accepted_draft_tokens
            ),
            round_times(rounds) if self._options.rounds else None,
        )

    def _request(self, prompt: BenchPrompt, max_tokens: int) -> GenerateRequest:
        options = self._options
        return GenerateRequest(
            prompt=prompt.text if options.raw else (ChatMessage("user", prompt.text),),
            sampling=SamplingParams(temperature=options.temperature),
            max_tokens=max_tokens,
            ignore_eos=options.ignore_eos,
            num_draft_tokens=options.num_draft_tokens,
            include_rounds=options.rounds,
        )


def round_times(rounds: list[RoundReport]) -> RoundTimes:
    """Their sums."""
    return RoundTimes(
        num_rounds=len(rounds),
        num_hits=sum(entry.look_ahead_hit for entry in rounds),
        draft_ms=sum(entry.draft_ms for entry in rounds),
        wire_ms=sum(entry.wire_ms for entry in rounds),
        queue_ms=sum(entry.queue_ms for entry in rounds),
        verify_ms=sum(entry.verify_ms for entry in rounds),
        commit_ms=sum(entry.commit_ms for entry in rounds),
    )
