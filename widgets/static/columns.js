/** Which column of a source holds which part: a choice for each, and three rows that follow it at once. */
import { button, fill, h, number, say } from "./dom.js";
import { following } from "./news.js";

/** `kept` is called when the config says something else than before. */
export function columnsView(stage, kept) {
  const choices = h("div", { class: "ftw-columns-choices" });
  const rows = h("div", { class: "ftw-columns-rows" });
  const status = h("span", { class: "ftw-quiet", role: "status" });
  const keep = button("Keep", async () => {
    const answer = await stage.ask("columns_keep");
    if (answer) (draw(answer.data), kept());
  }, { class: "ftw-primary", disabled: true });
  const element = h("section", { class: "ftw-columns-map", role: "region", "aria-label": "Columns", hidden: true }, choices, h("header", { class: "ftw-head" }, keep, status), rows);

  const send = following(stage, "columns_news", (state) => draw(state));
  const pick = (label, options, chosen, act) =>
    h("label", { class: "ftw-columns-part" }, label, h("select", { "aria-label": label, on: { change: (event) => act(event.target.value) } }, options.map(([value, text]) => h("option", { value, selected: value === chosen }, text))));
  const draw = (state) => {
    const named = new Map(state.columns);
    const sources = state.sources.length > 1 ? pick("source", state.sources.map((path, at) => [String(at), path]), String(state.source), (value) => send("columns_open", { source: Number(value) })) : null;
    const format = pick("format", state.formats.map((name) => [name, name === "detected" && state.title ? `detected: ${state.title}` : name]), state.format, (value) => send("columns_format", { format: value }));
    const parts = state.parts.map((part) => {
      const known = named.has(part.column) || part.column === "" ? [] : [[part.column, part.column]];
      const options = [["", part.needed ? "no column" : "-"], ...known, ...state.columns.map(([name]) => [name, name])];
      return pick(`${part.name}${part.needed ? " *" : ""}`, options, part.column, (value) => send("columns_choose", { part: part.name, column: value }));
    });
    if (!choices.contains(document.activeElement) || state.done) fill(choices, sources, format, parts);
    keep.disabled = !state.changed;
    say(status, state.problem || (state.done ? "* needed by the format" : "reading rows…"));
    fill(
      rows,
      state.rows.map((row) =>
        h(
          "article",
          { class: "ftw-row" },
          h("header", { class: "ftw-row-head" }, `Row ${number(row.index)}`),
          row.problem ? h("p", { class: "ftw-finding", dataset: { severity: "error" } }, row.problem) : null,
          h("dl", { class: "ftw-says" }, row.says.map(([label, text]) => [h("dt", { class: "ftw-quiet" }, label), h("dd", {}, text)])),
        ),
      ),
    );
  };
  return {
    element,
    toggle() {
      element.hidden = !element.hidden;
      if (!element.hidden) send("columns_open");
      return !element.hidden;
    },
  };
}
