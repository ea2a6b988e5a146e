"""The form in a real JupyterLab: what is typed is judged, mended, saved and previewed, and every view of it agrees."""

from __future__ import annotations

from typing import Any

import lab as browsing

LEARNING_RATE = "[data-path='optim.learning_rate']"


def test_a_form_edit_shows_a_finding_its_fix_mends_it_and_the_preview_shows_tokens(
    lab: browsing.Lab, chromium: browsing.Window
) -> None:
    """Two views of one widget: what is edited in the first is seen in the second."""
    cell = "from widgets import Workbench\nwb = Workbench(runs='runs')\ndisplay(wb)\ndisplay(wb)"
    browsing.write_notebook(lab.root / "form.ipynb", [cell])
    with chromium.opened("form.ipynb", height=1400) as page:
        page.run_all()
        page.sees(".ftw-goal")
        first, second = page.tab.locator(".ftw").nth(0), page.tab.locator(".ftw").nth(1)
        page.tab.set_viewport_size({"width": 1100, "height": 1400})  # beside the file browser all steps are in view
        assert first.locator(".ftw-tabs").evaluate("tabs => tabs.scrollWidth - tabs.clientWidth") == 0
        counting = """name => {
            name.parentElement.querySelector('.ftw-quiet').textContent = 'counting the rows of builtin/dates …';
            name.parentElement.querySelector('.ftw-plain').hidden = false;
            return [name.textContent, name.scrollWidth - name.clientWidth];
        }"""
        assert first.locator(".ftw-name").evaluate(counting) == ["demo", 0], "it is whole while rows are counted"
        first.locator("[data-recipe=kto]").hover()
        page.sees(".ftw-explain code", has_text='"label"')
        first.locator("[data-tab=method]").click()
        first.locator("[data-path='method.kind'] select").focus()
        page.sees(".ftw-explain h4", has_text="SFT: learn to answer")
        field = first.locator(LEARNING_RATE)
        field.locator("input").fill("-3")
        page.sees(f"{LEARNING_RATE} .ftw-finding")
        assert "above 0" in field.inner_text()
        assert field.locator("input").get_attribute("aria-invalid") == "true"
        named = field.locator("input").get_attribute("aria-describedby")
        assert "above 0" in first.locator(f"#{named}").inner_text()
        assert first.get_by_role("tabpanel", name="Method").count() == 1
        assert first.locator(".ftw-count").inner_text() == "✗ 1 error"
        second.locator(LEARNING_RATE).locator(".ftw-finding").wait_for()
        assert field.locator(".ftw-fix").count() == 0, "nobody knows which number was meant"
        field.locator("input").fill("auto")
        page.shows("() => !document.querySelector('.ftw-count').textContent.includes('error')", "no error is left")
        first.locator("[data-tab=data]").click()
        limit = first.locator("[data-path='data.max_length']")
        limit.locator("input").fill("5000")
        limit.locator(".ftw-fix").click()
        limit.locator(".ftw-finding").wait_for(state="detached")
        assert limit.locator("input").input_value() == "4096"
        first.get_by_role("button", name="Save").click()
        first.get_by_label("file to save to").fill(str(lab.root / "mine.yaml"))
        first.get_by_role("button", name="Save").click()
        browsing.until((lab.root / "mine.yaml").exists, "the config is saved", state=page.state)
        assert "-3" not in (lab.root / "mine.yaml").read_text()
        (lab.root / "mine.yaml").write_text("version: 1\n")
        first.get_by_role("button", name="Save").click()
        page.sees(".ftw-notice", has_text="was changed by someone else")
        assert first.get_by_label("file to save to").input_value() == str(lab.root / "mine.yaml")
        assert (lab.root / "mine.yaml").read_text() == "version: 1\n"
        first.get_by_role("button", name="Replace it").click()
        first.get_by_label("file to save to").wait_for(state="hidden")
        assert "max_length: 4096" in (lab.root / "mine.yaml").read_text()
        assert first.locator(".ftw-notice").is_hidden()
        levels_open_one_after_the_other(first)
        the_file_is_typed_and_taken(first)
        first.locator("[data-tab=preview]").click()
        page.sees(".ftw-rows .ftw-trained")
        assert "<|im_end|>" in first.locator(".ftw-tokens .ftw-trained").last.inner_text()
        first.get_by_role("button", name="Columns").click()
        page.sees(".ftw-columns-part select")
        page.sees(".ftw-says dd")
        assert first.get_by_label("messages *").input_value() == "messages"
        first.get_by_role("button", name="Template", exact=True).click()
        page.sees(".ftw-template-row .ftw-trained")
        assert "add_generation_prompt" in first.get_by_label("chat template", exact=True).input_value()
        typed = "map => { const box = map.querySelector('textarea'); box.value += '{# mine #}'; box.dispatchEvent(new Event('input'));"
        typed += " [...map.querySelectorAll('button')].find((each) => each.textContent === 'Save template').click(); }"
        first.locator("[aria-label='Chat template']").evaluate(typed)
        browsing.until((lab.root / "template.jinja").exists, "the template is saved", state=page.state)
        assert (lab.root / "template.jinja").read_text().endswith("{# mine #}"), "with what was typed last"
        assert first.get_by_label("chat template", exact=True).input_value().endswith("{# mine #}")
        first.get_by_role("button", name="↶ Undo").click()
        pictures_are_seen(page, first)
        assert (page.outside, page.errors) == ([], [])


def pictures_are_seen(page: browsing.Page, form: Any) -> None:
    """Rows of a model that sees hold their pictures, drawn by the browser, each with its size and its tokens."""
    form.locator("[data-tab=model]").click()
    form.locator("[data-path='model.name'] input").fill("builtin/tiny-vl")
    form.locator("[data-tab=data]").click()
    form.locator("[data-path='data.train'] input").first.fill("builtin/shapes")
    form.locator("[data-tab=preview]").click()
    page.sees(".ftw-image img")
    picture = form.locator(".ftw-image img").first
    assert picture.get_attribute("src").startswith("data:image/")
    browsing.until(
        lambda: picture.evaluate("each => each.complete && [each.naturalWidth, each.naturalHeight]") == [32, 32],
        "the picture is drawn at its size",
        state=page.state,
    )
    assert "32 x 32 pixels, seen as 32 x 32, 7 tokens" in form.locator(".ftw-image figcaption").first.inner_text()


def the_file_is_typed_and_taken(form: Any) -> None:
    """What cannot be read is told until it can, and what is typed while the kernel reads is not drawn over."""
    form.locator("[data-tab=review]").click()
    area, take = form.get_by_label("the config as YAML"), form.get_by_role("button", name="Take this text")
    browsing.until(lambda: "version: 1" in area.input_value(), "the file is shown")
    good = area.input_value()
    area.fill("optim: [")
    take.click()
    form.locator(".ftw-notice", has_text="YAML").wait_for()
    area.fill(f"{good}# mine\n")
    take.click()
    form.locator(".ftw-notice").wait_for(state="hidden")
    typing = "box => { box.querySelector('button').click(); const area = box.querySelector('textarea');"
    typing += " area.value += '# typed meanwhile\\n'; area.dispatchEvent(new Event('input')); }"
    area.fill(f"{good}# ours\n")
    form.locator(".ftw-yamlbox").evaluate(typing)
    form.get_by_role("button", name="undo", exact=False).first.click()
    form.get_by_role("button", name="redo", exact=False).first.click()
    form.locator("[data-tab=data]").click()
    form.locator("[data-path='data.train']").wait_for()
    assert area.input_value() == f"{good}# ours\n# typed meanwhile\n"
    form.locator("[data-tab=review]").click()
    form.get_by_role("button", name="Discard").click()
    browsing.until(lambda: area.input_value() == f"{good}# ours\n", "the file as it is")


def levels_open_one_after_the_other(form: Any) -> None:
    """Basic settings first; a press shows the advanced ones, another the expert ones, a last one the basic ones again."""
    form.locator("[data-tab=data]").click()
    form.locator("[data-path='data.train']").wait_for()
    more, fewer = form.locator(".ftw-more", has_text="+"), form.locator(".ftw-more", has_text="− fewer settings")
    rows, shown = form.locator(".ftw-field"), []
    for level in ("advanced", "expert"):
        shown.append(rows.count())
        words = more.inner_text()
        assert words.endswith(f"({level})")
        more.click()
        assert rows.count() == shown[-1] + int(words.split()[1])
    assert more.count() == 0
    # A step begins at its top, also where the one before was read to its end.
    place = "page => [page.scrollTop, page.scrollHeight - page.clientHeight]"
    form.locator(".ftw-main").evaluate("page => { page.scrollTop = 1e6; }")
    assert form.locator(".ftw-main").evaluate(place)[0] > 300
    form.locator("[data-tab=memory]").click()
    form.locator(".ftw-field").first.wait_for()
    browsing.until(
        lambda: (at := form.locator(".ftw-main").evaluate(place))[0] == 0 and at[1] > 300, "the step's top is in view"
    )
    form.locator("[data-tab=data]").click()
    form.locator("[data-path='data.train']").wait_for()
    fewer.click()
    assert rows.count() == shown[0]
    assert fewer.count() == 0
