// The session's KV cache by turn, and its tree of branches.

import { bytes, button, count, find, make, put } from "./dom.js";

const named = (turn) => turn.text || (turn.kind === "opening" ? "opening" : "…");

function state(turn) {
  const words = [turn.kind];
  if (turn.evicted) words.push("evicted");
  if (turn.superseded_by !== null) words.push("superseded");
  else if (turn.hidden) words.push(`hidden (${turn.hidden})`);
  if (turn.pinned) words.push("pinned");
  return words.join(", ");
}

function block(turn) {
  const masked = turn.hidden ? "masked" : "";
  const pinned = turn.pinned ? "pinned" : "";
  const share = turn.relevance === null ? 100 : Math.round(35 + 65 * Math.max(0, Math.min(1, turn.relevance)));
  return make("div", {
    class: `block ${turn.kind} ${masked} ${pinned}`,
    title: `${named(turn)}: ${count(turn.tokens, "token")}, ${state(turn)}`,
    "--tokens": Math.max(turn.tokens, 1),
    "--share": `${share}%`,
  });
}

function detail(turn, judged) {
  const parts = [count(turn.tokens, "token")];
  if (turn.range) parts.push(`${turn.range[0]}–${turn.range[1]}`);
  if (judged && turn.kind === "turn" && turn.relevance !== null) parts.push(`relevance ${turn.relevance.toFixed(2)}`);
  if (turn.evicted || turn.hidden || turn.pinned) parts.push(state(turn).split(", ").slice(1).join(", "));
  return parts.join(" · ");
}

function row(turn, does, judged = false) {
  const kind = [turn.evicted && "gone", turn.superseded_by !== null && "tombstone"].filter(Boolean).join(" ");
  return make("li", { class: `row ${kind}`, "data-turn": turn.id },
    make("span", { class: "text", title: named(turn) }, named(turn)),
    make("span", { class: "detail" }, detail(turn, judged)),
    make("span", { class: "does" }, does));
}

export function showStreams(session, actions) {
  const turns = session?.turns ?? [];
  const held = turns.filter((turn) => !turn.evicted);
  const evicted = turns.length - held.length;
  const free = session ? Math.max(session.turn_tokens.capacity - session.turn_tokens.held, 0) : 1;
  const stream = find("stream");
  stream.setAttribute("role", "img");
  stream.setAttribute("aria-label", session
    ? `${count(held.length, "turn")} in memory, ${session.tokens} tokens; ${free} more fit before a turn is evicted`
    : "memory is empty");
  stream.replaceChildren(...held.map(block), make("div", { class: "block free", title: `${count(free, "token")} free`, "--tokens": free }));
  find("memory-sum").textContent = session
    ? `turns ${session.turn_tokens.held} of ${session.turn_tokens.capacity} · facts ${session.fact_tokens.held} of ${session.fact_tokens.capacity} tokens`
      + ` · ${bytes(session.cache_bytes)}${evicted ? ` · ${evicted} evicted` : ""}`
    : "";
  const spoken = turns.filter((turn) => turn.kind !== "fact");
  const none = (words) => make("li", { class: "empty" }, words);
  put(find("turns"), spoken.length ? spoken.map((turn) => row(turn, turn.evicted || turn.kind === "opening" ? [] : [
    button("Pin", () => actions.mark(turn.id, { pinned: !turn.pinned }),
      { name: `Pin: ${named(turn)}`, key: `pin-${turn.id}`, pressed: turn.pinned }),
    button("Hide", () => actions.mark(turn.id, { hidden: !turn.hidden }),
      { name: `Hide: ${named(turn)}`, key: `hide-${turn.id}`, pressed: Boolean(turn.hidden) }),
  ], session.relevance)) : none("No turns."));
  // Scroll to the newest turn.
  if (showStreams.last !== spoken.at(-1)?.id) find("turns").scrollTop = find("turns").scrollHeight;
  showStreams.last = spoken.at(-1)?.id;
  const facts = turns.filter((turn) => turn.kind === "fact");
  put(find("facts"), facts.length ? facts.map((fact) => row(fact, fact.evicted || fact.superseded_by !== null ? [] : [
    button("Replace", () => actions.replaceFact(fact), { name: `Replace: ${fact.text}`, key: `fact-${fact.id}` }),
  ])) : none("No facts."));
}

export function showTree(session, actions) {
  const branches = session?.branches ?? [];
  const under = (parent) => {
    const children = branches.filter((branch) => branch.parent === parent);
    return children.length === 0 ? null : make("ul", {}, children.map((branch) => make("li", {}, twig(branch), under(branch.id))));
  };
  const twig = (branch) => {
    const name = branch.parent === null ? "main branch" : `branch ${branch.id}`;
    const does = [];
    if (!branch.active) does.push(button("Switch", () => actions.branch("switch", branch.id), { name: `Switch to ${name}`, key: `go-${branch.id}` }));
    if (branch.parent !== null) {
      does.push(button("Promote", () => actions.branch("promote", branch.id), { name: `Promote ${name}`, key: `promote-${branch.id}` }));
      does.push(button("Delete", () => actions.branch("drop", branch.id), { name: `Delete ${name}`, key: `drop-${branch.id}` }));
    }
    const shared = branch.parent === null ? "" : `, ${branch.from} shared`;
    return make("div", { class: `twig ${branch.active ? "active" : ""}`, "data-branch": branch.id, "aria-current": branch.active ? "true" : undefined },
      make("strong", {}, name), make("span", { class: "text" }, branch.last ?? "no turns"),
      make("span", { class: "detail" }, `${count(branch.turns, "turn")}, ${branch.tokens} tokens${shared}`),
      make("span", { class: "does" }, does));
  };
  put(find("tree"), branches.length ? under(null) : make("p", { class: "empty" }, "No session."));
}
