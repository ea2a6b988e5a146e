"""The guided first run in a real JupyterLab: from the step Goal over own rows and a real rehearsal to the real run's config."""

from __future__ import annotations

import json

import lab as browsing
import pytest

from engine.run.store import runs_in

ROWS = [
    ("What colour is the ferry?", "White above, blue below."),
    ("When does the first boat leave?", "At 6:40, on Sundays at 7:15."),
    ("Can I take my dog?", "Yes, on a lead, for half the fare."),
]


@pytest.mark.slow
def test_a_person_walks_from_the_goal_to_a_model_that_knows_their_rows(
    lab: browsing.Lab, chromium: browsing.Window
) -> None:
    text = "".join(json.dumps({"prompt": prompt, "completion": answer}) + "\n" for prompt, answer in ROWS)
    (lab.root / "ferry.jsonl").write_text(text)
    browsing.write_notebook(lab.root / "guide.ipynb", ["from widgets import Workbench\nWorkbench(runs='guided')"])
    with chromium.opened("guide.ipynb") as page:
        page.run_all()
        page.sees("[data-offer=guide]", has_text="Guided first run").click()
        onward = page.tab.locator(".ftw-guide-foot .ftw-primary")
        page.sees(".ftw-guide h4", has_text="cores")
        onward.click()
        page.sees(".ftw-guide h4", has_text="What shall the model learn?")
        page.sees("[data-goal=prefer]").click()
        page.sees("[data-goal=prefer][aria-pressed=true]")
        page.sees(".ftw-guide-foot .ftw-primary", has_text="Begin this config")
        page.tab.locator("[data-goal=answer]").click()
        page.sees(".ftw-guide-foot .ftw-primary", has_text="Next")
        onward.click()
        page.sees(".ftw-guide", has_text="24,000 rows")
        page.tab.get_by_label("file of your rows").fill("gone.jsonl")
        page.tab.get_by_label("file of your rows").press("Enter")
        page.sees(".ftw-guide p[data-kind=bad]", has_text="no such file")
        page.tab.get_by_label("file of your rows").fill("ferry.jsonl")
        page.tab.get_by_role("button", name="Take these rows").click()
        page.sees(".ftw-guide", has_text="ferry.jsonl: the first 3")
        onward.click()
        page.sees(".ftw-guide h4", has_text="The first row:", seconds=180)
        page.tab.get_by_text("Words of this page").click()
        page.sees(".ftw-terms dt", has_text="chat template")
        onward.click()
        page.shows(
            "() => document.querySelector('.ftw-guide-foot .ftw-primary').textContent === 'Start the rehearsal'",
            "a rehearsal can be started",
        )
        onward.click()
        page.sees(".ftw-guide .ftw-chart", seconds=180)
        page.sees(".ftw-guide h4", has_text="word for word", seconds=180)
        assert ROWS[0][1] in page.tab.locator(".ftw-guide").inner_text()
        page.sees(".ftw-guide-foot button", has_text="Chat").click()
        line = page.tab.get_by_label("what to say")
        assert line.input_value() == ROWS[0][0]
        line.press("Enter")
        page.sees(".ftw-chat .ftw-said", has_text=ROWS[0][1], seconds=180)
        page.tab.locator("[data-tab=guide]").click()
        onward.click()
        page.sees(".ftw-guide", has_text="overfitting")
        onward.click()
        page.sees(".ftw-tab[data-tab=model][aria-selected=true]")
        page.tab.locator("[data-tab=runs]").click()
        page.tab.get_by_role("button", name="‹ Run", exact=True).click()
        page.tab.get_by_role("button", name="‹ Runs").click()
        page.sees(".ftw-run", has_text="rehearsal")
        assert (page.outside, page.errors) == ([], [])
    (run,) = runs_in(lab.root / "guided")
    browsing.until(lambda: run.state == "stopped", "the rehearsal has stopped by itself", state=lambda: run.state)
