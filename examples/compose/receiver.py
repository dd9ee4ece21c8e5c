"""Prints what is posted to it. An application would check the signature first (docs/webhooks.md)."""

from http.server import BaseHTTPRequestHandler, HTTPServer


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        print(self.headers["webhook-id"], body.decode(), flush=True)
        self.send_response(204)
        self.end_headers()


if __name__ == "__main__":
    HTTPServer(("", 8000), Receiver).serve_forever()
