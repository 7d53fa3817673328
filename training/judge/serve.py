"""Serves a trained judge as any model is served: ``POST /v1/chat/completions``, of the OpenAI form.

    python training/judge/serve.py DIR --port 8090
    semkv serve ... --policy judge --judge-url http://127.0.0.1:8090

It reads the JSON object of `semkv_guards.judge.messages` and answers ``yes`` or ``no`` with the chances of both. What
was said before the pair is not read: both texts come after the same conversation. For measurements only.
"""

from __future__ import annotations

import argparse
import json
import math
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import network
import torch

_LEAST = 1e-9  # of a chance whose logarithm is told


class Handler(BaseHTTPRequestHandler):
    """Answers one pair."""

    judge: network.Judge
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """A chat completion of one token."""
        length = int(self.headers["content-length"])
        try:
            asked = json.loads(self.rfile.read(length))
            pair = json.loads(asked["messages"][-1]["content"])
            texts = (str(pair["first"]), str(pair["second"]))
        except (LookupError, TypeError, ValueError):
            self._answer(400, {"error": {"message": "not a pair of a judge"}})
            return
        self._answer(200, completion(self.judge.chances([texts])[0]))

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: Any) -> None:
        """Nothing: requests are texts of users."""


def completion(chance: float) -> dict[str, Any]:
    """A chat completion that says yes with this chance."""
    chances = {"yes": chance, "no": 1.0 - chance}
    top = [
        {"token": word, "logprob": math.log(max(_LEAST, value))} for word, value in chances.items()
    ]
    word = max(chances, key=chances.__getitem__)
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": word},
        "finish_reason": "length",
        "logprobs": {"content": [{"token": word, "logprob": 0.0, "top_logprobs": top}]},
    }
    return {"object": "chat.completion", "model": "judge", "choices": [choice]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=8090)
    given = parser.parse_args()
    torch.set_num_threads(1)
    Handler.judge = network.Judge(given.folder)
    server = ThreadingHTTPServer(("127.0.0.1", given.port), Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
