"""The browser's side as text: genuine modules, no markup from strings, nothing fetched, no setting named."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from playwright._impl._driver import compute_driver_executable

import widgets
from engine.config.tree import fields
from widgets import Compare, ConfigForm, Monitor, Preview, Workbench

HERE = Path(widgets.__file__).parent
SCRIPTS = sorted((HERE / "static").glob("*.js"))
SOURCES = sorted(HERE.glob("*.py"))


@pytest.mark.parametrize("face", [Workbench, ConfigForm, Preview, Monitor, Compare])
def test_a_face_is_one_module_that_parses(face: type, tmp_path: Path) -> None:
    node = shutil.which("node") or compute_driver_executable()[0]  # Playwright brings one
    module = tmp_path / "face.mjs"
    module.write_text(str(face._esm), encoding="utf-8")  # type: ignore[attr-defined]
    done = subprocess.run([node, "--check", str(module)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "import " not in re.sub(r"/\*.*?\*/|//.*", "", str(face._esm), flags=re.S)  # type: ignore[attr-defined]


def test_a_view_that_asks_at_once_still_asks_one_question_after_the_other(tmp_path: Path) -> None:
    """A kick while an answer is waited for takes the place of the next turn, it does not come beside it."""
    (tmp_path / "dom.mjs").write_bytes((HERE / "static" / "dom.js").read_bytes())
    script = tmp_path / "kicks.mjs"
    script.write_text("""
import { timer } from "./dom.mjs";
const [due, open] = [[], []];
globalThis.document = { addEventListener() {}, hidden: false };
globalThis.IntersectionObserver = class { observe() {} };
globalThis.setTimeout = (act) => (due.push(act), act);
globalThis.clearTimeout = (act) => due.includes(act) && due.splice(due.indexOf(act), 1);
const clock = timer({}, () => new Promise((answer) => open.push(answer)));
due.shift()();
clock.kick();
due.shift()();
open.forEach((answer) => answer(100));
await new Promise((done) => setImmediate(done));
if (open.length !== 2 || due.length !== 1) throw new Error(`${open.length} asked, ${due.length} to come`);
""")
    node = shutil.which("node") or compute_driver_executable()[0]
    done = subprocess.run([node, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_edit_whose_answer_cannot_be_drawn_is_reported_and_the_next_is_sent(tmp_path: Path) -> None:
    (tmp_path / "draft.mjs").write_bytes((HERE / "static" / "draft.js").read_bytes())
    script = tmp_path / "edits.mjs"
    script.write_text("""
import { draftLink } from "./draft.mjs";
const [asked, reported] = [[], []];
globalThis.reportError = (trouble) => reported.push(trouble.message);
const link = draftLink({ ask: async (what) => (asked.push(what), { data: { specs: [], what } }) });
link.onState(({ what }) => { if (what === "first") throw new Error("not drawn"); });
if ((await link.send("first")) !== null) throw new Error("an edit that failed has no state");
const state = await link.send("second");
if (state.what !== "second" || asked.join() !== "first,second" || reported.join() !== "not drawn") throw new Error(`${asked}; ${reported}`);
""")
    node = shutil.which("node") or compute_driver_executable()[0]
    done = subprocess.run([node, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_module_imports_what_it_uses_and_nothing_else() -> None:
    """Bundled, all modules share one scope, so a forgotten import would show only in the face that lacks the module."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in SCRIPTS}
    homes = {
        name: stem
        for stem, text in texts.items()
        for name in re.findall(r"^export (?:async )?(?:function|class|const) (\w+)", text, re.M)
    }
    for stem, text in texts.items():
        imports = re.findall(r"^import \{ ([^}]*) \} from \"\./([a-z]+)\.js\";", text, re.M)
        taken = {name: home for names, home in imports for name in names.split(", ")}
        body = _code(text)
        used = {name: home for name, home in homes.items() if home != stem and re.search(rf"(?<![.\w]){name}\b", body)}
        called = {
            name: home for name, home in used.items() if re.search(rf"(?<![.\w]){name}(\(|\.| \()|new {name}\b", body)
        }
        assert called.items() <= taken.items(), stem
        assert taken.items() <= used.items(), stem


def _code(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", re.sub(r"^(import .*|\s*//.*)$", "", text, flags=re.M), flags=re.S)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_text_never_becomes_markup_and_nothing_is_fetched(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "fetch(",
                 "XMLHttpRequest", "WebSocket", "http://", "https://", "srcdoc", "setHTML"):  # fmt: skip
        assert word not in text, word


def test_styles_fetch_nothing() -> None:
    text = (HERE / "static" / "face.css").read_text(encoding="utf-8")
    assert "url(" not in text
    assert "@import" not in text


@pytest.mark.parametrize("source", [*SCRIPTS, *SOURCES], ids=lambda path: path.name)
def test_no_setting_is_named_by_a_string(source: Path) -> None:
    text = source.read_text(encoding="utf-8")
    named = [spec.path for spec in fields if re.search(rf"[\"'`]{re.escape(spec.path)}[\"'`.]", text)]
    assert named == []
