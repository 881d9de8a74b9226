"""The model card (README.md) of an exported policy: its run, its results and its use.

Names, paths and texts are untrusted, so the card puts them in code spans and fences that such text
cannot close. Absolute paths keep only their last part.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from reprise.models.config import ModelConfig, num_params
from reprise.models.formats import gguf_header, hf_files
from reprise.rl.gin.loader import dump
from reprise.rl.metrics.writer import Row
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.run_folder import Launch

CARD = "README.md"
MAX_CHARACTERS = 300  # of one untrusted text
MAX_HEAD_CHARACTERS = 2**16  # read from the card of a base policy
MAX_ITEMS = 20  # of a list
_METRICS = ("reward", "completions/mean_length", "completions/clipped_ratio")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
# The folders of an absolute path in a spec or setting, from a quote, colon or = to the last slash.
_FOLDERS = re.compile(r"""(?<=['":=])/(?:(?:\\.|[^/?:'"\\\n])+/)+""")


@dataclasses.dataclass(frozen=True)
class Base:
    """The initial policy of a run: its name, and the origin that its files declare."""

    name: str
    hub_id: str | None = None
    license: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class History:
    """A run up to the exported step: folder name, rows of metrics and legs."""

    run: str
    step: int
    rows: Sequence[Row]
    legs: Sequence[Launch]


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of an exported policy."""

    model: ModelConfig
    dtype: str
    has_chat_template: bool
    date: str
    prints_day: bool = False  # in the chat template


def read_base(policy: Path) -> Base:
    """Return the name and the declared origin of a policy folder or file."""
    path = policy.absolute()
    if hf_files.is_gguf(path):
        declared = gguf_header.read(path).metadata.get("general.license")
        return Base(path.stem, license=declared if isinstance(declared, str) else None)
    head = _front_matter(path / CARD)
    cached = re.search(r"models--([^/]+)--([^/]+)/", f"{path}/")
    ids = [hf_files.read_json(path / hf_files.CONFIG).get("_name_or_path"), head.get("base_model")]
    ids += ["/".join(cached.groups())] if cached else []
    known = [i for i in ids if isinstance(i, str) and _HUB_ID.fullmatch(i)]
    name = cached[2] if cached else path.name
    return Base(name, known[0] if known else None, head.get("license"))


def _front_matter(card: Path) -> dict[str, str]:
    """Return the plain `name: value` pairs in the front matter of a card."""
    if not card.is_file():
        return {}
    with card.open(encoding="utf-8", errors="replace") as file:
        head = re.match(r"---\n(.*?\n)---\n", file.read(MAX_HEAD_CHARACTERS), re.DOTALL)
    lines = re.findall(r"^(\w+):(.*)$", head[1], re.MULTILINE) if head else []
    values = {name: value.strip(" '\"") for name, value in lines}
    return {name: value for name, value in values.items() if value}


# --- untrusted text ------------------------------------------------------------------


def code(value: object) -> str:
    """Return a value as a code span that the value cannot close."""
    line = _one_line(value) or " "
    ticks = _fence(line, 1)
    pad = " " if line[0] == "`" or line[-1] == "`" else ""
    return f"{ticks}{pad}{line}{pad}{ticks}"


def _fence(content: str, min_ticks: int) -> str:
    return "`" * max(min_ticks, 1 + max(map(len, re.findall("`+", content)), default=0))


def _one_line(value: object) -> str:
    line = _printable(str(value))
    return line if len(line) <= MAX_CHARACTERS else f"{line[:MAX_CHARACTERS]}…"


def _printable(line: str) -> str:
    escapes = {c: c.encode("unicode_escape", "backslashreplace").decode() for c in set(line)}
    return "".join(c if c.isprintable() else escapes[c] for c in line)


def _spec(value: str) -> str:
    """Return a spec or a path as a code span, without the folders of this machine."""
    return code(_FOLDERS.sub("", f"'{value}'")[1:-1])


def _listed(values: Iterable[str]) -> str:
    items = list(values)
    more = f" and {len(items) - MAX_ITEMS} more" if len(items) > MAX_ITEMS else ""
    return ", ".join(items[:MAX_ITEMS]) + more


# --- cards ------------------------------------------------------------------------------


def of_run(config: TrainConfig, base: Base, history: History, form: Form) -> str:
    """Return the card for a checkpoint of a run."""
    algorithm = config.algorithm
    settings = dict(vars(algorithm.resolved))
    source = settings.pop("source")
    terms = ", ".join(f"{name} {x}" for name, x in settings.items() if x is not None)
    functions = zip(config.reward.functions, config.reward.full_weights, strict=True)
    rewards = [_spec(name) + ("" if w == 1 else f" × {w:g}") for name, w in functions]
    num_tokens = _number(history.rows[-1].get("num_tokens")) if history.rows else math.nan
    facts = {
        "Base policy": _origin(base, form),
        "Algorithm": f"{algorithm.name} ({source}): {terms}; KL to the base policy × "
        f"{algorithm.kl_coefficient:g}",
        "Teacher": _teacher(config),
        "Tasks": _listed(map(_spec, config.task.specs)),
        "Rewards": _listed(rewards),
        "Steps": f"{history.step:,} of {config.run.steps:,}, each "
        f"{config.rollout.prompts_per_step} prompts × {config.rollout.group_size} responses",
        "Response tokens": "" if math.isnan(num_tokens) else f"{num_tokens:,.0f}",
        "Hardware and versions": _hardware(history),
        **_changes(history),
        "Exported": f"{form.date}, weights in {form.dtype}",
        "Prompts, sampling, optimizer, evaluations": "see the configuration below",
    }
    bullets = "\n".join(f"- **{title}**: {value}" for title, value in facts.items() if value)
    lines = "\n".join(map(_printable, _FOLDERS.sub("", dump(config)).splitlines()))
    fence = _fence(lines, 3)
    return f"""{_head(base, "reinforcement-learning", algorithm.name)}

# {code(history.run)}, step {history.step:,}

{code(base.name)} after {history.step:,} of {config.run.steps:,} steps of {algorithm.name.upper()} \
in Reprise, a program for reinforcement learning with verifiable rewards.

## What was run

{bullets}

## Results

{_results(history.rows)}

{_use(form, config)}

{_license(base)}

## Configuration

<details>
<summary>config.gin, with paths shortened to their last part</summary>

{fence}
{lines}
{fence}

</details>
"""


def of_policy(base: Base, form: Form) -> str:
    """Return the card for a policy that was written in another form, without training.

    The card repeats the license of the weights if this license is a plain name.
    """
    name = base.license if _is_plain(base.license) else None
    return f"""{_head(base, license_name=name)}

# {code(base.name)}

{code(base.name)}, written anew by Reprise on {form.date}. It was not trained further.

- **Base policy**: {_origin(base, form)}
- **Weights**: {form.dtype}

{_use(form)}

{_license(base, is_given=name is not None)}
"""


def _is_plain(license_name: str | None) -> bool:
    return re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,40}", license_name or "") is not None


def _teacher(config: TrainConfig) -> str:
    """Return the folder of a teacher and the weights of advantages; empty without distillation."""
    distill = config.distill
    if distill.teacher is None:
        return ""
    name = code(Path(distill.teacher).name)
    return f"{name}, × {distill.coefficient:g}; advantages of rewards × {distill.task_weight:g}"


def _head(base: Base, *tags: str, license_name: str | None = None) -> str:
    """Return the metadata for the hub; each value is from a known set or has safe characters."""
    origin = f"base_model: {json.dumps(base.hub_id)}\n" if base.hub_id else ""
    listed = "".join(f"\n- {tag}" for tag in ("reprise", *tags))
    pipeline = "library_name: transformers\npipeline_tag: text-generation\n"
    args = f"\nlicense: {license_name}" if license_name else ""
    return f"---\n{pipeline}{origin}tags:{listed}{args}\n---"


def _origin(base: Base, form: Form) -> str:
    known = f" ({code(base.hub_id)})" if base.hub_id else ""
    size = f"{num_params(form.model):,} parameters"
    return f"{code(base.name)}{known}; {form.model.architecture}, {size}"


def _hardware(history: History) -> str:
    """Return devices, versions, dates and hours up to the exported step."""
    seconds = [s for r in history.rows if not math.isnan(s := _number(r.get("step_time")))]
    hours = f"; {math.fsum(seconds) / 3600:.2g} hours of steps" if seconds else ""
    legs = [launch for launch in history.legs if launch.after_step < history.step]
    if not legs:
        return f"not recorded{hours}"
    places = [
        f"{code(x.device)} with {_listed(code(f'{k} {v}') for k, v in x.versions.items())}"
        for x in legs
    ]
    dates = " to ".join(dict.fromkeys((code(legs[0].began), code(legs[-1].began))))
    return f"{_listed(dict.fromkeys(places))}; {dates}{hours}"


def _changes(history: History) -> dict[str, str]:
    """Return the settings that resumed legs changed, by step; the card lists only the last."""
    changed: dict[str, list[str]] = {}
    for launch in history.legs:
        if launch.after_step < history.step and launch.changes:
            title = f"From step {launch.after_step + 1:,} on"
            changed.setdefault(title, []).extend(map(_spec, launch.changes))
    return {title: _listed(changes) for title, changes in changed.items()}


def _results(rows: Sequence[Row]) -> str:
    """Return metrics at the first and last steps that report the metric."""
    every = dict.fromkeys(name for row in rows for name in row)
    names = [n for n in every if n in _METRICS or n.startswith("eval/")]
    names = [n for n in names if not n.endswith(("_low", "_high"))]
    of_sets = [n for n in names if n.count("/") > 1 and n.startswith("eval/")]
    if len({n.split("/")[1] for n in of_sets}) == 1:  # one set has the figures of all sets
        names = [n for n in names if n in _METRICS or n in of_sets]
    lines = []
    for name in names[: 2 * MAX_ITEMS]:
        known = [row for row in rows if not math.isnan(_number(row.get(name)))]
        few = max(1, min(10, len(known) // 2)) if name in _METRICS else 1
        if known:
            first = _figure(known[:few], name)
            last = _figure(known[-few:], name)
            lines.append(f"- {code(name)}: first {first}, last {last}")
    note = "Each figure is a mean over the steps that are named; in brackets: 95% intervals."
    return "\n".join([*lines, "", note]) if lines else "The run has no metrics of these steps."


def _figure(rows: Sequence[Row], name: str) -> str:
    mean = math.fsum(_number(row[name]) for row in rows) / len(rows)
    low, high = (_number(rows[-1].get(f"{name}_{end}")) for end in ("low", "high"))
    bounds = "" if math.isnan(low + high) else f" [{low:.4g}, {high:.4g}]"
    first = rows[0]["step"]
    last = rows[-1]["step"]
    steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
    return f"{mean:.4g}{bounds} ({steps if last else 'before training'})"


def _number(value: object) -> float:
    """Return a metric as a float; nan if it is missing or has a value that no run writes."""
    return float(value) if isinstance(value, int | float) and abs(value) < 1e15 else math.nan


def _use(form: Form, config: TrainConfig | None = None) -> str:
    """Return example code that formats prompts and samples as the run did."""
    limit_tokens = 256 if config is None else config.sampling.max_new_tokens
    stop = [] if config is None else list(config.sampling.stop)
    strings = f", stop_strings={stop!r}, tokenizer=tokenizer" if stop else ""
    body = f"""from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

folder, question = "path/of/this/folder", "..."
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)  # reads tokenizer.json as it is
{_prompt(form, config)}
output = model.generate(ids, max_new_tokens={limit_tokens}{strings})
print(tokenizer.decode(output[0, ids.shape[1] :]))"""
    fence = _fence(body, 3)
    return f"""## Use

{fence}python
{body}
{fence}

Reprise trains from this folder (`Policy.directory`), and reads it with \
`models.formats.hf.load_pretrained`."""


def _prompt(form: Form, config: TrainConfig | None) -> str:
    """Return example code that encodes `question` to `ids` like `rl.data.prompts.encode_prompt`."""
    suffix = config.task.prompt_suffix if config else ""
    system = config.task.system_prompt if config else None
    content = f"question + {suffix!r}" if suffix else "question"
    text = content if system is None else f"{system + chr(10) * 2!r} + {content}"
    plainly = f'ids = tokenizer({text}, return_tensors="pt")["input_ids"]'
    chat = config.task.chat if config else "all"
    if not form.has_chat_template or chat == "none":
        return plainly
    turns = [] if system is None else [f'    {{"role": "system", "content": {system!r}}},\n']
    turns += [f'    {{"role": "user", "content": {content}}},\n']
    variables = config.task.chat_template_kwargs if config else ()
    options = ["add_generation_prompt=True", *(f"{name}={value!r}" for name, value in variables)]
    options += ["return_dict=True", 'return_tensors="pt"']
    lines = [f"messages = [\n{''.join(turns)}]"]
    if config and form.prints_day and config.task.date:
        lines.append(f"# the template prints the day; in training it was {config.task.date}")
    lines.append(
        f'ids = tokenizer.apply_chat_template(messages, {", ".join(options)})["input_ids"]'
    )
    if chat == "messages":
        lines.append(f"# of prompts that are no messages, but texts: {plainly}")
    return "\n".join(lines)


def _license(base: Base, *, is_given: bool = False) -> str:
    terms = "Its terms hold for these weights too: look them up before you share them."
    if base.license is not None:
        terms = f"Its own card says {code(base.license)}, whose terms hold for these weights too."
    none = "" if is_given else "None is given here. Add `license: …` to the head of this file. "
    return f"""## License

{none}These weights are made from the \
base policy {code(base.name)}. {terms}"""
