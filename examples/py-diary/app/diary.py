"""Keeps a diary of what you spend, in Python.

The model reads the sentence: what was bought and its price come back as JSON that matches a schema, which is enforced
while decoding. Python adds up the amounts, and the session's state stores the entries.
"""

import json

from componentize_py_types import Err
from wit_world import exports
from wit_world.imports import inference, log, state, types

ENTRIES = "entries"

EXPENSE = {
    "type": "object",
    "properties": {
        "what": {"type": "string", "minLength": 2, "maxLength": 24},
        "euros": {"type": "integer", "minimum": 0, "maximum": 9999},
    },
    "required": ["what", "euros"],
    "additionalProperties": False,
}


class Handler(exports.Handler):
    """The exports of `skep:agent/handler`."""

    def describe(self) -> types.Description:
        return types.Description("Keeps a diary of what you spend.", tools=[])

    async def on_message(self, message: types.Message) -> types.Reply:
        if not any(character.isdigit() for character in message.text):
            raise Err(types.AgentError_InvalidMessage("say what you bought and for how many euros"))
        expense = await read(message.text)
        entries = json.loads(state.get(ENTRIES) or b"[]")
        entries.append(expense)
        state.set(ENTRIES, json.dumps(entries).encode())
        log.write(log.Level.INFO, f"{expense['what']} for {expense['euros']} euros")

        total = sum(entry["euros"] for entry in entries)
        text = await answer(expense, total)
        return types.Reply(text, json.dumps({"entries": entries, "total_euros": total}))


async def read(text: str) -> dict:
    """Reads what was bought, in a separate conversation that the caller does not see."""
    with inference.Conversation.open("reading", None) as conversation:
        conversation.clear()
        conversation.set_system(
            "Reply with what was bought and for how many euros, as JSON. "
            'For "I bought tea for 3 euros" reply {"what":"tea","euros":3}.'
        )
        conversation.append_user(text)
        output = types.OutputFormat_JsonSchema(json.dumps(EXPENSE))
        generation = await generate(conversation, output, visible=False)
    expense = json.loads(generation.text)
    # JSON Schema accepts 9.0 as an integer, so the model may write it.
    expense["euros"] = int(expense["euros"])
    return expense


async def answer(expense: dict, total: int) -> str:
    with inference.Conversation.open("main", None) as conversation:
        conversation.set_system("You keep a diary of expenses. Answer in one short sentence.")
        conversation.append_user(f"I bought {expense['what']} for {expense['euros']} euros.")
        # A very small model needs a fixed form for its answer.
        output = types.OutputFormat_Regex(f"That makes {total} euros in all\\.")
        generation = await generate(conversation, output, visible=True)
    return generation.text


async def generate(
    conversation: inference.Conversation, output: types.OutputFormat, visible: bool
) -> types.Generation:
    greedy = types.Sampling(0.0, None, None, None, None, None, None, None)
    options = types.GenerateOptions(
        sampling=greedy,
        max_tokens=60,
        stop=[],
        tools=[],
        tool_choice=types.ToolChoice_None_(),
        output=output,
        visible=visible,
    )
    try:
        return await conversation.generate(options)
    except Err as error:
        raise Err(types.AgentError_Inference(error.value)) from error
