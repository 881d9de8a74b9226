"""Chat templates, rendered in a child process.

A template is an untrusted Jinja program. The sandbox of transformers does not bound computation
(`"a" * 10**10`), so a child process renders templates (`models.child`), limited to `MEMORY_BYTES`
above its initial size, `DEADLINE_S` for each prompt and `MAX_CHARACTERS` for the text. One child
serves all tokenizers of a process. `strftime_now` prints a day that the caller fixes, so that a run
has the same prompts every day.
"""

from __future__ import annotations

import datetime
import json
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from reprise.models.child import Child, ChildEnded, serve

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
    """Raise ValueError for names that users may not give to template variables."""
    for name in variables:
        is_set = name in RESERVED or name in specials or name.endswith("_token")
        if is_set or not name.isidentifier():
            raise ValueError(
                "expected names of a chat template's own variables, such as enable_thinking, got "
                f"{name[:80]!r}{', which is set already: leave it out' if is_set else ''}"
            )


class Renderer:
    """Renders templates in one child process, which starts on first use; thread-safe."""

    def __init__(self, deadline_s: int = DEADLINE_S) -> None:
        self._child = Child("reprise.models.text.chat_template", MEMORY_BYTES, deadline_s)

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        day: datetime.date | None = None,
        **names: Any,
    ) -> str:
        """Render a conversation with further template variables; ValueError if that fails.

        `day` is the date that the template may print; None means today.
        """
        request = {"template": template, "messages": list(messages), "names": names}
        request["day"] = (day or datetime.datetime.now(datetime.UTC).date()).isoformat()
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
        """Stop the child process if it is running."""
        self._child.close()


SHARED = Renderer()


# --- in the child ---------------------------------------------------------------------


def _prepare() -> Callable[[bytes], Iterable[bytes]]:
    from transformers.utils import chat_template_utils

    return lambda request: [json.dumps(_render(chat_template_utils, request)).encode()]


def _render(library: Any, line: bytes) -> dict[str, str]:
    request = json.loads(line)
    day = datetime.datetime.fromisoformat(request["day"])
    library.datetime = types.SimpleNamespace(now=lambda: day)  # for strftime_now
    try:
        chat = [request["messages"]]
        names = request["names"]
        rendered = library.render_jinja_template(
            conversations=chat, chat_template=request["template"], **names
        )
    except Exception as error:  # of many types, all caused by the template
        return {"error": ascii(f"{type(error).__name__}: {str(error)[:300]}")[1:-1]}
    text = rendered[0][0]
    if len(text) > MAX_CHARACTERS:
        return {"error": f"expected at most {MAX_CHARACTERS} characters, got {len(text)}"}
    return {"text": text}


if __name__ == "__main__":
    serve(_prepare)
