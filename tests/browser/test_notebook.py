"""The notebook face in a real JupyterLab and Chromium: built, previewed, launched, watched, and never reaching outside."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import lab as browsing

from engine.run import store
from engine.run.events import EventWriter

pytestmark = pytest.mark.skipif(bool(browsing.missing()), reason=browsing.missing())
WAIT = 60_000
LEARNING_RATE = "[data-path='optim.learning_rate']"
CANARY = '<img src=x onerror="window.fired=1"><script>window.fired=2</script>'


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browsing.Lab]:
    with browsing.serve(tmp_path_factory.mktemp("lab")) as served:
        yield served


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browsing.browser() as opened:
        yield opened


def until(check: Any, seconds: float = 30.0) -> None:
    give_up = time.monotonic() + seconds
    while not check():
        if time.monotonic() > give_up:
            raise TimeoutError("the effect did not show")
        time.sleep(0.1)


def test_a_form_edit_shows_a_finding_its_fix_mends_it_and_the_preview_shows_tokens(
    lab: browsing.Lab, chromium: Any
) -> None:
    """Two views of one widget: what is edited in the first is seen in the second."""
    cell = "from widgets import Workbench\nwb = Workbench(runs='runs')\ndisplay(wb)\ndisplay(wb)"
    browsing.write_notebook(lab.root / "form.ipynb", [cell])
    with browsing.opened(chromium, lab, "form.ipynb", height=1400) as page:
        page.run_all()
        first, second = page.tab.locator(".ftw").nth(0), page.tab.locator(".ftw").nth(1)
        first.locator(".ftw-goal").first.wait_for(timeout=WAIT)
        first.locator("[data-tab=method]").click()
        field = first.locator(LEARNING_RATE)
        field.locator("input").fill("-3")
        field.locator(".ftw-finding").wait_for(timeout=WAIT)
        assert "above 0" in field.inner_text()
        assert first.locator(".ftw-count").inner_text() == "✗ 1 error"
        second.locator(LEARNING_RATE).locator(".ftw-finding").wait_for(timeout=WAIT)
        field.locator(".ftw-fix").click()
        page.tab.wait_for_function("!document.querySelector('.ftw-count').textContent.includes('error')", timeout=WAIT)
        assert "auto" in field.inner_text()
        first.get_by_role("button", name="Save").click()
        first.get_by_label("file to save to").fill(str(lab.root / "mine.yaml"))
        first.get_by_role("button", name="Save").click()
        until((lab.root / "mine.yaml").exists)
        assert "-3" not in (lab.root / "mine.yaml").read_text()
        first.locator("[data-tab=preview]").click()
        page.tab.wait_for_selector(".ftw-rows .ftw-trained", timeout=WAIT)
        assert "<|im_end|>" in first.locator(".ftw-tokens .ftw-trained").last.inner_text()
        assert page.outside == []
        assert page.errors == []


def test_a_run_is_launched_watched_to_its_end_and_found_again_after_reload_and_kernel_restart(
    lab: browsing.Lab, chromium: Any
) -> None:
    small = {"optim.max_steps": 40, "optim.per_device_train_batch_size": 8, "run.save_steps": 20, "run.eval_steps": 40}
    cells = [
        f"from widgets import Workbench\nwb = Workbench(runs='runs', fresh=True)\n"
        f"for path, value in {small!r}.items():\n    wb.draft.set(path, value)\nwb",
        "import sys\nprint('heavy:', sorted({'torch', 'transformers', 'numpy', 'pandas'} & set(sys.modules)), 'end')",
    ]
    browsing.write_notebook(lab.root / "run.ipynb", cells)
    browsing.write_notebook(
        lab.root / "watch.ipynb", ["from widgets import Monitor\nMonitor('dates-0001', runs='runs')"]
    )
    with browsing.opened(chromium, lab, "run.ipynb") as page:
        page.run_all()
        page.tab.locator(".ftw-goal").first.wait_for(timeout=WAIT)
        page.tab.locator("[data-tab=launch]").click()
        page.tab.get_by_role("button", name="Start the run").click()
        page.tab.locator(".ftw-monitor").wait_for(timeout=WAIT)
        assert "heavy: [] end" in page.tab.locator(".jp-OutputArea-output pre").last.inner_text()
        # Reloaded while it trains: the same widget comes back from the kernel, on the step it was on.
        page.tab.evaluate("() => { window.jupyterapp.commands.execute('docmanager:save'); }")
        page.tab.wait_for_timeout(1000)
        page.tab.reload(wait_until="domcontentloaded")
        page.tab.locator(".ftw-launch button").wait_for(timeout=WAIT)
        assert page.outside == []
    run = store.find("dates-0001", lab.root / "runs")
    with browsing.opened(chromium, lab, "watch.ipynb") as page:
        page.run_all()
        page.tab.wait_for_function(
            "document.querySelector('.ftw-state')?.textContent === '✓ finished'", timeout=120_000
        )
        until(lambda: run.state == "finished")
        words = page.tab.locator(".ftw-canvas").first.get_attribute("aria-label")
        assert "last step 40" in words
        assert "step 40 of 40" in page.tab.locator(".ftw-share").inner_text()
        page.tab.locator("[data-tab=samples]").click()
        page.tab.locator(".ftw-answers").first.wait_for(timeout=WAIT)
        page.tab.locator("[data-tab=receipt]").click()
        page.tab.get_by_text("precision", exact=False).first.wait_for(timeout=WAIT)
        page.tab.evaluate("() => { document.querySelector('.ftw').dataset.before = 'restart'; }")
        page.tab.evaluate("() => { window.jupyterapp.commands.execute('notebook:restart-run-all'); }")
        page.tab.locator(".jp-Dialog .jp-mod-accept, .jp-Dialog .jp-mod-warn").first.click()
        page.tab.locator(".ftw:not([data-before]) .ftw-state", has_text="✓ finished").wait_for(timeout=WAIT)
        assert page.outside == []
        assert page.errors == []


def test_hostile_text_in_names_rows_logs_and_metrics_stays_text(lab: browsing.Lab, chromium: Any) -> None:
    (lab.root / "rows.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": CANARY}, {"role": "assistant", "content": CANARY}]}) + "\n"
    )
    info = {"name": "hostile", "method": CANARY, "model": CANARY, "host": "another-machine"}
    run = store.create(lab.root / "hostile", f"# {CANARY}\nversion: 1\n", info)
    pen = EventWriter(run)
    pen.write("started", method=CANARY, model=CANARY, max_steps=3, epochs=1)
    for step in (1, 2, 3):
        pen.write("metrics", step=step, **{"loss": 1.0 / step, CANARY: 2.0})
    pen.write("sample", step=1, index=0, prompt=CANARY, completion=CANARY)
    pen.write(
        "receipt", entries=[{"feature": CANARY, "requested": CANARY, "effective": CANARY, "count": 1, "detail": CANARY}]
    )
    pen.write("failed", step=3, cause="unknown", message=CANARY, lines=[CANARY])
    run.log.write_text(CANARY + "\x1b]0;x\x07\n")
    run.update_json(state="failed", message=CANARY)
    cells = [
        f"from widgets import Monitor, Preview\nfrom engine.config.draft import Draft\nMonitor({str(run.path)!r})",
        "draft = Draft.new('demo')\ndraft.set('data.train', [{'path': 'rows.jsonl'}])\ndraft.unset('data.eval')\n"
        "Preview(draft, height=320)",
    ]
    browsing.write_notebook(lab.root / "hostile.ipynb", cells)
    with browsing.opened(chromium, lab, "hostile.ipynb", height=1300) as page:
        page.run_all()
        monitor = page.tab.locator(".ftw").nth(0)
        monitor.locator(".ftw-card b").wait_for(timeout=WAIT)
        assert monitor.locator(".ftw-card b").inner_text() == CANARY
        for tab in ("samples", "log", "receipt", "config", "curves"):
            monitor.locator(f"[data-tab={tab}]").click()
            until(lambda: "onerror" in monitor.locator(".ftw-page").inner_text())
        page.tab.wait_for_selector(".ftw-rows .ftw-trained", timeout=WAIT)
        assert "onerror" in "".join(page.tab.locator(".ftw-tokens").first.all_inner_texts()).replace("\n", "")
        assert page.tab.evaluate("window.fired") is None
        assert page.tab.locator(".ftw img, .ftw script").count() == 0
        assert page.outside == []
        assert page.errors == []
