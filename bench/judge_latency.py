"""What asking a judge costs on a real vLLM: ``python bench/judge_latency.py --out FILE``.

A vLLM server gets a small Llama with drawn weights, whose tokens are the words of the judge's prompt. What it says is
noise; how long it takes is measured. Each pair of ``bench/data/paraphrases.jsonl`` is shown as the gateway shows it.

The result has, in milliseconds at p50 and p99: a verdict, which is what a request waits for where the judge is asked
inline (with the share that is later than the gateway waits); and answers of 32 tokens, one after the other, alone and
while verdicts are asked beside them, as they are in the background.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from gateway import process
from models import TEMPLATE, learn_words, write_weights

from semkv_guards.judge import PROMPT, messages, one_token
from semkv_lab.semantic import DATA, machine, times

_PORT = 8397
_WAITS_S = 0.25  # of the gateway, for a verdict
_TOKENS = 32  # of an answer
_ANSWERS = 40
Body = dict[str, Any]


def write_model(directory: Path, texts: list[str]) -> None:
    """A Llama of 8 layers with drawn weights, and a tokenizer that knows the words of texts."""
    from transformers import LlamaConfig

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import tiny_models

    tiny_models.tokenizer(directory, [])
    learn_words(directory, " ".join(texts))
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        max_position_embeddings=4096,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(directory)
    write_weights(directory)
    (directory / "template.jinja").write_text(TEMPLATE, encoding="utf-8")


def ask(body: Body) -> float:
    """How many seconds a chat completion takes."""
    connection = http.client.HTTPConnection("127.0.0.1", _PORT, timeout=120)
    begin = time.perf_counter()
    head = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps({"model": "m", **body}), head)
    answer = connection.getresponse()
    payload = answer.read()
    took = time.perf_counter() - begin
    connection.close()
    if answer.status != 200:
        raise RuntimeError(payload.decode())
    return took


def answers(texts: list[str]) -> list[float]:
    """The seconds of answers, one after the other."""
    more = {"max_tokens": _TOKENS, "ignore_eos": True, "temperature": 0}
    return [ask({"messages": [{"role": "user", "content": text}], **more}) for text in texts]


def measure(rows: list[dict[str, str]]) -> dict[str, Any]:
    """Verdicts alone, then answers alone and beside verdicts."""
    shown = [messages([], row["a"], row["b"]) for row in rows]
    verdicts = [one_token(pair) for pair in shown if pair is not None]
    ask(verdicts[0])  # the prefix cache has the prompt from now on
    alone = [ask(body) for body in verdicts[1:]]
    late = sum(took > _WAITS_S for took in alone) / len(alone)
    texts = [row["a"] for row in rows]
    quiet = answers(texts[:_ANSWERS])
    is_over = threading.Event()

    def judge() -> None:
        for body in verdicts * 100:
            if is_over.is_set():
                return
            ask(body)

    thread = threading.Thread(target=judge)
    thread.start()
    beside = answers(texts[_ANSWERS : 2 * _ANSWERS])
    is_over.set()
    thread.join()
    return {
        "verdict": {**times(alone), "later than 0.25 s": round(late, 4)},
        "answer alone": times(quiet),
        "answer beside verdicts": times(beside),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    lines = (DATA / "paraphrases.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[: given.pairs]]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_model(model, [PROMPT, *(row["a"] for row in rows)])
        server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
        server += [
            "--served-model-name",
            "m",
            "--port",
            str(_PORT),
            "--max-model-len",
            "4096",
            "--enforce-eager",
        ]
        server += ["--chat-template", str(model / "template.jinja")]
        with process(server, f"http://127.0.0.1:{_PORT}/health", VLLM_CPU_KVCACHE_SPACE="1"):
            found = {"machine": machine(), **measure(rows)}
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: row for name, row in found.items() if name != "machine"}))


if __name__ == "__main__":
    main()
