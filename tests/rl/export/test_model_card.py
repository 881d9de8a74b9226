"""The model card: what was run, in text of others that cannot leave its place."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy

import pytest
import yaml
from huggingface_hub import ModelCardData
from markdown_it import MarkdownIt

from policies.make.characters import save_character_tokenizer
from reprise.models.text import tokenizer
from reprise.rl.data.prompts import encode_prompt
from reprise.rl.data.tasks import Example
from reprise.rl.export import model_card
from reprise.rl.export.model_card import Base, Form, History
from reprise.rl.gin.loader import dump, load
from reprise.rl.settings import run_folder
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.run_folder import Launch
from tests.support import tiny_run

HTML = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
BASE = Base("SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M", "apache-2.0")
FORM = Form(tiny_run.MODEL, "bfloat16", True, "2026-11-23")
LEG = Launch(0, "2026-11-20", "1 × NVIDIA H200", {"reprise": "0.1.0", "jax": "0.10.2"})
ROWS = [
    {"step": i, "reward": i / 40, "completions/mean_length": 30.0, "step_time": 180.0}
    | {"num_tokens": 1000 * i}
    | ({"eval/sums/mean_reward": 0.5, "eval/sums/mean_length": 12} if i == 40 else {})
    | ({"eval/sums/mean_reward_low": 0.4, "eval/sums/mean_reward_high": 0.6} if i == 40 else {})
    for i in range(1, 41)
]
ROWS = [{"step": 0, "eval/sums/mean_reward": 0.1, "eval_s": 3.0, "eval/pass@1": 0.1}, *ROWS]
HOSTILE = (
    "# big\n\n<script>alert(1)</script>",
    "`` ` ```\n---\nlicense: mit",
    "</details>|<img src=x onerror=alert(1)>|",
    "[click](javascript:alert(1)) **bold** &lt; \\",
    "www.example.com https://example.com <https://example.com> a@example.com ~~x~~",
    "\u202egnp.exe\x1b[2J\u2028\ud800",
)


def card(*overrides, base=BASE, rows=ROWS, run="own", device=LEG):
    config = load(TrainConfig, [], overrides)
    return model_card.of_run(config, base, History(run, 40, rows, [device]), FORM)


def section(text, title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)[1]


def front_matter(text):
    head, rest = re.fullmatch(r"---\n(.*?)\n---\n(.*)", text, re.DOTALL).groups()
    return yaml.safe_load(head), rest


def test_the_head_is_valid_for_the_hub():
    head, _ = front_matter(card("Algorithm.name='dr_grpo'"))
    assert head == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "HuggingFaceTB/SmolLM2-135M",
        "tags": ["reprise", "reinforcement-learning", "dr_grpo"],
    }
    assert ModelCardData(**head).to_dict() == head


def test_a_teacher_is_named_without_its_folders():
    text = card("Distill.teacher='/home/me/Qwen3-8B'", "Distill.task_weight=0.5")
    assert "- **Teacher**: `Qwen3-8B`, × 1; advantages of rewards × 0.5\n" in text
    assert "Teacher" not in card()


def test_what_was_run():
    text = card(
        "Task.specs=('jsonl:/home/me/data/own.jsonl?prompt=q', 'reasoning_gym:gcd')",
        "Reward.functions=('/home/me/rewards.py:score', 'task')",
        "Reward.weights=(1.0, 0.5)",
        "Rollout.prompts_per_step=6",
        "Task.system_prompt='Be brief.'",
        "Task.chat_template_kwargs=(('enable_thinking', False),)",
        "Sampling.stop=('\\n\\n', 'Question:')",
        "Sampling.by_task=('reasoning_gym:gcd: temperature=0.6',)",
        "Run.directory='/home/me/runs/own'",
    )
    what = section(text, "What was run")
    for part in (
        "`SmolLM2-135M` (`HuggingFaceTB/SmolLM2-135M`); qwen3",
        "grpo (arXiv 2402.03300)",
        "`jsonl:own.jsonl?prompt=q`, `reasoning_gym:gcd`",
        "`rewards.py:score`, `task` × 0.5",
        "40 of 100, each 6 prompts × 8 responses",
        "**Response tokens**: 40,000",
        "`1 × NVIDIA H200` with `reprise 0.1.0`, `jax 0.10.2`; `2026-11-20`; 2 hours",
        "2026-11-23, weights in bfloat16",
    ):
        assert part in what, part
    settings = section(text, "Configuration")
    for part in ("Be brief.", "'enable_thinking', False", "Question:", "temperature=0.6", "1e-06"):
        assert part in settings.replace('"', "'"), part
    assert "/home/me" not in text
    assert 'Run.directory = "own"' in text.replace("'", '"')


def test_what_legs_changed_has_a_line_by_step():
    one, other = (
        Launch(20, "2026-11-21", "cpu", {}, [change])
        for change in ("Optimizer.learning_rate: 1e-06 → 3e-06", "Task.specs: ('/me/a',) → ('/b',)")
    )
    later = Launch(40, "2026-11-22", "cpu", {}, ["Run.steps: 40 → 80"])
    config = load(TrainConfig, [], ())
    history = History("own", 40, ROWS, [LEG, one, other, later])
    what = section(model_card.of_run(config, BASE, history, FORM), "What was run")
    line = "- **From step 21 on**: `Optimizer.learning_rate: 1e-06 → 3e-06`, `Task.specs: ('a',) → "
    assert line in what and "/me" not in what
    assert "From step 41" not in what and "From step 1 " not in what


def use(*overrides, form=FORM):
    config = load(TrainConfig, [], overrides)
    text = section(model_card.of_run(config, BASE, History("own", 40, ROWS, [LEG]), form), "Use")
    return re.search(r"^(`{3,})python\n(.*?)^\1$", text, re.M | re.S)[2]


TASK = (
    "Task.system_prompt='Be brief. ```'",
    "Task.prompt_suffix='\\n'",
    "Task.chat_template_kwargs=(('enable_thinking', False),)",
    "Task.date='2026-11-27'",
    "Sampling.max_new_tokens=48",
    "Sampling.stop=('</a>',)",
)
QWEN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ enable_thinking }}"


@pytest.mark.parametrize("chat", ["all", "none"])
def test_the_code_of_use_makes_the_prompt_of_the_run(chat, tmp_path):
    """It is run on a tokenizer with BOS, with what loads and generates taken out."""
    save_character_tokenizer(tmp_path, "".join(map(chr, range(32, 127))) + "\n", QWEN)
    rules = json.loads((tmp_path / "tokenizer.json").read_text())
    one = {"Sequence": {"id": "A", "type_id": 0}}
    bos = {"SpecialToken": {"id": "<unk>", "type_id": 0}}
    known = {"<unk>": {"id": "<unk>", "ids": [2], "tokens": ["<unk>"]}}
    rules["post_processor"] = {
        **{"type": "TemplateProcessing", "single": [bos, one], "pair": [bos, one]},
        "special_tokens": known,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    code = use(*TASK, f"Task.chat='{chat}'")
    assert "max_new_tokens=48, stop_strings=['</a>'], tokenizer=tokenizer)" in code
    lines = [x for x in code.split("\n") if "odel" not in x and not x.startswith("print")]
    code = "from transformers import PreTrainedTokenizerFast\n" + "\n".join(lines)
    code = code.replace("path/of/this/folder", str(tmp_path)).replace('"..."', '"1+1"')
    file = tmp_path / "use.py"
    file.write_text(code.replace('return_tensors="pt"', 'return_tensors="np"'))
    ids = runpy.run_path(str(file))["ids"]
    task = load(TrainConfig, [], [*TASK, f"Task.chat='{chat}'"]).task
    wanted = encode_prompt(tokenizer.load(tmp_path), Example("x", "1+1", "2", {}, "t"), task)
    assert tuple(ids[0].tolist()) == wanted and (wanted[0] == 2) == (chat == "none")


def test_the_code_of_use_names_the_day_that_a_template_prints():
    form = dataclasses.replace(FORM, prints_day=True)
    assert "in training it was 2026-11-27" in use(*TASK, form=form)
    assert "2026" not in use(*TASK)


def test_first_and_last_rewards_and_evaluations():
    results = section(card(), "Results")
    assert "- `reward`: first 0.1375 (steps 1 to 10), last 0.8875 (steps 31 to 40)\n" in results
    name = "`eval/sums/mean_reward`"
    assert f"{name}: first 0.1 (before training), last 0.5 [0.4, 0.6] (step 40)\n" in results
    assert "`eval/sums/mean_length`: first 12 (step 40), last 12 (step 40)\n" in results
    assert "pass@1" not in results  # of the only set, so over all sets
    assert "low" not in results
    assert "clipped" not in results  # no row has it
    assert "no metrics" in section(card(rows=[]), "Results")


def test_the_settings_are_whole_and_load_again():
    text = card("Run.steps=77")
    (settings,) = re.findall(r"^```\n(.*?)^```$", section(text, "Configuration"), re.M | re.S)
    assert settings == dump(load(TrainConfig, [], ["Run.steps=77"]))


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_others_stays_in_its_place(text):
    plain = "".join(c for c in text if c.isprintable() and c not in "?&=:'\"\\")
    overrides = [
        f"Task.specs=({'jsonl:' + plain!r},)",
        f"Task.system_prompt={json.dumps(text.replace(chr(0xD800), ''))}",
    ]
    name = f"eval/{text}"
    whole = card(
        *overrides,
        base=Base(text, None, text),
        rows=[{"step": 40, "reward": 1.0, name: 0.5}],
        run=text,
        device=Launch(0, text, text, {text: text}),
    )
    head, rest = front_matter(whole)
    assert set(head) == {"library_name", "pipeline_tag", "tags"}
    assert all(c.isprintable() or c == "\n" for c in whole)
    page = HTML.render(rest)
    tags = set(re.findall(r"<(\w+)", page))
    assert tags <= {
        *("h1", "h2", "p", "ul", "li", "strong", "code", "pre", "details", "summary"),
    }
    assert page.count("<h1>") == page.count("<details>") == page.count("</details>") == 1
    assert page.count("<h2>") == 5 and page.count("<pre>") == 2
    assert section(whole, "Results").count("\n- ") == 2
    assert len(set(re.findall(r"<strong>(.*?)</strong>", page))) == page.count("<strong>")


def test_a_base_policy_is_known_by_its_own_files(tmp_path):
    folder = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert model_card.read_base(folder) == Base("Qwen3-0.6B", "Qwen/Qwen3-0.6B")
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_text('{"_name_or_path": "/home/me/model"}')
    assert model_card.read_base(own) == Base("own")
    (own / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: 'a/b'\n---\nlicense: x")
    assert model_card.read_base(own) == Base("own", "a/b", "apache-2.0")
    (own / "README.md").write_text("---\nlicense: apache-2.0\nno end")
    assert model_card.read_base(own) == Base("own")


def test_legs_are_noted_and_rows_that_no_run_writes_left_out(tmp_path):
    assert run_folder.read_launches(tmp_path) == []
    run_folder.note_launch(tmp_path, 0)
    (tmp_path / "legs.jsonl").open("a").write('{"device": 3}\n[[\n{"after_step": 1}\n')
    run_folder.note_launch(tmp_path, 7, [run_folder.Change("Run.steps", "8", "12")])
    first, second = run_folder.read_launches(tmp_path)
    assert (first.after_step, second.after_step) == (0, 7)
    assert (first.changes, second.changes) == ([], ["Run.steps: 8 → 12"])
    assert "jax" in first.versions and first.device
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", first.began)
