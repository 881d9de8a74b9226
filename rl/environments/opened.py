"""The environments of a run with the renderer of their messages, checked before any device work."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from reprise.models.text.tokenizer import Tokenizer
from reprise.rl.data.tasks import Example, TaskConfig
from reprise.rl.environments.config import EnvironmentConfig
from reprise.rl.environments.pool import Environments, row_of
from reprise.rl.environments.rendering import TurnRenderer
from reprise.rl.environments.server import EnvironmentServerError, EpisodeFailed


@dataclasses.dataclass(frozen=True, eq=False)
class OpenEnvironments:
    """The environments of a run; at most `num_live` are open at a time."""

    config: EnvironmentConfig
    calls: Environments
    turns: TurnRenderer
    num_live: int


@contextlib.contextmanager
def opened(
    config: EnvironmentConfig, task: TaskConfig, tokenizer: Tokenizer, example: Example, rows: int
) -> Iterator[OpenEnvironments]:
    """Start the environment server; check that the chat template can append messages.

    `example` is one of the task, and `rows` the rows of the engine. Raises EnvironmentServerError.
    """
    num_live = config.live or rows
    with Environments(config, num_live) as calls:
        turns = TurnRenderer(tokenizer, task, calls.tools)
        try:
            turns.check(example, config.history)
        except ValueError as error:
            raise EnvironmentServerError(f"Environment: {error}") from error
        yield OpenEnvironments(config, calls, turns, num_live)


def check_environment(
    config: EnvironmentConfig, task: TaskConfig, tokenizer: Tokenizer, example: Example
) -> None:
    """Raise ValueError if the environment of an example cannot be opened, reset and rendered."""
    try:
        with opened(config, task, tokenizer, example, 1) as environments:
            answer = environments.calls.reset(0, row_of(example), [0, 0]).result()
            environments.turns.prompt(example, answer.messages, answer.text)
    except EnvironmentServerError as error:
        raise ValueError(str(error)) from error
    except (EpisodeFailed, TypeError, ValueError) as error:
        raise ValueError(
            f"Environment.factory: expected an environment that can be reset with the row "
            f"{example.example_id}, got {error}: fix {config.factory}, or the task"
        ) from error
