/**
 * One control for each kind of setting. Each shows what the kernel says and hands back what a person put in, unjudged:
 * whether it is a number, and a good one, is for the kernel to say.
 */
import { button, fill, h, unique } from "./dom.js";

/** The settings that everyone meets, then those that fewer need; each level shows the ones before it too. */
export const LEVELS = ["basic", "advanced", "expert"];

/** One control per `spec.control`; `set` receives the raw value, `get` tells what it shows. */
export function controlFor(spec, change, later) {
  const id = unique();
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
  let [held, level] = [[], 0];
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
    const shown = spec.parts.filter((part) => LEVELS.indexOf(part.level) <= level || entry[part.key] !== undefined);
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
  const show = (value, upTo) => {
    const next = Array.isArray(value) ? value : [];
    if (list.childElementCount && upTo === level && JSON.stringify(next) === JSON.stringify(held)) return;
    [held, level] = [next, upTo];
    draw();
  };
  return { element: list, main: list, show };
}
