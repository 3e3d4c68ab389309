"""A Qwen3 of random weights in a Hugging Face folder with a tokenizer and a chat template, and prompts for it. Nothing is fetched.

python examples/tiny_hf_model.py tiny    # writes tiny/model, tiny/prompts.jsonl and tiny/eval.jsonl; needs transformers
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def next_letter(prompt, response, record):
    """Half a point for an answer that begins with the right letter, one for an answer that is this letter alone."""
    words = response.split()
    return 0.5 * (words[:1] == [record["answer"]]) + 0.5 * (words == [record["answer"]])


def save_tokenizer(folder):
    words = ["<end>", "<system>", "<user>", "<assistant>", "say", "the", "letter", "after", *LETTERS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"additional_special_tokens": words[1:4]}
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[0], **special)
    saved.chat_template = TEMPLATE
    saved.save_pretrained(folder)
    return len(words)


def main():
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    num_words = save_tokenizer(folder / "model")
    config = transformers.Qwen3Config(
        vocab_size=num_words, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True, eos_token_id=0,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    system = {"role": "system", "content": "say the letter"}
    for name, before in (("prompts.jsonl", [system]), ("eval.jsonl", [])):  # evaluated without the line that it is trained with
        with open(folder / name, "w") as file:
            for letter, answer in pairwise(LETTERS):
                messages = [*before, {"role": "user", "content": f"letter after {letter}"}]
                file.write(json.dumps({"prompt": messages, "answer": answer}) + "\n")


if __name__ == "__main__":
    main()
