"""The limit of memory mappings is named before XLA runs into it."""

import pytest

from rl.runtime import memory_mappings


def test_what_is_held_is_compared_with_the_limit(tmp_path, monkeypatch):
    limit, held = tmp_path / "limit", tmp_path / "maps"
    monkeypatch.setattr(memory_mappings, "LIMIT", limit)
    monkeypatch.setattr(memory_mappings, "HELD", held)
    memory_mappings.check("3 of 9 programs are compiled")  # a system without such a limit
    limit.write_text("100\n")
    held.write_text("a mapping\n" * 90)
    memory_mappings.check("3 of 9 programs are compiled")
    held.write_text("a mapping\n" * 91)
    with pytest.raises(
        memory_mappings.TooManyMappings, match=r"3 of 9 .* 91 of the 100 .*max_map_count=400"
    ):
        memory_mappings.check("3 of 9 programs are compiled")


def test_of_this_process():
    memory_mappings.check("nothing is compiled")
