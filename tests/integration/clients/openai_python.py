"""Uses the official `openai` client against a Skep host: BASE_URL MODEL -> exit code 0 and "all checks passed"."""
import json
import sys

import openai

base, model = sys.argv[1:3]
client = openai.OpenAI(base_url=base, api_key="unused", max_retries=0, timeout=300)
hello = [{"role": "user", "content": "Say hello to the bees."}]

assert model in [m.id for m in client.models.list().data], "the model is listed"

answer = client.chat.completions.create(model=model, messages=hello, max_tokens=16, temperature=0)
assert answer.choices[0].message.content, answer
assert answer.usage.prompt_tokens > 0 and answer.usage.completion_tokens <= 16
assert answer.usage.prompt_tokens_details.cached_tokens >= 0

stream = client.chat.completions.create(model=model, messages=hello, max_tokens=16, temperature=0, stream=True,
                                        stream_options={"include_usage": True})
chunks = list(stream)
text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
assert text == answer.choices[0].message.content, (text, answer)
assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens

again = client.chat.completions.create(model=model, messages=hello, max_tokens=16, temperature=0)
assert again.usage.prompt_tokens_details.cached_tokens > 0, "the second request reuses the first one's prompt"

scored = client.chat.completions.create(model=model, messages=hello, max_tokens=4, temperature=0, logprobs=True,
                                        top_logprobs=3)
for entry in scored.choices[0].logprobs.content:
    assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
    assert entry.top_logprobs[0].token == entry.token, "greedy decoding takes the most likely token"

several = client.chat.completions.create(model=model, messages=hello, max_tokens=4, n=3, seed=5, temperature=1)
assert [c.index for c in several.choices] == [0, 1, 2]

schema = {"type": "object", "additionalProperties": False, "required": ["name", "age"],
          "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}}}
shaped = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "Ada is 36 years old."}], max_tokens=60, temperature=0,
    response_format={"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}})
person = json.loads(shaped.choices[0].message.content)
assert set(person) == {"name", "age"} and 0 <= person["age"] <= 120, person

tools = [{"type": "function", "function": {"name": "count_bees", "description": "Counts the bees of a hive.",
          "parameters": {"type": "object", "additionalProperties": False, "required": ["hive"],
                         "properties": {"hive": {"type": "integer", "minimum": 1, "maximum": 99}}}}}]
ask = [{"role": "user", "content": "How many bees are in hive 7?"}]
called = client.chat.completions.create(model=model, messages=ask, tools=tools, tool_choice="required", max_tokens=60,
                                        temperature=0)
assert called.choices[0].finish_reason == "tool_calls"
call = called.choices[0].message.tool_calls[0]
assert call.function.name == "count_bees" and 1 <= json.loads(call.function.arguments)["hive"] <= 99

name, arguments = "", ""
for chunk in client.chat.completions.create(model=model, messages=ask, tools=tools, tool_choice="required", max_tokens=60,
                                            temperature=0, stream=True):
    for part in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
        name += part.function.name or ""
        arguments += part.function.arguments or ""
assert (name, json.loads(arguments)) == ("count_bees", json.loads(call.function.arguments)), "streamed = not streamed"

history = ask + [called.choices[0].message.model_dump(exclude_none=True),
                 {"role": "tool", "tool_call_id": call.id, "content": "{\"bees\": 41000}"}]
final = client.chat.completions.create(model=model, messages=history, tools=tools, tool_choice="none", max_tokens=24,
                                       temperature=0)
assert final.choices[0].message.content

plain = client.completions.create(model=model, prompt="The capital of France is", max_tokens=4, temperature=0, echo=True,
                                  logprobs=2)
assert plain.choices[0].text.startswith("The capital of France is")
assert len(plain.choices[0].logprobs.token_logprobs) == len(plain.choices[0].logprobs.tokens)

for bad, expected in [(dict(model="no-such-model"), openai.NotFoundError), (dict(temperature=9), openai.BadRequestError)]:
    try:
        client.chat.completions.create(**{"model": model, "messages": hello, **bad})
        raise SystemExit(f"{bad} was accepted")
    except expected as error:
        assert error.code, error

print("all checks passed")
