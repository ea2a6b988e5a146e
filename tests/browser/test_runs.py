"""Runs in a real JupyterLab: launched, reloaded, restarted, watched several at once, stopped from another window."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import lab as browsing
import pytest

from engine.run import checkpoint, store
from engine.run.events import EventWriter
from engine.run.in_flight import InFlight
from engine.run.store import RunFolder
from tests import hung
from tests.checkpointed import run_of_four, steps


def ended(run: RunFolder, page: browsing.Page, *, state: str) -> None:
    def log() -> str:
        return (
            f"{run.state}\n{run.log.read_text('utf-8', 'replace')[-800:] if run.log.exists() else ''}\n{page.state()}"
        )

    browsing.until(lambda: run.state == state, f"the run is {state}", seconds=100, state=log)


def test_a_run_is_launched_and_found_again_after_a_reload_and_a_kernel_restart(
    lab: browsing.Lab, chromium: browsing.Window
) -> None:
    small = {"optim.max_steps": 40, "optim.per_device_train_batch_size": 8, "run.save_steps": 20, "run.eval_steps": 40}
    cells = [
        f"from widgets import Workbench\nwb = Workbench(runs='launched', fresh=True)\n"
        f"for path, value in {small!r}.items():\n    wb.draft.set(path, value)\nwb",
        "import sys\nprint('heavy:', sorted({'torch', 'transformers', 'numpy', 'pandas'} & set(sys.modules)), 'end')",
    ]
    browsing.write_notebook(lab.root / "run.ipynb", cells)
    with chromium.opened("run.ipynb") as page:
        page.run_all()
        page.sees(".ftw-goal")
        page.tab.locator("[data-tab=launch]").click()
        page.tab.get_by_role("button", name="Start the run").click()
        page.sees(".ftw-monitor")
        assert "heavy: [] end" in page.tab.locator(".jp-OutputArea-output pre").last.inner_text()
        # Reloaded while it trains: the same widget comes back from the kernel, on the step it was on.
        page.save(lab.root / "run.ipynb", "widget-view+json")
        page.tab.reload(wait_until="domcontentloaded")
        page.sees(".ftw-launch button")
        page.tab.locator("[data-tab=runs]").click()
        page.sees(".ftw-run", has_text="dates-0001").click()
        run = store.find("dates-0001", lab.root / "launched")
        ended(run, page, state="finished")
        page.sees(".ftw-state", has_text="✓ finished")
        page.shows("() => document.querySelector('.ftw-share').innerText.includes('step 40 of 40')", "the last step")
        assert "last step 40" in (page.tab.locator(".ftw-canvas").first.get_attribute("aria-label") or "")
        # The card of its end: what it leaves, and a button for each way on.
        page.sees(".ftw-end dd", has_text="checkpoint-40")
        page.sees(".ftw-end code", has_text="workbench resume dates-0001 --set optim.max_steps=80")
        root, steps, pages = (
            page.tab.locator(each).first for each in (".ftw", ".ftw-tabs", ".ftw-monitor > .ftw-page")
        )
        assert steps.bounding_box()["y"] > root.bounding_box()["y"], "the card leaves the head in view"
        assert pages.bounding_box()["height"] > 100, "the card leaves room for the curves"
        page.tab.get_by_role("button", name="Measure it").click()
        page.sees(".ftw-end dd", has_text="rows of data.eval: loss")
        page.tab.get_by_role("button", name="Train longer").click()
        page.shows("() => document.querySelector('.ftw-share').innerText.includes('of 80')", "it goes on")
        ended(run, page, state="finished")
        page.shows("() => document.querySelector('.ftw-share').innerText.includes('step 80 of 80')", "the last step")
        page.sees(".ftw-end dd", has_text="checkpoint-80")
        page.tab.get_by_label("gguf", exact=True).check()
        page.tab.get_by_label("number format of the GGUF").select_option("Q8_0")
        page.tab.get_by_role("button", name="Take it along").click()
        page.sees(".ftw-phase", has_text="✓ safetensors")
        page.sees(".ftw-phase", has_text="✗ gguf: tokenizer.json: is a tokenizer that cuts texts by rules")
        assert ".;" not in page.tab.locator(".ftw-phase").first.inner_text()
        page.tab.locator("[data-tab=samples]").click()
        page.sees(".ftw-answers")
        page.tab.locator("[data-tab=receipt]").click()
        page.sees(".ftw-page td", has_text="precision")
        # The kernel restarted: the old view says so. The notebook run again: a new view over the same folder.
        page.tab.evaluate("() => { document.querySelector('.ftw').dataset.before = 'restart'; }")
        page.command("kernelmenu:restart")
        page.sees(".jp-Dialog .jp-mod-accept, .jp-Dialog .jp-mod-warn").click()
        page.sees(".ftw-notice", has_text="A run that is going is not touched.")
        page.ready("run.ipynb")
        page.command("notebook:run-all-cells")
        page.sees(".ftw:not([data-before]) .ftw-goal")
        page.tab.locator("[data-tab=runs]").click()
        page.sees(".ftw-runs .ftw-state", has_text="✓ finished")
        assert (page.outside, page.errors) == ([], [])


def test_the_way_to_the_first_step_is_shown_with_its_times(lab: browsing.Lab, chromium: browsing.Window) -> None:
    run = store.create(lab.root / "starting", "version: 1\n", {"name": "written", "host": "another-machine"})
    run.update_json(state="starting")
    pen = EventWriter(run)
    pen.write("phase", name="Loading the libraries")
    pen.write("phase", name="Loading the tokenizer")
    cells = [f"from widgets import Monitor\nMonitor({run.id!r}, runs={str(run.path.parent)!r})"]
    browsing.write_notebook(lab.root / "way.ipynb", cells)
    with chromium.opened("way.ipynb") as page:
        page.run_all()
        page.sees(".ftw-way li[data-state=now]", has_text="tokenizer")
        done = page.tab.locator(".ftw-way li[data-state=done]")
        assert done.locator("span").nth(1).inner_text() == "libraries"
        assert done.locator("span").nth(2).inner_text().endswith("s")
        words = page.tab.locator(".ftw-way li > span:nth-child(2)").all_inner_texts()
        assert words == ["libraries", "tokenizer", "rows", "model", "trainer", "first step"]
        # The seconds of what goes on go on.
        page.shows(
            "() => /^[1-9]/.test(document.querySelector('.ftw-way li[data-state=now] > :last-child').innerText)", "time"
        )
        if picture := os.environ.get("WORKBENCH_TEST_PICTURES"):
            page.tab.screenshot(path=f"{picture}/way.png")
        pen.write("started", method="sft", model="builtin/tiny", max_steps=50, epochs=1)
        pen.write("metrics", step=1, loss=2.0)
        page.shows("() => document.querySelector('.ftw-way').hidden", "the way is over")
        assert (page.outside, page.errors) == ([], [])


@pytest.fixture
def endless(lab: browsing.Lab) -> Iterator[RunFolder]:
    """A run that a terminal's command started and that nothing ends but a request."""
    root = lab.root / "elsewhere"
    sizes = ["optim.max_steps=100000", "optim.per_device_train_batch_size=4"]
    command = [sys.executable, "-m", "workbench"]
    terminal = subprocess.Popen([*command, "demo", "--detach", "--runs", str(root), *sizes], stdout=subprocess.DEVNULL)
    browsing.until(lambda: (root / "dates-0001" / "run.json").exists(), "the terminal has made a run")
    run = store.find("dates-0001", root)
    yield run
    terminal.wait(timeout=browsing.SECONDS)
    if run.state not in store.ENDED:
        subprocess.run([*command, "stop", run.id, "--now", "--runs", str(root)], timeout=browsing.SECONDS)


@pytest.mark.slow
def test_several_monitors_follow_runs_started_elsewhere_and_one_is_stopped_from_here(
    lab: browsing.Lab, chromium: browsing.Window, endless: RunFolder
) -> None:
    """One run is trained by a terminal's command, the other is written while it is watched."""
    root = endless.path.parent
    written = store.create(root, "version: 1\n", {"name": "written", "host": "another-machine"})
    written.update_json(state="running")
    pen = EventWriter(written)
    pen.write("started", method="sft", model="builtin/tiny", max_steps=50, epochs=1)
    pen.write("metrics", step=1, loss=2.0)
    cells = [
        f"from widgets import Monitor\nfirst = Monitor('dates-0001', runs={str(root)!r})\nfirst",
        f"second = Monitor('written-0001', runs={str(root)!r})\nsecond",
        "second",
    ]
    browsing.write_notebook(lab.root / "watch.ipynb", cells)
    with chromium.opened("watch.ipynb", height=1900) as page:
        page.run_all()
        for at, word in enumerate(("dates-0001", "written-0001", "written-0001")):
            name = page.tab.locator(".ftw").nth(at).locator(".ftw-name", has_text=word)
            name.wait_for()
        page.shows(
            "() => /step [1-9]/.test(document.querySelectorAll('.ftw-share')[0].innerText)", "steps of the first"
        )
        # It has shown that it is followed, and would take a core for as long as the other one is looked at.
        worker = endless.worker()
        assert worker is not None
        os.kill(worker.pid, signal.SIGSTOP)
        for step in range(2, 31):
            pen.write("metrics", step=step, loss=2.0 / step)
        page.shows(
            "() => [1, 2].every((at) => document.querySelectorAll('.ftw-share')[at].innerText.includes('step 30 of 50'))",
            "step 30 in both views",
        )
        os.kill(worker.pid, signal.SIGCONT)
        # By keys alone: the menu opens at its first way, and who pressed it is still in this view when its buttons have gone.
        page.tab.get_by_role("button", name="Stop or save…").first.press("Enter")
        page.shows("() => document.activeElement.textContent === 'Save, then stop'", "the first way to stop is focused")
        page.tab.keyboard.press("Enter")
        ended(endless, page, state="stopped")
        page.sees(".ftw-state", has_text="■ stopped")
        assert page.tab.evaluate("document.activeElement.closest('.ftw') === document.querySelector('.ftw')")
        assert list(endless.checkpoints.glob("checkpoint-*"))
        assert (page.outside, page.errors) == ([], [])


def test_a_hung_run_shows_where_it_is_and_changed_rows_are_gone_on_with_by_buttons(
    lab: browsing.Lab, chromium: browsing.Window
) -> None:
    """The worker hangs in earnest. What compares rows and what starts a worker are stood in for: the buttons are looked at."""
    root = lab.root / "asked"
    stuck = store.create(root, "version: 1\n", {"name": "stuck", "method": "sft", "model": "builtin/tiny"})
    hung.steps_taken(stuck)
    changed = store.create(root, "version: 1\n", {"name": "changed", "host": "another-machine"})
    with EventWriter(changed) as pen:
        pen.write("started", method="sft", model="builtin/tiny", max_steps=50, epochs=1)
        pen.write("metrics", step=1, loss=2.0)
        pen.write("stopped", step=1, seconds=1.0, by="someone")
    changed.update_json(state="stopped")
    empty = store.create(root, "version: 1\n", {"name": "empty", "host": "another-machine"})
    with EventWriter(empty) as pen:
        pen.write("started", method="sft", model="builtin/tiny", max_steps=50, epochs=1)
        pen.write("stopped", step=0, seconds=1.0, by="someone")
    empty.update_json(state="stopped")
    cells = [
        "import pathlib, engine.session.resume\nfrom engine.run import launch\n"
        "launch.settle = lambda folder: None\n"
        "engine.session.resume.data_changes = lambda *words: ['data.train: row 3 of 40 differs']\n"
        f"launch.resume = lambda folder, **how: pathlib.Path({str(lab.root)!r}, 'how.txt').write_text(str(how))",
        f"from widgets import Monitor\nMonitor('stuck-0001', runs={str(root)!r})",
        f"Monitor('changed-0001', runs={str(root)!r})",
        f"Monitor('empty-0001', runs={str(root)!r})",
    ]
    browsing.write_notebook(lab.root / "asked.ipynb", cells)
    with hung.in_c(stuck) as worker, chromium.opened("asked.ipynb", height=1900) as page:
        hung.put_back(stuck, 45)
        page.run_all()
        page.sees(".ftw-share", has_text="silent for")
        page.sees("button", has_text="Where is it?").click()
        shown = page.sees("pre.ftw-card", has_text="in deep_inside").inner_text()
        assert f"process {worker.pid}:" in shown
        page.sees(".ftw-empty", has_text="This run made no step, so it has no curves.")
        accept = page.tab.get_by_role("button", name="Go on with the rows as they are now")
        assert accept.count() == 0, "nobody has asked to resume yet"
        page.tab.get_by_role("button", name="Resume", exact=True).first.click()
        page.sees(".ftw", has_text="row 3 of 40 differs")
        assert not (lab.root / "how.txt").exists()
        accept.click()
        how, accepted = lab.root / "how.txt", "{'accept_data': True}"
        browsing.until(
            lambda: how.exists() and how.read_text() == accepted, "the run is gone on with", state=page.state
        )
        assert (page.outside, page.errors) == ([], [])


@pytest.mark.slow
def test_a_failed_run_tells_memory_and_rows_and_a_finished_one_takes_a_task_to_be_scored_by(
    lab: browsing.Lab, chromium: browsing.Window
) -> None:
    root = lab.root / "over"
    (lab.root / "packages" / "lm_eval").mkdir(parents=True)
    (lab.root / "packages" / "lm_eval" / "__init__.py").touch()
    for name in ("broken", "whole"):
        run = store.create(root, "version: 1\n", {"name": name, "host": "another-machine"})
        with EventWriter(run) as pen:
            pen.write("started", method="sft", model="builtin/tiny", max_steps=2, epochs=1)
            for step in (1, 2):
                pen.write("metrics", step=step, loss=2.0, memory_allocated=step << 30)
            if name == "broken":
                InFlight(run).note(3, [17, 4])
                pen.write("failed", cause="cuda_oom", message="The GPU ran out of memory.", lines=[])
            else:
                checkpoint.commit(checkpoint.begin(run, 2), {})
                pen.write("checkpoint", step=2, path="checkpoints/checkpoint-2", state="committed", bytes=1)
                pen.write("finished", step=2, seconds=1.0)
        run.update_json(state="failed" if name == "broken" else "finished")
    cells = [
        f"import sys\nsys.path.insert(0, {str(lab.root / 'packages')!r})\nfrom widgets import Monitor\n"
        f"Monitor('broken-0001', runs={str(root)!r})",
        f"Monitor('whole-0001', runs={str(root)!r})",
    ]
    browsing.write_notebook(lab.root / "over.ipynb", cells)
    with chromium.opened("over.ipynb", height=1900) as page:
        page.run_all()
        card = page.sees(".ftw-card", has_text="The GPU ran out of memory.").inner_text()
        assert "1.0 GiB at step 1, 2.0 GiB at step 2" in card
        assert "step 3: rows 17, 4" in card
        page.tab.get_by_label("task of lm-evaluation-harness").fill("nothing.yaml")
        page.tab.get_by_role("button", name="Score it").click()
        page.sees(".ftw-notice", has_text="nothing.yaml. Its rows lie on this machine")  # there is no such file
        assert page.tab.get_by_label("task of lm-evaluation-harness").input_value() == "nothing.yaml"
        assert (page.outside, page.errors) == ([], [])


@pytest.mark.slow
def test_runs_marked_in_the_list_are_laid_beside_each_other_and_followed(
    lab: browsing.Lab, chromium: browsing.Window
) -> None:
    root = lab.root / "beside"
    runs, pens = [], []
    for name, rate in (("slow", "0.0001"), ("quick", "0.0003")):
        text = f"version: 1\nmodel:\n  name: builtin/tiny\noptim:\n  learning_rate: {rate}\n"
        run = store.create(root, text, {"name": name, "host": "another-machine"})
        run.update_json(state="running")
        runs.append(run)
        pens.append(EventWriter(run))
        pens[-1].write("started", method="sft", model="builtin/tiny", max_steps=50, epochs=1)
        for step in range(1, 6):
            pens[-1].write("metrics", step=step, loss=2.0 / step, memory_peak=2.0**30)
        pens[-1].write("sample", step=5, index=0, prompt="2 + 2?", completion=f"<b>{name}</b>")
    cells = [f"from widgets import Workbench\nWorkbench(runs={str(root)!r}, fresh=True)"]
    browsing.write_notebook(lab.root / "beside.ipynb", cells)
    with chromium.opened("beside.ipynb") as page:
        page.run_all()
        page.sees(".ftw-goal")
        page.sees("[data-tab=runs][aria-label='Runs, 2 of them go on']").click()
        compare = page.tab.get_by_role("button", name="Compare", exact=True)
        page.sees("[data-mark=slow-0001]").check()
        assert compare.is_disabled()
        page.tab.locator("[data-mark=quick-0001]").check()
        compare.click()
        page.sees(".ftw-legend", has_text="quick-0001")
        label = "() => document.querySelector('.ftw-canvas')?.getAttribute('aria-label') ?? ''"
        page.shows(f"() => ({label})().includes('slow-0001 0.4, quick-0001 0.4')", "both newest losses")
        for step in range(6, 9):
            pens[1].write("metrics", step=step, loss=2.0 / step, memory_peak=2.0**30)
        page.shows(f"() => ({label})().includes('quick-0001 0.25')", "the newest loss of the one that goes on")
        page.sees(".ftw-beside td", has_text="0.25 (0.25 to 2)")
        page.sees(".ftw-beside td", has_text="1.0 GiB (1.0 GiB to 1.0 GiB)")
        page.tab.locator("[data-tab=settings]").click()
        page.sees(".ftw-beside tbody tr", has_text="optim.learning_rate")
        assert page.tab.locator(".ftw-beside tbody td").all_inner_texts() == ["0.0001", "0.0003"]
        page.tab.locator("[data-tab=answers]").click()
        page.sees(".ftw-answers dd", has_text="<b>quick</b>")
        pens[1].write("stopped", step=8, seconds=1.0, by="a person")
        runs[1].update_json(state="stopped")
        page.sees("[data-tab=runs][aria-label='Runs, 1 of them goes on']")
        page.tab.evaluate("() => { window.left = new WeakRef(document.querySelector('.ftw-monitor')); }")
        page.tab.get_by_role("button", name="‹ Runs").click()
        page.sees(".ftw-runs input")
        assert page.tab.locator(".ftw-runs input:checked").count() == 2
        page.tab.locator("[data-mark=slow-0001]").focus()
        devtools = page.tab.context.new_cdp_session(page.tab)

        def forgotten() -> bool:
            devtools.send("HeapProfiler.collectGarbage")
            return bool(page.tab.evaluate("() => window.left.deref() === undefined"))

        browsing.until(forgotten, "a view that was left takes no memory")
        assert (page.outside, page.errors) == ([], [])


@pytest.mark.slow
def test_checkpoints_are_shown_with_why_they_stay_or_go_and_go_by_a_button(
    lab: browsing.Lab, chromium: browsing.Window
) -> None:
    run = run_of_four(lab.root / "pruned")
    cells = [f"from widgets import Monitor\nMonitor('my-0001', runs={str(run.path.parent)!r})"]
    browsing.write_notebook(lab.root / "prune.ipynb", cells)
    with chromium.opened("prune.ipynb") as page:
        page.run_all()
        page.sees(".ftw-end button", has_text="Free disk")
        page.tab.get_by_role("button", name="Checkpoints…").click()
        panel = page.sees(".ftw-prune", has_text="held-out loss 1, the best")
        top, news = panel.bounding_box(), page.tab.locator(".ftw-news").bounding_box()
        assert abs(top["y"] - news["y"]) < 20, "it is in view also where the card above was scrolled"
        assert "checkpoint-4, 4.1 KiB" in panel.inner_text()
        if folder := os.environ.get("WORKBENCH_TEST_PICTURES"):
            page.tab.screenshot(path=f"{folder}/prune-notebook.png")
        page.tab.get_by_role("button", name="Remove nothing").click()
        assert steps(run) == [1, 2, 3, 4]
        page.tab.get_by_role("button", name="Free disk").click()
        page.tab.get_by_label("so many of the newest stay").fill("2")
        page.tab.get_by_label("so many of the newest stay").press("Tab")
        page.tab.get_by_role("button", name="Remove 1 checkpoint, which frees 1.1 KiB").click()
        browsing.until(lambda: steps(run) == [2, 3, 4], "it is removed", state=page.state)
        page.sees(".ftw-phase", has_text="1 checkpoint removed, 1.1 KiB free.")
        assert (page.outside, page.errors) == ([], [])
