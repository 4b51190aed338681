"""Answers that are a text, a letter, or the number at the end of a word problem."""

import json
import re
import string
from typing import Any

from megarl.rewards.rules.math_rules import last_boxed

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
# The colon may stand in Markdown (`**Answer**:`), the answer on a later line.
_ANNOUNCED = re.compile(r"\banswer(?:[ \t]+is)?[ \t*_`]*[:\uff1a][\s*_`]*([^\n]+)", re.IGNORECASE)
_LETTER = r"[\s*_\"'`]*[\(\[]?([A-Z])[\)\].:,*_\"'`]*(?![A-Za-z0-9])"
# In "the answer I chose is (C)", I is nobody's choice.
_PRONOUN = (
    r"[ \t]+I(?:['\u2019](?:d|ll|m|ve)|[ \t]+(?:am|arrived?|believe|came|chose|choose|computed|derived|find|found|gave|get|give|got|"
    r"had|have|obtain(?:ed)?|pick(?:ed)?|reached|select(?:ed)?|think|want|will|would))\b"
)
_CHOSEN = re.compile(
    rf"\b(?:[Aa]nswer|ANSWER|[Cc]hoice|[Oo]ption)\b(?!{_PRONOUN})(?:[ \t]+(?:is|would be|must be))?[ \t*_`]*[:\uff1a=]?"
    + _LETTER
)
_ALONE = re.compile(r"\A" + _LETTER + r"\s*\Z")
_IN_PARENTHESES = re.compile(r"\(([A-Z])\)")
_MOST_TAGS = 10
_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}")

# GSM8K: an answer stands at the end; looking only there also keeps a runaway response from being searched whole.
_TAIL_CHARACTERS = 300
_AFTER_MARK = re.compile(r"#### (\-?[0-9\.\,]+)")
_NUMBER = re.compile(r"\-?[0-9][0-9\.\,]*|\-?\.[0-9]+")


def gsm8k(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """1.0 if the number behind the last `#### ` in the response's last 300 characters is the ground truth, else 0.0.

    Numbers are compared as texts without commas: `#### 72.` and `#### 72.0` are not `72`, and `#### $72` is no answer (verl's
    rule, so that scores compare). A ground truth that is a teacher's whole answer stands for the text behind its last "####".
    """
    answer = _last(_AFTER_MARK, solution_str[-_TAIL_CHARACTERS:])
    return _compared_numbers(None if answer is None else _plain(answer), ground_truth)


def gsm8k_flexible(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """As `gsm8k`, with the last number whatever stands before it, without a closing full stop."""
    answer = _last(_NUMBER, solution_str[-_TAIL_CHARACTERS:])
    return _compared_numbers(None if answer is None else _plain(answer).rstrip("."), ground_truth)


def _compared_numbers(answer: str | None, ground_truth: str) -> dict[str, Any]:
    truth = ground_truth.rpartition("####")[2].strip() or ground_truth.strip()
    return {"score": float(answer == _plain(truth)), "pred": answer}


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "")


def exact_match(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """1.0 if the answer is the ground truth, else 0.0; letter case, spacing and a closing full stop aside.

    `ground_truth` is a text, or a JSON list of texts that are all right.
    """
    answer = extract_text(solution_str)
    return {
        "score": float(_folded(answer) in {_folded(truth) for truth in _truths(ground_truth)}),
        "pred": answer,
    }


def extract_text(response: str) -> str:
    r"""The last `<answer>...</answer>`, else the last `\boxed{...}`, else the last line's `Answer: ...`, else all of it."""
    tagged = _TAGGED.findall(response)
    if tagged:
        return tagged[-1].strip()
    boxed = last_boxed(response)
    if boxed is not None:
        return _TEXT_COMMAND.sub(r"\1", boxed).strip()
    announced = _ANNOUNCED.findall(response)
    return (announced[-1].strip().rstrip("*_`") if announced else response).strip()


def search_r1(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """1.0 if the last `<answer>...</answer>` is one of the accepted answers, else 0.0: Search-R1's rule (arXiv:2503.09516),
    as verl has it. Letter case, punctuation, the articles a, an, the and spacing aside (SQuAD's exact match,
    arXiv:1606.05250); 0.25 where more than 10 tags of a kind stand in the response.

    `ground_truth` is a text, a JSON list of texts, or a JSON object with one of these under "target".
    """
    tagged = _TAGGED.findall(solution_str)
    if not tagged:
        return {"score": 0.0, "pred": None}
    answer = tagged[-1].strip()
    right = _squad_folded(answer) in {_squad_folded(truth) for truth in _targets(ground_truth)}
    num_tags = max(solution_str.lower().count(tag) for tag in ("<answer>", "</answer>"))
    return {"score": float(right) * (0.25 if num_tags > _MOST_TAGS else 1.0), "pred": answer}


def multiple_choice(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """1.0 if the chosen letter is the ground truth's (`B`, `(B)`), else 0.0.

    ValueError: the ground truth is no letter.
    """
    truth = _ALONE.match(ground_truth.strip())
    if truth is None:
        raise ValueError(
            f"the ground truth of the rule multiple_choice must be a letter, not {ground_truth!r}"
        )
    choice = extract_choice(solution_str)
    return {"score": float(choice == truth.group(1)), "pred": choice}


def extract_choice(response: str) -> str | None:
    r"""The letter in the last `<answer>` or `\boxed{}`, else after the last "answer is", "option" and the like, else
    a response that is a letter, else the last letter in parentheses; None: none of these.
    """
    for marked in (_TAGGED.findall(response)[-1:], [last_boxed(response)]):
        if marked and marked[0] is not None:
            alone = _ALONE.match(_TEXT_COMMAND.sub(r"\1", marked[0]))
            return alone.group(1) if alone else _last(_IN_PARENTHESES, marked[0])
    alone = _ALONE.match(response)
    return _last(_CHOSEN, response) or (alone.group(1) if alone else _last(_IN_PARENTHESES, response))


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.findall(text)
    return found[-1] if found else None


def _folded(text: str) -> str:
    return " ".join(text.split()).rstrip(".").casefold()


def _squad_folded(text: str) -> str:
    bare = "".join(character for character in text.casefold() if character not in string.punctuation)
    words = " ".join(re.sub(r"\b(?:a|an|the)\b", " ", bare).split())
    return words or _folded(text)  # "The" is an answer, and another one than "A"


def _targets(ground_truth: str) -> list[str]:
    if ground_truth.lstrip().startswith("{"):
        try:
            target = json.loads(ground_truth)["target"]
        except (ValueError, KeyError):
            return [ground_truth]
        return [str(value) for value in target] if isinstance(target, list) else [str(target)]
    return _truths(ground_truth)


def _truths(ground_truth: str) -> list[str]:
    if ground_truth.lstrip().startswith("["):
        try:
            values = json.loads(ground_truth)
        except ValueError:
            return [ground_truth]
        return [str(value) for value in values]
    return [ground_truth]
