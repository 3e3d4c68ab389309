"""Draws tiny_hf_model.png: the lines of docs/training.md, "A small one that learns", as they are there, on three seeds.

python docs/images/tiny_hf_model.py    # three to ten minutes on a CPU; prints rewards, and how many answers transformers gets right
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import torch
import transformers
from smollm2 import ROOT, SEEDS, documented_lines, draw, rows_in, run


def num_right(folder: Path, prompts: Path) -> int:
    """Of the most probable answers of the saved model, by transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    records = [json.loads(line) for line in prompts.read_text().splitlines()]
    found = 0
    for record in records:
        tokens = tokenizer.apply_chat_template(record["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=False)
        answer = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=3, pad_token_id=0)
        found += tokenizer.decode(answer[0, tokens.shape[1] :], skip_special_tokens=True) == record["answer"]
    print(f"{folder.name}: {found} of {len(records)} answers are right", flush=True)
    return found


def main() -> None:
    make, train = documented_lines("A small one that learns")
    rows_of_seed = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "examples").symlink_to(ROOT / "examples")
        run(make, folder)
        for seed in SEEDS:
            began = time.monotonic()
            run([*train, "--seed", str(seed), "--output-dir", f"run{seed}", "--save-hf", f"trained{seed}"], folder)
            rows_of_seed[seed] = rows_in(folder / f"run{seed}")
            print(f"seed {seed}: {time.monotonic() - began:.0f} s", flush=True)
            num_right(folder / f"trained{seed}", folder / "tiny" / "prompts.jsonl")
        draw(Path(__file__).with_suffix(".png"), rows_of_seed, window=20)


if __name__ == "__main__":
    main()
