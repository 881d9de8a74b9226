"""Pictures of a report: choices of a bandit, from rows made by hand."""

import numpy as np
from matplotlib import figure

from reprise.rl.reports import plots
from reprise.rl.reports.runs import Run


def run(arms):
    """Two steps; each arm had a hundredth more of the decisions than the one before."""
    rows = [{"step": n, "reward": 0.5} for n in (1, 2)]
    for i in range(arms):
        rows[1][f"bandit/own_×_{i}/share"] = i / 100
        rows[1][f"bandit/own_×_{i}/tokens_per_s"] = 1000.0 * i
    return Run("a", rows, [])


def test_the_arms_that_had_least_are_shown_together():
    shares = plots.arm_shares(run(9))
    assert list(shares) == [*(f"own_×_{i}" for i in range(8, 2, -1)), "others"]
    np.testing.assert_allclose(shares["own_×_8"], [0, 8])
    np.testing.assert_allclose(shares["others"], [0, 0 + 1 + 2])
    assert list(plots.arm_shares(run(2))) == ["own_×_1", "own_×_0"]


def test_it_is_drawn_of_one_run_that_has_a_bandit():
    panel = plots.BanditArms()
    assert panel.shown([run(9)]) and not panel.shown([run(0)]) and not panel.shown([run(9)] * 2)
    for given in (run(9), run(2)):
        assert plots._figure([panel], [given], 1, columns=1).startswith(b"\x89PNG")
    assert plots.arm_label(run(9), "own_×_8") == "own × 8: 8,000 tokens/s"


def test_a_metric_that_ends_early_keeps_the_axis_of_the_run():
    rows = [{"step": n, "reward": 0.5, "drafts": 0.1} if n < 3 else {"step": n} for n in range(11)]
    ax = figure.Figure().subplots()
    panel = plots.Curve("drafts.png", "Drafts", "share", "drafts", "")
    panel.draw(ax, [Run("a", rows, []), Run("b", rows[4:6], [])], 1)
    assert ax.get_xlim() == (0 - 0.2, 10 + 0.2)
