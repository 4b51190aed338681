import json

import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megarl.data.tokenizer import PLAIN_CHAT_TEMPLATE, ROWS_AT_ONCE, decode_texts, load_tokenizer, render_text
from tests.data.shared import render_prompt, shared_data

CHAT = [{"role": "user", "content": "What is 12 + 3?"}]


def test_render_prompt_opens_the_assistants_turn(tokenizer):
    ids = render_prompt(tokenizer, CHAT)
    assert tokenizer.decode(ids) == "<|im_start|>user\nWhat is 12 + 3?<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_saved_tokenizer_is_loaded(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert render_prompt(loaded, CHAT) == render_prompt(tokenizer, CHAT)


def test_qwen_tokenizer_renders_as_published():
    tokenizer = load_tokenizer(shared_data("qwen2.5_tokenizer"))
    ids = render_prompt(tokenizer, CHAT)
    # Qwen's own ids: 151644 <|im_start|>, 77091 assistant, 198 newline, 151645 <|im_end|>
    assert ids[-5:] == [151645, 198, 151644, 77091, 198]
    assert tokenizer.decode(ids).endswith(
        "<|im_start|>user\nWhat is 12 + 3?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_sentencepiece_folder_gives_sentencepieces_own_ids():
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = shared_data("stories260k")
    with pytest.warns(UserWarning, match="has no chat template"):
        tokenizer = load_tokenizer(folder)
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    texts = ["Once upon a time", " a  b ", "x\ny", "é ü 漢字 🙂", "user: hi\nassistant: yes"]
    with (shared_data("gsm8k") / "test.jsonl").open() as file:
        for row in map(json.loads, file):
            texts += [row["question"], row["answer"]]
    assert tokenizer(texts, add_special_tokens=False)["input_ids"] == [oracle.encode(text) for text in texts]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (oracle.bos_id(), oracle.eos_id())


def test_a_column_is_decoded_in_parts(tokenizer, monkeypatch):
    texts = [f"{number} + 1" for number in range(ROWS_AT_ONCE + 3)]
    rows = tokenizer(texts)["input_ids"]
    column = pa.chunked_array([pa.array(rows[:5]), pa.array(rows[5:])])
    decode, parts = tokenizer.batch_decode, []

    def recording(ids, **options):
        parts.append(len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "batch_decode", recording)
    assert decode_texts(tokenizer, column) == decode(rows, skip_special_tokens=True)
    assert parts == [ROWS_AT_ONCE, 3]
    assert decode_texts(tokenizer, column[:0]) == []


def test_plain_chat_template():
    with pytest.warns(UserWarning, match="has no chat template"):
        tokenizer = load_tokenizer(shared_data("stories260k"))
    assert tokenizer.chat_template == PLAIN_CHAT_TEMPLATE
    assert render_text(tokenizer, CHAT, add_generation_prompt=True) == "<s>user: What is 12 + 3?\nassistant:"
    turns = [*CHAT, {"role": "assistant", "content": "15"}]
    assert render_text(tokenizer, turns, add_generation_prompt=False) == (
        "<s>user: What is 12 + 3?\nassistant: 15</s>\n"
    )
    ids = render_prompt(tokenizer, CHAT)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids) == "<s>user: What is 12 + 3?\nassistant:"


def test_tokenizer_of_another_kind_than_its_models_family(tmp_path):
    """transformers 5.12 gives a Qwen2 model Qwen's splitting rules, whatever its tokenizer.json says."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=100, special_tokens=["<unk>", "<eos>"], show_progress=False)
    bpe.train_from_iterator(["hello world , the capital 1 2 3 4"] * 3, trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", unk_token="<unk>").save_pretrained(
        tmp_path
    )
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.warns(UserWarning) as warned:
        tokenizer = load_tokenizer(tmp_path)
    assert "which gives other ids than its tokenizer.json" in str(warned[0].message)
    text = "hello, the world 12"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == bpe.encode(text).ids
    assert tokenizer.eos_token == "<eos>"


def test_missing_folder_is_named():
    with pytest.raises(ValueError, match="tokenizer folder /gone/model does not exist"):
        load_tokenizer("/gone/model")


def test_folder_without_tokenizer_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ValueError, match=rf"{tmp_path} holds no tokenizer: none of tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_broken_sentencepiece_file_is_named(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"not a model at all")
    with pytest.raises(ValueError, match=r"tokenizer\.model is not a SentencePiece model"):
        load_tokenizer(tmp_path)


def test_refusal_of_the_template_is_a_value_error(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    loaded.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="chat template refuses the messages: roles must alternate"):
        render_prompt(loaded, CHAT)
