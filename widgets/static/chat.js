/**
 * A chat: turns with the answers of each side beside one another, a line to write in that is never blocked, and what can
 * be done with the conversation. What the model says only ever becomes a text node.
 */
import { button, fill, h, openWhenReady, say, timer } from "./dom.js";

const WANTS = { prompt: "write here", answer: "an answer to score", query: "the query", text: "a text to rank" };

/** The chat with the run `run` (empty: the one that was given); `leave` is drawn as a way back where there is one, `asked` stands in the line. */
export function chatView(stage, run, leave, asked = "") {
  let [version, over, queued] = [-1, false, null];
  let told = { state: "loading", turns: [], titles: [], notes: [], settings: {}, kind: "text", wants: "prompt" };
  const title = h("strong", { class: "ftw-name" });
  const status = h("div", { class: "ftw-phase", role: "status" });
  const log = h("div", { class: "ftw-page", tabindex: "0", role: "log", "aria-label": "conversation" });
  const card = h("pre", { class: "ftw-card", hidden: true });
  const settings = h("div", { class: "ftw-menu", hidden: true });
  const line = h("textarea", { rows: 2, "aria-label": "what to say", placeholder: WANTS.prompt, value: asked });

  const act = async (what, params) => {
    const answer = await stage.ask(what, params);
    if (answer) stage.notice("");
    clock.kick();
    return answer;
  };
  const send = async () => {
    const text = line.value;
    if (!text.trim()) return;
    if (told.state === "loading" && queued === null) {
      queued = text;
      line.value = "";
    } else if (await act("chat_say", { text })) line.value = "";
    draw();
  };
  /** What was sent and did not arrive stands in the line again. */
  const writeOn = (text) => {
    queued = null;
    line.value = text + line.value;
    draw();
  };
  line.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Escape") queued === null ? act("chat_stop") : writeOn(queued);
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  const stop = button("Stop", () => act("chat_stop"));
  const again = button("Again", () => act("chat_again"));
  const fresh = button("New", () => act("chat_new"));
  const template = button("Rendered prompt", async () => {
    card.hidden = !card.hidden;
    template.setAttribute("aria-expanded", String(!card.hidden));
    if (card.hidden) return;
    const answer = await act("chat_prompt", { text: line.value });
    card.hidden = !answer;
    template.setAttribute("aria-expanded", String(Boolean(answer)));
    if (answer) say(card, answer.data.prompts.map(({ title: name, tokens, text }) => `${name}: ${tokens} tokens\n${text}`).join("\n\n"));
  }, { "aria-expanded": "false" });
  const save = button("Save as rows", async () => {
    const answer = await act("chat_save", { path: file.value });
    if (answer) stage.notice(`${answer.data.rows} rows written to ${answer.data.path}.`);
  });
  const file = h("input", { type: "text", "aria-label": "file of the rows", value: "chat.jsonl" });
  const more = button("Settings", () => ((settings.hidden = !settings.hidden), more.setAttribute("aria-expanded", String(!settings.hidden))), { "aria-expanded": "false" });
  const reload = button("Load again", () => act("chat_open", { run }));

  const field = ([name, value]) => {
    const input = h("input", { type: "text", value });
    input.addEventListener("change", () => act("chat_set", { name, value: input.value }));
    return h("label", {}, `${name} `, input);
  };
  const answers = (turn) =>
    turn.answers.map((answer, at) =>
      h("div", { class: "ftw-side" }, h("b", {}, told.titles[at]), h("pre", { class: "ftw-said" }, answer.text + (answer.done ? "" : "▌")), h("div", { class: "ftw-quiet" }, answer.note)),
    );
  const draw = () => {
    const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
    const busy = told.state === "answering";
    say(title, told.titles.join("  |  "));
    const waits = queued === null ? "" : "; what you sent waits for it, esc takes it back";
    const words = { loading: `${told.phase} … ${told.seconds ?? 0} s${waits}`, failed: told.problem, answering: "answering" };
    say(status, words[told.state] ?? "ready");
    line.placeholder = WANTS[told.wants];
    [stop.hidden, again.hidden, reload.hidden] = [!busy, busy || told.kind !== "text", told.state !== "failed"];
    [template.hidden, save.hidden, file.hidden, more.hidden] = Array(4).fill(told.kind !== "text");
    fill(log, told.notes.map((note) => h("p", { class: "ftw-quiet" }, note)), told.subject ? h("p", {}, h("b", {}, told.subject)) : null, told.turns.map((turn) => h("section", {}, told.kind === "rank" ? null : h("pre", { class: "ftw-said ftw-quiet" }, turn.prompt), h("div", { class: "ftw-sides" }, answers(turn)))), queued === null ? null : h("pre", { class: "ftw-said ftw-quiet" }, queued));
    if (atEnd) log.scrollTop = log.scrollHeight;
  };
  const turn = async () => {
    if (over || stage.retired) return null;
    const answer = await stage.ask("chat", { version });
    if (over) return null;
    if (!answer) return 1500;
    const changed = answer.data.version !== version;
    const known = version >= 0;
    told = { ...told, ...answer.data };
    version = told.version;
    if (!known) fill(settings, Object.entries(told.settings).map(field));
    if (changed || told.state === "loading") draw();
    if (queued !== null && told.state === "ready") {
      const text = queued;
      queued = null;
      if (!(await act("chat_say", { text }))) writeOn(text);
    }
    return told.state === "answering" ? 150 : 500;
  };
  const back = leave ? button("‹ Run", leave, { class: "ftw-plain" }) : null;
  const element = h(
    "div",
    { class: "ftw-monitor ftw-chat" },
    h("header", { class: "ftw-head" }, back, title),
    status,
    log,
    card,
    settings,
    h("div", { class: "ftw-write" }, line, h("div", { class: "ftw-tools" }, button("Send", send, { class: "ftw-primary" }), stop, again, fresh, template, more, save, file, reload)),
  );
  let clock = { kick() {}, stop() {} };
  stage.ask("chat_open", { run }).then((answer) => {
    if (answer && !over) clock = timer(stage.root, turn);
  });
  const close = () => {
    // Who leaves for the run's curves needs its memory no more; of a cell that goes the kernel's end sees to it.
    if (leave && !over && !stage.over) stage.ask("chat_leave", { run });
    over = true;
    forget();
    clock.stop();
  };
  const forget = stage.onEnd(close);
  draw();
  /** To the line, where one writes next. */
  const start = () => (line.focus({ preventScroll: true }), line.setSelectionRange(line.value.length, line.value.length));
  return { element, close, start };
}

/** `Chat(run)` alone. */
export function chatFace(stage) {
  openWhenReady(stage, async () => {
    const answer = await stage.ask("chat_open");
    if (answer) fill(stage.body, chatView(stage, "", null).element);
    return answer;
  });
}
