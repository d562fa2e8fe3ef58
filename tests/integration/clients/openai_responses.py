"""Uses the official `openai` client's Responses API against a Skep host: BASE_URL MODEL -> exit code 0 and "all checks passed"."""
import inspect
import json
import pathlib
import re
import sys

import openai

base, model, guide = sys.argv[1:4]
client = openai.OpenAI(base_url=base, api_key="unused", max_retries=0, timeout=300)

# The table of the guide has every field that this client knows.
section = pathlib.Path(guide).read_text().split("\n## Fields\n")[1]
rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
documented = {re.split(r"[.:]", name)[0] for row in rows for name in re.findall(r"`([^`]*)`", row)}
transport = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
missing = set(inspect.signature(client.responses.create).parameters) - documented - transport
assert not missing, f"the guide does not say what happens to {missing}"

greedy = dict(model=model, temperature=0)

answer = client.responses.create(**greedy, input="Say hello to the bees.", max_output_tokens=16)
assert answer.output_text and answer.usage.output_tokens <= 16, answer

text = ""
for event in client.responses.create(**greedy, input="Say hello to the bees.", max_output_tokens=16, stream=True):
    if event.type == "response.output_text.delta":
        text += event.delta
final = event.response
assert text == answer.output_text == final.output_text, (text, answer)

after = client.responses.create(**greedy, input="And to the flowers.", previous_response_id=answer.id, max_output_tokens=16)
assert after.usage.input_tokens_details.cached_tokens > 0, "the chain's prefix is cached"
assert client.responses.retrieve(after.id).output_text == after.output_text
items = client.responses.input_items.list(after.id).data
assert [item.content[0].text for item in items] == ["And to the flowers."]

schema = {"type": "object", "additionalProperties": False, "required": ["name", "age"],
          "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}}}
shaped = client.responses.create(**greedy, input="Ada is 36 years old.", max_output_tokens=60,
                                 text={"format": {"type": "json_schema", "name": "person", "strict": True, "schema": schema}})
person = json.loads(shaped.output_text)
assert set(person) == {"name", "age"} and 0 <= person["age"] <= 120, person

tools = [{"type": "function", "name": "count_bees", "description": "Counts the bees of a hive.", "strict": True,
          "parameters": {"type": "object", "additionalProperties": False, "required": ["hive"],
                         "properties": {"hive": {"type": "integer", "minimum": 1, "maximum": 99}}}}]
arguments = ""
with client.responses.stream(**greedy, input="How many bees are in hive 7?", tools=tools, tool_choice="required",
                             max_output_tokens=60) as stream:
    for event in stream:
        if event.type == "response.function_call_arguments.delta":
            arguments += event.delta
    called = stream.get_final_response()
[call] = [item for item in called.output if item.type == "function_call"]
assert (call.name, call.arguments) == ("count_bees", arguments) and 1 <= json.loads(arguments)["hive"] <= 99
result = {"type": "function_call_output", "call_id": call.call_id, "output": "{\"bees\": 41000}"}
final = client.responses.create(**greedy, input=[result], previous_response_id=called.id, tools=tools, tool_choice="none",
                                max_output_tokens=24)
assert final.output_text

# Without stored responses the client sends everything again.
unstored = client.responses.create(**greedy, input="Say hello to the bees.", max_output_tokens=16, store=False,
                                   include=["reasoning.encrypted_content"])
again = [{"role": "user", "content": "Say hello to the bees."}, *unstored.output, {"role": "user", "content": "And to the flowers."}]
assert client.responses.create(**greedy, input=again, max_output_tokens=16, store=False).output_text

queued = client.responses.create(**greedy, input="Tell me about bees.", background=True, max_output_tokens=40)
assert queued.status in ("queued", "in_progress"), queued
events = list(client.responses.retrieve(queued.id, stream=True))
assert events[-1].response.output_text, events[-1]
rest = list(client.responses.retrieve(queued.id, stream=True, starting_after=5))
assert [event.sequence_number for event in rest] == list(range(6, len(events)))
assert [event.model_dump() for event in rest] == [event.model_dump() for event in events[6:]]
cancelled = client.responses.create(**greedy, input="Count to a million.", background=True)
assert client.responses.cancel(cancelled.id).status == "cancelled"
client.responses.delete(queued.id)
try:
    client.responses.retrieve(queued.id)
    raise SystemExit("a deleted response was found")
except openai.NotFoundError as error:
    assert error.code == "response_not_found", error

print("all checks passed")
