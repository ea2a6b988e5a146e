"""Text from rows, names, logs, metrics and samples stays text: no canary of it is ever executed or becomes an element."""

from __future__ import annotations

import json

import lab as browsing

from engine.run import store
from engine.run.events import EventWriter
from engine.run.rollouts import Completion, Group, RolloutFile

CANARY = '<img src=x onerror="window.fired=1"><script>window.fired=2</script>'


def hostile_run(lab: browsing.Lab) -> store.RunFolder:
    run = store.create(lab.root / "hostile", f"# {CANARY}\nversion: 1\n", {"name": CANARY, "host": "another-machine"})
    pen = EventWriter(run)
    pen.write("started", method=CANARY, model=CANARY, max_steps=3, epochs=1)
    for step in (1, 2, 3):
        pen.write("metrics", step=step, **{"loss": 1.0 / step, CANARY: 2.0})
    pen.write("sample", step=1, index=0, prompt=CANARY, completion=CANARY)
    entry = dict.fromkeys(("feature", "requested", "effective", "detail"), CANARY)
    pen.write("receipt", entries=[{**entry, "count": 1}])
    rewards = {CANARY: 1.0}
    texts = RolloutFile(run)
    group = texts.add(Group(3, 0, 0, CANARY, CANARY, [Completion(CANARY, 9, rewards, 1.0, 0.5, True)]))
    texts.close()
    pen.write("rollout", **(group or {}))
    pen.write("failed", step=3, cause="unknown", message=CANARY, lines=[CANARY])
    run.log.write_text(CANARY + "\x1b]0;x\x07\n")
    run.update_json(state="failed", message=CANARY, name=CANARY)
    return run


def test_hostile_text_in_names_rows_logs_and_metrics_stays_text(lab: browsing.Lab, chromium: browsing.Window) -> None:
    row = {"messages": [{"role": "user", "content": CANARY}, {"role": "assistant", "content": CANARY}]}
    (lab.root / "rows.jsonl").write_text(json.dumps(row) + "\n")
    run = hostile_run(lab)
    cells = [
        f"from widgets import Monitor, Preview, Workbench\nfrom engine.session.draft import Draft\nMonitor({str(run.path)!r})",
        "draft = Draft.new('demo')\ndraft.set('data.train', [{'path': 'rows.jsonl'}])\ndraft.unset('data.eval')\n"
        f"draft.set('run.name', {CANARY!r})\ndraft.set('run.prompts', [{CANARY!r}])\nPreview(draft, height=320)",
        "Workbench(draft, runs='hostile')",
    ]
    browsing.write_notebook(lab.root / "hostile.ipynb", cells)
    with chromium.opened("hostile.ipynb", height=1900) as page:
        page.run_all()
        page.sees(".ftw-card b")
        monitor, workbench = page.tab.locator(".ftw").nth(0), page.tab.locator(".ftw").nth(2)
        assert monitor.locator(".ftw-card b").inner_text() == CANARY
        for tab in ("samples", "rollouts", "log", "receipt", "config", "curves"):
            monitor.locator(f"[data-tab={tab}]").click()
            browsing.until(
                lambda: "onerror" in monitor.locator(".ftw-page").inner_text(), f"the page {tab}", state=page.state
            )
        monitor.locator("[data-tab=rollouts]").click()
        page.sees(".ftw-completion .ftw-raw", has_text="onerror")
        page.sees(".ftw-rows .ftw-trained")
        assert "onerror" in "".join(page.tab.locator(".ftw-tokens").first.all_inner_texts()).replace("\n", "")
        for tab in ("model", "data", "review", "launch", "runs"):
            workbench.locator(f"[data-tab={tab}]").click()
        page.sees(".ftw-runs td", has_text="onerror")
        assert page.tab.evaluate("window.fired") is None
        assert page.tab.locator(".ftw img, .ftw script").count() == 0
        assert (page.outside, page.errors) == ([], [])
