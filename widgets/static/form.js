/**
 * The form: controls made by a loop over field specs, findings with their fixes, and the right column that explains the
 * focused field and shows what the last edit changed. The kernel's draft is the truth; every edit comes back as a state.
 */
import { button, fill, h, openWhenReady, say, tabs } from "./dom.js";

const GLYPH = { error: "✗", warning: "!", hint: "?" };

/**
 * Holds the newest state and the specs seen so far, and sends edits one after the other.
 * Specs travel once: each question says how many are known, each answer brings the rest.
 */
export function draftLink(stage, extra = () => ({})) {
  const specs = [];
  const listeners = new Set();
  let queue = Promise.resolve();
  const link = {
    state: null,
    specs,
    onState: (act) => listeners.add(act),
    /** Sends an edit (or a plain question for the state); resolves to the state, or null after trouble. */
    send(what, params = {}) {
      queue = queue.then(async () => {
        const answer = await stage.ask(what, { ...params, specs: specs.length, ...extra() });
        if (!answer) return null;
        link.take(answer.data);
        return link.state;
      });
      return queue;
    },
    take(data) {
      if (data.same) return;
      for (const [index, spec] of data.specs) specs[index] = spec;
      link.state = data;
      listeners.forEach((act) => act(data));
    },
  };
  return link;
}

/** One control per `spec.control`; `set` receives the raw value, `get` tells what it shows. */
function control(spec, change, later) {
  const id = `ftw-${Math.random().toString(36).slice(2, 9)}`;
  const text = (props = {}) => {
    const input = h("input", { id, type: "text", spellcheck: "false", autocomplete: "off", ...props });
    input.addEventListener("input", () => later(() => input.value));
    input.addEventListener("change", () => change(input.value));
    return { element: input, main: input, show: (value) => (input.value = value ?? "") };
  };
  const area = (rows, read, write) => {
    const input = h("textarea", { id, rows, spellcheck: "false" });
    input.addEventListener("input", () => later(() => read(input.value)));
    input.addEventListener("change", () => change(read(input.value)));
    return { element: input, main: input, show: (value) => (input.value = write(value)) };
  };
  const lines = (value) => value.split("\n").map((line) => line.trim()).filter(Boolean);
  const made = {
    bool: () => {
      const input = h("input", { id, type: "checkbox", role: "switch", class: "ftw-switch" });
      input.addEventListener("change", () => change(input.checked));
      return { element: input, main: input, show: (value) => (input.checked = value === true) };
    },
    choice: () => choice(id, spec, change),
    int: () => text({ inputmode: "numeric", class: "ftw-number" }),
    float: () => text({ inputmode: "decimal", class: "ftw-number" }),
    prompts: () => area(3, lines, (value) => (Array.isArray(value) ? value.join("\n") : (value ?? ""))),
    sources: () => sources(id, spec, change, later),
  }[spec.control];
  return { id, ...(made ?? text)() };
}

function choice(id, spec, change) {
  const input = h("select", { id });
  spec.choices.forEach((value, index) => input.append(h("option", { value: String(index) }, spec.words[index])));
  input.addEventListener("change", () => change(spec.choices[Number(input.value)]));
  const show = (value) => {
    const at = spec.choices.findIndex((known) => known === value);
    if (at < 0 && !input.querySelector("[data-odd]"))
      input.append(h("option", { value: "-1", dataset: { odd: "1" } }, String(value)));
    input.value = String(at);
  };
  return { element: input, main: input, show };
}

/** Data sources: one block each, of the parts that the kernel names; what the form does not show is kept. */
function sources(id, spec, change, later) {
  const list = h("div", { class: "ftw-sources" });
  let [held, advanced] = [[], false];
  const send = () => change(held);
  const put = (at, part, value) => {
    held = held.map((entry, index) => (index === at ? { ...entry } : entry));
    if (value === "" || value === null) delete held[at][part.key];
    else held[at][part.key] = value;
  };
  const piece = (part, entry, at) => {
    const props = { "aria-label": `${spec.title}, source ${at + 1}, ${part.title}`, placeholder: part.title.toLowerCase(), title: part.help };
    if (at === 0 && part === spec.parts[0]) props.id = id;
    if (part.control === "choice") {
      const select = h("select", props, part.choices.map((value, index) => h("option", { value: String(index) }, value === null ? "detected" : part.words[index])));
      select.value = String(part.choices.findIndex((value) => value === (entry[part.key] ?? null)));
      select.addEventListener("change", () => (put(at, part, part.choices[Number(select.value)]), send()));
      return select;
    }
    const input = h("input", { type: "text", spellcheck: "false", ...props, value: entry[part.key] ?? "" });
    input.addEventListener("input", () => (put(at, part, input.value), later(() => held)));
    return input;
  };
  const block = (entry, at) => {
    const remove = button("✕", () => ((held = held.filter((_, index) => index !== at)), draw(), send()), {
      class: "ftw-plain",
      "aria-label": `remove source ${at + 1}`,
    });
    const shown = spec.parts.filter((part) => part.level === "basic" || advanced || entry[part.key] !== undefined);
    const [first, ...rest] = shown;
    const named = (part) => h("label", { class: "ftw-part", title: part.help }, h("span", {}, part.title.toLowerCase()), piece(part, entry, at));
    return h("div", { class: "ftw-source" }, piece(first, entry, at), remove, h("div", { class: "ftw-source-parts" }, rest.map(named)));
  };
  const draw = () => {
    const add = button("+ add a source", () => {
      held = [...held, { [spec.parts[0].key]: "" }];
      draw();
      list.querySelectorAll(".ftw-source > input")[held.length - 1].focus();
    }, { class: "ftw-plain", ...(held.length ? {} : { id }) });
    fill(list, held.map(block), add);
  };
  const show = (value, more) => {
    const next = Array.isArray(value) ? value : [];
    if (list.childElementCount && more === advanced && JSON.stringify(next) === JSON.stringify(held)) return;
    [held, advanced] = [next, more];
    draw();
  };
  return { element: list, main: list, show };
}

/** The fields of one step. `focus` is told which field's explanation to show. */
export function formView(link, focus) {
  const element = h("div", { class: "ftw-form" });
  const rows = new Map();
  let shape = "";
  let advanced = false;
  let hold = 0;

  const edit = (path, value, typing = false) => {
    clearTimeout(hold);
    rows.get(path).waiting = null;
    link.send("set", { path, value, typing });
  };
  const later = (path, read) => {
    clearTimeout(hold);
    rows.get(path).waiting = read;
    hold = setTimeout(() => edit(path, read(), true), 180);
  };

  const make = (field) => {
    const spec = link.specs[field.spec];
    const made = control(spec, (value) => edit(spec.path, value), (read) => later(spec.path, read));
    const auto = h("span", { class: "ftw-auto" });
    const reset = button("↺", () => link.send("unset", { path: spec.path }), {
      class: "ftw-plain ftw-reset",
      title: "back to the recipe's value",
      "aria-label": `${spec.title}: back to the recipe's value`,
    });
    const finding = h("div", { class: "ftw-under" });
    const tall = ["prompts", "sources"].includes(spec.control);
    const element = h(
      "div",
      { class: tall ? "ftw-field ftw-tall" : "ftw-field", dataset: { path: spec.path } },
      h("label", { for: made.id, title: spec.path }, spec.title),
      h("div", { class: "ftw-control" }, made.element, spec.unit ? h("span", { class: "ftw-unit" }, spec.unit) : null, auto, reset),
      finding,
    );
    element.addEventListener("focusin", () => focus(spec.path));
    return { element, spec, show: made.show, main: made.main, auto, reset, finding, waiting: null };
  };

  const update = (row, field, state) => {
    const busy = row.waiting || (row.main.contains(document.activeElement) && row.main.type !== "checkbox" && row.main.tagName !== "SELECT");
    if (!busy) row.show(field.value, advanced);
    say(row.auto, field.auto ? `auto → ${field.auto}` : "");
    row.reset.style.visibility = field.given ? "visible" : "hidden";
    row.element.classList.toggle("ftw-given", field.given);
    const mine = state.findings.filter((finding) => finding.path === row.spec.path).slice(0, 2);
    row.element.dataset.severity = mine[0]?.severity ?? "";
    const said = JSON.stringify(mine);
    if (row.said === said) return;
    row.said = said;
    fill(row.finding, mine.map((finding) => findingLine(finding, link, null)));
  };

  const draw = (state) => {
    const next = `${state.step}:${advanced}:${state.fields.map((field) => field.spec).join()}`;
    const hidden = state.fields.filter((field) => !shownAt(link.specs[field.spec], field, advanced));
    const visible = state.fields.filter((field) => !hidden.includes(field));
    const signature = next + visible.length;
    if (signature !== shape) {
      shape = signature;
      const focused = element.contains(document.activeElement) ? document.activeElement.closest("[data-path]")?.dataset.path : null;
      const kept = new Map(rows);
      rows.clear();
      for (const field of visible) {
        const path = link.specs[field.spec].path;
        const old = kept.get(path);
        rows.set(path, old && old.spec === link.specs[field.spec] ? old : make(field));
      }
      fill(element, [...rows.values()].map((row) => row.element), more(hidden.length));
      if (focused) rows.get(focused)?.element.querySelector("input, select, textarea")?.focus();
    }
    visible.forEach((field) => update(rows.get(link.specs[field.spec].path), field, state));
  };

  const more = (count) => {
    if (!count && !advanced) return null;
    const label = advanced ? "− fewer settings" : `+ ${count} more settings (advanced)`;
    const toggle = button(label, () => {
      advanced = !advanced;
      draw(link.state);
    }, { class: "ftw-plain ftw-more", "aria-expanded": advanced ? "true" : "false" });
    return toggle;
  };

  return {
    element,
    draw,
    /** Sends what is typed but not sent yet. */
    flush() {
      for (const [path, row] of rows) if (row.waiting) edit(path, row.waiting());
    },
    jump(path) {
      advanced = advanced || !rows.has(path);
      draw(link.state);
      const row = rows.get(path);
      row?.element.scrollIntoView({ block: "nearest" });
      (row?.element.querySelector("input, select, textarea, button") ?? element).focus({ preventScroll: true });
    },
  };
}

function shownAt(spec, field, advanced) {
  return advanced || spec.level === "basic" || field.given || field.finding;
}

/** A finding in words with the buttons that help: its fix, and the way to its field. */
export function findingLine(finding, link, jump) {
  return h(
    "div",
    { class: "ftw-finding", dataset: { severity: finding.severity } },
    h("span", { class: "ftw-glyph", "aria-label": finding.severity }, GLYPH[finding.severity] ?? "?"),
    h("span", { class: "ftw-message" }, jump ? h("b", {}, `${finding.title}: `) : null, finding.message),
    finding.fix ? button(finding.fix, () => link.send("fix", { finding: finding.key }), { class: "ftw-fix" }) : null,
    jump ? button("go there", () => jump(finding), { class: "ftw-plain" }) : null,
  );
}

/** All findings, worst first. */
export function findingsView(link, jump) {
  const list = h("div", { class: "ftw-findings", role: "log", "aria-label": "findings" });
  let before = "";
  return {
    element: list,
    draw(state) {
      const now = JSON.stringify(state.findings);
      if (now === before) return;
      before = now;
      list.hidden = state.findings.length === 0;
      fill(list, state.findings.map((finding) => findingLine(finding, link, jump)));
    },
  };
}

/** The right column: the focused field in plain words, then the consequences with the change of the last edit. */
export function sideView(link) {
  const words = h("section", { class: "ftw-explain", "aria-live": "polite" });
  const list = h("dl", { class: "ftw-consequences" });
  const element = h("aside", { class: "ftw-side" }, words, h("section", {}, h("h4", {}, "What this costs"), list));
  let path = null;
  const explain = (state) => {
    const spec = link.specs.find((known) => known?.path === path && state.fields.some((field) => link.specs[field.spec] === known));
    const step = state.steps.find((known) => known.id === state.step);
    if (!spec) return fill(words, h("h4", {}, step.title), h("p", {}, step.question));
    const facts = [spec.limits, spec.default ? `default ${spec.default}` : null, spec.level === "basic" ? null : spec.level, spec.source];
    return fill(
      words,
      h("h4", {}, spec.title),
      h("p", {}, spec.help),
      h("p", { class: "ftw-quiet" }, facts.filter(Boolean).join(" · ")),
      h("p", { class: "ftw-quiet" }, h("code", {}, spec.path)),
    );
  };
  return {
    element,
    focus(next) {
      path = next;
      if (link.state) explain(link.state);
    },
    draw(state) {
      explain(state);
      fill(
        list,
        state.consequences.map(({ label, text, delta, worse, over }) =>
          h(
            "div",
            { class: "ftw-consequence" },
            h("dt", {}, label),
            h("dd", { dataset: { over: over ? "yes" : "no" } }, text, delta ? h("small", { dataset: { worse: worse ? "yes" : "no" } }, `${delta} with this edit`) : null),
          ),
        ),
      );
    },
  };
}

/** The wishes in words; one click begins from the recipe that answers it. */
function goalsView(link) {
  const element = h("div", { class: "ftw-goals", role: "group", "aria-label": "what the model shall learn" });
  let before = "";
  return {
    element,
    draw(state) {
      const now = JSON.stringify(state.goals);
      element.hidden = !state.goals.length;
      if (now === before) return;
      before = now;
      fill(
        element,
        state.goals.map((goal) =>
          button(
            [h("b", {}, `${goal.chosen ? "● " : ""}${goal.words}`), goal.note ? h("span", { class: "ftw-quiet" }, goal.note) : null],
            () => link.send("recipe", { name: goal.recipe }),
            { class: "ftw-goal", "aria-pressed": goal.chosen ? "true" : "false", disabled: !goal.recipe, dataset: { recipe: goal.recipe ?? "" } },
          ),
        ),
      );
    },
  };
}

/** What the kernel says beside the settings: titles, sentences, tables. */
function blocksView() {
  const element = h("div", { class: "ftw-blocks" });
  let before = "";
  const block = ({ kind, text, rows }) => {
    if (kind === "title") return h("h4", {}, text);
    if (kind === "table") return h("table", { class: "ftw-table" }, h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell))))));
    return h("p", { dataset: { kind } }, text);
  };
  return {
    element,
    draw(state) {
      const now = JSON.stringify(state.blocks);
      if (now === before) return;
      before = now;
      fill(element, state.blocks.map(block));
    },
  };
}

/** The file itself, for experts: edited as text, taken back with the same findings. */
function yamlView(stage, link) {
  const area = h("textarea", { class: "ftw-yaml", rows: "14", spellcheck: "false", "aria-label": "the config as YAML" });
  const apply = button("Take this text", async () => {
    if (await link.send("replace", { text: area.value })) touched(false);
  });
  const back = button("Discard", () => load(), { class: "ftw-plain" });
  const element = h("div", { class: "ftw-yamlbox" }, h("h4", {}, "The file"), area, h("div", { class: "ftw-tools" }, apply, back));
  let [version, dirty] = ["", false];
  const touched = (now) => {
    dirty = now;
    apply.disabled = back.disabled = !now;
  };
  area.addEventListener("input", () => touched(true));
  const load = async () => {
    const answer = await stage.ask("yaml");
    if (!answer) return;
    area.value = answer.data.text;
    touched(false);
  };
  return {
    element,
    draw(state) {
      element.hidden = state.step !== "review";
      if (element.hidden || state.version === version || dirty) return;
      version = state.version;
      load();
    },
  };
}

/** The form alone, as `ConfigForm(draft)` shows it. */
export function configForm(stage) {
  const link = draftLink(stage);
  const parts = formParts(stage, link);
  fill(stage.body, parts.head, parts.steps.bar, h("div", { class: "ftw-columns" }, parts.main, parts.side.element), parts.findings.element);
  link.onState(parts.draw);
  openWhenReady(stage, () => link.send("state"));
  stage.onEnd(watchDraft(stage, link));
}

/** Shows edits made elsewhere (another view, a cell) and facts that became known meanwhile. */
export function watchDraft(stage, link) {
  let over = false;
  const turn = async () => {
    if (over || stage.retired) return;
    if (link.state && !document.hidden) await link.send("state", { version: link.state.version });
    setTimeout(turn, link.state?.working ? 400 : 1500);
  };
  setTimeout(turn, 1500);
  return () => (over = true);
}

/** Head line, step tabs, page, side column and findings, wired to one link; `more` are further tabs. */
export function formParts(stage, link, more = null) {
  const side = sideView(link);
  const form = formView(link, side.focus);
  const [goals, blocks, yaml] = [goalsView(link), blocksView(), yamlView(stage, link)];
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
  const head = h("header", { class: "ftw-head" }, title, state, working, h("span", { class: "ftw-space" }), findBox(stage, jump), undo, redo, saveBox(link));
  const steps = tabs("steps", (step) => {
    form.flush();
    if (more?.open(step)) return null;
    return link.send("step", { step });
  });
  const main = h("div", { class: "ftw-main" }, goals.element, extra, form.element, blocks.element, yaml.element);
  const draw = (now) => {
    say(title, now.name + (now.dirty ? " *" : ""));
    title.title = now.path;
    const count = (severity) => now.findings.filter((finding) => finding.severity === severity).length;
    const [bad, soft] = [count("error"), count("warning") + count("hint")];
    say(state, bad ? `✗ ${bad} ${bad === 1 ? "error" : "errors"}` : soft ? `? ${soft} to look at` : "✓ ready");
    state.dataset.kind = bad ? "error" : soft ? "hint" : "ok";
    say(working, now.words ? `${now.words}…` : "");
    undo.disabled = !now.undo;
    redo.disabled = !now.redo;
    steps.set([...now.steps.map((step) => ({ ...step, here: step.id === now.step && !more?.current() })), ...(more?.tabs() ?? [])]);
    for (const view of [goals, form, blocks, yaml, side, findings]) view.draw(now);
  };
  return { head, steps, main, extra, side, findings, form, draw, jump };
}

/** Find a setting by words of its name or help. */
function findBox(stage, jump) {
  const input = h("input", { type: "search", class: "ftw-find", placeholder: "find a setting", "aria-label": "find a setting" });
  const list = h("div", { class: "ftw-hits", role: "listbox", hidden: true });
  const look = async () => {
    if (!input.value.trim()) return void (list.hidden = true);
    const answer = await stage.ask("find", { text: input.value });
    list.hidden = !answer;
    const go = (hit) => () => ((list.hidden = true), (input.value = ""), jump(hit));
    if (answer) fill(list, answer.data.found.map((hit) => button([h("b", {}, hit.title), " ", h("code", {}, hit.path)], go(hit), { class: "ftw-hit" })));
    if (answer && !answer.data.found.length) fill(list, h("p", { class: "ftw-quiet" }, "No setting has these words."));
    return null;
  };
  let hold = 0;
  input.addEventListener("input", () => (clearTimeout(hold), (hold = setTimeout(look, 200))));
  const box = h("span", { class: "ftw-findbox" }, input, list);
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") list.hidden = true;
    if (event.key === "Enter" && event.target === input) list.querySelector("button")?.click();
    if (event.key === "ArrowDown") (document.activeElement === input ? list.firstChild : document.activeElement.nextSibling)?.focus?.();
  });
  return box;
}

/** Saves to the draft's file, or asks where while it has none. */
function saveBox(link) {
  const name = h("input", { type: "text", class: "ftw-find", placeholder: "config.yaml", "aria-label": "file to save to", hidden: true });
  const go = async () => {
    if (!link.state.path && name.hidden) {
      name.hidden = false;
      name.value = `${link.state.name.replace(/[^\w.-]+/g, "-")}.yaml`;
      name.focus();
      return;
    }
    if (await link.send("save", { path: name.hidden ? "" : name.value })) name.hidden = true;
  };
  name.addEventListener("keydown", (event) => event.key === "Enter" && go());
  return h("span", { class: "ftw-savebox" }, name, button("Save", go, { class: "ftw-plain" }));
}
