/**
 * The form: controls made by a loop over field specs, findings with their fixes, and the right column that explains the
 * focused field and shows what the last edit changed. The kernel's draft is the truth; every edit comes back as a state.
 */
import { button, fill, h, say, tabs } from "./dom.js";

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
    list: () => area(2, lines, (value) => (Array.isArray(value) ? value.join("\n") : (value ?? ""))),
    prompts: () => area(3, lines, (value) => (Array.isArray(value) ? value.join("\n") : (value ?? ""))),
    mapping: () => area(2, (value) => value, (value) => value ?? ""),
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

/** Data sources: one line each, of the parts that the kernel names; what the form does not show is kept. */
function sources(id, spec, change, later) {
  const list = h("div", { class: "ftw-sources" });
  let held = [];
  const send = () => change(held);
  const line = (entry, at) => {
    const parts = spec.parts.map((part) => {
      const props = { "aria-label": `${spec.title}, source ${at + 1}, ${part.title}`, placeholder: part.title, title: part.help };
      if (at === 0 && part === spec.parts[0]) props.id = id;
      const put = (value) => {
        held[at] = { ...held[at] };
        if (value === "") delete held[at][part.key];
        else held[at][part.key] = value;
      };
      if (part.choices.length) {
        const select = h("select", props, h("option", { value: "" }, part.empty), part.choices.map((value) => h("option", { value }, value)));
        select.value = entry[part.key] ?? "";
        select.addEventListener("change", () => (put(select.value), send()));
        return select;
      }
      const input = h("input", { type: "text", spellcheck: "false", ...props, value: entry[part.key] ?? "" });
      input.addEventListener("input", () => (put(input.value), later(() => held)));
      return input;
    });
    const remove = button("✕", () => ((held = held.filter((_, index) => index !== at)), draw(), send()), {
      class: "ftw-plain",
      "aria-label": `remove source ${at + 1}`,
    });
    return h("div", { class: "ftw-source" }, parts, remove);
  };
  const draw = () => {
    const add = button("+ add a source", () => ((held = [...held, {}]), draw()), { class: "ftw-plain", ...(held.length ? {} : { id }) });
    fill(list, held.map(line), add);
  };
  const show = (value) => {
    const next = Array.isArray(value) ? value.map((entry) => (typeof entry === "string" ? { [spec.parts[0].key]: entry } : entry)) : [];
    if (list.childElementCount && JSON.stringify(next) === JSON.stringify(held)) return;
    held = next;
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

  const edit = (path, value) => {
    clearTimeout(hold);
    rows.get(path).waiting = null;
    link.send("set", { path, value });
  };
  const later = (path, read) => {
    clearTimeout(hold);
    rows.get(path).waiting = read;
    hold = setTimeout(() => edit(path, read()), 180);
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
    const tall = ["list", "prompts", "mapping", "sources"].includes(spec.control);
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
    if (!busy || field.value !== row.last) {
      if (!busy) row.show(field.value);
    }
    row.last = field.value;
    say(row.auto, field.auto ? `auto → ${field.auto}` : "");
    row.reset.style.visibility = field.given ? "visible" : "hidden";
    row.element.classList.toggle("ftw-given", field.given);
    const mine = state.findings.filter((finding) => finding.path === row.spec.path);
    const worst = mine[0];
    row.element.dataset.severity = worst?.severity ?? "";
    fill(row.finding, mine.slice(0, 2).map((finding) => findingLine(finding, link, null)));
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
        state.consequences.map(({ label, text, delta, worse }) =>
          h(
            "div",
            { class: "ftw-consequence" },
            h("dt", {}, label),
            h("dd", {}, text, delta ? h("small", { dataset: { worse: worse ? "yes" : "no" } }, `${delta} with this edit`) : null),
          ),
        ),
      );
    },
  };
}

/** The parts of the form alone, as `ConfigForm(draft)` shows it: steps, fields, side, findings. */
export function configForm(stage) {
  const link = draftLink(stage);
  const parts = formParts(stage, link);
  fill(stage.body, parts.head, parts.steps.bar, h("div", { class: "ftw-columns" }, parts.main, parts.side.element), parts.findings.element);
  link.onState((state) => parts.draw(state));
  openWhenReady(stage, () => link.send("state"));
  stage.onEnd(watchDraft(stage, link));
}

/** The view can be drawn before its comm is wired: ask until something answers. */
export async function openWhenReady(stage, ask) {
  for (let pause = 300; !stage.retired; pause = Math.min(pause * 1.5, 4000)) {
    if (await ask()) return;
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
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

/** Head line, step tabs, fields, side column and findings, wired to one link. */
export function formParts(stage, link) {
  const side = sideView(link);
  const form = formView(link, side.focus);
  const jump = async (finding) => {
    if (finding.step && finding.step !== link.state.step) await link.send("step", { step: finding.step });
    form.jump(finding.path);
  };
  const findings = findingsView(link, jump);
  const title = h("strong", { class: "ftw-name" });
  const state = h("span", { class: "ftw-count", role: "status" });
  const undo = button("↶ Undo", () => link.send("undo"), { class: "ftw-plain" });
  const redo = button("↷ Redo", () => link.send("redo"), { class: "ftw-plain" });
  const head = h("header", { class: "ftw-head" }, title, state, h("span", { class: "ftw-space" }), undo, redo);
  const steps = tabs("steps", (step) => (form.flush(), link.send("step", { step })));
  const main = h("div", { class: "ftw-main" }, form.element);
  const draw = (now) => {
    say(title, now.name + (now.dirty ? " *" : ""));
    const count = (severity) => now.findings.filter((finding) => finding.severity === severity).length;
    const [bad, soft] = [count("error"), count("warning") + count("hint")];
    say(state, bad ? `✗ ${bad} ${bad === 1 ? "error" : "errors"}` : soft ? `? ${soft} to look at` : "✓ ready");
    state.dataset.kind = bad ? "error" : soft ? "hint" : "ok";
    undo.disabled = !now.undo;
    redo.disabled = !now.redo;
    steps.set(now.steps.map((step) => ({ ...step, here: step.id === now.step })));
    form.draw(now);
    side.draw(now);
    findings.draw(now);
  };
  return { head, steps, main, side, findings, form, draw, jump };
}
