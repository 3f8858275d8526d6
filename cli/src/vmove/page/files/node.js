// Asks vmoved, through the server of this page, and says when it cannot be asked.

import { element, setText } from "./drawing.js";

const INTERVAL = 2000;
/** A daemon that takes long is asked less often: this many times as long as it takes. */
const REST = 5;
const AGAIN = 1000;
const TIMEOUT = 15_000;

/** Why there is no answer. */
export class Trouble extends Error {
  constructor(kind, message, retryAfter = AGAIN) {
    super(message);
    Object.assign(this, { kind, retryAfter });
  }
}

const TITLES = {
  page: "The server of this page does not answer.",
  daemon: "vmoved does not answer.",
  forbidden: "You may not look at this node, or not any more.",
  unknown: "vmoved does not know what was asked for.",
  other: "vmoved refuses to answer.",
};

/** The answer to a question such as "v1/vms". */
export async function ask(path) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT) });
  } catch (error) {
    if (error.name === "TimeoutError") throw new Trouble("daemon", `It has said nothing for ${TIMEOUT / 1000} s.`);
    throw new Trouble("page", "vmove page has ended, or cannot be reached: start it again, and open the address that it prints.");
  }
  if (!response.ok) throw await refusal(response);
  try {
    return await response.json();
  } catch {
    throw new Trouble("daemon", "Its answer broke off.");
  }
}

async function refusal(response) {
  const text = await response.text().catch(() => "");
  let problem;
  try {
    problem = JSON.parse(text);
  } catch {
    // Another vmove page has this port now: its secret is another one.
    return new Trouble("page", text || `HTTP status ${response.status}`);
  }
  const kind = { 403: "forbidden", 404: "unknown", 502: "daemon" }[response.status] ?? "other";
  return new Trouble(kind, problem.message ?? text, problem.details?.retry_after_ms);
}

const banner = document.getElementById("trouble");
/** What is not answered, since when, and why. */
const unanswered = new Map();

/** Says that this is not answered, until it is. */
function lost(what, trouble) {
  unanswered.set(what, { trouble, since: unanswered.get(what)?.since ?? new Date() });
  tell();
}

/** This is answered, or wanted no more. */
function found(what) {
  if (!unanswered.delete(what)) return;
  tell();
  if (unanswered.size === 0) say("vmoved answers again.");
}

function tell() {
  const [first] = unanswered.values();
  if (!first) {
    delete document.body.dataset.trouble;
    banner.replaceChildren();
    return;
  }
  document.body.dataset.trouble = first.trouble.kind;
  const old = `What is shown is of ${first.since.toLocaleTimeString("sv")}. It is asked again until there is an answer.`;
  const lines = [TITLES[first.trouble.kind], first.trouble.message, old];
  // Screen readers say only what is new.
  if (banner.textContent !== lines.join("")) {
    banner.replaceChildren(...lines.map((line, index) => element(index === 0 ? "strong" : "p", {}, line)));
  }
}

const said = document.getElementById("said");

/** Tells those who do not see the page. */
export function say(text) {
  setText(said, text);
}

const sleep = (ms) => new Promise((wake) => setTimeout(wake, ms));

const shown = () => document.hidden
  ? new Promise((wake) => document.addEventListener("visibilitychange", wake, { once: true }))
  : Promise.resolve();

/**
 * Asks these questions again and again, until told to stop, and gives the answers. Nobody looks: nobody is asked. `unknown` is given what the daemon
 * says of a name that it does not know.
 */
export function keepAsking(paths, tell, unknown = null) {
  let stopped = false;
  // Views may have the same question.
  const what = Symbol(paths[0]);
  const run = async () => {
    while (!stopped) {
      await shown();
      let rest = INTERVAL;
      const begun = performance.now();
      try {
        const answers = await Promise.all(paths.map(ask));
        if (stopped) return;
        rest = Math.max(INTERVAL, REST * (performance.now() - begun));
        found(what);
        tell(...answers);
      } catch (trouble) {
        if (!(trouble instanceof Trouble)) throw trouble;
        if (stopped) return;
        if (unknown && trouble.kind === "unknown") {
          found(what);
          unknown(trouble);
        } else {
          lost(what, trouble);
        }
        rest = Math.max(AGAIN, trouble.retryAfter ?? AGAIN);
      }
      await sleep(rest);
    }
  };
  run();
  return () => {
    stopped = true;
    found(what);
  };
}

/** Follows a migration by its events until it has ended. The browser itself takes a broken stream up after the last event. */
export function follow(id, tell, unknown) {
  const path = `v1/migrations/${encodeURIComponent(id)}/events`;
  const what = Symbol(path);
  let source;
  let stopped = false;
  const open = () => {
    source = new EventSource(path);
    source.onmessage = (event) => {
      found(what);
      if (tell(JSON.parse(event.data))) source.close();
    };
    source.onerror = async () => {
      // Refused: the browser does not try again by itself, nor does it say why.
      const closed = source.readyState === EventSource.CLOSED;
      if (stopped || !closed) return;
      const trouble = await why(path);
      if (stopped) return;
      if (trouble?.kind === "unknown") {
        unknown(trouble);
        return;
      }
      if (trouble) lost(what, trouble);
      await sleep(AGAIN);
      if (!stopped) open();
    };
  };
  open();
  return () => {
    stopped = true;
    source.close();
    found(what);
  };
}

async function why(path) {
  const stop = new AbortController();
  try {
    const response = await fetch(path, { cache: "no-store", signal: stop.signal });
    const trouble = response.ok ? null : await refusal(response);
    stop.abort();
    return trouble;
  } catch {
    return new Trouble("page", "vmove page has ended, or cannot be reached: start it again, and open the address that it prints.");
  }
}
