/**
 * One run, live: state, curves, samples, log, receipt and the controls. The view asks four times a second while the run
 * goes and names what it holds; only what is new travels, series as binary arrays, whole curves thinned once.
 */
import { chatView } from "./chat.js";
import { chartsPage } from "./curves.js";
import { fill, h, openWhenReady, tabs, timer } from "./dom.js";
import { Held } from "./held.js";
import { rolloutsPage } from "./rollouts.js";
import { RESTING, headView } from "./runhead.js";
import { expertsPage, receiptPage, samplesPage, textPage } from "./words.js";

const PAGES = [
  { id: "curves", title: "Curves" },
  { id: "samples", title: "Samples" },
  { id: "rollouts", title: "Rollouts" },
  { id: "experts", title: "Experts" },
  { id: "log", title: "Log" },
  { id: "receipt", title: "Receipt" },
  { id: "config", title: "Config" },
];

/** The monitor of the run `run`; `leave` is drawn as a way back where there is one, `beside` as a way to compare it. */
export function monitorView(stage, run, leave, beside) {
  const held = new Held();
  let page = "curves";
  let over = false;
  const charts = chartsPage(async (range) => {
    if (!range) held.zoomed = null;
    else {
      const answer = await stage.ask("zoom", { run, start: Math.floor(range[0]), stop: Math.ceil(range[1]) });
      if (answer) held.zoom(answer);
    }
    draw();
  });
  const pages = { curves: charts, samples: samplesPage(), rollouts: rolloutsPage((offset) => stage.ask("group", { run, offset })), experts: expertsPage(), log: textPage("ftw-log"), receipt: receiptPage(), config: textPage("ftw-code") };
  const holder = h("div", { class: "ftw-page", tabindex: "-1" });
  let within = null;
  const back = () => {
    within?.close();
    within = null;
    fill(element, head.element, bar.bar, holder);
    clock.kick();
  };
  const enter = (view) => {
    within?.close();
    within = view;
    fill(element, view.element);
  };
  const talk = (text = "") => {
    const chat = chatView(stage, run, back, text);
    enter(chat);
    chat.start();
  };
  const watch = (other) => enter(monitorView(stage, other, back));
  const head = headView(stage, run, held, leave, () => clock.kick(), { talk, beside, watch });
  const bar = tabs("what to watch", (id) => {
    if (id === "curves" && page !== id) held.curves.clear();
    page = id;
    draw();
    clock.kick();
  });
  const draw = () => {
    const known = PAGES.filter(({ id }) => !["rollouts", "experts"].includes(id) || held.parts.head?.[id]);
    bar.set(known.map((entry) => ({ ...entry, here: entry.id === page })));
    if (holder.firstChild !== pages[page].element) fill(holder, pages[page].element);
    head.draw();
    pages[page].draw(held);
  };
  const element = h("div", { class: "ftw-monitor" }, head.element, bar.bar, holder);
  bar.show(holder);

  const turn = async () => {
    if (over || stage.retired) return null;
    if (!element.isConnected) return 500; // another tab or the chat stands in its place
    const answer = await stage.ask("watch", { run, seq: held.seq, epoch: held.epoch, marks: held.marks, series: held.ends(), page });
    if (over) return null;
    if (!answer) return 1500;
    if (held.take(answer)) draw();
    return held.loading < 1 || RESTING.has(held.state) === false ? 250 : 2000;
  };
  const clock = timer(stage.root, turn);
  const redraw = () => charts.redraw();
  stage.onTheme.add(redraw);
  const close = () => {
    over = true;
    forget();
    within?.close();
    clock.stop();
    charts.close();
    stage.onTheme.delete(redraw);
  };
  const forget = stage.onEnd(close);
  draw();
  return { element, close, talk };
}

/** `Monitor(run)` alone. */
export function monitorFace(stage) {
  openWhenReady(stage, async () => {
    const answer = await stage.ask("monitored");
    if (answer) fill(stage.body, monitorView(stage, answer.data.run, null).element);
    return answer;
  });
}
