/**
 * What every view shares: elements made of text nodes only, numbers in words, the question-and-answer channel to the
 * kernel, a timer that sleeps while nobody looks, and light or dark taken from what is really behind the view.
 * Text from rows, logs and names only ever becomes a text node or a canvas string.
 */

/** An element. Properties: `class`, `dataset`, `on` (event handlers); anything else is an attribute. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") element.className = value;
    else if (key === "dataset") Object.assign(element.dataset, value);
    else if (key === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else if (key === "value" || key === "checked" || key === "disabled" || key === "selected") element[key] = value;
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function button(label, act, props = {}) {
  return h("button", { type: "button", ...props, on: { click: act } }, label);
}

/** An id that no other element has. */
export function unique() {
  return `ftw-${Math.random().toString(36).slice(2, 9)}`;
}

/** Replace what an element shows, unless it shows the same text already (spares layout at 4 Hz). */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function fill(element, ...children) {
  element.replaceChildren(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
}

/** A number for reading: 9,812 and 0.0312 and 1.1e-4. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(1).replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return value.toLocaleString("en-US", { maximumSignificantDigits: size >= 1000 ? 5 : 4 });
}

/** Bytes with at most three digits, as `engine.figures.size` writes them: 512 MiB, 1.0 GiB. */
export function bytes(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (Math.round(Math.abs(value)) >= 1000 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${value.toFixed(at === 0 || Math.abs(value) >= 100 ? 0 : 1)} ${units[at]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "-";
  const whole = Math.max(0, Math.round(seconds));
  const two = (part) => String(part).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60)];
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

/** A short time in one unit: 208 ms, 4.1 s, 2:05. */
export function brief(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "-";
  if (seconds < 1) return `${(seconds * 1000).toLocaleString("en-US", { maximumFractionDigits: seconds < 0.01 ? 1 : 0 })} ms`;
  return seconds < 60 ? `${seconds.toFixed(1)} s` : duration(seconds);
}

export function ago(started) {
  if (!started) return "-";
  const seconds = Math.max(0, Date.now() / 1000 - started);
  const [unit, length] = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]].find(([, size]) => seconds >= size) ?? ["s", 1];
  return `${Math.floor(seconds / length)} ${unit} ago`;
}

const ANSWER_MS = 8000;

/**
 * Questions to the kernel, each with its own id, so that several views of one widget share one comm.
 * `ask` resolves to `{data, buffers}`; it rejects with the kernel's sentence, or with `silent` after eight seconds or where
 * the kernel is gone.
 */
export function channel(model) {
  const own = Math.random().toString(36).slice(2, 8);
  const waiting = new Map();
  let count = 0;
  const receive = (content, buffers) => {
    const asked = waiting.get(content?.id);
    if (!asked) return;
    waiting.delete(content.id);
    clearTimeout(asked.timer);
    if (content.ok) asked.resolve({ data: content, buffers: buffers ?? [] });
    else asked.reject(Object.assign(new Error(content.error), { hint: content.hint ?? "", retired: content.retired }));
  };
  model.on("msg:custom", receive);
  return {
    ask(what, params = {}) {
      const id = `${own}.${(count += 1)}`;
      return new Promise((resolve, reject) => {
        const silent = () => {
          waiting.delete(id);
          reject(Object.assign(new Error("The kernel does not answer."), { silent: true }));
        };
        const timer = setTimeout(silent, ANSWER_MS);
        waiting.set(id, { resolve, reject, timer });
        try {
          model.send({ ...params, id, do: what });
        } catch {
          // The kernel was restarted or ended: its end of the wire is gone, which is said in words of our own.
          clearTimeout(timer);
          silent();
        }
      });
    },
    close() {
      model.off("msg:custom", receive);
      for (const asked of waiting.values()) clearTimeout(asked.timer);
      waiting.clear();
    },
  };
}

/** Calls `work` again and again, `work` naming the pause in ms (or null to end); slower while out of sight. */
export function timer(root, work) {
  let seen = true;
  let stopped = false;
  let handle = 0;
  let round = 0;
  const watcher = new IntersectionObserver((entries) => {
    const now = entries[entries.length - 1].isIntersecting;
    if (now && !seen) kick();
    seen = now;
  });
  watcher.observe(root);
  const turn = async () => {
    const mine = round;
    let pause = 3000;
    try {
      pause = await work();
    } catch (trouble) {
      reportError(trouble); // a look that went wrong is not the last one
    }
    if (stopped || pause === null || mine !== round) return;
    handle = setTimeout(turn, seen && !document.hidden ? pause : Math.max(pause, 3000));
  };
  const kick = () => {
    if (stopped) return;
    clearTimeout(handle);
    round += 1; // a turn that waits for its answer is not followed by another one
    handle = setTimeout(turn, 0);
  };
  const onShow = () => !document.hidden && kick();
  document.addEventListener("visibilitychange", onShow);
  kick();
  return {
    kick,
    stop() {
      stopped = true;
      clearTimeout(handle);
      watcher.disconnect();
      document.removeEventListener("visibilitychange", onShow);
    },
  };
}

/** Marks the root `light` or `dark` by the colour that is really behind it, and again whenever the theme changes. */
export function followTheme(root, changed) {
  const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const behind = () => {
    for (let element = root.parentElement; element; element = element.parentElement ?? element.getRootNode()?.host) {
      const colour = getComputedStyle(element).backgroundColor;
      if (!colour || colour === "transparent" || /,\s*0\)$/.test(colour)) continue;
      probe.fillStyle = colour;
      probe.fillRect(0, 0, 1, 1);
      const [red, green, blue] = probe.getImageData(0, 0, 1, 1).data;
      return 0.299 * red + 0.587 * green + 0.114 * blue < 128;
    }
    return matchMedia("(prefers-color-scheme: dark)").matches;
  };
  const apply = () => {
    const theme = behind() ? "dark" : "light";
    if (root.dataset.theme === theme) return;
    root.dataset.theme = theme;
    changed();
  };
  const observer = new MutationObserver(() => setTimeout(apply, 120));
  observer.observe(document.body, { attributes: true });
  observer.observe(document.documentElement, { attributes: true });
  const media = matchMedia("(prefers-color-scheme: dark)");
  media.addEventListener("change", apply);
  requestAnimationFrame(apply);
  return () => {
    observer.disconnect();
    media.removeEventListener("change", apply);
  };
}

/** Tabs by the pattern that screen readers know: arrows move, the chosen one alone is in the tab order. */
export function tabs(label, choose) {
  const bar = h("div", { class: "ftw-tabs", role: "tablist", "aria-label": label });
  let [items, panel, chosen] = [[], null, null];
  bar.addEventListener("keydown", (event) => {
    const at = items.findIndex((item) => item.tab === event.target);
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -at, End: items.length - 1 - at }[event.key];
    if (at < 0 || step === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const next = items[(at + step + items.length) % items.length];
    next.tab.focus();
    choose(next.id);
  });
  return {
    bar,
    /** Names the element that shows what is chosen. */
    show(element) {
      panel = element;
      panel.id ||= unique();
      panel.setAttribute("role", "tabpanel");
    },
    set(entries) {
      const same = entries.length === items.length && entries.every((entry, index) => entry.id === items[index].id);
      if (!same) {
        items = entries.map((entry) => {
          const mark = h("span", { class: "ftw-mark" });
          const tab = button("", () => choose(entry.id), { role: "tab", id: unique(), class: "ftw-tab", dataset: { tab: entry.id } });
          tab.append(mark, entry.title);
          return { id: entry.id, tab, mark };
        });
        fill(bar, items.map((item) => item.tab));
      }
      entries.forEach((entry, index) => {
        const { tab, mark } = items[index];
        say(mark, entry.mark ?? "");
        mark.dataset.kind = entry.kind ?? "";
        tab.setAttribute("aria-selected", entry.here ? "true" : "false");
        tab.tabIndex = entry.here ? 0 : -1;
        if (entry.words) tab.title = entry.words;
        else tab.removeAttribute("title");
        tab.setAttribute("aria-label", entry.words ? `${entry.title}, ${entry.words}` : entry.title);
        if (panel && entry.here) tab.setAttribute("aria-controls", panel.id);
        else tab.removeAttribute("aria-controls");
      });
      const here = items[entries.findIndex((entry) => entry.here)]?.tab;
      if (!here || here === chosen || !bar.clientWidth) return;
      chosen = here;
      panel?.setAttribute("aria-labelledby", here.id);
      // In a narrow cell the bar scrolls: the chosen tab comes into view, and nothing outside of the bar moves.
      bar.scrollLeft = Math.max(Math.min(bar.scrollLeft, here.offsetLeft), here.offsetLeft + here.offsetWidth - bar.clientWidth);
    },
  };
}

const FOCUSABLE = "button, input, select, textarea, summary, [tabindex='0']";

/**
 * What is focused may be drawn anew, hidden or gone after a press: the focus then moves to what stands there now, else to
 * the first control around its place, so that nobody who uses keys alone begins again at the top of the page.
 */
function keepFocus(root) {
  const seen = (element) => element.getClientRects().length > 0 && !element.disabled;
  const sign = (element) => element.dataset.recipe ?? element.dataset.mark ?? element.getAttribute("aria-label") ?? element.textContent;
  let [last, around] = [null, []];
  const forget = (event) => {
    if (!root.contains(event.target) || (event.type === "pointerdown" && !event.target.closest?.(FOCUSABLE))) last = null;
  };
  root.addEventListener("focusin", ({ target }) => {
    [last, around] = [target, []];
    for (let element = target.parentElement; element && element !== root.parentElement; element = element.parentElement) around.push(element);
  });
  const observer = new MutationObserver(() => {
    const active = root.getRootNode().activeElement;
    const gone = last;
    if (!gone || active === gone || !root.getClientRects().length) return; // also where the cell itself is out of sight
    if (active && active !== document.body) return void (last = null);
    if (gone.isConnected && seen(gone)) return gone.focus({ preventScroll: true }); // moved, which takes the focus away
    last = null;
    const places = around;
    around = []; // what is gone is not held
    const twin = [...root.querySelectorAll(gone.tagName)].find((each) => seen(each) && sign(each) === sign(gone));
    const near = () => places.filter((each) => each.isConnected).flatMap((each) => [...each.querySelectorAll(FOCUSABLE)].find((found) => seen(found)) ?? [])[0];
    (twin ?? near())?.focus({ preventScroll: true });
  });
  observer.observe(root, { childList: true, subtree: true, attributes: true, attributeFilter: ["hidden", "class"] });
  document.addEventListener("focusin", forget);
  document.addEventListener("pointerdown", forget, true);
  return () => {
    observer.disconnect();
    document.removeEventListener("focusin", forget);
    document.removeEventListener("pointerdown", forget, true);
  };
}

/** The root of a face: theme, the channel, the line that says when the kernel is gone, and the clean end. */
export function face(model, el, build) {
  const notice = h("div", { class: "ftw-notice", role: "status", hidden: true });
  let refused = ""; // the question whose refusal the notice tells
  const body = h("div", { class: "ftw-body" });
  const root = h("div", { class: "ftw" }, notice, body);
  root.style.setProperty("--ftw-height", `${model.get("height")}px`);
  el.append(root);
  const link = channel(model);
  const ends = new Set([link.close]);
  const onTheme = new Set();
  const stage = {
    root,
    body,
    onTheme,
    over: false,
    /** `end` is called when the cell's view goes; what this returns takes that back, for a view that is closed before. */
    onEnd: (end) => (ends.add(end), () => ends.delete(end)),
    notice(text) {
      notice.hidden = !text;
      say(notice, text);
      refused = "";
    },
    /** One question; trouble becomes the notice, until the same is answered, and resolves to null. */
    async ask(what, params) {
      try {
        const answer = await link.ask(what, params);
        if (notice.dataset.kind === "silent" || refused === what) {
          stage.notice("");
          notice.dataset.kind = "";
        }
        return answer;
      } catch (trouble) {
        notice.dataset.kind = trouble.silent ? "silent" : "error";
        if (trouble.silent)
          stage.notice("The kernel does not answer: it is busy with a cell, or gone. A run that is going is not touched. This view goes on once the kernel is free; if it is gone, run this cell again.");
        else stage.notice(trouble.hint ? `${trouble.message} ${trouble.hint}` : trouble.message);
        refused = what;
        if (trouble.retired) root.classList.add("ftw-retired");
        return null;
      }
    },
    get retired() {
      return root.classList.contains("ftw-retired");
    },
  };
  ends.add(followTheme(root, () => onTheme.forEach((redraw) => redraw()))).add(keepFocus(root));
  // A notebook's own shortcuts must not act on what is typed here.
  root.addEventListener("keydown", (event) => event.stopPropagation());
  root.setAttribute("data-lm-suppress-shortcuts", "true");
  build(stage);
  return () => {
    stage.over = true;
    ends.forEach((end) => end());
    root.remove();
  };
}

/** The view can be drawn before its comm is wired: ask until something answers. */
export async function openWhenReady(stage, ask) {
  for (let pause = 300; !stage.retired; pause = Math.min(pause * 1.5, 4000)) {
    if (await ask()) return;
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}
