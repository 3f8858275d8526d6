// Asks vmoved or vbridged, through the server of this page, and says when it cannot be asked.

import { element, setText } from "./drawing.js";

const INTERVAL = 2000;
/** A daemon that takes long is asked less often: this many times as long as it takes. */
const REST = 5;
const AGAIN = 1000;
/** For what changes seldom, or is refused by a role. */
export const RARELY = 60_000;
const TIMEOUT = 15_000;

/** Why there is no answer. */
export class Trouble extends Error {
  constructor(kind, message, retryAfter = AGAIN) {
    super(message);
    Object.assign(this, { kind, retryAfter });
  }
}

/** Who is asked: the page says it. */
const { asked: WHO = "vmoved", command: COMMAND = "vmove page" } = document.documentElement.dataset;

const TITLES = {
  page: "The server of this page does not answer.",
  daemon: `${WHO} does not answer.`,
  "own-certificate": `The certificate with which ${WHO} is asked is not valid now.`,
  "their-certificate": `The certificate of ${WHO} is not valid now.`,
  forbidden: `You may not look at what ${WHO} knows, or not any more.`,
  unknown: `${WHO} does not know what was asked for.`,
  other: `${WHO} refuses to answer.`,
};
const ENDED = `${COMMAND} has ended, or cannot be reached: start it again, and open the address that it prints.`;

/** Codes of the server of this page, and what kind of trouble each is. */
const CODES = { "own-certificate-expired": "own-certificate", "their-certificate-expired": "their-certificate" };

/** The answer to a question such as "v1/vms". */
export async function ask(path) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT) });
  } catch (error) {
    if (error.name === "TimeoutError") throw new Trouble("daemon", `It has said nothing for ${TIMEOUT / 1000} s.`);
    throw new Trouble("page", ENDED);
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
    // Another server has this port now: its secret is another one.
    return new Trouble("page", text || `HTTP status ${response.status}`);
  }
  const kind = CODES[problem.code] ?? { 401: "forbidden", 403: "forbidden", 404: "unknown", 502: "daemon" }[response.status] ?? "other";
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
  if (unanswered.size === 0) say(`${WHO} answers again.`);
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
 * Asks these questions again and again, until told to stop, and gives the answers. Nobody looks: nobody is asked. A question is a path, or gives one.
 * `unknown` is given what the daemon says of a name that it does not know, and `forbidden` what it says to those who may not ask this; without them, that
 * is trouble.
 */
export function keepAsking(questions, tell, { unknown = null, forbidden = null, interval = INTERVAL } = {}) {
  let stopped = false;
  // Views may have the same question.
  const what = Symbol(String(questions[0]));
  const run = async () => {
    while (!stopped) {
      await shown();
      let rest = interval;
      const begun = performance.now();
      try {
        const answers = await Promise.all(questions.map((question) => ask(typeof question === "function" ? question() : question)));
        if (stopped) return;
        rest = Math.max(interval, REST * (performance.now() - begun));
        found(what);
        tell(...answers);
      } catch (trouble) {
        if (!(trouble instanceof Trouble)) throw trouble;
        if (stopped) return;
        const expected = { unknown, forbidden }[trouble.kind];
        if (expected) {
          found(what);
          expected(trouble);
        } else {
          lost(what, trouble);
        }
        rest = Math.max(expected && trouble.kind === "forbidden" ? RARELY : AGAIN, trouble.retryAfter ?? AGAIN);
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
    return new Trouble("page", ENDED);
  }
}
