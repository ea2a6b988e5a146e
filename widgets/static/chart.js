/**
 * Curves on a canvas: whole runs as min/max bands, new points appended, thinned in place when they grow too many.
 * No library: a curve is three arrays, and drawing costs the width of the chart, not the length of the run.
 */
import { h, number } from "./dom.js";

const MOST_POINTS = 4096;
const DASHES = [[], [7, 4], [2, 3], [8, 3, 2, 3], [1, 6], [12, 3, 5, 3], [8, 3, 2, 3, 2, 3], [4, 4]];
const TONES = ["--ftw-accent", "--ftw-second", "--ftw-third", "--ftw-fourth"];

/** A binary buffer of the channel as numbers, copied because its offset may not be aligned. */
export function numbers(view, Kind) {
  const start = view.byteOffset ?? 0;
  const raw = view.buffer ?? view;
  return new Kind(raw.slice(start, start + view.byteLength));
}

/** A name without the words that it begins with as the first one does: "reward of chosen", then "rejected". */
function beside(name, first) {
  if (name === `held-out ${first}`) return "held-out";
  const [words, others] = [name.split(" "), first.split(" ")];
  let same = 0;
  while (name !== first && same < words.length - 1 && words[same] === others[same]) same += 1;
  return words.slice(same).join(" ");
}

export class Curve {
  constructor() {
    this.clear();
  }

  clear() {
    this.steps = [];
    this.low = [];
    this.high = [];
  }

  get last() {
    return this.steps.length ? this.steps[this.steps.length - 1] : null;
  }

  /** Points beyond what is held; what is not beyond (a second asker, a late answer) is left out. */
  append(steps, low, high) {
    for (let at = 0; at < steps.length; at += 1) {
      if (this.last !== null && steps[at] <= this.last) continue;
      this.steps.push(steps[at]);
      this.low.push(low[at]);
      this.high.push(high[at]);
    }
    if (this.steps.length > MOST_POINTS) this.thin();
  }

  thin() {
    const keep = new Curve();
    for (let at = 0; at < this.steps.length; at += 2) {
      const next = Math.min(at + 1, this.steps.length - 1);
      keep.steps.push(this.steps[next]);
      keep.low.push(lower(this.low[at], this.low[next]));
      keep.high.push(higher(this.high[at], this.high[next]));
    }
    Object.assign(this, { steps: keep.steps, low: keep.low, high: keep.high });
  }

  /** The middle of each point, smoothed by an exponential mean with its start corrected. */
  middles(weight) {
    const out = new Array(this.steps.length);
    let mean = 0;
    let mass = 0;
    for (let at = 0; at < out.length; at += 1) {
      const value = (this.low[at] + this.high[at]) / 2;
      if (Number.isNaN(value) || !weight) {
        out[at] = value;
        continue;
      }
      mean = weight * mean + (1 - weight) * value;
      mass = weight * mass + (1 - weight);
      out[at] = mean / mass;
    }
    return out;
  }

  nearest(step) {
    let [from, to] = [0, this.steps.length - 1];
    while (from < to) {
      const mid = (from + to) >> 1;
      if (this.steps[mid] < step) from = mid + 1;
      else to = mid;
    }
    if (from > 0 && step - this.steps[from - 1] < this.steps[from] - step) from -= 1;
    return from;
  }
}

function lower(a, b) {
  return Number.isNaN(a) ? b : Number.isNaN(b) ? a : Math.min(a, b);
}

function higher(a, b) {
  return Number.isNaN(a) ? b : Number.isNaN(b) ? a : Math.max(a, b);
}

/** Round values that span low..high, about `want` of them. */
function ticks(low, high, want) {
  const raw = (high - low) / Math.max(1, want);
  const power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw * 0.99) ?? raw;
  const out = [];
  for (let value = Math.ceil(low / size) * size; value <= high + size * 1e-6; value += size) out.push(Math.abs(value) < size * 1e-6 ? 0 : value);
  return out;
}

/** Points from which the axis is chosen by most of them, and by how much a few must stretch it to be left beyond it. */
const [MANY, STRETCHED] = [20, 3];

/**
 * The axis of these values (finite, ascending: the lowest and the highest of each point): `low`, `high`, `log`, and `beyond`, what
 * lies outside. Most of them decide: a curve that lies at the foot of its range is drawn on a log scale (where `mayLog`), and
 * single points that would stretch the range are left beyond it.
 */
function axisOf(lows, highs, mayLog) {
  const whole = { low: lows[0] ?? Infinity, high: highs.at(-1) ?? -Infinity, log: false, beyond: [] };
  if (lows.length < MANY) return whole;
  const few = Math.max(1, Math.floor(lows.length / 50));
  const most = [lows[few], highs[highs.length - 1 - few]];
  const atFoot = lows[Math.floor(lows.length / 2)] <= most[0] + 0.1 * (most[1] - most[0]);
  const log = mayLog && whole.low > 0 && most[1] >= 20 * most[0] && atFoot;
  const [to, back] = log ? [Math.log10, (value) => 10 ** value] : [(value) => value, (value) => value];
  const [from, until] = most.map(to);
  const span = until - from;
  if (!(span > 0) || to(whole.high) - to(whole.low) <= STRETCHED * span) return { ...whole, log };
  const [above, below] = [to(whole.high) > until + span / 10, to(whole.low) < from - span / 10];
  return {
    low: below ? back(from - span / 10) : whole.low,
    high: above ? back(until + span / 10) : whole.high,
    log,
    beyond: [...(above ? [whole.high] : []), ...(below ? [whole.low] : [])],
  };
}

/**
 * One chart of one or more curves over steps. `options`: `title`, `small`, `format`, and `least`, the share of its value
 * that the height stands for at least: what moves less is drawn as the calm line it is. With `runs` the lines are one curve
 * of several runs: each has its own dashes, and is called by its `sign` beside its value.
 * Pointer or arrow keys move a cursor that names step and value; dragging zooms, Escape or a double click shows all.
 */
export class Chart {
  constructor(options) {
    this.options = options;
    this.lines = [];
    this.scale = "auto"; // or "linear", "log": with every value
    this.log = false;
    this.smooth = 0;
    this.range = null;
    this.cursor = null;
    this.drag = null;
    this.onZoom = () => {};
    this.canvas = h("canvas", { class: "ftw-canvas", tabindex: "0", role: "img" });
    this.value = h("span", { class: "ftw-chart-value" });
    this.title = h("span", { class: "ftw-chart-title" }, options.title);
    this.how = h("span", { class: "ftw-quiet" });
    this.element = h(
      "figure",
      { class: options.small ? "ftw-chart ftw-chart-small" : "ftw-chart" },
      h("figcaption", {}, this.title, this.how, this.value),
      this.canvas,
    );
    this.listen();
    this.resizer = new ResizeObserver(() => this.draw());
    this.resizer.observe(this.canvas);
  }

  close() {
    this.resizer.disconnect();
  }

  /** `[{curve, name, tone, newest, sign}]`, the first one being the one whose value is shown; `newest` stands there without a cursor. */
  set(lines) {
    this.lines = lines;
    const names = lines.map((line) => line.name).join(", ");
    // A large chart names its lines beside their values; a small one has room for the names alone.
    if (this.options.small && !this.options.runs && this.title.title !== names) {
      this.title.title = names;
      this.title.replaceChildren(...lines.map((line) => h("span", { class: `ftw-tone${line.tone % TONES.length}` }, beside(line.name, lines[0].name))));
    }
    this.draw();
  }

  listen() {
    const step = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return this.stepAt?.(event.clientX - box.left) ?? null;
    };
    this.canvas.addEventListener("pointermove", (event) => {
      this.cursor = step(event);
      if (this.drag) this.drag.to = this.cursor;
      this.draw();
    });
    this.canvas.addEventListener("pointerleave", () => {
      this.cursor = null;
      if (!this.drag) this.draw();
    });
    this.canvas.addEventListener("pointerdown", (event) => {
      this.drag = { from: step(event), to: step(event) };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointerup", () => {
      const { from, to } = this.drag ?? {};
      this.drag = null;
      const wide = this.window && Math.abs(to - from) > (this.window[1] - this.window[0]) * 0.03;
      if (wide) this.zoom([Math.min(from, to), Math.max(from, to)]);
      else this.draw();
    });
    this.canvas.addEventListener("dblclick", () => this.zoom(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  /** The line along whose points the cursor goes: of several runs the one that has come furthest. */
  get main() {
    return this.options.runs ? this.lines.reduce((best, line) => (line.curve.last > (best?.curve.last ?? -1) ? line : best), this.lines[0]) : this.lines[0];
  }

  key(event) {
    const curve = this.main?.curve;
    if (!curve?.steps.length) return;
    if (event.key === "Escape") this.zoom(null);
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (!move) return;
    event.preventDefault();
    const at = this.cursor === null ? curve.steps.length - 1 : curve.nearest(this.cursor) + move;
    this.cursor = curve.steps[Math.max(0, Math.min(curve.steps.length - 1, at))];
    this.draw();
  }

  zoom(range) {
    this.range = range;
    this.onZoom(range);
    this.draw();
  }

  /** First and last step in view, and the axis of its values. */
  bounds() {
    let [first, last] = [Infinity, -Infinity];
    const [lows, highs] = [[], []];
    const byValues = this.scale === "auto";
    this.log = this.scale === "log";
    for (const { curve } of this.lines) {
      if (!curve.steps.length) continue;
      first = Math.min(first, curve.steps[0]);
      last = Math.max(last, curve.last);
    }
    if (this.range) [first, last] = this.range;
    for (const { curve, tone } of this.lines) {
      const middles = this.smooth ? curve.middles(this.smooth) : null;
      for (let at = 0; at < curve.steps.length; at += 1) {
        if (curve.steps[at] < first || curve.steps[at] > last) continue;
        const [down, up] = tone || !middles ? [curve.low[at], curve.high[at]] : [middles[at], middles[at]];
        if (!Number.isFinite(down) || !Number.isFinite(up) || (this.log && !(down > 0))) continue;
        lows.push(down);
        highs.push(up);
      }
    }
    [lows, highs].forEach((values) => values.sort((one, other) => one - other));
    if (!byValues) return { first, last, low: lows[0] ?? Infinity, high: highs.at(-1) ?? -Infinity, beyond: [] };
    const axis = axisOf(lows, highs, !this.options.small);
    this.log = axis.log;
    return { first, last, ...axis };
  }

  draw() {
    const { width, height } = this.canvas.getBoundingClientRect();
    if (!width || !height) return;
    const scale = window.devicePixelRatio || 1;
    const [wide, tall] = [Math.round(width * scale), Math.round(height * scale)];
    if (this.canvas.width !== wide) this.canvas.width = wide;
    if (this.canvas.height !== tall) this.canvas.height = tall;
    const pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const style = getComputedStyle(this.canvas);
    const colour = (name) => style.getPropertyValue(name).trim() || "#888";
    pen.font = `11px ${style.fontFamily}`;
    const box = this.bounds();
    const format = this.options.format ?? number;
    this.stepAt = null;
    if (!(box.last >= box.first) || !(box.high >= box.low)) {
      pen.fillStyle = colour("--ftw-quiet");
      pen.fillText("no points yet", 8, height / 2);
      this.canvas.setAttribute("aria-label", `${this.options.title}: no points yet`);
      this.value.replaceChildren();
      this.value.title = "";
      return;
    }
    const said = [...(this.log ? ["log scale"] : []), ...(box.beyond.length ? [`beyond: ${box.beyond.map(format).join(", ")}`] : [])].join(", ");
    if (this.how.textContent !== said) this.how.textContent = said;
    this.plot(pen, colour, format, box, width, height);
  }

  plot(pen, colour, format, box, width, height) {
    const of = (value) => (this.log ? Math.log10(value) : value);
    let [low, high] = [of(box.low), of(box.high)];
    const lacking = (this.options.least ?? 0) * Math.abs(high) - (high - low);
    if (lacking > 0 && !this.log) [low, high] = [low - lacking / 2, high + lacking / 2];
    const pad = high > low ? (high - low) * 0.06 : Math.max(Math.abs(high) * 0.1, 1e-9);
    [low, high] = [low - pad, high + pad];
    const marks = ticks(low, high, this.options.small ? 2 : 4).map((value) => ({ value, text: format(this.log ? 10 ** value : value) }));
    const left = this.options.small ? 4 : Math.max(...marks.map((mark) => pen.measureText(mark.text).width), 20) + 10;
    const [top, bottom, right] = [6, height - (this.options.small ? 4 : 18), width - 8];
    const span = Math.max(box.last - box.first, 1e-9);
    const x = (step) => left + ((step - box.first) / span) * (right - left);
    const y = (value) => bottom - ((of(value) - low) / (high - low)) * (bottom - top);
    this.window = [box.first, box.last];
    this.stepAt = (at) => box.first + ((Math.min(Math.max(at, left), right) - left) / (right - left)) * span;

    pen.strokeStyle = colour("--ftw-grid");
    pen.fillStyle = colour("--ftw-quiet");
    pen.lineWidth = 1;
    for (const mark of marks) {
      const at = Math.round(y(this.log ? 10 ** mark.value : mark.value)) + 0.5;
      pen.beginPath();
      pen.moveTo(left, at);
      pen.lineTo(right, at);
      pen.stroke();
      if (!this.options.small) pen.fillText(mark.text, left - 6 - pen.measureText(mark.text).width, at + 4);
    }
    if (!this.options.small) {
      pen.fillText(number(Math.round(box.first)), left, height - 4);
      const end = `step ${number(Math.round(box.last))}`;
      pen.fillText(end, right - pen.measureText(end).width, height - 4);
    }
    pen.save();
    pen.beginPath();
    pen.rect(left, top - 4, right - left + 4, bottom - top + 8);
    pen.clip();
    [...this.lines].reverse().forEach((line) => this.line(pen, line, colour, x, y));
    pen.restore();
    this.pointer(pen, colour, format, x, y, top, bottom);
  }

  line(pen, { curve, tone }, colour, x, y) {
    const ink = colour(TONES[tone % TONES.length]);
    const ok = (value) => !Number.isNaN(value) && (!this.log || value > 0);
    pen.strokeStyle = ink;
    pen.fillStyle = ink;
    pen.globalAlpha = this.smooth ? 0.25 : 0.35;
    for (let at = 0; at < curve.steps.length; at += 1) {
      if (!ok(curve.low[at]) || !ok(curve.high[at]) || curve.low[at] === curve.high[at]) continue;
      const [up, down] = [y(curve.high[at]), y(curve.low[at])];
      pen.fillRect(x(curve.steps[at]) - 0.75, up, 1.5, Math.max(1, down - up));
    }
    if (this.smooth) this.path(pen, curve.steps, curve.middles(0), ok, x, y, 1);
    pen.globalAlpha = 1;
    if (this.options.runs) pen.setLineDash(DASHES[tone % DASHES.length]);
    this.path(pen, curve.steps, curve.middles(this.smooth), ok, x, y, 1.75);
    pen.setLineDash([]);
    if ((tone && !this.options.runs && curve.steps.length <= 200) || curve.steps.length === 1) {
      for (let at = 0; at < curve.steps.length; at += 1) {
        const middle = (curve.low[at] + curve.high[at]) / 2;
        if (!ok(middle)) continue;
        pen.beginPath();
        pen.arc(x(curve.steps[at]), y(middle), 2.5, 0, 7);
        pen.fill();
      }
    }
  }

  path(pen, steps, values, ok, x, y, thick) {
    pen.lineWidth = thick;
    pen.lineJoin = "round";
    pen.beginPath();
    let down = false;
    for (let at = 0; at < steps.length; at += 1) {
      if (!ok(values[at])) down = false;
      else if (down) pen.lineTo(x(steps[at]), y(values[at]));
      else {
        pen.moveTo(x(steps[at]), y(values[at]));
        down = true;
      }
    }
    pen.stroke();
  }

  pointer(pen, colour, format, x, y, top, bottom) {
    const { main } = this;
    const { curve } = main;
    if (this.drag && this.drag.to !== null) {
      pen.fillStyle = colour("--ftw-accent");
      pen.globalAlpha = 0.15;
      const [from, to] = [x(this.drag.from), x(this.drag.to)];
      pen.fillRect(Math.min(from, to), top, Math.abs(to - from), bottom - top);
      pen.globalAlpha = 1;
    }
    const at = this.cursor === null ? curve.steps.length - 1 : curve.nearest(this.cursor);
    // A small chart has room for one value, of several runs for none; the list beside the charts has them all.
    const named = this.options.small && this.cursor === null ? this.lines.slice(0, this.options.runs ? 0 : 1) : this.lines;
    const parts = named
      .filter((line) => line.curve.steps.length && !(this.options.runs && this.cursor !== null && line.curve.last < curve.steps[at]))
      .map((line) => {
        const index = line === main ? at : this.cursor === null ? line.curve.steps.length - 1 : line.curve.nearest(this.cursor);
        const [from, to] = [line.curve.low[index], line.curve.high[index]];
        const whole = this.cursor === null && Number.isFinite(line.newest) ? [line.newest, line.newest] : [from, to];
        const value = whole[0] === whole[1] ? format(whole[0]) : `${format(whole[0])} to ${format(whole[1])}`;
        const called = this.options.runs ? line.sign : this.lines.length > 1 && !this.options.small ? line.name : "";
        return { text: called ? `${called} ${value}` : value, tone: line.tone, said: this.options.runs ? `${line.name} ${value}` : null };
      });
    if (this.cursor !== null && at >= 0) parts.unshift({ text: `step ${number(curve.steps[at])}` });
    const text = parts.map((part) => part.text).join(", ");
    if (this.value.title !== text) {
      this.value.title = text;
      this.value.replaceChildren(...parts.map((part) => h("span", { class: part.tone || part.said ? `ftw-tone${part.tone % TONES.length}` : "" }, part.text)));
    }
    this.canvas.setAttribute("aria-label", `${this.options.title}: ${parts.map((part) => part.said ?? part.text).join(", ")}, ${curve.steps.length} points, last step ${number(curve.last)}`);
    if (this.cursor === null || at < 0) return;
    const place = x(curve.steps[at]);
    pen.strokeStyle = colour("--ftw-quiet");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(place, top);
    pen.lineTo(place, bottom);
    pen.stroke();
    const middle = (curve.low[at] + curve.high[at]) / 2;
    if (Number.isNaN(middle) || (this.log && middle <= 0)) return;
    pen.fillStyle = colour(TONES[main.tone % TONES.length]);
    pen.beginPath();
    pen.arc(place, y(middle), 3.5, 0, 7);
    pen.fill();
  }
}
