// Shows the text of an answer, and rejected draft tokens. A token's style shows its origin.

const GHOST_MS = 1200;

/** Returns the text of a single token, with visible white space. */
export function shown(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}

function element(kind, name, text = "") {
  const made = document.createElement(kind);
  made.className = name;
  made.textContent = text;
  return made;
}

export class Writing {
  /** Calls `pick` with the token that the user points at or has chosen, or null. */
  constructor(paper, pick) {
    this.paper = paper;
    this.pick = pick;
    this.keeps = false;
    this.reset();
    paper.addEventListener("mouseover", (event) => this.#point(event.target));
    paper.addEventListener("mouseleave", () => this.#point(null));
    paper.addEventListener("click", (event) => this.#choose(this.#index(event.target)));
    paper.addEventListener("keydown", (event) => this.#key(event));
    paper.addEventListener("blur", () => this.#choose(-1));
  }

  reset() {
    this.paper.replaceChildren();
    this.tokens = [];
    this.chosen = -1;
    this.waiting = [];
    this.round = null;
    this.ghosts = [];
    clearTimeout(this.fading);
  }

  /** Begins a round. The next call of `write` must have the round's tokens. */
  begin(round) {
    this.round = { ...round, tokens: [] };
  }

  /** Shows the proposal of a round before its tokens, in the style of drafts. */
  pencil(round) {
    this.#erase();
    const texts = this.#texts(round, 0);
    const ghost = element("span", "ghost");
    ghost.append(...texts.map((text) => element("span", "pencil", text)));
    this.#show([ghost]);
  }

  /** Shows committed tokens. Returns their round. */
  write(event) {
    const round = this.round ?? {
      proposed_token_ids: [], num_accepted: 0, tokens: [], index: -1,
    };
    this.#erase();
    const made = event.token_ids.map((id, i) => this.#token(event, i, round));
    const isRefused = round.num_accepted < round.proposed_token_ids.length;
    const ghosts = isRefused ? [this.#ghost(round)] : [];
    const nodes = made.map((one) => one.node);
    if (this.keeps) nodes.splice(round.num_accepted, 0, ...ghosts);
    this.#append(...nodes);
    this.#take(event.text_delta);
    if (!this.keeps) this.#show(ghosts);
    if (this.round) this.round = null;
    return round;
  }

  /** Ends the answer. Rejected tokens disappear after `GHOST_MS`. */
  end() {
    this.fading = setTimeout(() => this.#erase(), GHOST_MS);
  }

  #token(event, i, round) {
    const drafted = round.proposed_token_ids.length > 0;
    const origin = event.origins[i] === "bonus" && !drafted ? "plain" : event.origins[i];
    const node = element("span", `token ${origin}`);
    if (round.look_ahead_hit && i === 0) node.classList.add("hit");
    const text = event.texts === null ? String(event.token_ids[i]) : event.texts[i];
    if (event.texts === null) node.classList.add("chip");
    node.dataset.index = this.tokens.length;
    node.dataset.id = event.token_ids[i];
    const token = {
      index: this.tokens.length, id: event.token_ids[i], origin, text, node, round, place: i,
    };
    this.tokens.push(token);
    round.tokens.push(token);
    if (event.texts === null) node.textContent = text;
    else this.waiting.push({ token, left: text.length });
    return token;
  }

  /** Divides new text among the tokens that wait for their text. */
  #take(delta) {
    while (this.waiting.length && (delta || this.waiting[0].left === 0)) {
      const first = this.waiting[0];
      const piece = delta.slice(0, first.left);
      delta = delta.slice(piece.length);
      first.left -= piece.length;
      first.token.node.textContent += piece;
      first.token.node.classList.toggle("mute", first.token.node.textContent === "");
      if (first.left > 0) break;
      this.waiting.shift();
    }
    // At the answer's end, there may be text but no waiting token. The last token gets this text.
    if (delta && this.tokens.length) this.tokens.at(-1).node.textContent += delta;
  }

  /** Returns the texts of the proposed tokens from the place `from` on. */
  #texts(round, from) {
    const texts = round.proposed_texts ?? round.proposed_token_ids.map((id) => ` ${id}`);
    return texts.slice(from);
  }

  #ghost(round) {
    const refused = this.#texts(round, round.num_accepted);
    const texts = refused.map((text) => text.replaceAll("\n", "⏎"));
    const ghost = element("del", "refused");
    ghost.setAttribute("aria-hidden", "true");
    ghost.append(...texts.map((text) => element("span", "", text)));
    return ghost;
  }

  #show(ghosts) {
    this.ghosts = ghosts;
    this.#append(...ghosts);
  }

  #erase() {
    clearTimeout(this.fading);
    for (const one of this.ghosts) one.remove();
    this.ghosts = [];
  }

  #append(...nodes) {
    const { paper } = this;
    const follows = paper.scrollHeight - paper.scrollTop - paper.clientHeight < 60;
    paper.append(...nodes);
    if (follows) paper.scrollTop = paper.scrollHeight;
  }

  #index(node) {
    return Number(node?.closest?.(".token")?.dataset.index ?? -1);
  }

  #point(node) {
    const index = node ? this.#index(node) : -1;
    this.pick(this.tokens[index >= 0 ? index : this.chosen] ?? null);
  }

  #choose(index) {
    this.tokens[this.chosen]?.node.classList.remove("chosen");
    this.chosen = index;
    this.tokens[index]?.node.classList.add("chosen");
    this.tokens[index]?.node.scrollIntoView({ block: "nearest" });
    this.pick(this.tokens[index] ?? null);
  }

  #key(event) {
    const last = this.tokens.length - 1;
    const from = this.chosen;
    const to = {
      ArrowRight: Math.min(last, from + 1), ArrowLeft: from < 0 ? last : Math.max(0, from - 1),
      Home: 0, End: last,
    }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.#choose(to);
  }
}
