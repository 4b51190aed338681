"""A taskset of verifiers 0.4: questions of a file of JSON lines ("question", "work", "answer").

A reply is worth 1 for the work at its beginning, and 1 for the answer as its last word.
"""

import json
from pathlib import Path

import verifiers.v1 as vf


class QuestionData(vf.TaskData):
    work: str = ""
    answer: str = ""


class QuestionTask(vf.Task[QuestionData]):
    @vf.reward
    async def worked(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.startswith(f"{self.data.work} ="))

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.split()[-1:] == [self.data.answer])


class QuestionsConfig(vf.TasksetConfig):
    file: str = ""


class QuestionsTaskset(vf.Taskset[QuestionTask, QuestionsConfig]):
    def load(self) -> list[QuestionTask]:
        lines = Path(self.config.file).read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        data = [QuestionData(prompt=row["question"], work=row["work"], answer=row["answer"]) for row in rows]
        return [QuestionTask(one, self.config.task) for one in data]


__all__ = ["QuestionsTaskset"]
