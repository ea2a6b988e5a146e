/**
 * The guided first run: a page at a time, the rows it is about, the rehearsal with its loss, and the way on. What is said
 * and where the way leads comes from the kernel; the rehearsal is followed also while another tab is open.
 */
import { Chart } from "./chart.js";
import { button, fill, h, say, tabs, timer } from "./dom.js";
import { Held } from "./held.js";
import { blocksView } from "./steps.js";

const ONWARD = { next: "Next", rehearse: "Start the rehearsal", rows: "Take other rows", config: "Go on to the real run", goal: "Begin this config" };

/**
 * `visible` tells whether the guide is on screen; `taken` is called once the real run's config is the draft, `watch` opens a
 * run, `talk` its chat with a question in the line.
 */
export function guideView(stage, visible, { taken, watch, talk }) {
  let [state, held, started, over] = [null, new Held(), false, false];
  const act = async (what, params = {}) => {
    const answer = await stage.ask(what, params);
    if (!answer || over) return null;
    stage.notice("");
    if (answer.data.blocks) take(answer.data);
    clock.kick();
    return answer.data;
  };
  const pages = tabs("pages of the guided first run", (page) => act("guide_go", { at: state.pages.findIndex(({ id }) => id === page) }));
  const said = blocksView();
  const meanings = h("dl", {});
  const terms = h("details", { class: "ftw-terms" }, h("summary", {}, "Words of this page"), meanings);
  const path = h("input", { type: "text", "aria-label": "file of your rows", spellcheck: "false" });
  const other = () => act("guide_rows", { path: path.value });
  path.addEventListener("keydown", (event) => event.key === "Enter" && other());
  const builtIn = button("Built-in rows", () => act("guide_rows", { path: state.built_in }));
  const note = h("div", { class: "ftw-quiet" });
  const rows = h("div", { class: "ftw-guide-rows", hidden: true }, h("div", { class: "ftw-tools" }, h("label", {}, "Your rows ", path), button("Take these rows", other), builtIn), note);
  const choices = h("div", { class: "ftw-goals", role: "group", "aria-label": "What shall the model learn?", hidden: true });
  let offered = "";
  const chart = new Chart({ title: "loss" });
  const curve = h("div", { class: "ftw-guide-curve", hidden: true }, chart.element);
  const asks = h("div", { class: "ftw-tools", hidden: true });
  const config = async (sure) => {
    const answer = await act("guide_config", { sure });
    asks.hidden = !answer?.asks;
    if (!answer) return;
    if (asks.hidden) return void taken();
    fill(asks, h("span", {}, answer.asks), button("Take it", () => config(true)), button("Leave it", () => (asks.hidden = true)));
    asks.querySelector("button").focus();
  };
  const go = button("", () => {
    if (state.onward === "next") act("guide_go", { at: state.at + 1 });
    else if (state.onward === "rehearse") act("guide_begin");
    else if (["config", "goal"].includes(state.onward)) config(false);
    else path.select();
  }, { class: "ftw-primary" });
  const back = button("Back", () => act("guide_go", { at: state.at - 1 }));
  const chat = button("Chat", () => talk(state.run, state.question));
  const all = button("All curves", () => watch(state.run));
  const page = h("div", { class: "ftw-page ftw-guide", tabindex: "-1" }, h("div", { class: "ftw-guide-main" }, said.element, curve), choices, rows, terms);
  const element = h("div", { class: "ftw-runsbox", role: "region", "aria-label": "Guided first run" }, pages.bar, page, asks, h("div", { class: "ftw-guide-foot" }, go, back, chat, all));
  pages.show(page);

  const take = (next) => {
    const turned = next.at !== state?.at;
    if (next.run !== state?.run) held = new Held();
    if (next.rows !== state?.rows) path.value = next.rows;
    state = next;
    pages.set(state.pages.map((entry, at) => ({ ...entry, title: `${at + 1} ${entry.title}`, here: at === state.at })));
    said.draw(state);
    choices.hidden = !state.choices.length;
    const now = JSON.stringify(state.choices);
    if (now !== offered) {
      const focused = choices.contains(document.activeElement);
      offered = now;
      fill(choices, state.choices.map(({ id, words, here }) => button(h("b", {}, words), () => act("guide_choose", { goal: id }), { class: "ftw-goal", "aria-pressed": String(here), dataset: { goal: id } })));
      if (focused) choices.querySelector('[aria-pressed="true"]')?.focus();
    }
    terms.hidden = !state.terms.length;
    fill(meanings, state.terms.map(([word, words]) => [h("dt", {}, word), h("dd", {}, words)]));
    rows.hidden = state.page !== "rows";
    say(note, state.note);
    builtIn.disabled = state.rows === state.built_in;
    say(go, ONWARD[state.onward]);
    [back.hidden, chat.hidden, all.hidden] = [!state.at, !state.chats, !state.run];
    if (turned) [page.scrollTop, asks.hidden] = [0, true];
    draw();
  };
  const draw = () => {
    const loss = held.names.find(({ name }) => name === "loss");
    curve.hidden = state.page !== "rehearsal" || !loss;
    if (!curve.hidden) chart.set([{ curve: held.curve("loss"), name: loss.title, tone: 0, newest: held.latest.get("loss") }]);
  };
  const turn = async () => {
    if (over || stage.retired) return null;
    if (!visible() && !state?.going) return 2000;
    const answer = await stage.ask("guide", { mark: state?.mark ?? 0 });
    if (over || !answer) return over ? null : 1500;
    if (answer.data.blocks) take(answer.data);
    if (state.run && state.page === "rehearsal") {
      const [run, into] = [state.run, held];
      const news = await stage.ask("watch", { run, seq: into.seq, epoch: into.epoch, marks: into.marks, series: into.ends(), page: "curves" });
      if (over) return null;
      if (news) into.take(news);
      draw();
    }
    return 300;
  };
  const redraw = () => chart.draw();
  stage.onTheme.add(redraw);
  let clock = { kick() {}, stop() {} };
  stage.onEnd(() => {
    over = true;
    clock.stop();
    chart.close();
    stage.onTheme.delete(redraw);
  });
  return {
    element,
    /** Begin to look, or look now. */
    start() {
      if (started) return clock.kick();
      started = true;
      clock = timer(stage.root, turn);
    },
  };
}

/** The way in from the step where one begins: what the guide is in a line. */
export function guideOffer(stage, open) {
  const card = button("", open, { class: "ftw-goal", dataset: { offer: "guide" } });
  const element = h("div", { class: "ftw-goals", hidden: true }, card);
  let asked = false;
  return {
    element,
    async draw(state) {
      element.hidden = !state.goals.length || !card.textContent;
      if (asked || !state.goals.length) return;
      asked = true;
      const answer = await stage.ask("guide_offer");
      asked = Boolean(answer);
      if (!answer) return;
      fill(card, h("b", {}, answer.data.title), h("span", { class: "ftw-quiet" }, answer.data.detail));
      element.hidden = false;
    },
  };
}
