/** The settings of one step as rows of label, control and what is wrong; a loop over specs that names no setting. */
import { controlFor, LEVELS } from "./controls.js";
import { button, fill, h, say, unique } from "./dom.js";
import { findingLine } from "./findings.js";

/** The fields of one step. `focus` is told which field's explanation to show. */
export function fieldsView(link, focus) {
  const element = h("div", { class: "ftw-form" });
  const rows = new Map();
  let shape = "";
  let level = 0;
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
    const made = controlFor(spec, (value) => edit(spec.path, value), (read) => later(spec.path, read));
    const auto = h("span", { class: "ftw-auto" });
    const reset = button("↺", () => link.send("unset", { path: spec.path }), {
      class: "ftw-plain ftw-reset",
    });
    const finding = h("div", { class: "ftw-under", id: unique() });
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
    if (!busy) row.show(field.value, level);
    say(row.auto, field.auto ? `auto → ${field.auto}` : "");
    row.reset.style.visibility = field.back ? "visible" : "hidden";
    row.reset.title = field.back;
    row.reset.setAttribute("aria-label", `${row.spec.title}: ${field.back}`);
    row.element.classList.toggle("ftw-changed", Boolean(field.back));
    const mine = state.findings.filter((finding) => finding.path === row.spec.path).slice(0, 2);
    row.element.dataset.severity = mine[0]?.severity ?? "";
    const said = JSON.stringify(mine);
    if (row.said === said) return;
    row.said = said;
    // A screen reader hears with the control what is wrong with it.
    if (row.main.matches("input, select, textarea")) {
      row.main.setAttribute("aria-invalid", String(mine[0]?.severity === "error"));
      row.main.setAttribute("aria-describedby", mine.length ? row.finding.id : "");
    }
    fill(row.finding, mine.map((finding) => findingLine(finding, link, null)));
  };

  const draw = (state) => {
    const hidden = state.fields.filter((field) => !shownAt(link.specs[field.spec], field, level));
    const visible = state.fields.filter((field) => !hidden.includes(field));
    const signature = `${state.step}:${level}:${visible.map((field) => field.spec).join()}:${hidden.map((field) => field.spec).join()}`;
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
      fill(element, [...rows.values()].map((row) => row.element), more(hidden.map((field) => link.specs[field.spec].level)));
      if (focused) rows.get(focused)?.element.querySelector("input, select, textarea")?.focus();
    }
    visible.forEach((field) => update(rows.get(link.specs[field.spec].path), field, state));
  };

  /** The way to the settings of the next level that has any, and back from there. */
  const more = (hidden) => {
    const next = LEVELS.findIndex((name) => hidden.includes(name));
    const go = (to) => () => ((level = to), draw(link.state), element.querySelector(".ftw-more")?.focus());
    const count = hidden.filter((name) => name === LEVELS[next]).length;
    const words = `+ ${count} more ${count === 1 ? "setting" : "settings"} (${LEVELS[next]})`;
    return [
      next < 0 ? null : button(words, go(next), { class: "ftw-plain ftw-more", "aria-expanded": "false" }),
      level ? button("− fewer settings", go(0), { class: "ftw-plain ftw-more", "aria-expanded": "true" }) : null,
    ];
  };

  return {
    element,
    draw,
    /** Sends what is typed but not sent yet. */
    flush() {
      for (const [path, row] of rows) if (row.waiting) edit(path, row.waiting());
    },
    jump(path) {
      const wanted = link.specs.find((spec) => spec?.path === path)?.level;
      if (!rows.has(path)) level = Math.max(level, LEVELS.indexOf(wanted));
      draw(link.state);
      const row = rows.get(path);
      row?.element.scrollIntoView({ block: "nearest" });
      (row?.element.querySelector("input, select, textarea, button") ?? element).focus({ preventScroll: true });
    },
  };
}

function shownAt(spec, field, level) {
  return LEVELS.indexOf(spec.level) <= level || field.given || field.finding;
}
