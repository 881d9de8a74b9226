"""The README.md of an exported policy: which run made it, from what, and how it is used.

Names, paths and texts of files are data of others. In prose they are escaped for Markdown and
HTML, elsewhere they stand in code spans and fences that they cannot close. Folders of this machine
are left out of paths.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from models import gguf_header, hf_files
from models.config import ModelConfig
from models.params import num_params
from rl.config.loader import dump
from rl.loop.experiment import TrainConfig
from rl.loop.legs import Leg
from rl.metrics.writer import Row, step_rows
from spec.config import SamplingConfig

CARD = "README.md"
MAX_CHARACTERS = 300  # of one text of a file
MAX_CARD_BYTES = 2**16  # of a base policy's card that is looked at
MOST_ITEMS = 20  # of one list
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
# From a quote or a colon to the last slash, as absolute paths stand in specs and settings.
_FOLDERS = re.compile(r"""(?<=['":=])/(?:(?:\\.|[^/?:'"\\\n])+/)+""")
# What begins a span, a cell or a link; a point makes one behind www.
_PUNCTUATION = re.compile(r"([\\`*_\[\]|~:@]|(?<=www)\.)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Base:
    """The policy that a run began with: its name, and what its own files say of it."""

    name: str
    hub_id: str | None = None
    licence: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class History:
    """A run up to the exported step: its folder's name, its rows of metrics and its legs."""

    run: str
    step: int
    rows: Sequence[Row]
    legs: Sequence[Leg]


@dataclasses.dataclass(frozen=True)
class Form:
    """The form in which a policy is exported."""

    model: ModelConfig
    dtype: str
    has_chat_template: bool
    date: str


def base_of(policy: Path) -> Base:
    """Read the name and what is known of the origin of a policy's folder or file."""
    path = policy.absolute()
    if hf_files.is_gguf(path):
        licence = gguf_header.read(path).metadata.get("general.license")
        return Base(path.stem, licence=licence if isinstance(licence, str) else None)
    config = hf_files.read_json(path / hf_files.CONFIG)
    front = _front_matter(path / CARD)
    cached = re.search(r"models--([^/]+)--([^/]+)/", f"{path}/")
    ids = [config.get("_name_or_path"), front.get("base_model")]
    ids += ["/".join(cached.groups())] if cached else []
    known = [i for i in ids if isinstance(i, str) and _HUB_ID.fullmatch(i)]
    name = cached[2] if cached else path.name
    return Base(name, known[0] if known else None, front.get("license"))


def of_run(config: TrainConfig, base: Base, history: History, form: Form) -> str:
    """Return the card of a checkpoint of a run."""
    name = config.algorithm.name
    title = f"{text(history.run)}, step {history.step:,}"
    lead = (
        f"{code(base.name)} after {history.step:,} of {config.run.steps:,} steps of "
        f"{name.upper()} in Reprise, a program for reinforcement learning with verifiable rewards."
    )
    parts = [
        _front(base, name),
        f"# {title}\n\n{lead}",
        "## What was run\n\n" + "\n".join(_what(config, base, history, form)),
        "## Results\n\n" + _results(config, history),
        _use(form),
        _licence(base),
        _settings(config),
    ]
    return "\n\n".join(parts) + "\n"


def of_policy(base: Base, form: Form) -> str:
    """Return the card of a policy that was written anew without training."""
    lead = f"{code(base.name)}, written anew by Reprise on {form.date}. It was not trained further."
    what = "\n".join([*_base_lines(base, form), f"- **Weights**: {form.dtype}"])
    parts = [_front(base), f"# {text(base.name)}\n\n{lead}", what, _use(form)]
    parts.append(_licence(base, is_given=_is_plain(base.licence)))
    return "\n\n".join(parts) + "\n"


# --- texts of others --------------------------------------------------------------------


def text(value: object) -> str:
    """Return a text of others as prose: one line that Markdown and HTML take as it stands."""
    return _PUNCTUATION.sub(r"\\\1", html.escape(_one_line(value), quote=False))


def code(value: object) -> str:
    """Return a text of others as a code span, which it cannot close."""
    line = _one_line(value) or " "
    ticks = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    pad = " " if line[0] == "`" or line[-1] == "`" else ""
    return f"{ticks}{pad}{line}{pad}{ticks}"


def without_folders(settings: str) -> str:
    """Return settings whose absolute paths have only their last part."""
    return _FOLDERS.sub("", settings)


def _one_line(value: object) -> str:
    line = "".join(c if c.isprintable() else _escape(c) for c in str(value))
    return line if len(line) <= MAX_CHARACTERS else f"{line[:MAX_CHARACTERS]}…"


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode()


def _spec(value: str) -> str:
    """Return a spec or a path as code, without the folders of this machine."""
    return code(without_folders(f"'{value}'")[1:-1])


def _listed(values: Iterable[str]) -> str:
    items = list(values)
    more = f" and {len(items) - MOST_ITEMS} more" if len(items) > MOST_ITEMS else ""
    return ", ".join(items[:MOST_ITEMS]) + more


def _front_matter(card: Path) -> dict[str, str]:
    """Return the plain `name: value` lines at the head of a card; none where there is no card."""
    if not card.is_file():
        return {}
    with card.open("rb") as file:
        lines = file.read(MAX_CARD_BYTES).decode("utf-8", "replace").splitlines()
    if not lines or lines[0].strip() != "---":
        return {}
    found: dict[str, str] = {}
    for line in lines[1:]:
        if line.strip() == "---":
            return found
        if match := re.fullmatch(r"(\w+): *[\"']?([^\"'#]+?)[\"']? *", line):
            found.setdefault(match[1], match[2])
    return {}


# --- sections ---------------------------------------------------------------------------


def _front(base: Base, algorithm: str | None = None) -> str:
    """Return the head that the hub reads. Its values are of known sets, or have known letters."""
    lines = ["library_name: transformers", "pipeline_tag: text-generation"]
    if base.hub_id is not None:
        lines.append(f"base_model: {json.dumps(base.hub_id)}")
    if algorithm is None and _is_plain(base.licence):  # the same weights in another form
        lines.append(f"license: {base.licence}")
    lines += ["tags:", "- reprise"]
    if algorithm is not None:
        lines += ["- reinforcement-learning", f"- {algorithm}"]
    return "\n".join(["---", *lines, "---"])


def _is_plain(licence: str | None) -> bool:
    return re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,40}", licence or "") is not None


def _base_lines(base: Base, form: Form) -> list[str]:
    known = f" ({text(base.hub_id)})" if base.hub_id else ""
    size = f"{num_params(form.model):,} parameters"
    return [f"- **Base policy**: {code(base.name)}{known}; {form.model.architecture}, {size}"]


def _what(config: TrainConfig, base: Base, history: History, form: Form) -> list[str]:
    algorithm, rollout, sampling = config.algorithm, config.rollout, config.sampling
    resolved = vars(algorithm.resolved)
    settings = [
        f"{name} {value}"
        for name, value in resolved.items()
        if name != "source" and value is not None
    ]
    weights = config.reward.full_weights
    rewards = [
        _spec(name) + ("" if weight == 1 else f" × {weight:g}")
        for name, weight in zip(config.reward.functions, weights, strict=True)
    ]
    last = history.rows[-1] if history.rows else {}
    tokens = f"; {n:,} response tokens" if (n := _number(last, "num_tokens")) is not None else ""
    speculation = config.speculation
    drafts = f"drafts from {', '.join(speculation.sources)}" if speculation.enabled else "no drafts"
    return [
        *_base_lines(base, form),
        f"- **Algorithm**: {algorithm.name} ({resolved['source']}): {', '.join(settings)}; KL to "
        f"the base policy × {algorithm.kl_coefficient:g}",
        f"- **Optimizer**: AdamW, learning rate {config.optimizer.learning_rate:g} "
        f"({config.optimizer.schedule}), {config.trainer.inner_updates} × "
        f"{config.trainer.minibatches} updates a step",
        f"- **Tasks**: {_listed(map(_spec, config.task.specs))}",
        f"- **Rewards**: {_listed(rewards)}",
        f"- **Steps**: {history.step:,} of {config.run.steps:,}, each {rollout.prompts_per_step} "
        f"prompts × {rollout.group_size} responses{tokens}; seed {config.run.seed}",
        f"- **Sampling**: temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, top-k "
        f"{sampling.top_k or 'off'}, at most {sampling.max_new_tokens:,} new tokens",
        *_ends(sampling),
        *_added(config),
        f"- **Rollouts**: {drafts}; reuse {code(config.reuse.mode)}",
        *_where(history),
        f"- **Exported**: {form.date}, weights in {form.dtype}",
    ]


def _ends(sampling: SamplingConfig) -> list[str]:
    """Return where responses end besides end tokens, and what differs from task to task."""
    lines = []
    if sampling.stop:
        lines.append(f"- **Responses end at**: {_listed(map(code, map(repr, sampling.stop)))}")
    if sampling.by_task:
        lines.append(f"- **Sampling of tasks**: {_listed(map(code, sampling.by_task))}")
    return lines


def _added(config: TrainConfig) -> list[str]:
    """Return what is added to every prompt: whoever uses the policy should add it too."""
    task = config.task
    variables = [code(f"{name}={value!r}") for name, value in task.chat_template_kwargs]
    added = {
        "System prompt": code(task.system_prompt) if task.system_prompt else "",
        "End of prompts": code(repr(task.prompt_suffix)) if task.prompt_suffix else "",
        "Variables of the chat template": _listed(variables),
    }
    return [f"- **{title}**: {value}" for title, value in added.items() if value]


def _where(history: History) -> list[str]:
    """Return the devices, versions, dates and hours of the legs up to the exported step."""
    seconds = [s for row in history.rows if (s := _number(row, "step_time")) is not None]
    hours = f"; {math.fsum(seconds) / 3600:.2g} hours of steps" if seconds else ""
    legs = [leg for leg in history.legs if leg.after_step < history.step]
    if not legs:
        return [f"- **Hardware and versions**: not recorded{hours}"]
    places = dict.fromkeys(
        f"{text(leg.device)} with "
        + _listed(f"{text(name)} {text(version)}" for name, version in leg.versions.items())
        for leg in legs
    )
    first, last = text(legs[0].began), text(legs[-1].began)
    dates = first if first == last else f"{first} to {last}"
    return [f"- **Hardware and versions**: {_listed(places)}; {dates}{hours}"]


_FIGURES = (
    ("mean reward", "reward", 3),
    ("tokens a response", "completions/mean_length", 1),
    ("share of responses cut at the limit", "completions/clipped_ratio", 2),
)


def _results(config: TrainConfig, history: History) -> str:
    tables = [t for t in (_training(step_rows(history.rows)), _evaluations(history.rows)) if t]
    if not tables:
        return "The run folder has no metrics of these steps."
    ev = config.eval
    sets = f" of {_listed(map(_spec, ev.sets))}" if ev.sets else ""
    drawn = f"at temperature {ev.temperature:g}" if ev.temperature else "greedily"
    how = (
        f"Evaluations ask up to {ev.num_prompts:,} questions of a set{sets}, {drawn}, {ev.samples} "
        f"times each; a response is correct from a reward of {ev.correct_at:g} on. In brackets: "
        "95% intervals."
    )
    return "\n\n".join([*map(_table, tables), *([how] if _evaluations(history.rows) else [])])


def _training(rows: Sequence[Row]) -> list[list[str]]:
    """Return the figures of the first and the last steps, as a table."""
    if not rows:
        return []
    few = max(1, min(10, len(rows) // 2))
    ends = rows[:few], rows[-few:]
    heads = [_steps(part[0]["step"], part[-1]["step"]) for part in ends]
    table = [["on the questions trained on", *heads]]
    for title, name, places in _FIGURES:
        means = [_mean(part, name) for part in ends]
        if None not in means:
            table.append([title, *(f"{mean:.{places}f}" for mean in means)])
    return table


def _steps(first: int, last: int) -> str:
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def _evaluations(rows: Sequence[Row]) -> list[list[str]]:
    """Return the first and the last evaluation, with 95% intervals, as a table."""
    evaluated = [row for row in rows if any(name.startswith("eval/") for name in row)]
    if not evaluated:
        return []
    ends = [evaluated[0], evaluated[-1]] if len(evaluated) > 1 else evaluated
    heads = [_steps(row["step"], row["step"]) if row["step"] else "before training" for row in ends]
    table = [["evaluation", *heads]]
    bounds = re.compile("_(low|high)$")
    names = [n for n in evaluated[-1] if n.startswith("eval/") and not bounds.search(n)]
    of_sets = [n for n in names if n.count("/") > 1]
    if len({n.split("/")[1] for n in of_sets}) == 1:
        names = of_sets  # over all sets they are the same
    for name in names[: 2 * MOST_ITEMS]:
        table.append([text(name.removeprefix("eval/")), *(_figure(row, name) for row in ends)])
    return table


def _figure(row: Row, name: str) -> str:
    mean, low, high = (_number(row, n) for n in (name, f"{name}_low", f"{name}_high"))
    if mean is None:
        return ""
    interval = "" if low is None or high is None else f" ({low:.3f} to {high:.3f})"
    return (f"{mean:.3f}" if interval else f"{mean:.4g}") + interval


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _use(form: Form) -> str:
    ask = 'ids = tokenizer(question, return_tensors="pt", add_special_tokens=False)["input_ids"]'
    encode = "tokenizer.encode(question)"
    if form.has_chat_template:
        chat = '[{"role": "user", "content": question}]'
        ask = (
            f"ids = tokenizer.apply_chat_template(\n    {chat},\n    add_generation_prompt=True,\n"
            '    return_dict=True,\n    return_tensors="pt",\n)["input_ids"]'
        )
        encode = f"tokenizer.apply_chat_template({chat})"
    return f"""## Use

In `transformers`:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, question = "path/of/this/folder", "..."
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(folder)
{ask}
output = model.generate(ids, max_new_tokens=256)
print(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
```

In Reprise:

```python
import models.hf
import models.tokenizer
from rl.rollout import generate
from rl.trajectory import Request
from spec.sampling import SamplingConfig

folder, question = "path/of/this/folder", "..."
config, params = models.hf.load_pretrained(folder, dtype="float32")
tokenizer = models.tokenizer.load(folder)
request = Request(0, tuple({encode}))
(response,) = generate(config, params, [request], SamplingConfig(max_new_tokens=256))
print(tokenizer.decode(response.response_ids))
```"""


def _licence(base: Base, *, is_given: bool = False) -> str:
    own = "Its terms hold for these weights too: look them up before you share them."
    if base.licence is not None:
        own = f"Its own card says {code(base.licence)}, whose terms hold for these weights too."
    none = "None is given here. Add `license: …` to the head of this file. "
    return (
        f"## Licence\n\n{'' if is_given else none}These weights are made from the base policy "
        f"{code(base.name)}. {own}"
    )


def _settings(config: TrainConfig) -> str:
    lines = without_folders(dump(config)).splitlines()
    settings = "\n".join("".join(c if c.isprintable() else _escape(c) for c in x) for x in lines)
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", settings)), default=0))
    return (
        "## Configuration\n\n<details>\n<summary>config.gin, with paths shortened to their last "
        f"part</summary>\n\n{ticks}\n{settings}\n{ticks}\n\n</details>"
    )


def _number(row: Row, name: str) -> float | int | None:
    """Return a figure of a row; None for what is missing, or not a number that is shown."""
    value = row.get(name)
    return value if isinstance(value, int | float) and abs(value) < 1e15 else None


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values: list[Any] = [v for row in rows if (v := _number(row, name)) is not None]
    return math.fsum(values) / len(values) if values else None
