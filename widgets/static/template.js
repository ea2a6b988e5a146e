/** A chat template in a box, beside a row as it writes it: turn by turn, what is learned, and what is odd about it. */
import { button, fill, h, say } from "./dom.js";
import { following } from "./news.js";

/** `saved` is called when the config names another template; `run` draws the tokens of a turn. */
export function templateView(stage, run, saved) {
  const box = h("textarea", { class: "ftw-template-text", spellcheck: "false", rows: "14", "aria-label": "chat template" });
  const row = h("div", { class: "ftw-template-row" });
  const status = h("span", { class: "ftw-quiet", role: "status" });
  const name = h("input", { type: "text", class: "ftw-find", value: "template.jinja", "aria-label": "file to save the template to" });
  let [at, hold, typed] = [0, 0, false];

  const send = following(stage, "template_news", (state) => draw(state));
  const draw = (state) => {
    at = state.row;
    if (!typed && state.text && box.value !== state.text) box.value = state.text;
    say(status, state.done ? `${state.words}${state.changed ? ", changed and not saved" : ""}` : "writing the row…");
    fill(
      row,
      state.problem ? h("p", { class: "ftw-finding", dataset: { severity: "error" } }, state.problem) : null,
      state.flaws.map((flaw) => h("p", { class: "ftw-finding", dataset: { severity: "warning" } }, flaw)),
      state.turns.map((turn) => h("section", {}, h("h5", {}, turn.role), run({ name: turn.role, ...turn }, false, null, []))),
      state.asked ? h("section", {}, h("h5", {}, "before an answer it writes"), h("div", { class: "ftw-raw" }, state.asked)) : null,
    );
  };
  const type = () => {
    clearTimeout(hold);
    hold = 0;
    return send("template_type", { text: box.value });
  };
  box.addEventListener("input", () => {
    typed = true;
    clearTimeout(hold);
    hold = setTimeout(type, 400);
  });
  const save = async () => {
    if (hold) await type(); // the last letters are saved too
    const text = box.value;
    const answer = await stage.ask("template_save", { path: name.value });
    if (!answer) return;
    typed = box.value !== text;
    draw(answer.data);
    saved();
  };
  const head = h(
    "header",
    { class: "ftw-head" },
    button("Row before", () => send("template_row", { row: Math.max(0, at - 1) })),
    button("Next row", () => send("template_row", { row: at + 1 })),
    name,
    button("Save template", save),
    status,
  );
  const element = h("section", { class: "ftw-columns-map", role: "region", "aria-label": "Chat template", hidden: true }, head, h("div", { class: "ftw-template" }, box, row));
  return {
    element,
    toggle(from) {
      element.hidden = !element.hidden;
      typed = false;
      if (!element.hidden) send("template_open", { row: from });
      return !element.hidden;
    },
  };
}
