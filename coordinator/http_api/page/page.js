// The window: sends requests, and shows their rounds.

import * as figures from "./figures.js";
import { follow } from "./fleet.js";
import { forgetKey, generate, hasKey, useKey } from "./stream.js";
import { Timeline } from "./timeline.js";
import { tell } from "./detail.js";
import { Writing } from "./writing.js";

const of = (id) => document.getElementById(id);
const form = of("form");
const REPLAY_MS = 420;
const VISIBLE_ASCII = /^[!-~]+$/;
const EXAMPLES = [
  ["Explain", "What is photosynthesis? Answer in one short paragraph."],
  ["Repeat", "Repeat this list twice: red apple, green pear, yellow lemon, blue plum."],
  ["Write code", "Write a short Python function that adds two numbers, and show how to call it."],
];

const detail = of("detail");
let newest = null;
const timeline = new Timeline(of("rounds"), of("axis"));
const writing = new Writing(of("text"), (token) => {
  tell(detail, token?.round ?? newest, token);
  timeline.mark(token?.round ?? null);
});

/** The run that is shown: the request's body, the events, and their `Tally`. */
let last = null;
let plain = null;
let stopper = null;
/** A function that repeats the request that was refused because a key was missing. */
let refused = null;

function say(words) {
  of("status").textContent = words;
}

/** Asks the user for a key. */
function askForKey() {
  if (!of("keys").hidden) return;  // The user has been asked already.
  of("keys-words").textContent = hasKey()
    ? "The server does not know this API key." : "This server requires an API key.";
  forgetKey();
  of("forget").hidden = true;
  of("keys").hidden = false;
  of("key").focus();
}

function complain(error) {
  const locked = error?.status === 401;
  if (locked) askForKey();
  const trouble = of("trouble");
  trouble.hidden = error === null || locked;
  trouble.textContent = error?.message ?? "";
  for (const one of form.elements) one.removeAttribute("aria-invalid");
  const name = error?.param?.replace("speculation.", "").replace(/^messages.*/, "prompt");
  const field = name && document.getElementById(name);
  if (field) {
    field.setAttribute("aria-invalid", "true");
    field.focus();
  }
}

function setState(state) {
  document.documentElement.dataset.state = state;
  const busy = state !== "idle";
  of("send").disabled = busy;
  of("stop").disabled = !busy;
  of("replay").disabled = busy || !last?.events.length;
  of("plain").disabled = busy || !last?.tally.metrics;
}

const number = (id) => (of(id).value === "" ? undefined : Number(of(id).value));

function asked() {
  const kind = form.elements.kind.value;
  const prompt = of("prompt").value;
  return {
    ...(kind === "chat" ? { messages: [{ role: "user", content: prompt }] } : {}),
    ...(kind === "raw" ? { prompt } : {}),
    ...(kind === "ids" ? { prompt: prompt.split(/[\s,]+/).filter(Boolean).map(Number) } : {}),
    temperature: number("temperature"),
    seed: of("seed").value || undefined,
    max_tokens: number("max_tokens"),
    speculation: {
      rule: of("rule").value || undefined, num_draft_tokens: number("num_draft_tokens"),
    },
  };
}

/** Sends a request with this body. Returns whether the answer is complete. If a key is missing,
 * `again` is called after the user has given a key. */
async function run(state, body, take, again) {
  refused = null;
  stopper = new AbortController();
  setState(state);
  complain(null);
  try {
    await generate(body, stopper.signal, take);
    return true;
  } catch (error) {
    say(error.name === "AbortError" ? "stopped" : "");
    if (error.name !== "AbortError") complain(error);
    if (error.status === 401) refused = again;
    return false;
  } finally {
    stopper = null;
    setState("idle");
  }
}

function show(event) {
  if (event.type === "round") writing.begin(event);
  if (event.type === "finished") writing.end();
  if (event.type !== "tokens") return null;
  newest = writing.write(event);
  tell(detail, newest, null);
  return newest;
}

function clear() {
  writing.reset();
  newest = null;
  tell(detail, null, null);
}

async function runDrafts() {
  of("examples").hidden = true;
  const body = asked();
  const events = [];
  const tally = new figures.Tally();
  last = { body, events, tally, rule: "", seed: "" };
  plain = null;
  clear();
  timeline.reset();
  figures.show(tally);
  figures.race(null, null, false);
  say("waiting for the first token");
  let due = false;
  const refresh = () => {
    due = false;
    figures.show(tally);
    figures.race(tally, plain?.tally ?? null, false);
  };
  const whole = await run("drafts", body, (event) => {
    events.push(event);
    if (event.type === "started") ({ rule: last.rule, seed: last.seed } = event);
    if (event.type === "tokens") {
      if (!tally.tokenIds.length) say("writing");
      tally.write(event);
    }
    if (event.type === "finished") tally.end(event);
    const round = show(event);
    if (round && round.index >= 0) {
      tally.play(round);
      timeline.add(round);
    }
    if (event.type === "finished") say(ending(event));
    if (!due) requestAnimationFrame(refresh);
    due = true;
  }, runDrafts);
  writing.end();
  if (!whole && !tally.endedAt) tally.endedAt = performance.now();
  refresh();
  if (whole && of("compare").checked) await runPlain();
}

function ending(event) {
  const { completion_tokens: count } = event.usage;
  const why = { stop: "the text has ended", length: "max tokens was reached",
    deadline: "the deadline passed", cancelled: "the request was cancelled" }[event.finish_reason];
  return `${count} tokens: ${why} (rule ${last.rule}, seed ${last.seed})`;
}

/** Runs the last request again without drafts. */
async function runPlain() {
  const ended = of("status").textContent;
  say("repeating without drafts");
  const tally = new figures.Tally();
  const { rule, seed } = last;
  plain = { tally };
  const speculation = { rule, num_draft_tokens: 0 };
  const same = rule === "greedy" || rule === "coupled";
  let due = false;
  const refresh = () => {
    due = false;
    figures.race(last.tally, tally, same);
  };
  const whole = await run("plain", { ...last.body, seed, speculation }, (event) => {
    if (event.type === "tokens") tally.write(event);
    if (event.type === "finished") tally.end(event);
    if (!due) requestAnimationFrame(refresh);
    due = true;
  }, runPlain);
  if (whole) say(ended);
  tally.endedAt ??= performance.now();
  refresh();
}

/** Shows the rounds again, slowly. Shows each round's proposal before the round's tokens. */
async function replay() {
  stopper = new AbortController();
  const { signal } = stopper;
  const pause = (ms) => new Promise((done) => {
    const timer = setTimeout(done, ms);
    signal.addEventListener("abort", () => { clearTimeout(timer); done(); }, { once: true });
  });
  setState("replay");
  clear();
  for (const event of last.events) {
    if (event.type === "round" && !signal.aborted && event.proposed_token_ids.length) {
      writing.pencil(event);
      await pause(REPLAY_MS);
    }
    show(event);
    if (event.type === "tokens" && !signal.aborted) await pause(REPLAY_MS);
  }
  stopper = null;
  setState("idle");
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!of("send").disabled) runDrafts();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  if (event.key === "Escape") stopper?.abort();
});
of("stop").addEventListener("click", () => stopper?.abort());
of("replay").addEventListener("click", replay);
of("plain").addEventListener("click", runPlain);
of("keep").addEventListener("change", () => {
  writing.keeps = of("keep").checked;
  if (!last || stopper) return;
  clear();
  last.events.forEach(show);
});
for (const one of form.elements.kind) {
  one.addEventListener("change", () => {
    of("prompt").placeholder = {
      chat: "Ask something", raw: "Begin a text", ids: "Token ids, such as 1 2 3",
    }[form.elements.kind.value];
  });
}

for (const [name, prompt] of EXAMPLES) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = name;
  button.title = prompt;
  button.addEventListener("click", () => {
    form.elements.kind.value = "chat";
    of("prompt").value = prompt;
    form.requestSubmit();
  });
  of("examples").append(button);
}

const look = follow(
  of("fleet"), of("fleet-note"), of("served"), () => of("keys").hidden,
  (error) => { if (error.status === 401) complain(error); },
);
of("forget").hidden = !hasKey();
of("forget").addEventListener("click", () => {
  forgetKey();
  askForKey();
});
of("keys").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = of("key").value.trim();
  of("key").value = "";
  if (!VISIBLE_ASCII.test(key)) {
    of("keys-words").textContent = "An API key has only visible ASCII characters, and no spaces.";
    return;
  }
  useKey(key);
  of("keys").hidden = true;
  of("forget").hidden = false;
  complain(null);
  look();
  if (refused) refused();
  else of("prompt").focus();
});
of("prompt").focus();
