"""The HTML page of a report: a single file with pictures, tables and samples.

All text from runs is escaped, and the content security policy allows only the script below.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from reprise.rl.reports.comparison import NOTE
from reprise.rl.reports.style import number

MAX_TEXT_CHARS = 20_000
PREVIEW_CHARS = 110
# Control characters beyond ASCII, and marks that change the direction of text.
_INVISIBLE = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_NAME_COLUMNS = ("metric", "set", "run")
_IN_SUMMARY = ("step", "set", "prompt", "completion", "reward", "advantage", "finish_reason")

_CSS = """
body { margin: 0 auto; max-width: 1180px; padding: 24px; font: 15px/1.5 system-ui, sans-serif; }
h1, pre, td.name { overflow-wrap: anywhere; }
.faint, figcaption, th, .text { color: #667; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); }
figure { margin: 8px; }
img { width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; }
th, td { padding: 4px 14px 4px 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid #e2e2e8; font-variant-numeric: tabular-nums; }
th.name, td.name { text-align: left; white-space: normal; min-width: 11em; }
.filter, summary { display: flex; flex-wrap: wrap; gap: 2px 14px; padding: 6px; }
details { border: 1px solid #e2e2e8; margin-bottom: 8px; }
details[hidden] { display: none; }
summary { cursor: pointer; }
.text { flex: 1 1 10em; min-width: 0; overflow: hidden; white-space: nowrap; }
pre { background: #f6f6f9; padding: 8px; white-space: pre-wrap; font-size: 13px; }
.good { color: #00694a; } .bad { color: #b3261e; }
"""

# Filters of the viewer by run, step and text; nothing is fetched or stored.
_SCRIPT = """
"use strict";
const samples = [...document.querySelectorAll("details.sample")];
const run = document.getElementById("run"), step = document.getElementById("step");
const text = document.getElementById("text"), count = document.getElementById("count");
function show() {
  const wanted = text.value.toLowerCase();
  let shown = 0;
  for (const sample of samples) {
    const hit = (!run.value || sample.dataset.run === run.value)
      && (!step.value || sample.dataset.step === step.value)
      && (!wanted || sample.textContent.toLowerCase().includes(wanted));
    sample.hidden = !hit;
    shown += hit;
  }
  count.textContent = shown + " of " + samples.length;
}
for (const control of [run, step, text]) control.addEventListener("input", show);
show();
"""


def page(
    *,
    title: str,
    runs: Sequence[tuple[str, int, int, Sequence[str]]],
    images: Sequence[tuple[str, bytes, str]],
    summaries: Sequence[Mapping[str, str]],
    evaluations: Sequence[Mapping[str, str]],
    compared: Sequence[Mapping[str, str]],
    samples: Sequence[tuple[str, Mapping[str, Any]]],
) -> str:
    """Return the whole page as text.

    `runs`: (label, rows, last step, summary lines); `images`: (file, PNG, caption); `summaries`,
    `evaluations`, `compared`: rows of tables; `samples`: (run label, row).
    """
    script = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    policy += f"script-src 'sha256-{script}'"
    facts = "<br>".join(
        f"<b>{_text(label)}</b>: {rows:,} steps recorded, the last is step {last:,}"
        + "".join(f"<br>{_text(line)}" for line in lines)
        for label, rows, last, lines in runs
    )
    plots = "\n".join(
        f'<figure><img alt="{_text(name.removesuffix(".png"))}" '
        f'src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        f"<figcaption>{_text(caption)}</figcaption></figure>"
        for name, png, caption in images
    )
    several = len(runs) > 1
    evaluated = ""
    if evaluations:
        evaluated = f"""<h2>Evaluation before and after training</h2>
{_table(evaluations, several)}
<p class="faint">In brackets: 95% intervals over questions.</p>"""
    if compared:
        evaluated += f"""<h2>Compared with {_text(runs[0][0])}</h2>
{_table(compared, several)}
<p class="faint">{NOTE}</p>"""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(title)} - run report</title>
<style>{_CSS}</style>
</head>
<body>
<h1>{_text(title)}</h1>
<p class="faint">{facts}</p>
<div class="plots">
{plots}
</div>
{evaluated}
<h2>First, last and best</h2>
{_table(summaries, several)}
<h2>Samples</h2>
{_viewer(samples)}
</body>
</html>
"""


def _table(rows: Sequence[Mapping[str, str]], several: bool) -> str:
    """Return a table, with a column of runs if `several`."""
    if not rows:
        return ""
    columns = {c: ' class="name"' * (c in _NAME_COLUMNS) for c in rows[0] if several or c != "run"}
    head = "".join(f"<th{kind}>{column}</th>" for column, kind in columns.items())
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{_cell(row, c)}</td>" for c, kind in columns.items()) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>'
        "</div>"
    )


def _cell(row: Mapping[str, str], column: str) -> str:
    cell = _text(row[column])
    # allow line breaks between the parts of a name
    return re.sub("([/_])", r"\1<wbr>", cell) if column == "metric" else cell


def _viewer(samples: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    if not samples:
        return '<p class="faint">These runs recorded no samples.</p>'
    labels = list(dict.fromkeys(label for label, _ in samples))
    steps = sorted({row["step"] for _, row in samples})
    return (
        '<div class="filter">'
        f'<label>run <select id="run"><option value="">all</option>{_options(labels)}</select>'
        f'</label><label>step <select id="step"><option value="">all</option>{_options(steps)}'
        '</select></label><input id="text" type="search" placeholder="search the text">'
        '<span class="faint" id="count"></span></div>\n'
        + "\n".join(_sample(label, row, several=len(labels) > 1) for label, row in samples)
        + f"\n<script>{_SCRIPT}</script>"
    )


def _options(values: Sequence[Any]) -> str:
    return "".join(f'<option value="{_text(v)}">{_text(v)}</option>' for v in values)


def _sample(label: str, row: Mapping[str, Any], *, several: bool) -> str:
    completion = _text(row.get("completion", ""))
    preview = _text(" ".join(str(row.get("completion", ""))[: 4 * PREVIEW_CHARS].split()))
    facts = [f"step {_text(row['step'])}"]
    if several:
        facts.insert(0, _text(label))
    if "set" in row:
        facts.append(f"evaluation {_text(row['set'])}")
    if "reward" in row:
        facts.append(f"reward {_value(row['reward'])}")
    advantage = row.get("advantage")
    if isinstance(advantage, (int, float)):
        kind = "good" if advantage > 0 else "bad" if advantage < 0 else "faint"
        plus = "+" if advantage > 0 else ""
        facts.append(f'<b class="{kind}">advantage {plus}{number(advantage)}</b>')
    if "finish_reason" in row:
        facts.append(_text(row["finish_reason"]))
    spans = "".join(f"<span>{fact}</span>" for fact in facts)
    rest = "; ".join(
        f"{_text(name)}: {_value(value)}" for name, value in row.items() if name not in _IN_SUMMARY
    )
    return (
        f'<details class="sample" data-run="{_text(label)}" data-step="{_text(row["step"])}">'
        f'<summary>{spans}<span class="text">{preview}</span></summary><div>'
        f'<span class="faint">prompt</span><pre>{_text(row.get("prompt", ""))}</pre>'
        f'<span class="faint">completion</span><pre>{completion}</pre>'
        + (f'<span class="faint">{rest}</span>' if rest else "")
        + "</div></details>"
    )


def _value(value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number(value)
    if isinstance(value, Mapping) and not any(isinstance(v, Mapping) for v in value.values()):
        return ", ".join(f"{_text(name)} {_value(item)}" for name, item in value.items())
    return _text(value if isinstance(value, str) else json.dumps(value))


def _text(value: Any) -> str:
    """Return a value as escaped HTML text, with visible control characters, truncated if long."""
    text = str(value)
    cut = len(text) - MAX_TEXT_CHARS
    if cut > 0:
        text = text[:MAX_TEXT_CHARS] + f" ... and {cut:,} more characters"
    clean = "".join(c if c >= " " or c in "\n\t" else chr(0x2400 + ord(c)) for c in text)
    clean = _INVISIBLE.sub(lambda match: match[0].encode("unicode_escape").decode(), clean)
    return html.escape(clean, quote=True)
