"""What a run is made of: digests by setting and file, compared at resume, export, evaluation."""

from __future__ import annotations

import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from reprise.models.decoder import lora
from reprise.models.formats import peft_files
from reprise.models.formats.hf_files import WEIGHTS
from reprise.rl.export import adapter_base
from reprise.rl.gin.loader import load
from reprise.rl.runtime.run_files import resolve_path
from reprise.rl.settings import identity
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import open_policy


@pytest.fixture
def policy(tiny, tmp_path):
    """A copy of the policy's folder, to be changed."""
    return shutil.copytree(tiny.parent / "policy", tmp_path / "policy")


def new_weights(policy, scale=2.0):
    weights = load_file(policy / WEIGHTS)
    save_file({k: x * np.float32(scale) for k, x in weights.items()}, policy / WEIGHTS)


def fields(changes):
    return [change.field for change in changes]


def test_each_file_has_a_digest(tiny, tmp_path, policy):
    rewards = tmp_path / "rewards"
    (rewards / "deep").mkdir(parents=True)
    (rewards / "own.py").write_text("import beside, os\nfrom deep import part\ndef f(): pass\n")
    (rewards / "beside.py").write_text("def g():\n    import later\n")
    (rewards / "later.py").write_text("import own\nsyntax error")
    (rewards / "deep" / "part.py").write_text("from .more import x\nfrom ... import outside\n")
    (rewards / "deep" / "more.py").write_text(
        "from .. import later\nfrom " + 99 * "." + " import x\n"
    )
    (tmp_path / "outside.py").write_text("")
    (rewards / "unused.py").write_text("")
    draft = shutil.copytree(policy, tmp_path / "draft")
    config = load(
        TrainConfig,
        [tiny],
        (
            f"Reward.functions=('{rewards}/own.py:f',)",
            *("Speculation.sources=('model',)", "Speculation.budget='fixed:2'"),
            f"DraftModel.directory='{draft}'",
        ),
    )
    before = identity.contents(config, policy)
    assert {name for name in before if name.startswith("Reward.")} == {
        f"Reward.functions/{x}"
        for x in ("own.py", "beside.py", "later.py", "deep/part.py", "deep/more.py")
    }
    assert {"Policy.directory/config.json", "DraftModel.directory/0/config.json"} <= before.keys()
    new_weights(draft)
    (rewards / "later.py").write_text("")
    changes = identity.changes(before, identity.contents(config, policy))
    assert fields(changes) == ["Reward.functions/later.py", f"DraftModel.directory/0/{WEIGHTS}"]
    assert [change.of_experiment for change in changes] == [True, False]  # drafts change no token
    (rewards / "beside.py").unlink()
    (gone,) = identity.changes(before, identity.contents(config, policy))[:1]
    assert gone.now == "no file" and gone.before.startswith("contents ")


def test_reward_files_of_one_name_in_two_folders_count_both(tiny, tmp_path):
    policy = resolve_path(load(TrainConfig, [tiny]).policy.directory)
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "reward.py").write_text("x = 1")
    functions = tuple(f"{tmp_path}/{name}/reward.py:f" for name in "ab")
    config = load(TrainConfig, [tiny], (f"Reward.functions={functions!r}",))
    before = identity.contents(config, policy)
    for name, changed in (("a", "reward.py"), ("b", "1/reward.py")):
        (tmp_path / name / "reward.py").write_text("x = -1")
        assert fields(identity.changes(before, identity.contents(config, policy)))[-1] == (
            f"Reward.functions/{changed}"
        )


def test_settings_that_a_checkpoint_does_not_know_are_not_compared():
    assert identity.changes({}, {"Policy.directory/config.json": "1"}) == []
    then, now = {"Policy.directory/a": "1"}, {"Policy.directory/a": "1", "Reward.functions/b": "2"}
    assert identity.changes(then, now) == identity.changes(now, then) == []


def test_a_checkpoint_s_policy(policy):
    then = identity.policy_contents(policy)
    assert identity.check_policy(4, then, policy, is_base=True) == []
    tokenizer = policy / "tokenizer_config.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    (warning,) = identity.check_policy(4, then, policy, is_base=True)
    assert "tokenizer_config.json has other contents than up to step 4" in warning
    new_weights(policy)
    assert len(identity.check_policy(4, then, policy, is_base=False)) == 1  # its own are used
    with pytest.raises(ValueError, match="model.safetensors has other contents.*bring the files"):
        identity.check_policy(4, then, policy, is_base=True)
    (policy / "config.json").write_text((policy / "config.json").read_text() + "\n")
    with pytest.raises(ValueError, match="config.json has other contents"):
        identity.check_policy(4, then, policy, is_base=False)
    assert identity.check_policy(4, {}, policy, is_base=True) == []  # of an older checkpoint


def test_reward_files_of_an_evaluation():
    then = {"Reward.functions/a.py": "1", "Policy.directory/x": "1"}
    assert identity.check_rewards(then, then | {"Policy.directory/x": "2"}) == []
    (warning,) = identity.check_rewards(then, {"Reward.functions/a.py": "2"})
    assert warning == "Reward.functions/a.py has other contents than in the run: rewards may differ"
    assert identity.check_rewards(then, {"Reward.functions/b.py": "2"}) == []  # asked for


def test_the_base_of_an_adapter(tiny, tmp_path, policy):
    config = load(TrainConfig, [tiny], ("Policy.lora_rank=2",))
    _, model, _ = open_policy(str(policy), None, config.policy.lora)
    adapter, folder = lora.init(model, jax.random.key(0)), tmp_path / "adapter"
    own = identity.policy_contents(policy)
    name, digest = adapter_base.describe_base(policy, own)
    assert name == "policy"  # no path of this machine
    peft_files.write(folder, model, adapter, name, digest)
    assert adapter_base.check_base(folder, policy, own, any_base=False) == ""
    new_weights(policy)
    other = identity.policy_contents(policy)
    with pytest.raises(ValueError, match="the adapter was trained on other weights"):
        adapter_base.check_base(folder, policy, other, any_base=False)
    assert "names the base" in adapter_base.check_base(folder, policy, other, any_base=True)
    for foreign, is_known in (
        ("some/policy", True),
        ("/x/Policy", True),
        ("", True),
        ("a/b", False),
    ):
        peft_files.write(folder, model, adapter, foreign)
        remark = adapter_base.check_base(folder, policy, other, any_base=False)
        assert (remark == "") is is_known
