// Calls to the server.

const KEY = "outrider-key";

/** An error of the server, with its message. */
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

/** Forgets the API key. */
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

/** The replicas that the server knows. */
export async function fleet() {
  return (await call("api/fleet")).json();
}

/** The server's OpenAPI document. */
export async function openapi() {
  return (await call("openapi.json")).json();
}

/** Sends a request, and calls `take` with each event. Aborting `signal` cancels the session. Seeds
 * are strings, because JavaScript's numbers cannot hold 64 bits. */
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

/** Yields the data of each server-sent event. The data of an event is a single line. */
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
