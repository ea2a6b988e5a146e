/**
 * The form put together: head line, step tabs, the page of a step, the right column and the findings, over one draft.
 * `Workbench()` takes the same parts and adds its own tabs.
 */
import { fieldsView } from "./fields.js";
import { button, fill, h, openWhenReady, say, tabs } from "./dom.js";
import { draftLink, watchDraft } from "./draft.js";
import { findingsView } from "./findings.js";
import { sideView } from "./side.js";
import { blocksView, goalsView, yamlView } from "./steps.js";

/** The form alone, as `ConfigForm(draft)` shows it. */
export function configForm(stage) {
  const link = draftLink(stage);
  const parts = formParts(stage, link);
  const columns = h("div", { class: "ftw-columns" }, parts.main, parts.side.element);
  parts.steps.show(columns);
  fill(stage.body, parts.head, parts.steps.bar, columns, parts.findings.element);
  link.onState(parts.draw);
  openWhenReady(stage, () => link.send("state"));
  stage.onEnd(watchDraft(stage, link));
}

/** Head line, step tabs, page, side column and findings, wired to one link; `more` are further tabs. */
export function formParts(stage, link, more = null) {
  const side = sideView(link);
  const form = fieldsView(link, side.focus);
  const [goals, blocks, yaml] = [goalsView(link, side.consider), blocksView(), yamlView(stage, link)];
  const extra = h("div", {});
  const jump = async (finding) => {
    if (finding.step && finding.step !== link.state.step) await link.send("step", { step: finding.step });
    more?.leave();
    form.jump(finding.path);
  };
  const findings = findingsView(link, jump);
  const title = h("strong", { class: "ftw-name" });
  const state = h("span", { class: "ftw-count", role: "status" });
  const working = h("span", { class: "ftw-quiet", role: "status" });
  const undo = button("↶ Undo", () => link.send("undo"), { class: "ftw-plain" });
  const redo = button("↷ Redo", () => link.send("redo"), { class: "ftw-plain" });
  const stop = button("Stop counting", () => link.send("count"), { class: "ftw-plain", hidden: true });
  const head = h("header", { class: "ftw-head" }, title, state, working, stop, h("span", { class: "ftw-space" }), findBox(stage, (hit) => (hit.about.length ? side.aside(hit.title, hit.about) : jump(hit))), undo, redo, saveBox(stage, link));
  const steps = tabs("steps", (step) => {
    form.flush();
    if (more?.open(step)) return null;
    return link.send("step", { step });
  });
  const main = h("div", { class: "ftw-main" }, goals.element, extra, form.element, blocks.element, yaml.element);
  let step = "";
  const draw = (now) => {
    say(title, now.name + (now.dirty ? " *" : ""));
    title.title = now.path;
    title.style.minWidth = `${Math.min(title.textContent.length, 12) + 1}ch`; // a short name is not cut, however full the head
    const count = (severity) => now.findings.filter((finding) => finding.severity === severity).length;
    const [bad, soft] = [count("error"), count("warning") + count("hint")];
    say(state, bad ? `✗ ${bad} ${bad === 1 ? "error" : "errors"}` : soft ? `? ${soft} to look at` : "✓ ready");
    state.dataset.kind = bad ? "error" : soft ? "hint" : "ok";
    say(working, now.words);
    stop.hidden = !now.counting && !now.stopped;
    say(stop, now.counting ? "Stop counting" : "Count the rows");
    undo.disabled = !now.undo;
    redo.disabled = !now.redo;
    steps.set([...now.steps.map((step) => ({ ...step, here: step.id === now.step && !more?.current() })), ...(more?.tabs() ?? [])]);
    const turned = step !== now.step;
    step = now.step;
    const field = main.querySelector(":focus")?.closest(".ftw-field");
    const below = () => field.getBoundingClientRect().bottom - main.getBoundingClientRect().bottom;
    const inView = field && below() <= 0;
    for (const view of [goals, form, blocks, yaml, side, findings]) view.draw(now);
    // In a narrow cell page and column scroll together.
    if (turned) main.scrollTop = main.parentElement.scrollTop = 0;
    // Findings that appear take height from the page: the field that is written in stays in view.
    else if (inView && field.isConnected) main.scrollTop += Math.max(0, below());
  };
  return { head, steps, main, extra, side, findings, form, draw, jump };
}

/** Find a setting or a term by words of its name or help; `chosen` gets the hit. */
function findBox(stage, chosen) {
  const input = h("input", { type: "search", class: "ftw-find", placeholder: "find a setting", "aria-label": "find a setting" });
  const list = h("div", { class: "ftw-hits", role: "group", "aria-label": "what was found", hidden: true });
  const look = async () => {
    if (!input.value.trim()) return void (list.hidden = true);
    const answer = await stage.ask("find", { text: input.value });
    list.hidden = !answer;
    const go = (hit) => () => ((list.hidden = true), (input.value = ""), chosen(hit));
    if (answer) fill(list, answer.data.found.map((hit) => button([h("b", {}, hit.title), " ", h("code", {}, hit.path), hit.whose ? h("small", { class: "ftw-quiet" }, ` ${hit.whose}`) : null], go(hit), { class: "ftw-hit" })));
    if (answer && !answer.data.found.length) fill(list, h("p", { class: "ftw-quiet" }, "No setting and no term has these words."));
    return null;
  };
  let hold = 0;
  input.addEventListener("input", () => (clearTimeout(hold), (hold = setTimeout(look, 200))));
  const box = h("span", { class: "ftw-findbox" }, input, list);
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") (list.contains(document.activeElement) && input.focus(), (list.hidden = true));
    if (event.key === "Enter" && event.target === input) list.querySelector("button")?.click();
    if (!["ArrowDown", "ArrowUp"].includes(event.key) || list.hidden) return;
    event.preventDefault(); // the list would scroll beside the choice
    const [inLine, down] = [document.activeElement === input, event.key === "ArrowDown"];
    const next = inLine ? (down ? list.firstChild : null) : down ? document.activeElement.nextSibling : document.activeElement.previousSibling ?? input;
    next?.focus?.();
  });
  // Later, so that a click on a hit still meets it.
  box.addEventListener("focusout", () => setTimeout(() => (list.hidden ||= !box.matches(":focus-within")), 250));
  return box;
}

/** Saves to the draft's file, or asks where while it has none, or where saving would lose what a file holds. */
function saveBox(stage, link) {
  const name = h("input", { type: "text", class: "ftw-find", placeholder: "config.yaml", "aria-label": "file to save to", hidden: true });
  const instead = button("Replace it", () => go(true), { class: "ftw-plain", hidden: true });
  const ask = (suggested) => {
    if (name.hidden) name.value = suggested;
    name.hidden = false;
    name.focus();
  };
  const go = async (replace) => {
    if (!link.state.path && name.hidden) return ask(`${link.state.name.replace(/[^\w.-]+/g, "-")}.yaml`);
    const state = await link.send("save", { path: name.hidden ? "" : name.value, replace });
    if (!state) return undefined;
    instead.hidden = !state.lost;
    stage.notice(state.lost ? `${state.lost} Save under another name, or replace it.` : "");
    if (state.lost) return ask(state.path);
    name.hidden = true;
    return undefined;
  };
  name.addEventListener("input", () => (instead.hidden = true));
  name.addEventListener("keydown", (event) => event.key === "Enter" && go(false));
  return h("span", { class: "ftw-savebox" }, name, instead, button("Save", () => go(false), { class: "ftw-plain" }));
}
