/** The ledger of another tool's config: every key under what became of it, and the button that takes the config over. */
import { button, fill, h } from "./dom.js";

const LEDGER_KIND = { unsupported: "bad", changed: "warn", mapped: "good", needless: "" };

export function ledgerView(stage, over) {
  const element = h("div", { class: "ftw-page ftw-ledger", tabindex: "0", role: "region", "aria-label": "Ledger" });
  let there = false;
  let drawn = "";
  const row = ({ text, outcome, reason }) =>
    h(
      "li",
      {},
      h("span", { class: "ftw-state", dataset: { kind: LEDGER_KIND[outcome] } }, text),
      reason ? h("div", { class: "ftw-quiet" }, reason) : null,
    );
  const draw = (state) => {
    const take = button("Take it over as a new config", async () => {
      if (await stage.ask("take_over")) over();
    }, { class: "ftw-primary", disabled: state.taken });
    const groups = state.groups.map(({ heading, rows }) => [h("h4", {}, heading), h("ul", {}, rows.map(row))]);
    fill(element, h("p", {}, state.title), take, groups);
  };
  return {
    element,
    there: () => there,
    async look() {
      const answer = await stage.ask("ledger");
      there = Boolean(answer?.data.there);
      // Drawn anew only where something changed: who reads far down keeps the place.
      if (there) {
        const { title, groups, taken } = answer.data;
        const shown = JSON.stringify([title, groups, taken]);
        if (shown !== drawn) draw(answer.data);
        drawn = shown;
      }
      return there && !answer.data.taken;
    },
  };
}
