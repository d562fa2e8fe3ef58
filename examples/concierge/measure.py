"""Sends each line of messages.jsonl to the concierge in a session of its own, and counts how often the model called the
right tool, with the right arguments, at temperature 0. Needs `skep up .`; pass another URL as argument.
"""
import json
import pathlib
import sys
import urllib.request
import uuid

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
run = uuid.uuid4().hex[:8]


def ask(session, text):
    address = f"{url}/v1/agents/concierge/sessions/{session}/messages"
    body = json.dumps({"text": text}).encode()
    request = urllib.request.Request(address, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


lines = (pathlib.Path(__file__).parent / "messages.jsonl").read_text().splitlines()
cases = [json.loads(line) for line in lines]
right_tool = right = 0
for number, case in enumerate(cases):
    answer = ask(f"measure-{run}-{number}", case["say"])
    calls = [(call["name"], call["arguments"]) for call in answer["tool_calls"]]
    expected = [(case["tool"], case["arguments"])] if case["tool"] else []
    right_tool += [name for name, _ in calls] == [name for name, _ in expected]
    right += calls == expected
    if calls != expected:
        print(f"{case['say']!r}: called {calls}, said {answer['text']!r}")
print(f"right tool: {right_tool} of {len(cases)}; right tool and arguments: {right} of {len(cases)}")
