/** What is wrong or worth a look, in words, with the buttons that help: the fix, and the way to the field. */
import { button, fill, h } from "./dom.js";

const GLYPH = { error: "✗", warning: "!", hint: "?" };
const SHOWN = 2;

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

/** All findings, worst first: two of them in view, the others a press away. */
export function findingsView(link, jump) {
  const list = h("div", { class: "ftw-findings", role: "log", "aria-label": "findings" });
  let [before, all] = ["", false];
  const draw = (findings) => {
    const rest = findings.length - SHOWN;
    const words = all ? "fewer" : `and ${rest} more`;
    const more = button(words, () => ((all = !all), draw(findings)), { class: "ftw-plain", "aria-expanded": String(all) });
    fill(list, (all ? findings : findings.slice(0, SHOWN)).map((finding) => findingLine(finding, link, jump)), rest > 0 ? more : null);
  };
  return {
    element: list,
    draw(state) {
      const now = JSON.stringify(state.findings);
      if (now === before) return;
      before = now;
      list.hidden = state.findings.length === 0;
      draw(state.findings);
    },
  };
}
