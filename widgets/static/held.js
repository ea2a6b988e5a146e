/**
 * What a view holds of a run, and how an answer changes it: newest values, curves, and parts in words with their marks.
 * The view names what it holds, so only what is new travels.
 */
import { Curve, numbers } from "./chart.js";

/** What the view holds of a run, and how an answer changes it. */
export class Held {
  constructor() {
    this.seq = -1;
    this.epoch = 0;
    this.loading = 1;
    this.latest = new Map();
    this.curves = new Map();
    this.points = 0; // grows with every answer that changes a curve or a newest value
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

  /** Takes an answer in; tells whether it brought anything that is to be drawn. */
  take({ data, buffers }) {
    const fresh = Boolean(data.parts || data.latest || data.series?.length || data.epoch !== undefined || this.loading !== data.loading);
    this.loading = data.loading;
    if (data.latest || data.series?.length || data.epoch !== undefined) this.points += 1;
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
    return fresh;
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
