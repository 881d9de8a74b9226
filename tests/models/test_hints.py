"""Commands that messages name: right in a checkout and for a wheel."""

import importlib.metadata
import re
from pathlib import Path

import pytest

from reprise.models import hints
from reprise.models.hints import download_hint, install_hint

ROOT = Path(__file__).parents[2]


def test_an_extra_is_installed_from_the_checkout_or_by_its_packages(tmp_path, monkeypatch):
    assert install_hint("gguf") == "pip install -e '.[gguf]'"
    lines = ["jax>=0.10", 'gguf>=0.17; extra == "gguf"', "jax[cuda13]; extra == 'cuda'"]
    lines += ["protobuf>=6; extra == 'serve'", "starlette>=1.0; extra == 'serve'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    assert install_hint("gguf", tmp_path) == "pip install 'gguf>=0.17'"
    assert install_hint("cuda", tmp_path) == "pip install 'jax[cuda13]'"
    assert install_hint("serve", tmp_path) == "pip install 'protobuf>=6' 'starlette>=1.0'"


def test_no_page_or_message_names_a_package_that_no_index_has():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").rglob("*")]
    sources = [p for name in ("models", "spec", "sched", "rl") for p in (ROOT / name).rglob("*.py")]
    wrong = re.compile(rf"install[^\n]*{hints.DISTRIBUTION}(?! @)")
    texts = {p: p.read_text("utf-8") for p in [*pages, *sources] if p.is_file()}
    assert not [str(p) for p, text in texts.items() if wrong.search(text)]
    assert wrong.search("pip install 'reprise-rl[serve]'")


@pytest.mark.parametrize(
    ("path", "command"),
    [
        ("Qwen/Qwen3-8B", "hf download Qwen/Qwen3-8B --local-dir downloads/Qwen3-8B"),
        ("openai/gsm8k", "hf download openai/gsm8k --local-dir downloads/gsm8k"),
        *[(path, "") for path in ("/models/x", "a/b/c", "x", "../x/y", "rl/none", "~/x")],
    ],
)
def test_a_name_of_the_hub_is_downloaded(path, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert download_hint(path) == command
    added = "--repo-type dataset --local-dir"
    assert download_hint(path, is_dataset=True) == command.replace("--local-dir", added)
