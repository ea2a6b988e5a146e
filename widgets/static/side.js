/** The column at the right: what the focused setting means, and what the config costs with the last edit's change. */
import { fill, h } from "./dom.js";

/** The right column: the focused field in plain words, then the consequences with the change of the last edit. */
export function sideView(link) {
  const words = h("section", { class: "ftw-explain", "aria-live": "polite" });
  const list = h("dl", { class: "ftw-consequences" });
  const element = h("aside", { class: "ftw-side" }, words, h("section", {}, h("h4", {}, "What this costs"), list));
  let [path, at] = [null, ""];
  let [considered, beside] = [null, null];
  // The same words drawn again would be read out again, and what a person has marked in them would be lost.
  const put = (...parts) => {
    const next = h("section", {}, parts);
    if (next.textContent !== words.textContent) fill(words, [...next.childNodes]);
  };
  const about = (title, paragraphs) =>
    put(h("h4", {}, title), paragraphs.filter(Boolean).map((text) => h("p", {}, text.startsWith("{") ? h("code", {}, text) : text)));
  const explain = (state) => {
    if (beside) return about(...beside);
    const spec = link.specs.find((known) => known?.path === path && state.fields.some((field) => link.specs[field.spec] === known));
    const step = state.steps.find((known) => known.id === state.step);
    const goal = state.goals.find((known) => known.recipe === considered) ?? state.goals.find((known) => known.chosen);
    const kind = spec ? state.kinds[path] : null;
    if (!spec && goal) return about(goal.words, goal.about);
    if (kind) return about(kind.title, kind.about);
    if (!spec) return about(step.title, [step.question]);
    const facts = [spec.limits, spec.default ? `default ${spec.default}` : null, spec.level === "basic" ? null : spec.level, spec.source];
    return put(
      h("h4", {}, spec.title),
      h("p", {}, spec.help),
      h("p", { class: "ftw-quiet" }, facts.filter(Boolean).join(" · ")),
      h("p", { class: "ftw-quiet" }, h("code", {}, spec.path)),
    );
  };
  return {
    element,
    focus(next) {
      [path, beside] = [next, null];
      if (link.state) explain(link.state);
    },
    /** A wish under the pointer or the focus is explained before it is taken. */
    consider(recipe) {
      [considered, beside] = [recipe, null];
      if (link.state) explain(link.state);
    },
    /** What was found and has no row here, until another setting or step is looked at. */
    aside(title, paragraphs) {
      [beside, at] = [[title, paragraphs], link.state?.step];
      if (link.state) explain(link.state);
    },
    draw(state) {
      if (state.step !== at) beside = null;
      explain(state);
      fill(
        list,
        state.consequences.map(({ label, text, delta, worse, over }) =>
          h(
            "div",
            { class: "ftw-consequence" },
            h("dt", {}, label),
            h("dd", { dataset: { over: over ? "yes" : "no" } }, text, delta ? h("small", { dataset: { worse: worse ? "yes" : "no" } }, `${delta} with this edit`) : null),
          ),
        ),
      );
    },
  };
}
