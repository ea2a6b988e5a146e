/** Removing checkpoints: which stay and why, which go, and a button that says what it frees. Nothing goes before it is pressed. */
import { button, fill, h } from "./dom.js";

export function prunePanel(stage, run, again, opened) {
  const element = h("section", { class: "ftw-end ftw-prune", hidden: true, "aria-label": "checkpoints of the run" });
  const close = () => (element.hidden = true);
  const row = (sign) => ([, name, words, answers]) =>
    h("div", { class: "ftw-prune-row", dataset: { sign } }, h("b", {}, sign), h("span", {}, name), h("span", {}, words, answers.map(([prompt, text]) => h("div", { class: "ftw-quiet" }, `${prompt} → ${text.trim() ? text : "no words"}`))));
  const draw = ({ keep, stay, go, act }) => {
    const newest = h("input", { type: "number", min: 1, max: stay.length + go.length, value: keep, "aria-label": "so many of the newest stay", on: { change: () => look(Math.max(1, Number.parseInt(newest.value, 10) || 1)) } });
    const remove = button(act, async () => {
      if (!(await stage.ask("prune", { run, keep, steps: go.map(([step]) => step) }))) return;
      stage.notice("");
      close();
      again();
    });
    fill(element, h("label", {}, "So many of the newest stay: ", newest), stay.map(row("stays")), go.map(row("goes")), h("div", {}, go.length ? remove : h("span", {}, "Nothing goes."), " ", button("Remove nothing", close)));
  };
  const look = async (keep) => {
    const answer = await stage.ask("pruning", { run, keep });
    if (!answer) return;
    stage.notice("");
    const before = element.hidden;
    element.hidden = false;
    draw(answer.data);
    if (before) opened(element);
  };
  return { element, close, open: () => look(1) };
}
