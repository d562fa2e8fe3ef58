"""Uses the official `anthropic` client against a Skep host: BASE_URL MODEL -> exit code 0 and "all checks passed"."""
import inspect
import json
import pathlib
import re
import sys

import anthropic

base, model = sys.argv[1:3]
client = anthropic.Anthropic(base_url=base, api_key="unused", max_retries=0, timeout=300)
hello = [{"role": "user", "content": "Say hello to the bees."}]
greedy = dict(model=model, extra_body={"temperature": 0})

answer = client.messages.create(**greedy, messages=hello, max_tokens=16)
assert answer.type == "message" and answer.content[0].type == "text" and answer.content[0].text, answer
assert answer.stop_reason in ("end_turn", "max_tokens") and answer.usage.output_tokens <= 16

with client.messages.stream(**greedy, messages=hello, max_tokens=16) as stream:
    text = "".join(stream.text_stream)
    whole = stream.get_final_message()
assert text == answer.content[0].text == whole.content[0].text, (text, answer)
assert whole.usage.output_tokens == answer.usage.output_tokens
assert whole.usage.cache_read_input_tokens > 0, "the second request reuses the first one's prompt"

count = client.messages.count_tokens(model=model, messages=hello)
assert count.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens, (count, whole.usage)

system = [{"type": "text", "text": "You are a beekeeper.", "cache_control": {"type": "ephemeral"}}]
told = client.messages.create(**greedy, system=system, messages=hello, max_tokens=8, stop_sequences=["QQ"])
assert told.content[0].text and told.usage.input_tokens + told.usage.cache_read_input_tokens > 0, told

tools = [{"name": "count_bees", "description": "Counts the bees of a hive.",
          "input_schema": {"type": "object", "additionalProperties": False, "required": ["hive"],
                           "properties": {"hive": {"type": "integer", "minimum": 1, "maximum": 99}}}}]
ask = [{"role": "user", "content": "How many bees are in hive 7?"}]
called = client.messages.create(**greedy, messages=ask, tools=tools, tool_choice={"type": "any"}, max_tokens=60)
assert called.stop_reason == "tool_use", called
call = called.content[-1]
assert call.type == "tool_use" and call.name == "count_bees" and 1 <= call.input["hive"] <= 99, call

with client.messages.stream(**greedy, messages=ask, tools=tools, tool_choice={"type": "tool", "name": "count_bees"},
                            max_tokens=60) as stream:
    streamed = stream.get_final_message().content[-1]
assert (streamed.name, streamed.input) == (call.name, call.input), "streamed = not streamed"

history = ask + [{"role": "assistant", "content": called.content},
                 {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "41000"}]}]
final = client.messages.create(**greedy, messages=history, tools=tools, tool_choice={"type": "none"}, max_tokens=24)
assert final.content[0].text

schema = {"type": "object", "additionalProperties": False, "required": ["name", "age"],
          "properties": {"name": {"type": "string", "maxLength": 12},
                         "age": {"type": "integer", "minimum": 0, "maximum": 120}}}
shaped = client.messages.create(model=model, messages=[{"role": "user", "content": "Ada is 36 years old."}], max_tokens=60,
                                extra_body={"temperature": 0, "output_config": {
                                    "format": {"type": "json_schema", "schema": schema}}})
person = json.loads(shaped.content[0].text)
assert set(person) == {"name", "age"} and 0 <= person["age"] <= 120, person

for bad, expected in [(dict(model="no-such-model"), anthropic.NotFoundError),
                      (dict(extra_body={"temperature": 9}), anthropic.BadRequestError)]:
    try:
        client.messages.create(**{"messages": hello, "max_tokens": 4, **greedy, **bad})
        raise SystemExit(f"{bad} was accepted")
    except expected as error:
        assert error.body["type"] == "error" and error.request_id, error.body

guide = (pathlib.Path(__file__).parents[3] / "host/guide/api-fields.md").read_text()
section = re.search(r"^## Messages\n(.*?)(?=^## )", guide, re.M | re.S)[1]
of_client = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
for method in (client.messages.create, client.messages.count_tokens, client.beta.messages.create):
    for field in set(inspect.signature(method).parameters) - of_client - {"betas"}:
        assert f"`{field}`" in section, f"the guide says nothing of {field}"

print("all checks passed")
