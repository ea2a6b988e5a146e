/**
 * The kernel's draft as a view knows it: the newest state, the specs seen so far, and edits sent one after the other.
 * The kernel is the truth; every edit comes back as a whole small state, and nothing is decided here.
 */

/**
 * Holds the newest state and the specs seen so far, and sends edits one after the other.
 * Specs travel once: each question says how many are known, each answer brings the rest.
 */
export function draftLink(stage) {
  const specs = [];
  const listeners = new Set();
  let queue = Promise.resolve();
  const link = {
    state: null,
    specs,
    onState: (act) => listeners.add(act),
    /** Sends an edit (or a plain question for the state); resolves to the state, or null after trouble. */
    send(what, params = {}) {
      const turn = queue.then(async () => {
        const answer = await stage.ask(what, { ...params, specs: specs.length });
        if (!answer) return null;
        link.take(answer.data);
        return link.state;
      });
      // What goes wrong with one edit is reported, and the next is sent all the same.
      queue = turn.catch((trouble) => (reportError(trouble), null));
      return queue;
    },
    /** Resolves once all that was sent so far has been answered. */
    settled: () => queue,
    take(data) {
      if (data.same) return;
      for (const [index, spec] of data.specs) specs[index] = spec;
      link.state = data;
      listeners.forEach((act) => act(data));
    },
  };
  return link;
}

/** Shows edits made elsewhere (another view, a cell) and facts that became known meanwhile. */
export function watchDraft(stage, link) {
  let over = false;
  const turn = async () => {
    if (over || stage.retired) return;
    if (link.state && !document.hidden) await link.send("state", { version: link.state.version });
    setTimeout(turn, link.state?.working ? 400 : 1500);
  };
  setTimeout(turn, 1500);
  return () => (over = true);
}
