"""A config of another tool opened in a real JupyterLab: the ledger first, a button takes it over, the form shows it."""

from __future__ import annotations

import lab as browsing
import pytest

FOREIGN = "base_model: Qwen/Qwen3-8B\nsequence_len: 1024\nmicro_batch_size: 2\nlearning_rate: 1e-4\nrelora: true\n"


@pytest.mark.slow
def test_the_ledger_opens_by_itself_and_a_button_takes_the_config_over(
    lab: browsing.Lab, chromium: browsing.Window
) -> None:
    (lab.root / "theirs.yml").write_text(FOREIGN)
    browsing.write_notebook(
        lab.root / "ledger.ipynb", ["from widgets import Workbench\nWorkbench('theirs.yml', height=320)"]
    )
    with chromium.opened("ledger.ipynb") as page:
        page.run_all()
        page.sees(".ftw-state[data-kind=bad]", has_text="relora: true")
        page.sees(".ftw-state[data-kind=good]", has_text="sequence_len: 1024 -> data.max_length: 1024")
        last = page.tab.locator(".ftw-ledger li").last
        last.scroll_into_view_if_needed()
        lower, low = (page.tab.locator(".ftw").bounding_box(), last.bounding_box())
        assert low["y"] + low["height"] <= lower["y"] + lower["height"], "the last key can be brought into view"
        page.tab.get_by_role("button", name="Take it over as a new config").click()
        page.tab.locator("[data-tab=data]").click()
        page.sees(".ftw input[value='1024'], .ftw", has_text="Longest row")
        page.tab.locator("[data-tab=ledger]").click()
        page.shows(
            "() => document.querySelector('.ftw-ledger button.ftw-primary')?.disabled === true",
            "nothing to take twice",
        )
        assert (page.outside, page.errors) == ([], [])
    assert (lab.root / "theirs.yml").read_text() == FOREIGN
