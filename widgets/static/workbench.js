/**
 * The whole workbench in one cell: seven steps, the guided first run, preview, launch and the runs, over one draft and one
 * channel. What is no step is a tab beside the steps; the run that was just started opens by itself.
 */
import { compareView } from "./compare.js";
import { draftLink, watchDraft } from "./draft.js";
import { formParts } from "./form.js";
import { ago, button, fill, h, number, openWhenReady, say, timer } from "./dom.js";
import { guideOffer, guideView } from "./guide.js";
import { ledgerView } from "./ledger.js";
import { monitorView } from "./monitor.js";
import { RESTING, STATE } from "./runhead.js";
import { previewView } from "./tokens.js";

export function workbenchFace(stage) {
  const link = draftLink(stage);
  let page = "";
  const preview = previewView(stage);
  const runs = runsView(stage, () => page === "runs", () => link.state && parts.draw(link.state));
  const ledger = ledgerView(stage, async () => {
    show("");
    await link.send("state");
    parts.steps.bar.querySelector('[aria-selected="true"]')?.focus(); // its button is gone from the page
  });
  const guide = guideView(stage, () => page === "guide", {
    taken() {
      show("");
      link.send("state");
    },
    watch(run) {
      show("runs");
      runs.open(run);
    },
    talk(run, text) {
      show("runs");
      runs.open(run).talk(text);
    },
  });
  const more = {
    tabs: () => [
      ...(ledger.there() ? [{ id: "ledger", title: "Ledger", here: page === "ledger", words: "what became of each key of the file" }] : []),
      { id: "guide", title: "Guide", here: page === "guide", words: "the guided first run" },
      { id: "preview", title: "Preview", here: page === "preview", words: "the tokens that will be trained" },
      { id: "runs", title: "Runs", here: page === "runs", mark: runs.going() ? STATE.running[0] : "", kind: "ok", words: runs.going() ? `${runs.going()} of them ${runs.going() === 1 ? "goes" : "go"} on` : "what is going and what has ended" },
    ],
    current: () => page,
    open(id) {
      show(["guide", "preview", "runs", "ledger"].includes(id) ? id : "");
      return Boolean(page);
    },
    leave: () => show(""),
  };
  const parts = formParts(stage, link, more);
  const launch = launchView(stage, link, (run) => {
    show("runs");
    runs.open(run);
  });
  parts.extra.append(launch.element);
  const offer = guideOffer(stage, () => show("guide"));
  parts.main.prepend(offer.element);
  const columns = h("div", { class: "ftw-columns" }, parts.main, parts.side.element);
  const middle = h("div", { class: "ftw-middle" }, columns);
  parts.steps.show(middle);
  const show = (next) => {
    const changed = next !== page;
    page = next;
    parts.findings.element.classList.toggle("ftw-away", Boolean(page));
    const shown = { "": columns, guide: guide.element, preview: preview.element, runs: runs.element, ledger: ledger.element }[page];
    if (middle.firstChild !== shown) fill(middle, shown);
    if (link.state) parts.draw(link.state);
    // What was typed a moment ago is on its way: rows are asked for once the draft has it.
    if (changed && page === "preview") link.settled().then(() => page === "preview" && preview.start());
    if (changed && page === "guide") guide.start();
    if (page === "runs") runs.look();
    if (changed && page === "ledger") ledger.look();
  };
  fill(stage.body, parts.head, parts.steps.bar, middle, parts.findings.element);
  link.onState((state) => {
    parts.draw(state);
    launch.draw(state);
    offer.draw(state);
  });
  openWhenReady(stage, async () => {
    const state = await link.send("state");
    if (state && (await ledger.look())) show("ledger");
    if (state) runs.look(true); // what goes on since an earlier kernel is told on its tab
    return state;
  });
  stage.onEnd(watchDraft(stage, link));
}

/** One button; what stands in its way is said beside it. */
function launchView(stage, link, started) {
  const note = h("span", { class: "ftw-quiet", role: "status" });
  const go = button("Start the run", async () => {
    go.disabled = true;
    say(note, "starting…");
    let answer = await stage.ask("launch");
    while (answer && !answer.data.done) {
      await new Promise((resolve) => setTimeout(resolve, 250));
      answer = await stage.ask("launched");
    }
    go.disabled = false;
    say(note, answer?.data.error ?? "");
    if (answer?.data.run) started(answer.data.run);
  }, { class: "ftw-primary" });
  const element = h("div", { class: "ftw-launch", hidden: true }, go, note);
  return {
    element,
    draw(state) {
      element.hidden = state.step !== "launch";
      go.disabled = state.findings.some((finding) => finding.severity === "error");
    },
  };
}

function stateMark(state) {
  const [glyph, kind] = STATE[state] ?? ["?", "bad"];
  return h("span", { class: "ftw-state", dataset: { kind } }, `${glyph} ${state}`);
}

const MOST_COMPARED = 8;

/**
 * The runs of the folder as a table, newest first; a click opens its monitor in the same place, marked ones are compared.
 * `told` is called when another number of them goes on.
 */
function runsView(stage, visible, told) {
  const list = h("div", { class: "ftw-runs" });
  const marked = new Set();
  const words = h("span", { class: "ftw-quiet", role: "status" });
  const beside = button("Compare", () => together([...marked]), { disabled: true });
  const bar = h("div", { class: "ftw-tools ftw-comparing", hidden: true }, beside, words);
  const element = h("div", { class: "ftw-runsbox" }, bar, list);
  let [monitor, mark, going] = [null, 0, 0];
  const back = () => {
    monitor?.close();
    monitor = null;
    fill(element, bar, list);
    look();
  };
  const together = (runs) => {
    monitor?.close();
    monitor = compareView(stage, runs, back);
    fill(element, monitor.element);
  };
  const count = () => {
    beside.disabled = marked.size < 2;
    say(words, marked.size < 2 ? "mark two to eight runs to lay them beside each other" : [...marked].join(", "));
    for (const box of list.querySelectorAll("input")) box.disabled = !box.checked && marked.size >= MOST_COMPARED;
  };
  const box = ({ id }) =>
    h("input", {
      type: "checkbox",
      checked: marked.has(id),
      dataset: { mark: id },
      "aria-label": `mark ${id} for comparing`,
      on: { change: (event) => (event.target.checked ? marked.add(id) : marked.delete(id), count()) },
    });
  const open = (run) => {
    monitor?.close();
    monitor = monitorView(stage, run, back, () => {
      marked.add(run);
      mark = 0;
      back();
    });
    fill(element, monitor.element);
    return monitor;
  };
  const row = (run) =>
    h(
      "tr",
      {},
      h("td", {}, box(run), button(run.id, () => open(run.id), { class: "ftw-plain ftw-run" })),
      h(
        "td",
        {},
        stateMark(run.state),
        run.silent ? h("span", { class: "ftw-quiet" }, ` ${run.silent}`) : null,
        run.why ? h("div", { class: "ftw-quiet ftw-why" }, run.why) : null,
      ),
      h("td", {}, run.method),
      h("td", {}, run.model),
      h("td", { class: "ftw-right" }, `${number(run.step)}${run.max_steps ? ` of ${number(run.max_steps)}` : ""}`),
      h("td", { class: "ftw-right" }, run.reward !== null ? `reward ${number(run.reward)}` : run.loss === null ? "-" : number(run.loss)),
      h("td", { class: "ftw-right" }, ago(run.started)),
    );
  const look = async (unseen = false) => {
    if (!unseen && (monitor || !visible())) return;
    const answer = await stage.ask("runs", { mark });
    if (!answer || answer.data.mark === mark) return;
    mark = answer.data.mark;
    const { runs, folder } = answer.data;
    const now = runs.filter((run) => !RESTING.has(run.state)).length;
    if (now !== going) {
      going = now;
      told();
    }
    const there = new Set(runs.map((run) => run.id));
    for (const id of marked) if (!there.has(id)) marked.delete(id);
    bar.hidden = runs.length < 2;
    if (!runs.length) return void fill(list, h("p", { class: "ftw-empty" }, `No runs in ${folder} yet. The step Launch starts one.`));
    const focused = list.contains(stage.root.getRootNode().activeElement) ? stage.root.getRootNode().activeElement.dataset.mark : null;
    const head = ["run", "state", "method", "model", "step", "loss", "started"].map((title, at) => h("th", { scope: "col", class: at > 3 ? "ftw-right" : "" }, title));
    fill(list, h("table", { class: "ftw-table ftw-wide" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, runs.map(row))));
    count();
    if (focused) list.querySelector(`[data-mark="${CSS.escape(focused)}"]`)?.focus();
  };
  // The tab tells what goes on also while another page is read, from a rarer look.
  let turns = 0;
  const clock = timer(stage.root, async () => (await look((turns += 1) % 5 === 0), stage.retired ? null : 2000));
  stage.onEnd(() => {
    clock.stop();
    monitor?.close();
  });
  return { element, open, look, going: () => going };
}
