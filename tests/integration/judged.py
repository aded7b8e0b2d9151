"""A reward that asks a judge, and the judge, a process of its own: a server that says the length of a text."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


async def longest(sample: Any, judges: Any) -> float:
    [number] = await judges["length"].classify(sample.text)
    return float(number)


def answer_to(question: dict[str, Any]) -> dict[str, Any]:
    """The length of a text; or of token ids, that each is as likely as its number says."""
    if "text" in question:
        return {"embedding": [len(question["text"])]}
    ids = question["input_ids"][question["logprob_start_len"] :]
    entries = [[None, ids[0], None], *([-one / 64, one, None] for one in ids[1:])]
    return {"text": "", "meta_info": {"id": "x", "finish_reason": {"type": "length"}, "input_token_logprobs": entries}}


class Handler(BaseHTTPRequestHandler):
    """Notes each question in a file before it is answered."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with open(sys.argv[2], "ab") as file:
            file.write(body + b"\n")
        if sys.argv[3] == "silent":
            self.connection.recv(1)  # until the other side, or this process, is gone
            return
        if sys.argv[3] == "refuses":
            self.send_error(400)
            return
        answer = json.dumps(answer_to(json.loads(body))).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """Nothing is told."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
