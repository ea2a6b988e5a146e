/**
 * Groups of completions: the newest of them as a list, one prompt with its completions side by side below. The newest
 * group of new answers is followed until another one is chosen.
 */
import { button, fill, h, number } from "./dom.js";

/** `ask(offset)` brings one group whole. */
export function rolloutsPage(ask) {
  const list = h("tbody", {});
  const whole = h("div", { class: "ftw-group" });
  const follow = button("Follow the newest", () => choose(null), { "aria-pressed": "true" });
  const head = h("tr", {}, ["step", "reward", "spread", "cut off"].map((title) => h("th", { scope: "col", class: "ftw-right" }, title)));
  const table = h("div", { class: "ftw-groups", tabindex: "0", "aria-label": "groups of completions" }, follow, h("table", { class: "ftw-table ftw-wide" }, h("thead", {}, head), list));
  const element = h("div", { class: "ftw-rollouts" }, table, whole);
  let [groups, chosen, shown] = [null, null, null];

  const choose = (offset) => {
    chosen = offset;
    follow.setAttribute("aria-pressed", String(offset === null));
    mark();
    look();
  };
  const newest = () => groups?.find((group) => group.replayed === null) ?? groups?.[0]; // what the model answers now
  const wanted = () => chosen ?? newest()?.offset ?? null;
  const mark = () => {
    for (const row of list.children) row.setAttribute("aria-selected", String(Number(row.dataset.offset) === wanted()));
  };
  const look = async () => {
    const offset = wanted();
    if (offset === null || offset === shown) return;
    shown = offset;
    const answer = await ask(offset);
    if (shown === offset && answer) fill(whole, groupView(answer.data));
  };
  const row = (group) =>
    h(
      "tr",
      { title: group.prompt, dataset: { offset: group.offset }, on: { click: () => choose(group.offset) } },
      h("td", { class: "ftw-right" }, button(number(group.step) + (group.replayed === null ? "" : " ↺"), () => {}, { class: "ftw-plain", "aria-label": `${group.replayed === null ? "" : `replay from step ${group.replayed} in the `}group of step ${group.step}: ${group.prompt}` })),
      h("td", { class: "ftw-right" }, number(group.reward)),
      h("td", { class: "ftw-right" }, number(group.spread)),
      h("td", { class: "ftw-right" }, group.cut ? `✂ ${group.cut} of ${group.count}` : "-"),
    );
  return {
    element,
    draw(held) {
      const next = held.parts.rollouts ?? [];
      if (next === groups) return;
      groups = next;
      const place = table.scrollTop;
      fill(list, groups.map(row));
      table.scrollTop = place;
      mark();
      look();
    },
  };
}

function groupView(group) {
  return [
    h(
      "div",
      { class: "ftw-row" },
      h("header", { class: "ftw-row-head" }, `Prompt of step ${number(group.step)}  ·  row ${number(group.row)}`),
      group.replay ? h("p", { class: "ftw-quiet" }, `↺ ${group.replay}`) : null,
      h("div", { class: "ftw-raw" }, group.prompt),
      group.answer === null ? null : h("div", { class: "ftw-raw ftw-quiet" }, `reference answer: ${group.answer}`),
    ),
    h("div", { class: "ftw-completions" }, group.completions.map((each) => completionView(each, group.functions))),
    group.left ? h("p", { class: "ftw-quiet" }, `and ${number(group.left)} more completions`) : null,
  ];
}

/** One completion; what was better than its group is told by a sign and a word, not by colour alone. */
function completionView(each, functions) {
  const value = each.advantage ?? 0;
  const [sign, words] = value > 0 ? ["▲", "above its group"] : value < 0 ? ["▼", "below its group"] : ["=", "as its group"];
  const facts = [each.tokens === null ? null : `${number(each.tokens)} tokens`, each.cut ? "✂ cut off" : null].filter(Boolean).join("  ·  ");
  const line = (name, text) => h("div", {}, h("dt", { title: name }, name), h("dd", {}, text));
  return h(
    "article",
    { class: "ftw-row ftw-completion", dataset: { kind: value > 0 ? "good" : value < 0 ? "bad" : "still" } },
    h("header", { class: "ftw-row-head" }, h("span", { class: "ftw-advantage" }, `${sign} ${words}`), h("span", {}, facts)),
    h("div", { class: "ftw-raw" }, each.text),
    h(
      "dl",
      { class: "ftw-values" },
      functions.map((name, at) => line(name, number(each.rewards[at]))),
      functions.length === 1 && each.rewards[0] === each.reward ? null : line("reward", number(each.reward)),
      line("advantage", number(each.advantage)),
    ),
  );
}
