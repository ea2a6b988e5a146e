/**
 * The batch as training will see it: tokens with borders, trained ones marked by colour and underline, ids on request,
 * pairs side by side with their first difference. Raw rows stand here until the tokens are known.
 */
import { columnsView } from "./columns.js";
import { templateView } from "./template.js";
import { button, fill, h, number, openWhenReady, say } from "./dom.js";

const WORST = ["longest", "masked", "truncated"];

/**
 * The tokens of one part. `differs` is the place from which it is unlike the other part of its pair; `marks` say where a
 * turn or a packed document begins.
 */
function tokenRun(part, ids, differs, marks) {
  const box = h("div", { class: ids ? "ftw-tokens ftw-with-ids" : "ftw-tokens", "aria-label": part.name });
  const begins = new Map(marks.map(([place, words, band]) => [place, h("div", { class: band ? "ftw-turn ftw-band" : "ftw-turn" }, words)]));
  part.tokens.forEach(([id, text, trained], at) => {
    if (begins.has(at)) box.append(begins.get(at));
    const classes = ["ftw-token", trained ? "ftw-trained" : "", at === differs ? "ftw-differs" : ""].filter(Boolean).join(" ");
    const span = h("span", { class: classes, title: `id ${id}, ${trained ? "trained" : "not trained"}` });
    span.append(text === "" ? "∅" : text.replaceAll("\n", "⏎\n"));
    if (ids) span.append(h("small", {}, String(id)));
    box.append(span);
  });
  if (part.left) box.append(h("span", { class: "ftw-quiet" }, ` … and ${number(part.left)} more tokens`));
  return box;
}

function firstDifference(parts) {
  const [one, two] = [parts.find((part) => part.name === "chosen"), parts.find((part) => part.name === "rejected")];
  if (!one || !two) return null;
  const most = Math.min(one.tokens.length, two.tokens.length);
  for (let at = 0; at < most; at += 1) if (one.tokens[at][0] !== two.tokens[at][0]) return at;
  return most;
}

function rowView(row, ids) {
  const differs = firstDifference(row.parts);
  const facts = [`Row ${number(row.index)}${row.of === null ? "" : ` of ${number(row.of)}`}`, row.words, row.truncated ? "✂ truncated" : null].filter(Boolean).join("  ·  ");
  const pair = row.parts.filter((part) => part.name === "chosen" || part.name === "rejected").length === 2;
  return h(
    "article",
    { class: "ftw-row" },
    h("header", { class: "ftw-row-head" }, facts),
    h(
      "div",
      { class: pair ? "ftw-parts ftw-pair" : "ftw-parts" },
      row.trouble ? h("p", { class: "ftw-finding", dataset: { severity: "warning" } }, row.trouble) : null,
      row.clipped ? h("div", { class: "ftw-raw" }, row.clipped) : null,
      row.images.map((image) => h("figure", { class: "ftw-image" }, h("img", { src: image.src, alt: "" }), h("figcaption", { class: "ftw-quiet" }, image.words))),
      row.parts.map((part) =>
        h(
          "section",
          { class: pair && part.name === "prompt" ? "ftw-wide" : "" },
          row.parts.length > 1 ? h("h5", {}, part.name) : null,
          tokenRun(part, ids, part.name === "chosen" || part.name === "rejected" ? differs : null, row.parts.length > 1 ? [] : row.marks),
        ),
      ),
      row.rewards.length ? h("section", {}, h("h5", {}, "given to rewards"), row.rewards.map((words) => h("div", { class: "ftw-quiet" }, words))) : null,
    ),
  );
}

function rawView(row) {
  return h(
    "article",
    { class: "ftw-row" },
    h("header", { class: "ftw-row-head" }, `Row ${number(row.index)}  ·  as it stands in the file`),
    h("div", { class: "ftw-raw" }, row.text),
  );
}

/** Bars with a line before the one `cut`, where rows are cut. */
function bars(values, label, cut) {
  const most = Math.max(...values, 1);
  const steps = "▁▂▃▄▅▆▇█";
  const signs = values.map((value) => (value ? steps[Math.min(7, Math.floor((value / most) * 7.99))] : " "));
  if (cut !== undefined) signs.splice(cut, 0, "│");
  const text = signs.join("");
  return h("span", { class: "ftw-bars" }, `${label} `, h("span", { class: "ftw-spark", "aria-hidden": "true" }, text));
}

/** Rows with buttons for next, random, worst, one by number, search; `stage` asks the verbs `rows` and `rows_news`. */
export function previewView(stage) {
  const rows = h("div", { class: "ftw-rows", tabindex: "0" });
  const status = h("span", { class: "ftw-quiet", role: "status" });
  const foot = h("footer", { class: "ftw-foot" });
  const find = h("input", { type: "search", placeholder: "text or row number", "aria-label": "find in rows, or a row number", class: "ftw-find" });
  let [ids, at, newest, shown, over, worst] = [false, 0, 0, null, false, -1];
  const columns = columnsView(stage, () => show("index", { row: 0 }));
  const template = templateView(stage, tokenRun, () => show("index", { row: 0 }));
  const templateButton = button("Template", () => templateButton.setAttribute("aria-pressed", String(template.toggle(shown?.rows?.[0]?.index ?? 0))), { "aria-pressed": "false", title: "the chat template, beside a row as it writes it" });
  const columnsButton = button("Columns", () => columnsButton.setAttribute("aria-pressed", String(columns.toggle())), { "aria-pressed": "false", title: "which column of the rows holds which part" });

  const show = async (kind, params = {}) => {
    const mine = (newest += 1);
    say(status, "reading…");
    const asked = await stage.ask("rows", { kind, count: 3, ...params });
    if (asked && mine === newest) follow(mine, asked.data);
    else if (mine === newest) say(status, "");
  };
  const follow = async (mine, data) => {
    while (mine === newest && !over) {
      draw(data);
      if (data.done) return;
      await new Promise((resolve) => setTimeout(resolve, 250));
      const answer = await stage.ask("rows_news", { ticket: data.ticket });
      if (!answer) return;
      data = { ...answer.data, raw: answer.data.raw ?? data.raw };
    }
  };
  const draw = (data) => {
    shown = data;
    say(status, data.words ?? "");
    cancel.hidden = Boolean(data.done);
    if (data.error) fill(rows, h("p", { class: "ftw-empty" }, data.error));
    else if (data.rows?.length) {
      at = data.rows[data.rows.length - 1].index + 1;
      fill(rows, data.rows.map((row) => rowView(row, ids)));
    } else if (data.raw?.length && !rows.querySelector(".ftw-token")) fill(rows, data.raw.map(rawView));
    else if (!rows.childElementCount) fill(rows, h("p", { class: "ftw-empty" }, "Reading the data."));
    const facts = data.facts ?? {};
    fill(
      foot,
      facts.lengths?.length ? bars(facts.lengths, "lengths", facts.cut) : null,
      facts.longest ? h("span", {}, `longest ${number(facts.longest)} tokens`) : null,
      facts.truncated !== undefined ? h("span", {}, `${number(facts.truncated)} truncated`) : null,
      facts.masked !== undefined ? h("span", {}, `${number(facts.masked)} with nothing to learn`) : null,
      h("span", { class: "ftw-space" }),
      h("span", {}, h("span", { class: "ftw-token ftw-trained" }, "trained"), " ", h("span", { class: "ftw-token" }, "not trained")),
    );
  };
  const search = () => {
    const text = find.value.trim();
    if (/^\d+$/.test(text)) show("index", { row: Number(text) });
    else if (text) show("search", { text });
  };
  find.addEventListener("keydown", (event) => event.key === "Enter" && search());
  const idsButton = button("# ids", () => {
    ids = !ids;
    idsButton.setAttribute("aria-pressed", String(ids));
    if (shown) draw(shown);
  }, { "aria-pressed": "false" });
  const cancel = button("Cancel", () => ((newest += 1), stage.ask("rows_cancel"), (cancel.hidden = true), say(status, "cancelled")), { class: "ftw-plain", hidden: true });
  const head = h(
    "header",
    { class: "ftw-head" },
    button("First", () => show("index", { row: 0 })),
    button("Next", () => show("index", { row: at })),
    button("Random", () => show("random")),
    button("Worst", () => ((worst = (worst + 1) % WORST.length), show("worst", { by: WORST[worst] })), { title: "the longest, then those with nothing to learn, then those that are cut most" }),
    find,
    idsButton,
    columnsButton,
    templateButton,
    h("span", { class: "ftw-preview-status" }, status, cancel),
  );
  stage.onEnd(() => (over = true));
  return { element: h("div", { class: "ftw-preview" }, head, columns.element, template.element, rows, foot), start: () => show("index", { row: 0 }) };
}

/** `Preview(draft)` alone. */
export function previewFace(stage) {
  const view = previewView(stage);
  fill(stage.body, view.element);
  openWhenReady(stage, async () => {
    const answer = await stage.ask("rows_ready");
    if (answer) view.start();
    return answer;
  });
}
