// Draws a bar for each round. All bars have the same scale. The newest bar is the last.

import { total } from "./detail.js";

const ROWS_MAX = 400;
const TICKS_MIN = 4;
const PARTS = ["draft", "wire", "queue", "verify", "commit"];

export class Timeline {
  constructor(list, axis) {
    this.list = list;
    this.axis = axis;
    this.reset();
  }

  reset() {
    this.list.replaceChildren();
    this.axis.replaceChildren();
    this.step = 0;
    this.totals = [];
    this.due = false;
    this.waiting = [];
  }

  /** Adds a round. Its bar is drawn with the next frame. */
  add(round) {
    this.waiting.push(round);
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.due = false;
    const { list } = this;
    const follows = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    const rounds = this.waiting.splice(0);
    this.totals.push(...rounds.map(total));
    this.totals.splice(0, this.totals.length - ROWS_MAX);
    list.append(...rounds.slice(-ROWS_MAX).map((round) => this.#row(round)));
    while (list.childElementCount > ROWS_MAX) list.firstElementChild.remove();
    // A round with a prefill takes long. So bars much longer than most bars are cut and marked.
    const sorted = this.totals.toSorted((a, b) => a - b);
    const full = this.#measure(sorted[Math.floor((sorted.length - 1) * 0.9)] * 1.15);
    for (const row of list.children) {
      row.classList.toggle("cut", Number(row.dataset.ms) > full);
    }
    if (follows) list.scrollTop = list.scrollHeight;
  }

  /** Draws an axis with a length of at least `most` ms. Returns the axis's length, ms. */
  #measure(most) {
    const rough = Math.max(most, 0.1) / TICKS_MIN;
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = unit * [1, 2, 5, 10].find((times) => times * unit >= rough);
    const ticks = Math.max(1, Math.ceil(most / step));
    if (step !== this.step || ticks !== this.axis.childElementCount - 1) {
      this.step = step;
      this.list.style.setProperty("--full", step * ticks);
      this.list.style.setProperty("--ticks", ticks);
      this.axis.replaceChildren(...Array.from({ length: ticks + 1 }, (_, i) => {
        const tick = part("span", "tick-mark", `${Number((i * step).toPrecision(6))}`);
        tick.style.setProperty("--at", i / ticks);
        return tick;
      }));
      this.axis.lastElementChild.textContent += " ms";
    }
    return step * ticks;
  }

  /** Marks the bar of a round. If `round` is null, no bar is marked. */
  mark(round) {
    this.marked?.classList.remove("marked");
    this.marked = round && this.list.querySelector(`[data-index="${round.index}"]`);
    this.marked?.classList.add("marked");
    if (!this.marked) return;
    const { list, marked } = this;
    const top = marked.offsetTop - list.offsetTop;
    if (top < list.scrollTop || top + marked.offsetHeight > list.scrollTop + list.clientHeight) {
      list.scrollTop = top - list.clientHeight / 2;
    }
  }

  #row(round) {
    const row = document.createElement("li");
    const ms = total(round);
    row.dataset.ms = ms;
    row.dataset.index = round.index;
    const bar = part("span", "bar");
    for (const name of PARTS) {
      const one = part("i", name);
      one.style.setProperty("--ms", round[`${name}_ms`]);
      bar.append(one);
    }
    const marks = round.proposed_token_ids.map((_, i) => (i < round.num_accepted ? "●" : "○"));
    row.append(
      part("span", "index", round.index),
      part("b", "ahead", round.look_ahead_hit ? "»" : ""),
      bar,
      dots(marks, round.num_accepted),
      part("span", "ms", `${ms.toFixed(1)} ms`),
    );
    const parts = PARTS.map((name) => `${name} ${round[`${name}_ms`].toFixed(1)}`).join(", ");
    const ahead = round.look_ahead_hit ? ", drafted ahead" : "";
    row.title = `round ${round.index}: ${parts} ms; ${round.num_accepted} of ${marks.length} accepted${ahead}`;
    return row;
  }
}

function dots(marks, numAccepted) {
  const made = part("span", "dots", marks.join(""));
  made.dataset.count = marks.length ? `${numAccepted}/${marks.length}` : "";
  return made;
}

function part(kind, name, text = "") {
  const made = document.createElement(kind);
  made.className = name;
  made.textContent = text;
  return made;
}
