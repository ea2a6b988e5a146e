"""The chat in a real JupyterLab: from the button of a finished run, written while it loads, answers beside each other."""

from __future__ import annotations

import lab as browsing

from tests.chats import QUESTION, make_run


def test_the_button_of_a_finished_run_opens_its_chat(lab: browsing.Lab, chromium: browsing.Window) -> None:
    run = make_run(lab.root / "chats")
    (run.events).write_text(
        '{"v":1,"seq":0,"t":1,"rank":0,"segment":0,"kind":"started","method":"sft","model":"builtin/tiny","max_steps":10,"epochs":1}\n'
        '{"v":1,"seq":1,"t":9,"rank":0,"segment":0,"kind":"finished","step":10,"seconds":8}\n'
    )
    browsing.write_notebook(
        lab.root / "chat.ipynb", [f"from widgets import Monitor\nMonitor({run.id!r}, runs='chats')"]
    )
    with chromium.opened("chat.ipynb") as page:
        page.run_all()
        page.tab.get_by_role("button", name="Chat", exact=True).click()
        line = page.tab.get_by_label("what to say")
        line.fill(QUESTION)
        line.press("Enter")
        page.sees(".ftw-chat .ftw-phase", has_text="what you sent waits for it, esc takes it back")
        line.press("Escape")
        assert line.input_value() == QUESTION
        assert page.tab.locator(".ftw-chat .ftw-said").count() == 0
        line.press("Enter")
        page.shows(
            "() => document.querySelectorAll('.ftw-chat .ftw-side').length === 2"
            " && [...document.querySelectorAll('.ftw-chat .ftw-side')].every((side) => side.textContent.includes('/s'))",
            "both sides answer",
            240,
        )
        page.sees(".ftw-chat .ftw-side", has_text="base builtin/tiny")
        page.tab.get_by_role("button", name="Rendered prompt").click()
        page.sees(".ftw-chat .ftw-card", has_text="<|im_start|>assistant")
        page.tab.get_by_role("button", name="‹ Run").click()
        page.tab.get_by_role("button", name="Chat", exact=True).wait_for()
        assert (page.outside, page.errors) == ([], [])
