"""Uses the official `openai` client against a Skep host: BASE_URL MODEL -> exit code 0 and "all checks passed"."""
import inspect
import json
import pathlib
import re
import sys
import time

import openai

base, model = sys.argv[1:3]
client = openai.OpenAI(base_url=base, api_key="unused", max_retries=0, timeout=300)
root = openai.OpenAI(base_url=base.removesuffix("/v1"), api_key="unused", max_retries=0)
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

assert client.models.retrieve(model).id == model
details = client.models.retrieve(model).model_extra["skep"]
assert details["capabilities"]["tools"] and details["location"] == "local", details

streamed = client.chat.completions.create(model=model, messages=hello, max_tokens=4, n=3, seed=5, temperature=1, stream=True)
texts = ["", "", ""]
for chunk in streamed:
    for choice in chunk.choices:
        texts[choice.index] += choice.delta.content or ""
assert texts == [c.message.content for c in several.choices], "streamed choices = not streamed"

first = scored.choices[0].logprobs.content[0].token
tokens = root.post("/tokenize", body={"model": model, "prompt": first, "add_special_tokens": False},
                     cast_to=object)["tokens"]
other = client.chat.completions.create(model=model, messages=hello, max_tokens=4, temperature=0,
                                       logit_bias={str(tokens[0]): -100}, logprobs=True)
assert other.choices[0].logprobs.content[0].token != first, "the bias forbids the most likely token"

raw = client.chat.completions.with_raw_response.create(
    model=model, messages=hello, max_tokens=4, store=True, metadata={"a": "b"}, service_tier="flex", safety_identifier="bee",
    prompt_cache_key="hive", verbosity="low", prediction={"type": "content", "content": "Hello"}, parallel_tool_calls=True)
ignored = set(raw.headers["x-skep-ignored"].split(", "))
assert ignored == {"store", "metadata", "service_tier", "safety_identifier", "verbosity", "prediction"}, ignored

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

guide = (pathlib.Path(__file__).parents[3] / "host/guide/api-fields.md").read_text()
sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", guide, re.M | re.S))
of_client = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
for method, section in [(client.chat.completions.create, "Chat completions"), (client.completions.create, "Completions"),
                        (client.files.create, "Files"), (client.files.list, "Files"), (client.batches.create, "Batches"),
                        (client.batches.list, "Batches")]:
    for field in set(inspect.signature(method).parameters) - of_client:
        assert f"`{field}`" in sections[section], f"the guide says nothing of {field} under {section}"


def request(name, **more):
    body = {"model": model, "messages": hello, "max_tokens": 8, "temperature": 0, **more}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})


def batch_of(lines):
    file = client.files.create(file=("requests.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h",
                                  metadata={"night": "7"})
    return file, batch


def lines_of(file):
    return [json.loads(line) for line in client.files.content(file).text.splitlines()]


file, batch = batch_of([request("one"), request("long", messages=[{"role": "user", "content": "a b " * 200_000}]), request("two")])
assert client.files.retrieve(file.id).purpose == "batch" and file.bytes > 1000
while batch.status in ("validating", "in_progress"):
    time.sleep(0.1)
    batch = client.batches.retrieve(batch.id)
assert batch.status == "completed" and batch.metadata == {"night": "7"}, batch
assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 2, 1), batch
answers = {line["custom_id"]: line for line in lines_of(batch.output_file_id)}
assert set(answers) == {"one", "two"} and answers["one"]["response"]["status_code"] == 200
now = client.chat.completions.create(model=model, messages=hello, max_tokens=8, temperature=0)
assert answers["one"]["response"]["body"]["choices"][0]["message"]["content"] == now.choices[0].message.content
failed = lines_of(batch.error_file_id)
assert [line["custom_id"] for line in failed] == ["long"] and failed[0]["response"]["status_code"] == 400, failed

_, wrong = batch_of([request("a"), "not JSON", request("a"), request("b", temperature=9)])
assert wrong.status == "failed", wrong
assert [(error.line, error.param) for error in wrong.errors.data] == [
    (2, None), (3, "custom_id"), (4, "body.temperature")], wrong.errors
assert "line 4" in wrong.errors.data[2].message

_, running = batch_of([request(str(n), max_tokens=400, ignore_eos=True) for n in range(20)])
cancelled = client.batches.cancel(running.id)
while cancelled.status == "cancelling":
    time.sleep(0.1)
    cancelled = client.batches.retrieve(cancelled.id)
assert cancelled.status == "cancelled", cancelled
ids = [b.id for b in client.batches.list(limit=1)]
assert ids[:3] == [cancelled.id, wrong.id, batch.id], "pages continue after the last batch"
assert client.files.delete(file.id).deleted
assert file.id not in [f.id for f in client.files.list()]
for missing in (lambda: client.files.content(file.id), lambda: client.batches.retrieve("batch_none")):
    try:
        missing()
        raise SystemExit("something missing was found")
    except openai.NotFoundError as error:
        assert error.code in ("file_not_found", "batch_not_found"), error

print("all checks passed")
