// Describes a round in one line: its draft tokens, the target's token, and the selected token.

import { shown } from "./writing.js";

const ORIGINS = {
  accepted: "a draft token that the target accepted",
  correction: "the target's own token, in place of a rejected draft token",
  bonus: "the target's own token, after all draft tokens were accepted",
  plain: "the target's own token, in a round without draft tokens",
  stored: "a committed token, read from the store",
};

function piece(kind, name, text) {
  const made = document.createElement(kind);
  made.className = name;
  made.textContent = text;
  return made;
}

export function total(round) {
  const { draft_ms, wire_ms, queue_ms, verify_ms, commit_ms } = round;
  return draft_ms + wire_ms + queue_ms + verify_ms + commit_ms;
}

/** Describes a token and its round. If `token` is null, describes only the round. */
export function tell(place, round, token) {
  if (!round || round.index < 0) return place.replaceChildren();
  const head = piece("span", "head", `round ${round.index}`);
  const line = piece("span", "proposal", "");
  const texts = round.proposed_texts ?? round.proposed_token_ids.map(String);
  texts.forEach((text, i) => {
    const passed = i < round.num_accepted;
    const one = piece("span", passed ? "draft passed" : "draft failed", shown(text));
    one.title = passed ? "accepted" : "rejected";
    if (token?.origin === "accepted" && token.place === i) one.classList.add("this");
    line.append(one);
  });
  const own = round.tokens.find((one) => one.origin !== "accepted");
  if (own) {
    const text = own.node.classList.contains("chip") ? String(own.id) : shown(own.text) || "▫";
    const one = piece("span", `pen ${own.origin}`, text);
    if (token === own) one.classList.add("this");
    line.append(one);
  }
  const words = token
    ? `token ${token.index}, id ${token.id}: ${ORIGINS[token.origin]}`
    : texts.length ? `${round.num_accepted} of ${texts.length} accepted` : "no draft tokens";
  const ahead = round.look_ahead_hit ? ", drafted ahead" : "";
  place.replaceChildren(head, line, piece("span", "words", `${words}${ahead}, ${total(round).toFixed(1)} ms`));
}
