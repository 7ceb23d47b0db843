// Figures about the rounds of an answer. A *run* is the generation of one answer.

/** Counts the rounds and tokens of a run, and measures times. */
export class Tally {
  constructor() {
    this.beganAt = performance.now();
    this.firstAt = null;
    this.endedAt = null;
    this.metrics = null;
    this.tokenIds = [];
    this.numRounds = 0;
    this.numAccepted = 0;
    this.numDrafted = 0;
    this.numHits = 0;
    this.places = [];
  }

  write(event) {
    this.firstAt ??= performance.now();
    this.tokenIds.push(...event.token_ids);
  }

  play(round) {
    this.numRounds += 1;
    this.numAccepted += round.num_accepted;
    if (round.proposed_token_ids.length) this.numDrafted += 1;
    if (round.look_ahead_hit) this.numHits += 1;
    for (let place = 0; place < round.proposed_token_ids.length; place += 1) {
      this.places[place] ??= { rounds: 0, accepted: 0 };
      this.places[place].rounds += 1;
      if (place < round.num_accepted) this.places[place].accepted += 1;
    }
  }

  end(event) {
    this.endedAt = performance.now();
    this.metrics = event.metrics;
  }

  /** Tokens a second, or null before the second token. The first token is left out, because its time
   * depends on whether the target's cache has the prompt. After the run, the rate is computed from
   * the server's times. */
  get rate() {
    const number = this.tokenIds.length;
    if (number < 2) return null;
    const ms = this.metrics
      ? (number / this.metrics.tokens_per_second) * 1e3 - this.metrics.time_to_first_token_ms
      : (this.endedAt ?? performance.now()) - this.firstAt;
    return ms > 0 ? ((number - 1) / ms) * 1e3 : null;
  }

  /** Milliseconds to the first token. */
  get first() {
    if (this.metrics) return this.metrics.time_to_first_token_ms;
    return this.firstAt === null ? null : this.firstAt - this.beganAt;
  }
}

const of = (id) => document.getElementById(id);

const inWords = (ms) => (ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1e3).toFixed(2)} s`);

/** Shows the tally of a run with drafts. */
export function show(tally) {
  of("rate").textContent = tally.rate?.toFixed(1) ?? "–";
  of("per-round").textContent = tally.numRounds
    ? (1 + tally.numAccepted / tally.numRounds).toFixed(2) : "–";
  of("first").textContent = tally.first === null ? "–" : inWords(tally.first);
  of("num-rounds").textContent = tally.numRounds || "–";
  of("num-tokens").textContent = tally.tokenIds.length || "–";
  of("hits").textContent = tally.numDrafted
    ? `${Math.round((100 * tally.numHits) / tally.numDrafted)} %` : "–";
  showPlaces(tally.places);
}

function showPlaces(places) {
  const list = of("places");
  while (list.childElementCount > places.length) list.lastElementChild.remove();
  places.forEach(({ rounds, accepted }, i) => {
    const share = accepted / rounds;
    let item = list.children[i];
    if (!item) {
      item = document.createElement("li");
      item.append(...["b", "i", "span"].map((kind) => document.createElement(kind)));
      item.lastElementChild.textContent = i + 1;
      list.append(item);
    }
    item.firstElementChild.textContent = Math.round(100 * share);
    item.children[1].style.setProperty("--share", share);
    item.title = `position ${i + 1}: ${accepted} of ${rounds} draft tokens accepted`;
  });
}

/** Compares the speeds of the runs with and without drafts. Either tally may be null.
 * `sameExpected` says whether both runs should have the same tokens under their rule. */
export function race(drafts, plain, sameExpected) {
  const rates = [drafts, plain].map((one) => one?.rate ?? 0);
  const most = Math.max(...rates, 1e-9);
  ["drafts", "plain"].forEach((name, i) => {
    of(`lane-${name}`).style.setProperty("--share", rates[i] / most);
    of(`lane-${name}-rate`).textContent = rates[i] ? rates[i].toFixed(1) : "–";
  });
  const over = drafts?.metrics && plain?.metrics && Math.min(...rates) > 0;
  of("ratio").textContent = over ? `${(rates[0] / rates[1]).toFixed(2)}×` : "–";
  of("speed").textContent = over ? "as fast as without drafts" : "";
  of("verdict").textContent = over ? sameness(drafts.tokenIds, plain.tokenIds, sameExpected) : "";
}

function sameness(drafts, plain, sameExpected) {
  if (!sameExpected) return "Both texts were drawn from the same distribution.";
  const at = drafts.findIndex((id, i) => id !== plain[i]);
  if (at < 0 && drafts.length === plain.length) return "Both answers have the same tokens.";
  const from = at < 0 ? drafts.length : at;
  return `The tokens differ from number ${from} on. Rounding errors can cause this.`;
}
