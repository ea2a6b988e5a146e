/**
 * Two to eight runs laid beside each other: one curve of each on one chart, the settings that differ, their answers. Curves
 * come run by run as a monitor's do; a run is told by its sign, its dashes and its name, never by colour alone.
 */
import { Chart } from "./chart.js";
import { FORMATS, chartTools } from "./curves.js";
import { button, fill, h, number, openWhenReady, tabs, timer } from "./dom.js";
import { Held } from "./held.js";
import { RESTING, STATE } from "./runhead.js";

const SIGNS = ["──", "╌╌", "··", "─·", "┈┈", "─╌", "╌·", "╴╴"];
const ASPECTS = [
  { id: "curves", title: "Curves" },
  { id: "settings", title: "Settings that differ" },
  { id: "answers", title: "Answers" },
];

/** The runs of these names; `leave` is drawn as a way back where there is one. */
export function compareView(stage, names, leave) {
  const runs = names.map((name, tone) => ({ name, tone, sign: SIGNS[tone], held: new Held() }));
  let [page, mark, over] = ["curves", 0, false];
  let told = { curves: [], settings: [], answers: [], problem: "" };
  const curves = overlaidPage(runs, async (range) => {
    await Promise.all(
      runs.map(async ({ name, held }) => {
        const answer = range && (await stage.ask("zoom", { run: name, start: Math.floor(range[0]), stop: Math.ceil(range[1]) }));
        if (answer) held.zoom(answer);
        else held.zoomed = null;
      }),
    );
    draw();
  });
  const pages = { curves, settings: settingsPage(runs), answers: besidePage(runs) };
  const legend = h("div", { class: "ftw-legend" });
  const holder = h("div", { class: "ftw-page", tabindex: "-1" });
  const bar = tabs("what to compare", (id) => {
    page = id;
    draw();
  });
  const draw = () => {
    bar.set(ASPECTS.map((entry) => ({ ...entry, here: entry.id === page })));
    fill(legend, runs.map(standing));
    if (holder.firstChild !== pages[page].element) fill(holder, pages[page].element);
    pages[page].draw(told);
  };
  bar.show(holder);
  const back = leave ? button("‹ Runs", leave, { class: "ftw-plain" }) : null;
  const element = h("div", { class: "ftw-monitor" }, h("header", { class: "ftw-head" }, back, legend), bar.bar, holder);

  const look = async ({ name, held }) => {
    if (held.loading === 1 && RESTING.has(held.state) && !missing(held)) return;
    const answer = await stage.ask("watch", { run: name, seq: held.seq, epoch: held.epoch, marks: held.marks, series: held.ends() });
    if (answer && !over) held.take(answer);
  };
  const turn = async () => {
    if (over || stage.retired) return null;
    await Promise.all(runs.map(look));
    const answer = await stage.ask("compare", { runs: names, mark });
    if (over) return null;
    if (answer && answer.data.mark !== mark) told = answer.data;
    if (answer) mark = answer.data.mark;
    draw();
    if (runs.some(({ held }) => held.loading < 1 || missing(held))) return 250;
    return runs.every(({ held }) => RESTING.has(held.state)) ? 4000 : 1000;
  };
  const clock = timer(stage.root, turn);
  stage.onTheme.add(curves.redraw);
  const close = () => {
    over = true;
    forget();
    clock.stop();
    curves.close();
    stage.onTheme.delete(curves.redraw);
  };
  const forget = stage.onEnd(close);
  draw();
  return { element, close };
}

/** `Compare(run, run)` alone. */
export function compareFace(stage) {
  openWhenReady(stage, async () => {
    const answer = await stage.ask("compared");
    if (answer) fill(stage.body, compareView(stage, answer.data.runs, null).element);
    return answer;
  });
}

/** Whether a curve of the run has not come yet: long ones travel over several answers. */
function missing(held) {
  return held.names.some(({ name }) => held.curve(name).last === null);
}

/** A run by its sign and name. */
function called({ name, tone, sign }) {
  return h("span", { class: `ftw-tone${tone % 4}` }, h("span", { class: "ftw-sign", "aria-hidden": "true" }, sign), ` ${name}`);
}

function standing(run) {
  const { held } = run;
  const [glyph, kind] = STATE[held.state] ?? ["?", "waiting"];
  const [step] = held.parts.now ?? [0];
  const of = held.parts.head?.max_steps ? ` of ${number(held.parts.head.max_steps)}` : "";
  const facts = held.state ? h("span", { class: "ftw-quiet" }, `${held.parts.head.method}  ·  step ${number(step)}${of}${held.loading < 1 ? `  ·  reading the whole curve, ${Math.round(held.loading * 100)} %` : ""}`) : null;
  return h("div", {}, h("b", {}, called(run)), held.state ? h("span", { class: "ftw-state", dataset: { kind } }, `${glyph} ${held.state}`) : null, facts);
}

/** One curve large, the others that at least two runs have small, and where each of them begins and ends as a table. */
function overlaidPage(runs, zoomTo) {
  const charts = new Map();
  const grid = h("div", { class: "ftw-charts" });
  const table = h("div", { class: "ftw-beside" });
  const chosen = h("select", { "aria-label": "the curve that is drawn large" });
  const tools = chartTools(charts, h("label", {}, "curve ", chosen));
  const element = h("div", { class: "ftw-curves" }, tools.element, grid, table);
  let [known, shape, rows] = [[], "", null];
  const build = () => {
    charts.forEach((chart) => chart.close());
    charts.clear();
    const first = known.find((entry) => entry.name === chosen.value) ?? known[0];
    for (const entry of [first, ...known.filter((other) => other !== first)]) {
      const chart = new Chart({ title: entry.title, small: entry !== first, runs: true, format: FORMATS[entry.unit], least: entry.unit === "bytes" ? 0.2 : 0 });
      chart.onZoom = (range) => {
        charts.forEach((each) => (each.range = range));
        zoomTo(range);
      };
      charts.set(entry.name, chart);
    }
    fill(grid, [...charts.values()].map((chart) => chart.element));
    tools.apply();
    lines();
  };
  const lines = () => {
    for (const [name, chart] of charts) {
      const having = runs.filter(({ held }) => held.names.some((entry) => entry.name === name));
      chart.set(
        having.map(({ name: run, tone, sign, held }) => ({ curve: held.zoomed?.get(name) ?? held.curve(name), name: run, tone, sign, newest: held.latest.get(name) })),
      );
    }
  };
  chosen.addEventListener("change", build);
  return {
    element,
    redraw: () => charts.forEach((chart) => chart.draw()),
    close: () => charts.forEach((chart) => chart.close()),
    draw(told) {
      const next = told.curves.map(({ name }) => name).join("\n");
      known = told.curves;
      if (next !== shape) {
        shape = next;
        const before = chosen.value;
        fill(chosen, known.map(({ name, title }) => h("option", { value: name, selected: name === before }, title)));
        if (known.length) build();
      }
      if (!known.length) return fill(grid, h("p", { class: "ftw-empty" }, "No curve that two of these runs have."));
      lines();
      if (told === rows) return undefined;
      rows = told;
      return fill(table, runsTable(runs, known.map(({ title, unit, ends }) => [title, ends.map((end) => between(end, FORMATS[unit] ?? number))])));
    },
  };
}

function between(end, format) {
  return end ? `${format(end.last)} (${format(end.lowest)} to ${format(end.highest)})` : "-";
}

/** A column a run. */
function runsTable(runs, rows) {
  const head = h("tr", {}, h("th", { scope: "col" }, ""), runs.map((run) => h("th", { scope: "col" }, called(run))));
  const body = rows.map(([label, cells]) => h("tr", {}, h("th", { scope: "row" }, label), cells.map((cell) => h("td", {}, cell))));
  return h("table", { class: "ftw-table ftw-wide" }, h("thead", {}, head), h("tbody", {}, body));
}

function settingsPage(runs) {
  const element = h("div", { class: "ftw-beside" });
  let before = null;
  return {
    element,
    draw(told) {
      if (told === before) return;
      before = told;
      const rows = told.settings.map(({ path, values }) => [h("code", {}, path), values]);
      const none = told.problem || (told.curves.length || told.answers.length ? "Their configs are the same." : "Reading the configs.");
      const alike = (told.identical ?? []).map((sentence) => h("p", {}, sentence));
      fill(element, alike, rows.length ? runsTable(runs, rows) : h("p", { class: "ftw-empty" }, none));
    },
  };
}

/** The newest answer of each run to each prompt that two of them were asked. */
function besidePage(runs) {
  const element = h("div", { class: "ftw-samples" });
  let before = null;
  const answer = (run, found) =>
    h("div", {}, h("dt", {}, called(run)), found ? h("dd", { class: "ftw-raw" }, h("span", { class: "ftw-quiet" }, `step ${number(found[0])}: `), found[1].trim() ? found[1] : "no words") : h("dd", { class: "ftw-quiet" }, "was not asked"));
  return {
    element,
    draw(told) {
      if (told === before) return;
      before = told;
      fill(
        element,
        told.answers.length ? null : h("p", { class: "ftw-empty" }, "No prompt was put to two of these runs."),
        told.answers.map(({ prompt, answers }) =>
          h("article", { class: "ftw-row" }, h("header", { class: "ftw-row-head ftw-raw" }, prompt), h("dl", { class: "ftw-answers ftw-named" }, runs.map((run, at) => answer(run, answers[at])))),
        ),
      );
    },
  };
}
