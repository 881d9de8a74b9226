"""The data order: every example once an epoch, resumable from a count; prompts to ids."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.rl.data.prompts import DataOrder, encode_prompt, prompts_for_step
from reprise.rl.data.tasks import Example, TaskConfig


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**63), st.lists(st.integers(0, 30), max_size=8))
def test_any_split_of_the_draws_gives_the_same_sequence(num_examples, seed, counts):
    order = DataOrder(num_examples, seed)
    cursor, pieces = 0, []
    for count in counts:
        piece = order.indices(cursor, count)
        assert len(piece) == count
        pieces += piece.tolist()
        cursor += count
    assert pieces == order.indices(0, sum(counts)).tolist()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 50), st.integers(0, 2**32), st.integers(0, 5))
def test_each_epoch_visits_each_example_once(num_examples, seed, epoch):
    order = DataOrder(num_examples, seed)
    indices = order.indices(epoch * num_examples, num_examples)
    assert sorted(indices.tolist()) == list(range(num_examples))


def test_the_order_is_the_same_on_every_machine_and_numpy():
    """Written down once: a change here breaks the resuming of every saved run."""
    assert DataOrder(10, 7).indices(8, 6).tolist() == [9, 7, 7, 9, 6, 1]


def test_every_position_sees_every_example_equally_often():
    """χ² over 400 epochs of 6 examples, 25 degrees of freedom; false alarm 1e-6 (fixed seed)."""
    order = DataOrder(6, 123)
    table = np.zeros((6, 6))
    for epoch in range(400):
        table[np.arange(6), order.indices(6 * epoch, 6)] += 1
    expected = 400 / 6
    assert ((table - expected) ** 2 / expected).sum() < 77


def test_bad_orders_are_refused():
    with pytest.raises(ValueError, match="empty"):
        DataOrder(0, 0)
    with pytest.raises(ValueError, match="seed"):
        DataOrder(1, -1)


def example(prompt):
    return Example("test#0", prompt, None, {}, "jsonl:test")


def test_prompts_for_step_are_the_ordered_examples():
    task = [example(str(i)) for i in range(5)]
    order = DataOrder(5, 0)
    step = prompts_for_step(task, order, cursor=3, count=4)
    assert [int(e.prompt) for e in step] == order.indices(3, 4).tolist()


@dataclasses.dataclass
class Characters:
    """One id per character; ^ begins a text, chats are shown as <role>text, then <assistant>."""

    has_chat_template: bool
    chat_marks = ("<user>", "<assistant>")

    def is_rendered(self, text):
        return text.startswith("<user>") and text.endswith("<assistant>")

    def encode(self, text):
        return [ord(character) for character in text]

    def encode_prompt(self, text):
        return self.encode(f"^{text}") if text else []

    def apply_chat_template(self, messages, add_generation_prompt=True, tools=(), **variables):
        text = "".join(f"{k}={v} " for k, v in variables.items())
        text += "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return self.encode(text + ("<assistant>" if add_generation_prompt else ""))


OWN_SYSTEM = {"role": "system", "content": "own"}
CHAT = (
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
)


@pytest.mark.parametrize(
    ("has_template", "prompt", "system", "expected"),
    [
        (False, "q", None, "^q!"),
        (False, "q", "s", "^s\n\nq!"),
        (False, "q!", None, "^q!"),  # a suffix that is there already is not doubled
        (True, "q", None, "<user>q!<assistant>"),
        (True, "q", "s", "<system>s<user>q!<assistant>"),
        (True, CHAT, "s", "<system>s<user>a<assistant>b<user>c!<assistant>"),
        (True, (OWN_SYSTEM, CHAT[0]), "s", "<system>own<user>a!<assistant>"),
        (False, CHAT[:1], None, "^a!"),
    ],
)
def test_encode_prompt(has_template, prompt, system, expected):
    config = TaskConfig(system_prompt=system, prompt_suffix="!")
    ids = encode_prompt(Characters(has_template), example(prompt), config)
    assert ids == tuple(map(ord, expected))


@pytest.mark.parametrize(
    ("chat", "text", "messages"),
    [
        ("all", "x=False <user>q<assistant>", "x=False <user>a<assistant>"),
        ("messages", "^q", "x=False <user>a<assistant>"),
        ("none", "^q", "^a"),
    ],
)
def test_task_chat_says_which_prompts_are_put_into_the_template(chat, text, messages):
    config = TaskConfig(chat=chat, chat_template_kwargs=(("x", False),))
    for prompt, expected in (("q", text), (CHAT[:1], messages)):
        ids = encode_prompt(Characters(True), example(prompt), config)
        assert ids == tuple(map(ord, expected))


def test_encode_prompt_refuses_what_it_cannot_mark():
    with pytest.raises(ValueError, match="chat template"):
        encode_prompt(Characters(False), example(CHAT), TaskConfig())
    with pytest.raises(ValueError, match="assistant turns"):
        encode_prompt(Characters(True), example(CHAT), TaskConfig(chat="none"))
    with pytest.raises(ValueError, match="no tokens"):
        encode_prompt(Characters(False), example(""), TaskConfig())


def test_a_text_in_the_template_already_is_encoded_as_it_is():
    words, text = Characters(True), "<user>q<assistant>"
    assert encode_prompt(words, example(text), TaskConfig()) == tuple(map(ord, f"^{text}"))
    for config in (
        TaskConfig(system_prompt="s"),
        TaskConfig(prompt_suffix="!"),
        TaskConfig(chat_template_kwargs=(("x", 1),)),
    ):
        with pytest.raises(ValueError, match="in the chat template already, and Task.* cannot be"):
            encode_prompt(words, example(text), config)


@pytest.mark.parametrize(
    ("prompt", "system"),
    [
        ("<user>q<assistant>#### 5", None),  # with its answer
        ("q<assistant>#### 5", None),
        (({"role": "user", "content": "a<user>b"},), None),
        (CHAT[:2] + ({"role": "user", "content": "<assistant>"},), None),
        ("q", "answer as <assistant>"),
    ],
)
def test_marks_of_the_template_in_a_message_are_refused(prompt, system):
    config = TaskConfig(system_prompt=system)
    with pytest.raises(ValueError, match="which marks turns in the chat template"):
        encode_prompt(Characters(True), example(prompt), config)
    if isinstance(prompt, str):  # without a template they are text
        assert encode_prompt(Characters(False), example(prompt), config)
        assert encode_prompt(Characters(True), example(prompt), TaskConfig(chat="messages"))
