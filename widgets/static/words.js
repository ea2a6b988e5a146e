/** The pages of a monitor that are words: answers to the pinned prompts, the log, the receipt, the config. */
import { fill, h } from "./dom.js";

export function samplesPage() {
  const element = h("div", { class: "ftw-samples" });
  let before = null;
  return {
    element,
    draw(held) {
      const samples = held.parts.samples ?? [];
      if (samples === before) return;
      before = samples;
      fill(
        element,
        samples.length ? null : h("p", { class: "ftw-empty" }, held.parts.head?.empty.samples),
        samples.map((group) =>
          h(
            "article",
            { class: "ftw-row" },
            h("header", { class: "ftw-row-head ftw-raw" }, group.prompt),
            h("dl", { class: "ftw-answers" }, group.answers.map(([when, text]) => h("div", {}, h("dt", {}, when), h("dd", { class: "ftw-raw" }, text)))),
          ),
        ),
      );
    },
  };
}

export function textPage(kind) {
  const element = h("pre", { class: kind, tabindex: "0" });
  return {
    element,
    draw(held) {
      const text = held.parts[kind === "ftw-log" ? "log" : "config"] ?? "";
      if (element.textContent === text) return;
      const page = element.parentElement;
      const atEnd = page ? page.scrollTop + page.clientHeight >= page.scrollHeight - 30 : true;
      element.textContent = text;
      if (page && atEnd && kind === "ftw-log") page.scrollTop = page.scrollHeight;
    },
  };
}

/** The load of a mixture's experts: a line a layer, a column an expert. */
export function expertsPage() {
  const picture = h("pre", { class: "ftw-load", tabindex: "0", role: "img" });
  const words = h("p", { class: "ftw-quiet" });
  return {
    element: h("div", {}, words, picture),
    draw(held) {
      const { picture: lines = "", words: said = "" } = held.parts.experts ?? {};
      if (picture.textContent === lines) return;
      picture.textContent = lines;
      words.textContent = said;
      picture.setAttribute("aria-label", said);
    },
  };
}

export function receiptPage() {
  const element = h("div", {});
  let before = null;
  return {
    element,
    draw(held) {
      const entries = held.parts.receipt ?? [];
      if (entries === before) return;
      before = entries;
      if (!entries.length) return fill(element, h("p", { class: "ftw-empty" }, held.parts.head?.empty.receipt));
      const head = h("tr", {}, ["feature", "asked", "done", "how many", ""].map((title) => h("th", { scope: "col" }, title)));
      const rows = entries.map((entry) => h("tr", {}, entry.map((cell) => h("td", {}, cell))));
      return fill(element, h("table", { class: "ftw-table" }, h("thead", {}, head), h("tbody", {}, rows)));
    },
  };
}
