"""An MCP server on standard input and output with one tool, without dependencies."""
import json
import sys

SHELVES = {"emma": 12, "dracula": 31, "walden": 7}

FIND_BOOK = {
    "name": "find_book",
    "description": "Finds the shelf of a book by its title.",
    "inputSchema": {
        "type": "object",
        "properties": {"title": {"type": "string", "description": "Title of the book."}},
        "required": ["title"],
        "additionalProperties": False,
    },
    "outputSchema": {"type": "object", "properties": {"shelf": {"type": "integer"}}, "required": ["shelf"]},
    "annotations": {"readOnlyHint": True, "destructiveHint": False, "openWorldHint": False},
}


def find_book(title):
    shelf = SHELVES.get(title.lower())
    if shelf is None:
        return {"content": [{"type": "text", "text": f"the library has no book {title!r}"}], "isError": True}
    return {"content": [{"type": "text", "text": f"shelf {shelf}"}], "structuredContent": {"shelf": shelf}}


def handle(method, params):
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "library", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": [FIND_BOOK]}
    if method == "tools/call":
        return find_book(params["arguments"]["title"])
    return {}


for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:  # a notification needs no answer
        result = handle(request["method"], request.get("params", {}))
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
