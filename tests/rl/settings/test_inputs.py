"""Notes on a run's prompts: texts that are in the chat template already, and shown answers."""

import json
import runpy
from pathlib import Path

import pytest

from reprise.rl.data.tasks import open_task
from reprise.rl.gin.loader import load
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import Inputs, remarks

CHAT = runpy.run_path(str(Path(__file__).parents[2] / "golden" / "chat_cases.py"))


@pytest.fixture
def noted(tmp_path):
    """Return the notes on a run whose data file has these rows."""
    from reprise.models.text import tokenizer

    CHAT["save_chatml_tokenizer"](tmp_path)
    words = tokenizer.load(tmp_path)

    def notes(rows):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        spec = f"jsonl:{tmp_path / 'rows.jsonl'}"
        config = load(TrainConfig, [], (f"Task.specs=('{spec}',)",))
        return "\n".join(remarks(config, Inputs(tmp_path, None, words, open_task(spec, 0), 0)))

    return notes


def test_texts_in_the_template_already_are_noted(noted):
    text = "<|im_start|>user\n2+3<|im_end|>\n<|im_start|>assistant\n"
    assert "in the chat template already" in noted([{"prompt": text, "answer": "5"}])
    assert "template" not in noted([{"prompt": "2+3", "answer": "5"}])


def test_texts_that_end_with_their_answers_are_noted(noted):
    rows = [{"prompt": f"{i}+1\nAnswer: {i + 1}.", "answer": f"{i + 1}"} for i in range(10)]
    assert "10 of the first 10 prompts end with their expected answers" in noted(rows)
    turn = {"role": "user", "content": "2+3 = $5$"}
    assert "end with their" in noted([{"prompt": [turn], "answer": "5"}] * 8)
    choice = [{"prompt": f"Is {i} odd, yes or no?", "answer": "no"} for i in range(10)]
    assert "end with their" not in noted(choice)
    questions = [{"prompt": f"{i}+1", "answer": f"{i + 1}"} for i in range(10)]
    assert "end with their" not in noted(questions[:7] + rows[:3])
