/** What a step shows besides its settings: wishes to begin from, facts and tables, the file as text. */
import { button, fill, h } from "./dom.js";

/** The wishes in words; one click begins from the recipe that answers it. */
export function goalsView(link, consider) {
  const element = h("div", { class: "ftw-goals", role: "group", "aria-label": "what the model shall learn" });
  let before = "";
  const explained = (goal, card) => {
    for (const event of ["mouseenter", "focus"]) card.addEventListener(event, () => consider(goal.recipe));
    for (const event of ["mouseleave", "blur"]) card.addEventListener(event, () => consider(null));
    return card;
  };
  return {
    element,
    draw(state) {
      const now = JSON.stringify(state.goals);
      element.hidden = !state.goals.length;
      if (now === before) return;
      before = now;
      fill(
        element,
        state.goals.map((goal, at) => [
          goal.ready && !state.goals[at - 1]?.ready ? h("h4", {}, "Other ready configs") : null,
          explained(goal, button(
            [h("b", {}, `${goal.chosen ? "● " : ""}${goal.words}`), goal.note ? h("span", { class: "ftw-quiet" }, goal.note) : null],
            () => link.send("recipe", { name: goal.recipe }),
            { class: "ftw-goal", "aria-pressed": goal.chosen ? "true" : "false", disabled: !goal.recipe, dataset: { recipe: goal.recipe ?? "" } },
          )),
        ]),
      );
    },
  };
}

/** What the kernel says beside the settings: titles, sentences, tables. */
export function blocksView() {
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
export function yamlView(stage, link) {
  const area = h("textarea", { class: "ftw-yaml", rows: "14", spellcheck: "false", "aria-label": "the config as YAML" });
  const apply = button("Take this text", async () => {
    const text = area.value;
    if (await link.send("replace", { text })) touched(area.value !== text);
  });
  const back = button("Discard", () => load(true), { class: "ftw-plain" });
  const element = h("div", { class: "ftw-yamlbox" }, h("h4", {}, "The file"), area, h("div", { class: "ftw-tools" }, apply, back));
  let [version, dirty] = ["", false];
  const touched = (now) => {
    dirty = now;
    apply.disabled = back.disabled = !now;
  };
  area.addEventListener("input", () => touched(true));
  const load = async (discard = false) => {
    const answer = await stage.ask("yaml");
    if (!answer || (dirty && !discard)) return; // what was typed meanwhile stays
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
