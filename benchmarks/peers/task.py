"""The task that all frameworks train on: a model folder that transformers 4 and 5 both read, and prompts.

Model: Qwen2, 4 layers of width 256 (8 heads, 4 key/value heads, MLP 688), vocabulary 512, output layer of its own, float32, random:
3.2 M parameters. Prompts: `What is 45 + 67?` in a chat template, filled up to 25 tokens each. Responses end at 32 tokens
at the latest; a random policy chooses the end token once in 512.
"""

import json
import random
from pathlib import Path

NUM_PROMPTS = 32
SAMPLES = 4
PROMPT_TOKENS = 25
RESPONSE_TOKENS = 32
LEARNING_RATE = 1e-4
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "ffn_hidden_size": 688,
    "num_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
# Keys that transformers 5 writes into tokenizer_config.json and transformers 4 reads otherwise, or not at all.
_TRANSFORMERS_5_ONLY = ("backend", "is_local", "local_files_only", "extra_special_tokens")
_FILLER = " please"  # one token: it is in every text that the tokenizer is trained on


def make_task(folder: Path, steps: int) -> None:
    """Write `<folder>/model` and `<folder>/train.parquet`, with the prompts of so many steps, all different.

    Needs megarl's environment. Nothing is done where both are there already.
    """
    done = folder / "task.json"
    facts = {"sizes": SIZES, "prompt_tokens": PROMPT_TOKENS, "prompts": NUM_PROMPTS * steps}
    if done.is_file() and json.loads(done.read_text()) == facts:
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    from megarl.util.packages import example

    folder.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    questions = draw_questions(NUM_PROMPTS * steps)
    texts = [question + _FILLER * 8 for question in questions[:512]]
    model = example("tiny_model").make_tiny_model(folder / "model", texts, **SIZES)
    make_readable_by_transformers_4(model / "tokenizer_config.json")
    pq.write_table(pa.Table.from_pylist(rows(model, questions)), folder / "train.parquet")
    done.write_text(json.dumps(facts))


def draw_questions(count: int) -> list[str]:
    """Different sums of three numbers of two digits."""
    draw = random.Random(0)
    found: dict[str, None] = {}
    while len(found) < count:
        a, b, c = (draw.randrange(10, 100) for _ in range(3))
        found[f"What is {a} + {b} + {c}?"] = None
    return list(found)


def rows(model: Path, questions: list[str]) -> list[dict]:
    """Prompts in the schema that megarl and verl share, of PROMPT_TOKENS tokens each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def length(text: str) -> int:
        messages = [{"role": "user", "content": text}]
        chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return len(tokenizer(chat)["input_ids"])

    made = []
    for index, question in enumerate(questions):
        text = question + _FILLER * max(0, PROMPT_TOKENS - length(question))
        if length(text) != PROMPT_TOKENS:
            raise ValueError(f"{text!r} has {length(text)} tokens, not {PROMPT_TOKENS}")
        made.append(
            {
                "data_source": "peers",
                "prompt": [{"role": "user", "content": text}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index, "split": "train"},
            }
        )
    return made


def make_readable_by_transformers_4(file: Path) -> None:
    """Take out of a tokenizer_config.json what transformers 4 stumbles over; transformers 5 reads it as before."""
    found = json.loads(file.read_text())
    kept = {name: value for name, value in found.items() if name not in _TRANSFORMERS_5_ONLY}
    file.write_text(json.dumps(kept, indent=2) + "\n")
