/** The curves of a run: the main one large, the others small beside the newest values, smoothed and zoomed together. */
import { Chart } from "./chart.js";
import { brief, bytes, fill, h, number, say } from "./dom.js";
import { RESTING } from "./runhead.js";

export const FORMATS = { bytes, brief, share: (value) => `${number(value * 100)} %` };

/** Smoothing and scale of `charts`, a map of them; `apply` sets what is chosen. */
export function chartTools(charts, ...more) {
  const smoothing = h("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: "0", "aria-label": "smoothing" });
  const scale = h("select", {}, [["auto", "by the values"], ["linear", "linear, every value"], ["log", "log, every value"]].map(([value, words]) => h("option", { value }, words)));
  const words = h("span", { class: "ftw-quiet" }, "drag to zoom, double click for all, arrow keys for values");
  const apply = () => {
    charts.forEach((chart) => {
      chart.smooth = Number(smoothing.value);
      chart.scale = chart.options.small && scale.value === "log" ? "linear" : scale.value;
      chart.draw();
    });
  };
  smoothing.addEventListener("input", apply);
  scale.addEventListener("change", apply);
  return { element: h("div", { class: "ftw-tools" }, more, h("label", {}, "smoothing ", smoothing), h("label", {}, "axis ", scale), words), apply };
}

/** The curves: the main one large, the others small, the newest values as a list. */
export function chartsPage(zoomTo) {
  const grid = h("div", { class: "ftw-charts" });
  const values = h("dl", { class: "ftw-values" });
  const good = h("p", { class: "ftw-quiet ftw-good" });
  const charts = new Map();
  const tools = chartTools(charts);
  const element = h("div", { class: "ftw-curves" }, h("div", { class: "ftw-curves-top" }, grid, h("div", {}, values, good)), tools.element);
  let [shape, points, zoomed] = ["", -1, null];
  const redraw = () => charts.forEach((chart) => chart.draw());
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
      const chart = new Chart({ title: group[0].title, small: at > 0, format: FORMATS[group[0].unit], least: group[0].unit === "bytes" ? 0.2 : 0 });
      chart.onZoom = zoomAll;
      charts.set(group[0].name, chart);
    });
    fill(grid, [...charts.values()].map((chart) => chart.element));
    tools.apply();
  };
  const list = (held) => {
    const gpu = held.parts.gpu ?? [];
    say(good, held.parts.head?.watch_for ?? "");
    const entries = held.names.map((entry) => [entry.title, (FORMATS[entry.unit] ?? number)(held.latest.get(entry.name))]);
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
        [shape, points] = [next, -1];
        build(held);
      }
      const moved = held.points !== points || held.zoomed !== zoomed;
      [points, zoomed] = [held.points, held.zoomed];
      for (const group of moved ? groups(held) : [])
        charts.get(group[0].name)?.set(group.map((entry, at) => ({ curve: (held.zoomed ?? held.curves).get(entry.name) ?? held.curve(entry.name), name: entry.title, tone: at, newest: held.latest.get(entry.name) })));
      list(held);
      if (held.names.length) return grid.querySelector(".ftw-empty")?.remove();
      const none = RESTING.has(held.parts.head?.state) ? "This run made no step, so it has no curves." : "Curves appear with the first step.";
      return grid.textContent === none ? undefined : fill(grid, h("p", { class: "ftw-empty" }, none));
    },
  };
}
