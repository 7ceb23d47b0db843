// The table of replicas. While the page is visible, the table is updated every `PERIOD_MS`.

import { fleet } from "./stream.js";

const PERIOD_MS = 1500;
const AWAY_MS = 3000;

const share = (figures, name, word) =>
  typeof figures[name] === "number" ? [`${Math.round(100 * figures[name])} % ${word}`] : [];

function lately(figures) {
  const rate = figures.tokens_per_second;
  return [
    ...(typeof rate === "number" ? [`${rate.toFixed(0)} tokens/s`] : []),
    ...share(figures, "busy", "busy"),
    ...share(figures, "acceptance", "of drafts accepted"),
    ...share(figures, "look_ahead_hits", "look-ahead hits"),
    ...share(figures, "kv_usage", "of KV cache in use"),
  ].join(", ");
}

function row(replica) {
  const made = document.createElement("tr");
  const node = [replica.node, replica.device].filter(Boolean).join(", ");
  const cells = [
    replica.role, replica.here ? `${replica.name} (this one)` : replica.name, replica.model,
    node || "–", replica.load, replica.state, lately(replica.figures) || "–",
  ];
  cells.forEach((text, i) => {
    const cell = document.createElement(i === 1 ? "th" : "td");
    if (i === 1) cell.scope = "row";
    cell.textContent = text;
    if (i === 5) cell.className = `state ${replica.state}`;
    made.append(cell);
  });
  return made;
}

/** Returns a remark about the table: its age, or which sessions it counts. */
function remark(replicas, heard) {
  if (heard > AWAY_MS) return `the registry has not answered for ${(heard / 1e3).toFixed(0)} s`;
  const coordinators = replicas.filter((one) => one.role === "coordinator").length;
  return coordinators > 1 ? "targets and drafts show only the sessions of this coordinator" : "";
}

/** Updates the table regularly while `mayLook()` is true. Calls `hear` with each error. */
export function follow(body, note, served, mayLook, hear) {
  let before = "";
  const look = async () => {
    if (document.visibilityState !== "visible" || !mayLook()) return;
    try {
      const { replicas, heard_ms_ago: heard } = await fleet();
      const now = JSON.stringify(replicas);
      if (now !== before) body.replaceChildren(...replicas.map(row));
      before = now;
      served.textContent = replicas.find((one) => one.here)?.model ?? "";
      note.textContent = remark(replicas, heard);
    } catch (error) {
      note.textContent = `the replicas are unknown: ${error.message}`;
      hear(error);
    }
  };
  const again = async () => {
    await look();
    setTimeout(again, PERIOD_MS);
  };
  document.addEventListener("visibilitychange", look);
  again();
  return look;
}
