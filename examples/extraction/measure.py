"""Has the agent read each document in documents/ and counts the fields that are right. Needs `skep up .`; pass another
URL as argument.
"""
import json
import pathlib
import sys
import urllib.request

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
documents = pathlib.Path(__file__).parent / "documents"


def read(document):
    body = json.dumps({"text": document}).encode()
    request = urllib.request.Request(f"{url}/invoices", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["data"]


expected = json.loads((documents / "expected.json").read_text())
right = {}
for name, fields in expected.items():
    found = read((documents / f"{name}.txt").read_text())
    for field, value in fields.items():
        right.setdefault(field, []).append(found[field] == value)
        if found[field] != value:
            print(f"{name}: {field} is {found[field]!r} and not {value!r}")
for field, answers in right.items():
    print(f"{field:10} {sum(answers)} of {len(answers)}")
answers = [answer for of_field in right.values() for answer in of_field]
print(f"{'all':10} {sum(answers)} of {len(answers)}")
