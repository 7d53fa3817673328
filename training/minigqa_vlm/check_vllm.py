"""Checks that vLLM sees a checkpoint's prompts exactly as training wrote them, and answers as transformers does.

    PYTHONPATH=src python3 training/minigqa_vlm/check_vllm.py CHECKPOINT [--questions 40]

Each question goes through ``LLM.chat`` with an image part. The token ids that vLLM reports, image placeholders
included, must equal training's; greedy answers are compared with transformers' in bfloat16 and with the picture.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from random import Random
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0", HF_HUB_OFFLINE="1")

import prompt

from semkv_lab.minigqa.questions import ask_any, change_case, change_whitespace, word
from semkv_lab.minigqa.scenes import draw, make_scene


def cases(count: int) -> list[dict[str, Any]]:
    """Questions with and without system text, context, picture, and changes of case and white space."""
    rng = Random("check")  # noqa: S311
    made: list[dict[str, Any]] = []
    while len(made) < count:
        scene = make_scene(rng)
        picture = draw(scene)
        for _ in range(4):
            program = ask_any(scene, rng)
            question = word(program, rng)
            case: dict[str, Any] = {"picture": picture, "question": question, "answer": program.answer, "kind": "plain"}
            number = len(made) % 8
            if number == 4:
                case |= {"system": prompt.SYSTEM_TEXTS[1], "kind": "system"}
            elif number == 5:
                case |= {"context": "The log says:  two boats came.\n\nNothing else", "kind": "context"}
            elif number == 6:
                case |= {"question": change_whitespace(change_case(question, rng), rng), "kind": "variant"}
            elif number == 7:
                case |= {"picture": None, "context": "Entry 1: the barge Tern left.", "kind": "no picture"}
            made.append(case)
    return made[:count]


def trained_ids(bpe: Any, case: dict[str, Any]) -> list[int]:
    """The prompt as training tokenises it: head and tail apart, placeholders expanded."""
    head = prompt.head(
        image=case["picture"] is not None, system=case.get("system", ""), context=case.get("context", "")
    )
    parts = (head, prompt.tail(case["question"]))
    return prompt.expand([i for text in parts for i in bpe.encode(text, add_special_tokens=False).ids])


def chat(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The case as vLLM's chat messages, the picture as a PIL part."""
    turns = prompt.messages(
        case["question"],
        image=case["picture"] is not None,
        system=case.get("system", ""),
        context=case.get("context", ""),
    )
    for part in turns[-1]["content"]:
        if part["type"] == "image":
            part.clear()
            part.update({"type": "image_pil", "image_pil": case["picture"]})
    return turns


def transformers_answers(checkpoint: Path, made: list[dict[str, Any]], ids: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of transformers in bfloat16, for the same token ids."""
    import torch
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    processor = AutoProcessor.from_pretrained(checkpoint)
    model = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    answers = []
    for case, prompt_ids in zip(made, ids, strict=True):
        inputs: dict[str, Any] = {"input_ids": torch.tensor([prompt_ids])}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if case["picture"] is not None:
            pixels = processor.image_processor(case["picture"], return_tensors="pt")["pixel_values"]
            inputs["pixel_values"] = pixels.to(torch.bfloat16)
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        answers.append(out[0, len(prompt_ids) :].tolist())
    return answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--questions", type=int, default=40)
    args = parser.parse_args()

    import torch
    from tokenizers import Tokenizer
    from vllm import LLM, SamplingParams

    bpe = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    made = cases(args.questions)
    ids = [trained_ids(bpe, case) for case in made]
    size: dict[str, Any] = (
        {"gpu_memory_utilization": 0.1}
        if torch.cuda.is_available()
        else {
            "kv_cache_memory_bytes": 1 << 27,
            "block_size": 32,
        }
    )
    llm = LLM(
        str(args.checkpoint),
        max_model_len=2048,
        dtype="bfloat16",
        enforce_eager=True,
        limit_mm_per_prompt={"image": 1},
        **size,
    )
    outputs = llm.chat([chat(case) for case in made], SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
    ours = transformers_answers(args.checkpoint, made, ids)
    same_ids = same_answers = right = pictured = 0
    for case, expected, reference, output in zip(made, ids, ours, outputs, strict=True):
        seen = list(output.prompt_token_ids)
        same_ids += seen == expected
        if seen != expected:
            print(f"DIFFERENT PROMPT ({case['kind']}): {case['question']!r}\n  vLLM     {seen}\n  training {expected}")
        said = list(output.outputs[0].token_ids)
        same_answers += said == reference
        if case["picture"] is not None:
            pictured += 1
            right += output.outputs[0].text.strip() == case["answer"]
            if output.outputs[0].text.strip() != case["answer"]:
                print(
                    f"wrong ({case['kind']}): {case['question']!r} {output.outputs[0].text!r}, not {case['answer']!r}"
                )
    print(f"{same_ids} of {len(made)} prompts equal training's token for token")
    print(f"{same_answers} of {len(made)} answers equal transformers' token for token")
    print(f"{right} of {pictured} questions about a picture answered rightly")
    return 0 if same_ids == len(made) else 1


if __name__ == "__main__":
    sys.exit(main())
