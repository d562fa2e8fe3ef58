"""Uses the OpenAI Agents SDK against a Skep host: BASE_URL MODEL -> exit code 0 and "all checks passed"."""
import asyncio
import sys

import openai
from agents import (Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool,
                    set_tracing_disabled)
from pydantic import BaseModel, Field

base, model = sys.argv[1:3]
set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=base, api_key="unused", max_retries=0, timeout=300)
counted = []


@function_tool
def count_bees(hive: int) -> str:
    """Counts the bees of a hive."""
    counted.append(hive)
    return "41000 bees"


class Hive(BaseModel):
    hive: int = Field(ge=1, le=99)


async def check(kind):
    counted.clear()
    settings = dict(temperature=0, max_tokens=60)
    keeper = Agent(name="keeper", instructions="You count bees.", model=kind(model=model, openai_client=client),
                   tools=[count_bees], model_settings=ModelSettings(tool_choice="required", **settings))
    # After a call the SDK lets the model choose, so it may call again; its turns are bounded.
    result = Runner.run_streamed(keeper, "How many bees are in hive 7?", max_turns=8)
    kinds = [event.type async for event in result.stream_events()]
    assert counted and result.final_output, (kind, counted, result.final_output)
    assert "raw_response_event" in kinds and "run_item_stream_event" in kinds, kinds
    shaped = Agent(name="shaper", model=kind(model=model, openai_client=client), output_type=Hive,
                   model_settings=ModelSettings(**settings))
    answer = (await Runner.run(shaped, "The bees are in hive 7.")).final_output
    assert 1 <= answer.hive <= 99, answer
    print(kind.__name__, "passed")


async def main():
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        await check(kind)
    print("all checks passed")


asyncio.run(main())
