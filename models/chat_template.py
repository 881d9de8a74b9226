"""Chat templates, rendered in a child process.

A template is an untrusted Jinja program. transformers' sandbox does not bound its
computation (`"a" * 10**10`), so a child process renders it (`models.child`), with `MEMORY_BYTES`
more than it started with, `DEADLINE_S` for each prompt and `MAX_CHARACTERS` for the text. One child
serves all tokenizers of a process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from models.child import Child, ChildEnded, serve

MEMORY_BYTES = 2**30
DEADLINE_S = 10
MAX_CHARACTERS = 2**22  # of a prompt; as long as today's longest contexts
# Variables that the renderer and transformers set themselves.
RESERVED = frozenset(
    "messages conversation conversations template chat_template tools documents tokenize names "
    "add_generation_prompt continue_final_message return_dict return_assistant_tokens_mask self "
    "render raise_exception strftime_now".split()
)


def check_variables(variables: Iterable[str], specials: Iterable[str] = ()) -> None:
    """Raise ValueError for names that a user may not give a template's variables."""
    for name in variables:
        is_set = name in RESERVED or name in specials or name.endswith("_token")
        if is_set or not name.isidentifier():
            raise ValueError(
                "expected names of a chat template's own variables, such as enable_thinking, got "
                f"{name[:80]!r}{', which is set already: leave it out' if is_set else ''}"
            )


class Renderer:
    """Renders in one child process, started when it is needed; thread-safe."""

    def __init__(self, deadline_s: int = DEADLINE_S) -> None:
        self._child = Child("models.chat_template", MEMORY_BYTES, deadline_s)

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], **names: Any) -> str:
        """Render a conversation with the template's other variables; ValueError if that fails."""
        request = {"template": template, "messages": list(messages), "names": names}
        try:
            (line,) = self._child.call(json.dumps(request, default=str).encode())
        except ChildEnded as error:
            raise ValueError(
                f"expected the chat template to render a prompt within {self._child.deadline_s} s "
                f"and {MEMORY_BYTES // 2**20} MiB, but its process ended: give the tokenizer "
                "another template"
            ) from error
        answer = json.loads(line)
        if "text" not in answer:
            raise ValueError(f"the chat template cannot be rendered: {answer['error']}")
        return str(answer["text"])

    def close(self) -> None:
        """End the child process, if there is one."""
        self._child.close()


SHARED = Renderer()


# --- in the child ---------------------------------------------------------------------


def _prepare() -> Callable[[bytes], Iterable[bytes]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    return lambda request: [json.dumps(_render(render_jinja_template, request)).encode()]


def _render(render: Any, line: bytes) -> dict[str, str]:
    request = json.loads(line)
    try:
        chat, names = [request["messages"]], request["names"]
        texts, _ = render(conversations=chat, chat_template=request["template"], **names)
    except Exception as error:  # of many types, all caused by the template
        return {"error": ascii(f"{type(error).__name__}: {str(error)[:300]}")[1:-1]}
    if len(texts[0]) > MAX_CHARACTERS:
        return {"error": f"expected at most {MAX_CHARACTERS} characters, got {len(texts[0])}"}
    return {"text": texts[0]}


if __name__ == "__main__":
    serve(_prepare)
