/** The head of a monitor: state, progress, what was asked and answered, the ways to stop, the cause of a bad end. */
import { button, duration, fill, h, number, say } from "./dom.js";
import { prunePanel } from "./prune.js";

/** Glyph and kind of each state of a run. */
export const STATE = {
  queued: ["○", "waiting"],
  starting: ["◔", "going"],
  running: ["▶", "going"],
  stopping: ["◧", "going"],
  finished: ["✓", "good"],
  stopped: ["■", "still"],
  failed: ["✗", "bad"],
  lost: ["?", "bad"],
};
export const RESTING = new Set(["finished", "stopped", "failed", "lost"]);

/**
 * `again` is called when something was asked of the run, so that its answer shows soon; `talk` opens the chat, `beside`
 * lays other runs beside this one where there is a list of them, `watch` shows the run that was started in its place.
 */
export function headView(stage, run, held, leave, again, { talk, beside, watch }) {
  const state = h("span", { class: "ftw-state", role: "status" });
  const name = h("strong", { class: "ftw-name" });
  const facts = h("span", { class: "ftw-quiet ftw-facts" });
  const progress = h("progress", { max: 1, "aria-label": "progress of the run" });
  const share = h("span", { class: "ftw-share" });
  const phase = h("div", { class: "ftw-phase", role: "status" });
  const way = h("div", { class: "ftw-way", hidden: true });
  const menu = h("div", { class: "ftw-menu", hidden: true });
  const cause = h("div", { class: "ftw-card", hidden: true });
  const end = h("details", { class: "ftw-end", open: true, hidden: true, "aria-label": "what the run leaves" });
  const actions = h("span", { class: "ftw-actions" });
  let [drawn, ended, mended, walked] = [null, null, null, null];
  const taken = { forms: new Set(["safetensors"]), quant: "F16" };
  let task = "";

  const control = async (verb) => {
    const answer = await stage.ask("control", { run, verb });
    menu.hidden = true;
    if (answer) stage.notice("");
    again();
  };
  const stop = button("Stop or save…", () => ((menu.hidden = !menu.hidden), stop.setAttribute("aria-expanded", String(!menu.hidden)), menu.querySelector("button")?.focus()), {
    "aria-expanded": "false",
  });
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    menu.hidden = true;
    stop.focus();
  });
  const resume = button("Resume", async () => {
    if (await stage.ask("resume", { run })) again();
  });
  const accept = button("Go on with the rows as they are now", async () => {
    if (await stage.ask("resume", { run, accept_data: true })) again();
  });
  accept.hidden = true;
  const fresh = button("Watch the new run", () => watch(fresh.dataset.run));
  fresh.hidden = true;
  const mend = button("Apply and start", async () => {
    if (await stage.ask("mend", { run })) again();
  }, { class: "ftw-primary" });
  const stack = h("pre", { class: "ftw-card", hidden: true });
  const where = button("Where is it?", async () => {
    const answer = await stage.ask("stack", { run });
    if (!answer) return;
    say(stack, answer.data.stack);
    stack.hidden = false;
    reveal(stack);
  });
  where.hidden = true;
  const reveal = (part) => (news.scrollTop = part.offsetTop);
  const prune = prunePanel(stage, run, again, reveal);

  /** What is taken along is ticked; a GGUF has a number format. What was chosen outlives what is drawn. */
  const takeAlong = (entry) => {
    const tick = ([form, words]) => {
      const box = h("input", { type: "checkbox", checked: taken.forms.has(form), on: { change: () => (box.checked ? taken.forms.add(form) : taken.forms.delete(form)) } });
      const format = form === "gguf" ? h("select", { "aria-label": "number format of the GGUF", on: { change: (event) => (taken.quant = event.target.value) } }, entry.quants.map((quant) => h("option", { value: quant, selected: quant === taken.quant }, quant))) : null;
      return h("div", {}, h("label", {}, box, ` ${form}`), " ", format, h("span", { class: "ftw-quiet" }, ` ${words}`));
    };
    const begin = button(entry.title, async () => {
      const answer = await stage.ask("export", { run, forms: [...taken.forms], quant: taken.quant });
      if (answer) stage.notice("");
      again();
    });
    return h("div", {}, begin, h("div", { class: "ftw-forms" }, entry.forms.map(tick), entry.needs ? h("div", { class: "ftw-quiet" }, entry.needs) : null, h("code", {}, entry.command)));
  };
  /** A task is a file that is named; what was typed outlives what is drawn. */
  const score = (entry) => {
    const file = h("input", { type: "text", value: task, placeholder: "task.yaml", "aria-label": "task of lm-evaluation-harness", on: { input: (event) => (task = event.target.value) } });
    const begin = button(entry.title, async () => (await stage.ask("score", { run, task })) && (stage.notice(""), again()));
    return h("div", {}, begin, file, h("span", { class: "ftw-quiet" }, entry.means, h("br"), h("code", {}, entry.command)));
  };
  const onward = (entry) => {
    const act = entry.do === "chat" ? () => talk() : entry.do === "prune" ? prune.open : async () => (await stage.ask(entry.do, { run })) && (stage.notice(""), again());
    if (entry.forms) return takeAlong(entry);
    if (entry.do === "tasks") return score(entry);
    const command = entry.command ? h("code", {}, entry.command) : null;
    return h("div", {}, button(entry.title, act), h("span", { class: "ftw-quiet" }, entry.means, command ? h("br") : null, command));
  };
  const drawEnd = (left) => {
    if (left === ended) return;
    ended = left;
    end.hidden = !left?.ways.length;
    if (end.hidden) return;
    const facts = left.facts.flatMap(([what, words]) => [h("dt", {}, what), h("dd", {}, words)]);
    const other = { do: "compare", title: "Compare it", means: "with other runs, marked in the list" };
    fill(end, h("summary", {}, "What the run leaves"), h("dl", {}, facts), h("div", { class: "ftw-ways" }, left.ways.map(onward), beside ? h("div", {}, button(other.title, beside), h("span", { class: "ftw-quiet" }, other.means)) : null));
  };

  /** The change that would mend it as a diff with its button, or how to go on. */
  const proposal = (left) => {
    if (!left?.change.length) return [h("p", {}, left?.way_on ?? "")];
    const diff = left.change.flatMap(([path, before, after]) => [h("del", {}, `- ${path}: ${before}`), h("ins", {}, `+ ${path}: ${after}`)]);
    return [h("div", { class: "ftw-diff" }, diff), h("p", {}, `${left.why}.`), h("p", {}, mend, ` ${left.way_on}`)];
  };

  /** What is done before the first step and how long it took, what goes on, and what is still to come. */
  const drawWay = (told) => {
    if (told === walked) return;
    walked = told;
    way.hidden = !told;
    if (!told) return;
    const rows = told.phases.map(([word, state, time]) => h("li", { "data-state": state, "aria-current": state === "now" ? "step" : null }, h("span", { "aria-hidden": "true" }, { done: "✓", now: "▸" }[state] ?? ""), h("span", {}, word), h("span", {}, time)));
    fill(way, h("div", { class: "ftw-quiet" }, told.title), h("ol", { "aria-label": told.title }, rows));
  };

  const draw = () => {
    const head = held.parts.head;
    if (!head) return say(phase, "Opening the run.");
    const [step, eta, words, asked, rowsChanged, silent, started] = held.parts.now ?? [0, null, "", "", false, false, ""];
    const [glyph, kind] = STATE[head.state] ?? ["?", "bad"];
    say(state, `${glyph} ${head.state}`);
    state.dataset.kind = kind;
    say(name, head.name);
    say(facts, [head.method, head.model, head.by].filter(Boolean).join("  ·  "));
    if (head.max_steps) progress.value = Math.min(1, step / head.max_steps);
    else progress.removeAttribute("value");
    const time = kind === "going" && eta !== null ? `${duration(eta)} left` : head.took ? `took ${duration(head.took)}` : "";
    const doing = RESTING.has(head.state) ? "" : words;
    say(share, [doing, `step ${number(step)}${head.max_steps ? ` of ${number(head.max_steps)}` : ""}`, time].filter(Boolean).join("  ·  "));
    const loading = held.loading < 1 ? `reading the whole curve, ${Math.round(held.loading * 100)} %` : "";
    say(phase, [loading, asked, ...head.warnings].filter(Boolean).join("  ·  "));
    phase.hidden = !phase.textContent;
    drawWay(held.parts.way ?? null);
    where.hidden = !(silent && !RESTING.has(head.state));
    if (where.hidden) stack.hidden = true;
    accept.hidden = !(rowsChanged && RESTING.has(head.state));
    drawEnd(RESTING.has(head.state) ? held.parts.end : null);
    fresh.hidden = !started;
    fresh.dataset.run = started ?? "";
    if (head === drawn && held.parts.end === mended) return undefined;
    [drawn, mended] = [head, held.parts.end];
    if (!RESTING.has(head.state)) prune.close();
    fill(actions, head.controls.length ? stop : null, head.resumable ? resume : null, head.checkpoints ? button("Checkpoints…", prune.open) : null, head.chats ? button("Chat", () => talk()) : null);
    fill(menu, head.controls.map((entry) => h("div", {}, button(entry.title, () => control(entry.verb)), h("span", { class: "ftw-quiet" }, entry.keeps))));
    if (!head.controls.length) menu.hidden = true;
    cause.hidden = !head.cause;
    const told = (held.parts.end?.facts ?? []).flatMap(([what, words]) => [h("dt", {}, what), h("dd", {}, words)]);
    fill(cause, head.cause ? [h("b", {}, head.cause), ...proposal(held.parts.end), told.length ? h("dl", {}, told) : null, head.lines.length ? h("pre", {}, head.lines.join("\n")) : null] : []);
    return undefined;
  };
  const back = leave ? button("‹ Runs", leave, { class: "ftw-plain" }) : null;
  const top = h("header", { class: "ftw-head" }, back, state, name, facts, h("span", { class: "ftw-space" }), actions);
  // What comes and goes scrolls by itself, so that the pages below keep their place.
  const news = h("div", { class: "ftw-news" }, way, h("div", { class: "ftw-tools" }, accept, fresh, where), stack, menu, prune.element, cause, end);
  return { element: h("div", { class: "ftw-run-head" }, top, h("div", { class: "ftw-progress" }, progress, share), phase, news), draw };
}
