"""A taskset of verifiers 0.4: questions of a file of JSON lines ("question", "answer"), whose answer is the last word of the reply."""

import json
from pathlib import Path

import verifiers.v1 as vf


class QuestionData(vf.TaskData):
    answer: str = ""


class QuestionTask(vf.Task[QuestionData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.split()[-1:] == [self.data.answer])


class QuestionsConfig(vf.TasksetConfig):
    file: str = ""


class QuestionsTaskset(vf.Taskset[QuestionTask, QuestionsConfig]):
    def load(self) -> list[QuestionTask]:
        lines = Path(self.config.file).read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        return [
            QuestionTask(QuestionData(prompt=row["question"], answer=row["answer"]), self.config.task)
            for row in rows
        ]


__all__ = ["QuestionsTaskset"]
