// Calls of the server: one generation as a stream of events, and what is known of the fleet.

const KEY = "outrider-key";

/** An error that the server told of, in its own words. */
export class Refused extends Error {
  constructor(status, told) {
    super(told?.message ?? `the server answers ${status}`);
    this.status = status;
    this.param = told?.param ?? null;
  }
}

/** Whether there is an API key. */
export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

/** Keeps an API key for as long as this tab is open. */
export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** Keeps none. */
export function forgetKey() {
  sessionStorage.removeItem(KEY);
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  const given = { "content-type": "application/json" };
  return key ? { ...given, authorization: `Bearer ${key}` } : given;
}

async function call(path, options = {}) {
  const response = await fetch(new URL(path, document.baseURI), { ...options, headers: headers() });
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new Refused(response.status, told?.error);
}

/** The replicas, as the server knows them. */
export async function fleet() {
  return (await call("api/fleet")).json();
}

/** What the server's routes take and answer. */
export async function openapi() {
  return (await call("openapi.json")).json();
}

/** Runs a request; `take(event)` hears each event. Aborting `signal` cancels the session.
    Seeds are text here: a number would lose digits of their 64 bits. */
export async function generate(body, signal, take) {
  const response = await call("api/generate", {
    method: "POST", signal,
    body: JSON.stringify(body).replace(/"seed":"(-?)0*(\d+)"/, '"seed":$1$2'),
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data.replace(/"seed":(\d+)/, '"seed":"$1"'));
    if (event.error) throw new Refused(response.status, event.error);
    take(event);
  }
  throw new Error("the stream broke off before its end");
}

/** The data of server-sent events, each of one line. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
