/**
 * One run, live: state, curves, samples, log, receipt and the controls. The view asks four times a second while the run
 * goes and names what it holds; only what is new travels, series as binary arrays, whole curves thinned once.
 */
import { Chart, Curve, numbers } from "./chart.js";
import { brief, button, bytes, duration, fill, h, number, openWhenReady, say, tabs, timer } from "./dom.js";

const STATE = {
  queued: ["○", "waiting"],
  starting: ["◔", "going"],
  running: ["▶", "going"],
  stopping: ["◧", "going"],
  finished: ["✓", "good"],
  stopped: ["■", "still"],
  failed: ["✗", "bad"],
  lost: ["?", "bad"],
};
const RESTING = new Set(["finished", "stopped", "failed", "lost"]);
const PAGES = [
  { id: "curves", title: "Curves" },
  { id: "samples", title: "Samples" },
  { id: "log", title: "Log" },
  { id: "receipt", title: "Receipt" },
  { id: "config", title: "Config" },
];
const FORMATS = { bytes, brief, share: (value) => `${number(value * 100)} %` };

/** What the view holds of a run, and how an answer changes it. */
class Held {
  constructor() {
    this.seq = -1;
    this.epoch = 0;
    this.loading = 1;
    this.latest = new Map();
    this.curves = new Map();
    this.zoomed = null;
    this.parts = {};
    this.marks = {};
  }

  get names() {
    return this.parts.names ?? [];
  }

  get state() {
    return this.parts.head?.state;
  }

  curve(name) {
    if (!this.curves.has(name)) this.curves.set(name, new Curve());
    return this.curves.get(name);
  }

  /** The last step held of each curve; a curve that is not held is sent whole. */
  ends() {
    return Object.fromEntries(this.names.map(({ name }) => [name, this.curve(name).last]));
  }

  take({ data, buffers }) {
    this.loading = data.loading;
    Object.assign(this.parts, data.parts ?? {});
    Object.assign(this.marks, data.marks ?? {});
    if (data.epoch !== undefined) {
      this.curves.clear();
      this.epoch = data.epoch;
    }
    if (data.seq !== undefined) this.seq = data.seq;
    let at = 0;
    if (data.latest) numbers(buffers[at++], Float64Array).forEach((value, index) => this.latest.set(this.names[index].name, value));
    for (const [index, count] of data.series ?? []) this.curve(this.names[index].name).append(...points(buffers[at++], count));
  }

  zoom({ data, buffers }) {
    this.zoomed = new Map();
    data.series.forEach(([index, count], at) => {
      const curve = new Curve();
      curve.append(...points(buffers[at], count));
      this.zoomed.set(this.names[index].name, curve);
    });
  }
}

/** One curve of a buffer: steps as float64, then lows and highs as float32. */
function points(buffer, count) {
  const start = buffer.byteOffset ?? 0;
  const raw = (buffer.buffer ?? buffer).slice(start, start + buffer.byteLength);
  return [new Float64Array(raw, 0, count), new Float32Array(raw, 8 * count, count), new Float32Array(raw, 12 * count, count)];
}

/** The monitor of the run `run`; `leave` is drawn as a way back where there is one. */
export function monitorView(stage, run, leave) {
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
  const pages = { curves: charts, samples: samplesPage(), log: textPage("ftw-log"), receipt: receiptPage(), config: textPage("ftw-code") };
  const holder = h("div", { class: "ftw-page", tabindex: "-1" });
  const head = headView(stage, run, held, leave, () => clock.kick());
  const bar = tabs("what to watch", (id) => {
    if (id === "curves" && page !== id) held.curves.clear();
    page = id;
    draw();
    clock.kick();
  });
  const draw = () => {
    bar.set(PAGES.map((entry) => ({ ...entry, here: entry.id === page })));
    if (holder.firstChild !== pages[page].element) fill(holder, pages[page].element);
    head.draw();
    pages[page].draw(held);
  };
  const element = h("div", { class: "ftw-monitor" }, head.element, bar.bar, holder);

  const turn = async () => {
    if (over || stage.retired) return null;
    const answer = await stage.ask("watch", { run, seq: held.seq, epoch: held.epoch, marks: held.marks, series: held.ends(), page });
    if (over) return null;
    if (!answer) return 1500;
    held.take(answer);
    draw();
    return held.loading < 1 || RESTING.has(held.state) === false ? 250 : 2000;
  };
  const clock = timer(stage.root, turn);
  const redraw = () => charts.redraw();
  stage.onTheme.add(redraw);
  const close = () => {
    over = true;
    clock.stop();
    charts.close();
    stage.onTheme.delete(redraw);
  };
  stage.onEnd(close);
  draw();
  return { element, close };
}

function headView(stage, run, held, leave, again) {
  const state = h("span", { class: "ftw-state", role: "status" });
  const name = h("strong", { class: "ftw-name" });
  const facts = h("span", { class: "ftw-quiet ftw-facts" });
  const progress = h("progress", { max: 1, "aria-label": "progress of the run" });
  const share = h("span", { class: "ftw-share" });
  const phase = h("div", { class: "ftw-phase", role: "status" });
  const menu = h("div", { class: "ftw-menu", hidden: true });
  const cause = h("div", { class: "ftw-card", hidden: true });
  const actions = h("span", { class: "ftw-actions" });
  let drawn = null;

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

  const draw = () => {
    const head = held.parts.head;
    if (!head) return say(phase, "Opening the run.");
    const [step, eta, words, asked] = held.parts.now ?? [0, null, "", ""];
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
    if (head === drawn) return undefined;
    drawn = head;
    fill(actions, head.controls.length ? stop : null, head.resumable ? resume : null);
    fill(menu, head.controls.map((entry) => h("div", {}, button(entry.title, () => control(entry.verb)), h("span", { class: "ftw-quiet" }, entry.keeps))));
    if (!head.controls.length) menu.hidden = true;
    cause.hidden = !head.cause;
    fill(cause, head.cause ? [h("b", {}, head.cause), head.lines.length ? h("pre", {}, head.lines.join("\n")) : null] : []);
    return undefined;
  };
  const back = leave ? button("‹ Runs", leave, { class: "ftw-plain" }) : null;
  const top = h("header", { class: "ftw-head" }, back, state, name, facts, h("span", { class: "ftw-space" }), actions);
  return { element: h("div", {}, top, h("div", { class: "ftw-progress" }, progress, share), phase, menu, cause), draw };
}

/** The curves: the main one large, the others small, the newest values as a list. */
function chartsPage(zoomTo) {
  const grid = h("div", { class: "ftw-charts" });
  const values = h("dl", { class: "ftw-values" });
  const smoothing = h("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: "0", "aria-label": "smoothing" });
  const logScale = h("input", { type: "checkbox" });
  const tools = h("div", { class: "ftw-tools" }, h("label", {}, "smoothing ", smoothing), h("label", {}, logScale, " log scale"), h("span", { class: "ftw-quiet" }, "drag to zoom, double click for all, arrow keys for values"));
  const element = h("div", { class: "ftw-curves" }, h("div", { class: "ftw-curves-top" }, grid, values), tools);
  const charts = new Map();
  let shape = "";
  const redraw = () => charts.forEach((chart) => chart.draw());
  const apply = () => {
    charts.forEach((chart) => {
      chart.smooth = Number(smoothing.value);
      chart.log = chart.options.small ? false : logScale.checked;
      chart.draw();
    });
  };
  smoothing.addEventListener("input", apply);
  logScale.addEventListener("change", apply);

  const groups = (held) => {
    const out = [];
    for (const entry of held.names) {
      const host = entry.with && out.find((group) => group[0].name === entry.with);
      if (host) host.push(entry);
      else out.push([entry]);
    }
    return out;
  };
  const zoomAll = (range) => {
    charts.forEach((chart) => (chart.range = range));
    zoomTo(range);
  };
  const build = (held) => {
    charts.forEach((chart) => chart.close());
    charts.clear();
    groups(held).forEach((group, at) => {
      const chart = new Chart({ title: group[0].title, small: at > 0, format: FORMATS[group[0].unit] });
      chart.onZoom = zoomAll;
      charts.set(group[0].name, chart);
    });
    fill(grid, [...charts.values()].map((chart) => chart.element));
    apply();
  };
  const list = (held) => {
    const gpu = held.parts.gpu ?? [];
    const entries = held.names.filter((entry) => entry.listed).map((entry) => [entry.title, (FORMATS[entry.unit] ?? number)(held.latest.get(entry.name)) + (entry.per ? ` ${entry.per}` : "")]);
    const text = JSON.stringify([entries, gpu]);
    if (values.dataset.text === text) return;
    values.dataset.text = text;
    fill(values, [...entries, ...gpu].map(([title, value]) => h("div", {}, h("dt", {}, title), h("dd", {}, value))));
  };
  return {
    element,
    redraw,
    close: () => charts.forEach((chart) => chart.close()),
    draw(held) {
      const next = held.names.map((entry) => entry.name).join("\n");
      if (next !== shape) {
        shape = next;
        build(held);
      }
      for (const group of groups(held))
        charts.get(group[0].name)?.set(group.map((entry, at) => ({ curve: (held.zoomed ?? held.curves).get(entry.name) ?? held.curve(entry.name), name: entry.title, faint: at > 0 })));
      list(held);
      if (!held.names.length && !grid.childElementCount) fill(grid, h("p", { class: "ftw-empty" }, "Curves appear with the first step."));
      else if (held.names.length) grid.querySelector(".ftw-empty")?.remove();
    },
  };
}

function samplesPage() {
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
        samples.length ? null : h("p", { class: "ftw-empty" }, "Answers to the pinned prompts appear here while the run goes."),
        samples.map((group) =>
          h(
            "article",
            { class: "ftw-row" },
            h("header", { class: "ftw-row-head ftw-raw" }, group.prompt),
            h("dl", { class: "ftw-answers" }, group.answers.map(([step, text]) => h("div", {}, h("dt", {}, `step ${number(step)}`), h("dd", { class: "ftw-raw" }, text)))),
          ),
        ),
      );
    },
  };
}

function textPage(kind) {
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

function receiptPage() {
  const element = h("div", {});
  let before = null;
  return {
    element,
    draw(held) {
      const entries = held.parts.receipt ?? [];
      if (entries === before) return;
      before = entries;
      if (!entries.length) return fill(element, h("p", { class: "ftw-empty" }, "What was really done with each setting stands here once the run has started."));
      const head = h("tr", {}, ["feature", "asked", "done", "how many", ""].map((title) => h("th", { scope: "col" }, title)));
      const rows = entries.map((entry) => h("tr", {}, entry.map((cell) => h("td", {}, cell))));
      return fill(element, h("table", { class: "ftw-table" }, h("thead", {}, head), h("tbody", {}, rows)));
    },
  };
}

/** `Monitor(run)` alone. */
export function monitorFace(stage) {
  openWhenReady(stage, async () => {
    const answer = await stage.ask("monitored");
    if (answer) fill(stage.body, monitorView(stage, answer.data.run, null).element);
    return answer;
  });
}
