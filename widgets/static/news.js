/** A question whose answer takes a while: asked once, then for its news until it is done. A newer question takes its place. */

const NEWS_EVERY = 100; // milliseconds

/** A function that asks a verb of the stage and draws each state that comes back; `verb` brings the news. */
export function following(stage, verb, draw) {
  let newest = 0;
  return async (first, params = {}) => {
    const mine = (newest += 1);
    let answer = await stage.ask(first, params);
    while (answer && mine === newest) {
      draw(answer.data);
      if (answer.data.done) return;
      await new Promise((resolve) => setTimeout(resolve, NEWS_EVERY));
      answer = mine === newest ? await stage.ask(verb) : null;
    }
  };
}
