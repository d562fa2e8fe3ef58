"""The API of a post office, for the example: it wants a key, and repeats the request's headers in its answer."""
import http.server
import json
import urllib.parse

KEY = "correct-horse-battery-staple"
PARCELS = {"P7": "Bergen", "P8": "Porto"}


class Post(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        query = urllib.parse.parse_qs(urllib.parse.urlparse(self.path).query)
        parcel = query.get("id", [""])[0]
        if self.headers.get("authorization") != f"Bearer {KEY}":
            self.answer(401, {"error": "the key is missing or wrong"})
        elif parcel not in PARCELS:
            self.answer(404, {"error": f"there is no parcel {parcel}"})
        else:
            self.answer(200, {"id": parcel, "place": PARCELS[parcel], "your_key": self.headers["authorization"]})

    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    http.server.ThreadingHTTPServer(("127.0.0.1", 9473), Post).serve_forever()
