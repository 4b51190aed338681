import copy
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.data.loader import TableLoader
from megarl.data.prompts import PromptDataset, truncate
from megarl.data.trajectories import (
    GIVEN_RESPONSES,
    MESSAGES,
    PROMPT_SCHEMA,
    REF_PROMPT_IDS,
    TEACHER,
    TEMPLATE_KWARGS,
    expand_prompts,
    response_columns,
)
from tests.data.shared import prompt_row, render_prompt


def write_rows(path, rows):
    """Write rows as Parquet or JSON lines, by the suffix."""
    if path.suffix == ".parquet":
        return write(path, rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_prompt_table(tokenizer, tmp_path):
    path = write(tmp_path / "train.parquet", [prompt_row(), prompt_row("Ann has 2 cups and buys 5.", "2")])
    dataset = PromptDataset(path, tokenizer, max_prompt_length=64)
    assert dataset.table.schema == PROMPT_SCHEMA
    assert len(dataset) == 2
    first, second = dataset.table.to_pylist()
    assert [first["uid"], second["uid"]] == ["train:0", "train:1"]
    assert first["prompt_ids"] == render_prompt(tokenizer, prompt_row()["prompt"])
    assert tokenizer.decode(second["prompt_ids"]) == (
        "<|im_start|>user\nAnn has 2 cups and buys 5.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (first["data_source"], second["ground_truth"]) == ("megarl/arithmetic", "2")
    assert json.loads(first["extra_info"]) == {"split": "train", "index": 4, "answer": "#### 7"}


def test_files_of_one_name_have_uids_of_their_own(tokenizer, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for folder in ("a", "b"):
        write(tmp_path / folder / "train.parquet", [prompt_row()])
    dataset = PromptDataset(f"{tmp_path}/*/train.parquet", tokenizer, max_prompt_length=64)
    assert dataset.table["uid"].to_pylist() == ["train:0", "train#2:0"]


def test_other_columns_than_ours(tokenizer, tmp_path):
    """A row without extra_info, with a ground truth that is a list, and with messages under another key."""
    row = prompt_row(reward_model={"ground_truth": ["7", "seven"]}, chat={"turns": prompt_row()["prompt"]})
    del row["extra_info"], row["prompt"]
    path = write(tmp_path / "x.parquet", [row])
    table = PromptDataset(path, tokenizer, max_prompt_length=64, prompt_key="chat.turns").table
    assert table["ground_truth"].to_pylist() == ['["7", "seven"]']
    assert table["extra_info"].to_pylist() == ["{}"]


def test_prompts_for_a_reward_model(tokenizer, tmp_path):
    """Rows of style "model" need no ground truth; where messages are kept, prompts and requests have them."""
    rows = [
        prompt_row(reward_model={"style": "model"}),
        prompt_row(reward_model={"style": "model", "ground_truth": "7"}),
    ]
    path = write(tmp_path / "x.parquet", rows)
    table = PromptDataset(path, tokenizer, max_prompt_length=64, keep_messages=True).table
    assert table["ground_truth"].to_pylist() == ["", "7"]
    kept = [json.loads(text) for text in table["messages"].to_pylist()]
    assert kept == [prompt_row()["prompt"]] * 2
    assert expand_prompts(table, 2)["messages"].to_pylist() == [
        text for text in table["messages"].to_pylist() for _ in "ab"
    ]
    assert "messages" not in PromptDataset(path, tokenizer, max_prompt_length=64).table.column_names


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prompt": []}, r"'prompt' must be a non-empty list of \{role, content\}, found \[\]"),
        ({"prompt": None}, "'prompt' must be a non-empty list .* found None"),
        ({"prompt": [{"role": "user", "content": None}]}, "'prompt' message 0 needs the string 'content'"),
        ({"reward_model": {"style": "rule", "ground_truth": None}}, "ground_truth' is null"),
        ({"reward_model": None}, "no 'reward_model.ground_truth': reward_model holds NoneType"),
        ({"prompt": [{"role": "user"}]}, "'prompt' message 0 needs the string 'content'"),
        ({"prompt": [{"role": "", "content": "x"}]}, "'prompt' message 0 needs the string 'role'"),
        ({"data_source": None}, "'data_source' must be a string, found None"),
        ({"data_source": ""}, "'data_source' must be a string, found ''"),
    ],
)
def test_wrong_rows_are_named_by_file_and_row(tokenizer, tmp_path, changes, message):
    path = write(tmp_path / "train.parquet", [prompt_row(), prompt_row(**changes), prompt_row()])
    with pytest.raises(ValueError, match=rf"train\.parquet row 1: .*{message}"):
        PromptDataset(path, tokenizer, max_prompt_length=64)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prompt": ""}, "'prompt' is an empty text"),
        ({"prompt": ["What is 1 + 1?"]}, "'prompt' message 0 needs the string 'role', found 'What"),
        ({"prompt": {"role": "user", "content": "x"}}, "'prompt' must be a non-empty list"),
        ({"prompt": [{"role": "user", "content": 3}]}, "'prompt' message 0 needs the string 'content'"),
        ({"data_source": 3}, "'data_source' must be a string, found 3"),
        ({"reward_model": "7"}, "no 'reward_model.ground_truth': reward_model holds str"),
        (
            {"reward_model": {"style": "rule"}},
            r"no 'reward_model.ground_truth': reward_model holds \['style'\]",
        ),
    ],
)
def test_values_of_a_wrong_type_are_named(tokenizer, tmp_path, changes, message):
    """The file has JSON lines, in which each row may have types of its own."""
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (prompt_row(), prompt_row(**changes))))
    with pytest.raises(ValueError, match=rf"train\.jsonl row 1: .*{message}"):
        PromptDataset(path, tokenizer, max_prompt_length=64)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": "cut \ud83d"},
        {"reward_model": {"ground_truth": "\ud83d"}},
        {"extra_info": {"note": "\ud83d"}},
    ],
)
def test_half_of_a_surrogate_pair_is_named_by_row(tokenizer, tmp_path, changes):
    """JSON can write one, of an emoji that was cut in two; neither a tokenizer nor Arrow takes it, and both are given many rows at once."""
    path = tmp_path / "train.jsonl"
    rows = (prompt_row(), prompt_row(**changes), prompt_row())
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"train\.jsonl row 1: a text has half of a surrogate pair"):
        PromptDataset(path, tokenizer, max_prompt_length=64)


def test_all_wrong_rows_are_counted_and_the_first_are_shown(tokenizer, tmp_path):
    rows = [prompt_row(data_source=None) if row % 2 else prompt_row() for row in range(20)]
    with pytest.raises(
        ValueError, match=r"x\.parquet row 1: .* found None \(so in 9 more rows of this file\)$"
    ):
        PromptDataset(write(tmp_path / "x.parquet", rows), tokenizer, max_prompt_length=64)
    rows = [prompt_row(data_source="" if row % 2 else None) for row in range(20)]
    with pytest.raises(ValueError, match=r"row 0: .* None \(.* 9 more .*\n.*row 1: .* '' \(so in 9 more"):
        PromptDataset(write(tmp_path / "x.parquet", rows), tokenizer, max_prompt_length=64)


def test_keywords_of_the_chat_template(tokenizer, tmp_path):
    """A template of a model that thinks reads enable_thinking."""
    path = write(tmp_path / "train.parquet", [prompt_row("Hi")])
    thinking = copy.deepcopy(tokenizer)
    thinking.chat_template = "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}<none>{% endif %}"

    def text(**keywords):
        return thinking.decode(
            PromptDataset(path, thinking, max_prompt_length=64, **keywords).table["prompt_ids"][0].as_py()
        )

    assert text() == "Hi"
    assert text(chat_template_kwargs={"enable_thinking": False}) == "Hi<none>"
    assert text(chat_template_kwargs={"enable_thinking": True}) == "Hi"


def test_the_column_of_the_data_source(tokenizer, tmp_path):
    path = write(tmp_path / "train.parquet", [prompt_row(task={"kind": "mine"})])
    dataset = PromptDataset(path, tokenizer, max_prompt_length=64, data_source_key="task.kind")
    assert dataset.table["data_source"].to_pylist() == ["mine"]


@pytest.mark.parametrize(
    "max_samples, expected", [(1, ["a:0"]), (3, ["a:0", "a:1", "b:0"]), (9, ["a:0", "a:1", "b:0", "b:1"])]
)
def test_the_first_rows_alone(tokenizer, tmp_path, max_samples, expected):
    """Later rows may be wrong: they are not read."""
    write(tmp_path / "a.parquet", [prompt_row(), prompt_row()])
    write(tmp_path / "b.parquet", [prompt_row(), prompt_row()])
    (tmp_path / "c.jsonl").write_text("{" if max_samples < 4 else "")
    files = [f"{tmp_path}/[ab].parquet", f"{tmp_path}/c.jsonl"]
    dataset = PromptDataset(files, tokenizer, max_prompt_length=64, max_samples=max_samples, uid_prefix="m:")
    assert dataset.table["uid"].to_pylist() == [f"m:{uid}" for uid in expected]


GSM8K_ROWS = [
    {"question": "Tom has 3 pens.", "answer": "Three.\n#### 3"},
    {"question": "Ann has 2 cups and buys 5.", "answer": "2 + 5 = 7.\n#### 7"},
]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_missing_columns_are_one_line_a_file(tokenizer, tmp_path, suffix):
    """The number of rows does not matter; the line has the columns that exist, and the keys to set."""
    for name in "ab":
        write_rows(tmp_path / f"{name}.{suffix}", GSM8K_ROWS * 20)
    with pytest.raises(ValueError) as error:
        PromptDataset(f"{tmp_path}/*.{suffix}", tokenizer, max_prompt_length=64)
    first, second = str(error.value).splitlines()
    assert (
        first
        == second.replace("/b.", "/a.")
        == (
            f"{tmp_path}/a.{suffix}: no column 'prompt', 'data_source', 'reward_model.ground_truth' (columns: question, answer); "
            "set data.prompt_key; data.reward_fn_key (no row needs it with reward.rule or custom_reward_function.path); "
            "data.answer_key (null: there is none)"
        )
    )
    named = {"prompt_key": "question", "answer_key": "answer"}
    with pytest.raises(
        ValueError, match=r"no column 'data_source' \(columns: question, answer\); set data.reward_fn"
    ):
        PromptDataset(f"{tmp_path}/*.{suffix}", tokenizer, max_prompt_length=64, **named)


def test_a_column_that_some_rows_lack(tokenizer, tmp_path):
    """JSON lines whose first row has the column."""
    rows = [prompt_row(), *({"question": "x"} for _ in range(9))]
    path = write_rows(tmp_path / "train.jsonl", rows)
    with pytest.raises(ValueError) as error:
        PromptDataset(path, tokenizer, max_prompt_length=64)
    assert str(error.value) == (
        f"{path} row 1: no 'prompt': the row holds ['question']; set data.prompt_key (so in 8 more rows of this file)"
    )


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_questions_and_answers(tokenizer, tmp_path, suffix):
    """A plain text is the user's message; where a row need not have a data source, the source is "unknown"."""
    path = write_rows(tmp_path / f"train.{suffix}", GSM8K_ROWS)
    table = PromptDataset(
        path,
        tokenizer,
        max_prompt_length=64,
        prompt_key="question",
        answer_key="answer",
        may_lack=["data_source"],
    ).table
    for row, prompt in zip(GSM8K_ROWS, table.to_pylist(), strict=True):
        assert prompt["prompt_ids"] == render_prompt(
            tokenizer, [{"role": "user", "content": row["question"]}]
        )
        assert prompt["ground_truth"] == row["answer"] and prompt["data_source"] == "unknown"
        assert prompt["extra_info"] == "{}"


def test_what_rows_may_lack(tokenizer, tmp_path):
    """A column may be missing only under its usual name, and null counts as missing; values that exist are read and must be right."""
    prompt = prompt_row()["prompt"]
    both = {"max_prompt_length": 64, "may_lack": ["data_source", "reward_model.ground_truth"]}
    rows = [{"prompt": prompt}, {"prompt": prompt, "data_source": None, "reward_model": None}, prompt_row()]
    path = write_rows(tmp_path / "x.jsonl", rows)
    table = PromptDataset(path, tokenizer, **both).table
    assert table["data_source"].to_pylist() == ["unknown", "unknown", "megarl/arithmetic"]
    assert table["ground_truth"].to_pylist() == ["", "", "7"]
    for key, setting in (("data_source_key", "reward_fn_key"), ("answer_key", "answer_key")):
        with pytest.raises(ValueError, match=rf"no column 'kind' .*; set data.{setting}"):
            PromptDataset(path, tokenizer, **both, **{key: "kind"})
    wrong = write_rows(tmp_path / "y.jsonl", [{"prompt": prompt, "data_source": 3}])
    with pytest.raises(ValueError, match="'data_source' must be a string, found 3"):
        PromptDataset(wrong, tokenizer, **both)
    without = PromptDataset(path, tokenizer, **both | {"answer_key": None}).table
    assert without["ground_truth"].to_pylist() == ["", "", ""]


def test_missing_file_is_named(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"gone\.parquet does not exist"):
        PromptDataset(tmp_path / "gone.parquet", tokenizer, max_prompt_length=64)


def test_file_without_rows(tokenizer, tmp_path):
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([prompt_row()]).slice(1), path)
    with pytest.raises(ValueError, match=r"no prompts in .*train\.parquet: the files have no rows"):
        PromptDataset(path, tokenizer, max_prompt_length=64)


def test_a_prompt_of_no_tokens_is_refused(tokenizer, tmp_path):
    own = copy.deepcopy(tokenizer)
    own.chat_template = "{# nothing #}"
    path = write(tmp_path / "x.parquet", [prompt_row()])
    with pytest.raises(
        ValueError, match=r"x\.parquet row 0: the chat template renders the prompt to no tokens"
    ):
        PromptDataset(path, own, max_prompt_length=64)


def test_overlong_prompts(tokenizer, tmp_path):
    rows = [prompt_row(), prompt_row("Tom has 3 pens. " * 9), prompt_row()]
    path = write(tmp_path / "train.parquet", rows)
    long = render_prompt(tokenizer, rows[1]["prompt"])
    with pytest.raises(ValueError, match=rf"row 1: the prompt has {len(long)} tokens, more than .* 20"):
        PromptDataset(path, tokenizer, max_prompt_length=20)
    filtered = PromptDataset(path, tokenizer, max_prompt_length=20, filter_overlong_prompts=True)
    assert filtered.table["uid"].to_pylist() == ["train:0", "train:2"]
    assert filtered.num_filtered == 1
    for truncation, kept in (("left", long[-20:]), ("right", long[:20]), ("middle", long[:10] + long[-10:])):
        cut = PromptDataset(path, tokenizer, max_prompt_length=20, truncation=truncation)
        assert cut.table["prompt_ids"].to_pylist()[1] == kept
        assert cut.num_filtered == 0
    with pytest.raises(ValueError, match="all 3 rows are longer than max_prompt_length 2"):
        PromptDataset(path, tokenizer, max_prompt_length=2, filter_overlong_prompts=True)
    with pytest.raises(ValueError, match="truncation must be one of error, left, right, middle, found 'top'"):
        PromptDataset(path, tokenizer, max_prompt_length=20, truncation="top")


def test_a_prompt_of_the_references_own(tokenizer, tmp_path):
    """The reference's prompt is tokenised and limited like the policy's, and goes with each request."""
    long = "Tom has 3 pens. " * 9
    told = [prompt_row()["prompt"], "It is 7. Tom has 3 pens and buys 4.", long]
    path = write_rows(tmp_path / "train.jsonl", [{**prompt_row(), "told": prompt} for prompt in told])
    reading = {"max_prompt_length": 40, "ref_prompt_key": "told", "filter_overlong_prompts": True}
    dataset = PromptDataset(path, tokenizer, **reading)
    assert dataset.table["uid"].to_pylist() == ["train:0", "train:1"] and dataset.num_filtered == 1
    first, second = dataset.table.to_pylist()
    assert first["prompt_ids"] == first[REF_PROMPT_IDS] == second["prompt_ids"]
    assert second[REF_PROMPT_IDS] == render_prompt(tokenizer, [{"role": "user", "content": told[1]}])
    requests = expand_prompts(dataset.table, 2)
    assert requests[REF_PROMPT_IDS].to_pylist() == [
        row[REF_PROMPT_IDS] for row in (first, first, second, second)
    ]
    assert not {"prompt_ids", REF_PROMPT_IDS} & set(response_columns(requests))
    with pytest.raises(ValueError, match=r"row 2: the prompt 'told' has .* more than max_prompt_length 40"):
        PromptDataset(path, tokenizer, **{**reading, "filter_overlong_prompts": False})
    with pytest.raises(ValueError, match=r"'hint'.*data\.ref_prompt_key"):
        PromptDataset(path, tokenizer, **{**reading, "ref_prompt_key": "hint"})


def test_given_responses_are_tokens_that_a_policy_would_generate(tokenizer, tmp_path):
    """A prompt has one or several responses, as texts or as a message; they get the end token, and the response length limits them."""
    prompt = prompt_row()["prompt"]
    message = {"role": "assistant", "content": "It is 7."}
    given = ["It is 7.", ["It is 7.", "7"], [message], [*prompt, message]]
    rows = [{**prompt_row(), "told": one} for one in given]
    path = write_rows(tmp_path / "train.jsonl", rows)
    reading = {"max_prompt_length": 64, "given_response_key": "told", "max_response_length": 30}
    table = PromptDataset(path, tokenizer, **reading).table
    eos = tokenizer.eos_token_id
    seven, short = ([*tokenizer.encode(text), eos] for text in ("It is 7.", "7"))
    assert table[GIVEN_RESPONSES].to_pylist() == [[seven], [seven, short], [seven], [seven]]
    size = len(seven) - 1
    with pytest.raises(
        ValueError, match=rf"the response 'told' has {size + 1} tokens.*max_response_length {size}"
    ):
        PromptDataset(path, tokenizer, **{**reading, "max_response_length": size})
    cut = PromptDataset(path, tokenizer, **{**reading, "max_response_length": size}, truncation="left").table
    assert cut[GIVEN_RESPONSES][1].as_py() == [seven[:size], short[:size]]
    shorter = {**reading, "max_response_length": size, "filter_overlong_prompts": True}
    with pytest.raises(ValueError, match="all 4 rows are longer"):
        PromptDataset(path, tokenizer, **shorter)


def test_the_teacher_of_a_row(tokenizer, tmp_path):
    """The row's data source, or another column, has one of a teacher's sources; the teacher's name goes with each request."""
    rows = [{**prompt_row(), "domain": domain} for domain in ("math", "code", "talk")]
    path = write(tmp_path / "train.parquet", rows)
    by_source = {"max_prompt_length": 64, "teachers": {"megarl/arithmetic": "numbers", "math": "other"}}
    assert PromptDataset(path, tokenizer, **by_source).table[TEACHER].to_pylist() == ["numbers"] * 3
    by_domain = {"max_prompt_length": 64, "teachers": {"math": "a", "code": "b"}, "teacher_key": "domain"}
    table = PromptDataset(path, tokenizer, **by_domain, max_samples=2).table
    assert expand_prompts(table, 2)[TEACHER].to_pylist() == ["a", "a", "b", "b"]
    with pytest.raises(
        ValueError, match=r"row 2: 'domain' is 'talk', and no teacher judges.*'math' \(a\), 'code' \(b\)"
    ):
        PromptDataset(path, tokenizer, **by_domain)
    with pytest.raises(ValueError, match=r"'field'.*data\.teacher_key"):
        PromptDataset(path, tokenizer, **{**by_domain, "teacher_key": "field"})
    assert TEACHER not in PromptDataset(path, tokenizer, max_prompt_length=64).table.column_names


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        ([], "must have a response at least"),
        ("", "'told' is an empty text"),
        ([{"role": "user", "content": "?"}], "of 'user', not of the assistant"),
        ([{"role": "assistant", "content": "7"}] * 2, "must be one message of the assistant's"),
    ],
)
def test_a_given_response_is_one_message(tokenizer, tmp_path, response, problem):
    path = write_rows(tmp_path / "train.jsonl", [{**prompt_row(), "told": response}])
    reading = {"max_prompt_length": 64, "given_response_key": "told", "max_response_length": 30}
    with pytest.raises(ValueError, match=f"row 0: .*{problem}"):
        PromptDataset(path, tokenizer, **reading)
    with pytest.raises(ValueError, match=r"'hint'.*data\.given_response_key"):
        PromptDataset(path, tokenizer, **{**reading, "given_response_key": "hint"})


@pytest.mark.parametrize(
    "truncation, kept", [("left", [6, 7, 8, 9, 10]), ("right", [1, 2, 3, 4, 5]), ("middle", [1, 2, 8, 9, 10])]
)
def test_truncate(truncation, kept):
    assert truncate([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 5, truncation) == kept
    assert truncate([1, 2], 5, truncation) == [1, 2]


def test_a_loader_yields_prompt_tables(tokenizer, tmp_path):
    path = write(tmp_path / "train.parquet", [prompt_row(truth=str(row)) for row in range(5)])
    dataset = PromptDataset(path, tokenizer, max_prompt_length=64)
    batches = list(TableLoader(dataset, 2, shuffle=True, seed=0))
    assert [batch.num_rows for batch in batches] == [2, 2]
    assert all(batch.schema == PROMPT_SCHEMA for batch in batches)
    for batch in batches:
        assert [f"train:{truth}" for truth in batch["ground_truth"].to_pylist()] == batch["uid"].to_pylist()


KEYWORDS_SHOWN = (
    "{{ style }}:{% for t in tools or [] %}{{ t.name }},{% endfor %}"
    "{% for m in messages %}{{ m.name }}={{ m.content }};{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def test_tools_and_keywords_of_rows_and_of_the_configuration(tokenizer, tmp_path):
    own = copy.deepcopy(tokenizer)
    own.chat_template = KEYWORDS_SHOWN
    rows = [
        prompt_row(
            prompt=[{"role": "user", "name": "Ann", "content": "a"}], extra_info={"tools": [{"name": "f"}]}
        ),
        prompt_row(
            prompt=json.dumps([{"role": "user", "name": "Bob", "content": "b"}]),
            chat_template_kwargs={"style": "row"},
        ),
        prompt_row(prompt=[{"role": "user", "content": "c"}], tools=[{"name": "unread"}], extra_info={}),
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keywords = {"style": "all", "tools": [{"name": "g"}]}
    table = PromptDataset(
        path,
        own,
        max_prompt_length=64,
        chat_template_kwargs=keywords,
        tools_key="extra_info.tools",
        keep_template_kwargs=True,
    ).table
    assert [own.decode(ids) for ids in table["prompt_ids"].to_pylist()] == [
        "all:f,Ann=a;>",
        "row:g,Bob=b;>",
        "all:g,=c;>",
    ]
    kept = [json.loads(text) for text in table[TEMPLATE_KWARGS].to_pylist()]
    assert kept == [keywords | {"tools": [{"name": "f"}]}, keywords | {"style": "row"}, keywords]
    assert MESSAGES not in table.column_names
    assert expand_prompts(table, 1)[TEMPLATE_KWARGS].to_pylist() == table[TEMPLATE_KWARGS].to_pylist()


def test_messages_are_kept_with_all_their_fields(tokenizer, tmp_path):
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    chat = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "f", "content": "1"},
    ]
    path = write(tmp_path / "x.parquet", [prompt_row(prompt=chat)])
    with pytest.warns(UserWarning, match="does not write the tool_calls"):
        table = PromptDataset(path, tokenizer, max_prompt_length=64, keep_messages=True).table
    assert json.loads(table[MESSAGES][0].as_py()) == chat


def test_wrong_tools_are_named_by_row(tokenizer, tmp_path):
    path = write(tmp_path / "x.parquet", [prompt_row(tools=["f"])])
    with pytest.raises(ValueError, match=r"x\.parquet row 0: 'tools' must be a list of objects"):
        PromptDataset(path, tokenizer, max_prompt_length=64)
    PromptDataset(path, tokenizer, max_prompt_length=64, tools_key=None)
    with pytest.raises(ValueError, match=r"x\.parquet: no column 'tool_list' .*set data.tools_key"):
        PromptDataset(path, tokenizer, max_prompt_length=64, tools_key="tool_list")
    rows = [prompt_row(), prompt_row(tool_list=[{"name": "f"}])]  # JSON lines have no schema
    path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    PromptDataset(path.with_suffix(".jsonl"), tokenizer, max_prompt_length=64, tools_key="tool_list")
