"""Prompts of data rows: a text, or the turns of a conversation in the roles of chat templates.

A conversation is a list of `{role, content}`, or of `{from, value}` as in ShareGPT, or the JSON
text of such a list. Its last turn is by the user, so that the policy sees no answer of the data.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

from reprise.rl.data.rows import parse_json
from reprise.rl.data.specs import MAX_PROMPT_CHARACTERS, check_text

Message = Mapping[str, str]  # {"role": ..., "content": ...}
Prompt = str | tuple[Message, ...]

# The roles in templates of the supported models, by their names in data files.
# OpenAI's newer name of a system message is developer.
ROLES: Mapping[str, str] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "ai"), "assistant"),
}
_TOOL_ROLES = ("tool", "function", "observation", "ipython", "environment")
_TOOL_PREFIXES = ("tool_", "function_")
_MEDIA = ("images", "image", "audio", "audios", "video", "videos", "tool_calls", "function_call")
_PROMPT = "text or a list of {role, content} messages"
_ROLE_KEY = re.compile(r"""['"](?:role|from)['"]\s*:""")
_CONTENT_KEY = re.compile(r"""['"](?:content|value)['"]\s*:""")


def read_prompt(value: Any, where: str) -> Prompt:
    """Return a text, or messages in `ROLES`. Raises ValueError, which names the row."""
    if isinstance(value, str) and value.strip():
        check_text(value, f"{where}: the prompt", MAX_PROMPT_CHARACTERS)
        text = _messages_text(value)
        if text is None:
            return value
        value = _parsed(text, where)
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return tuple(_message(item, where) for item in value)
    raise ValueError(f"{where}: the prompt must be {_PROMPT}, got {json.dumps(value):.80}")


def ends_with_answer(value: Any, where: str) -> bool:
    """Return whether a column value is a conversation with a last turn by the assistant."""
    if isinstance(value, str) and (text := _messages_text(value)) is not None:
        value = _parsed(text, where)
    last = value[-1] if isinstance(value, list | tuple) and value else None
    return isinstance(last, dict) and _role(last) == "assistant"


def check_last_turn(prompt: Prompt, where: str) -> None:
    """Raise ValueError unless the last turn of a conversation is by the user."""
    if isinstance(prompt, str) or (prompt and prompt[-1]["role"] == "user"):
        return
    last = f"a turn of the {prompt[-1]['role']}" if prompt else "nothing before the answer"
    raise ValueError(f"{where}: expected a conversation that ends with the user's turn, got {last}")


def prompt_key(prompt: Prompt) -> str:
    """Return a key of a prompt that ignores case, white space and the system message."""
    turns = [{"content": prompt}] if isinstance(prompt, str) else prompt
    texts = [turn["content"] for turn in turns if turn.get("role") != "system"]
    return " ".join(" ".join(texts).split()).casefold()


def _messages_text(text: str) -> str | None:
    """Return the text if it is a bracketed value with roles and contents, else None.

    A text that is quoted as a JSON string, as some exports are, is returned without its quotes.
    """
    bare = text.strip()
    if len(bare) > 1 and bare[0] == bare[-1] == '"':
        with contextlib.suppress(ValueError):
            bare = str(json.loads(bare)).strip()
    is_bracketed = bare[:1] in ("[", "{") and bare[-1:] in ("]", "}")
    has_keys = is_bracketed and _ROLE_KEY.search(bare) and _CONTENT_KEY.search(bare)
    return bare if has_keys else None


def _parsed(text: str, where: str) -> Any:
    """Return the list of messages that a JSON text holds. Raises ValueError for other texts."""
    expected = (
        "a conversation as a list of {role, content} messages, or as the JSON text of one "
        "(a question that looks like one needs a word before it)"
    )
    value = parse_json(text.encode(), f"{where}: the prompt", expected)
    if not isinstance(value, list):
        raise ValueError(f"{where}: the prompt: expected {expected}, got {text:.80}")
    return value


def _role(item: Mapping[str, Any]) -> str | None:
    """Return the role of a message as templates name it; None for an unknown role."""
    name = item.get("role") or item.get("from")
    return ROLES.get(name.strip().lower()) if isinstance(name, str) else None


def _message(item: Mapping[str, Any], where: str) -> Message:
    for name in _MEDIA:
        if item.get(name):
            raise ValueError(f"{where}: a message holds {name}; only text is supported")
    named = item.get("role") or item.get("from")
    content = item.get("content")
    content = item.get("value") if content is None else content  # Arrow fills with None
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    if not isinstance(named, str) or not isinstance(content, str):
        raise ValueError(f"{where}: the prompt must be {_PROMPT}, got {json.dumps(item):.80}")
    role = _role(item)
    if role is None:
        raise ValueError(f"{where}: a message has the role {_unknown(named)}")
    if role != "system" and not content.strip():
        raise ValueError(
            f"{where}: a message of the role {named!r:.80} is empty: leave the row out"
        )
    check_text(content, f"{where}: the prompt", MAX_PROMPT_CHARACTERS)
    return {"role": role, "content": content}


def _unknown(name: str) -> str:
    bare = name.strip().lower()
    if bare in _TOOL_ROLES or bare.startswith(_TOOL_PREFIXES):
        return f"{name!r:.80}; tools are not supported"
    return f"{name!r:.80}; expected one of {', '.join(ROLES)}"


def _part(part: Any, where: str) -> str:
    """Return the text of a part of the content of a message."""
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ValueError(f"{where}: a message has a part of type {kind!r:.80}; only text is supported")
