"""`python agent.py URL MODEL`, in an environment with openai-agents: runs an agent that must call a
tool, with whole answers and with streams. The exit code is 1 if a run does not end as expected."""

import asyncio
import sys
from typing import Literal

import agents
from openai import AsyncOpenAI

QUESTION = "Will I need an umbrella in Oslo?"
calls: list[str] = []


@agents.function_tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Returns the weather of a city."""
    calls.append(city)
    return f"It rains in {city}."


async def main(url: str, model: str) -> int:
    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    agent = agents.Agent(
        name="forecaster",
        instructions="Answer in one short sentence.",
        tools=[weather],
        model=agents.OpenAIChatCompletionsModel(model=model, openai_client=client),
        model_settings=agents.ModelSettings(
            tool_choice="required", parallel_tool_calls=False, temperature=0.0, max_tokens=64
        ),
    )
    whole = await agents.Runner.run(agent, QUESTION, max_turns=4)
    streamed = agents.Runner.run_streamed(agent, QUESTION, max_turns=4)
    async for _ in streamed.stream_events():
        pass
    for result in (whole, streamed):
        print(f"{result.final_output!r} after {len(result.raw_responses)} answers")
    print(f"called: {calls}")
    is_right = len(calls) >= 2 and all(len(one.raw_responses) >= 2 for one in (whole, streamed))
    return 0 if is_right and whole.final_output == streamed.final_output else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
