// The use of memory by account.

import { bytes, find, make } from "./dom.js";

const ORDER = ["weights", "streams", "activations", "scratch", "program"];
const WORDS = { weights: "weights", streams: "KV cache", activations: "activations", scratch: "buffers", program: "program" };

function account(name, held) {
  return make("div", { class: "account" }, make("i", { class: `swatch ${name}-c` }), make("span", {}, WORDS[name] ?? name), make("span", {}, bytes(held)));
}

// A model without a total draws on the shared budget, apart from what is reserved for it.
function limit({ total, reserved }) {
  if (total) return ` of ${bytes(total)}`;
  return reserved ? `, ${bytes(reserved)} reserved` : "";
}

function stack(budget) {
  const entries = ORDER.map((name) => [name, budget.held[name] ?? 0]).filter(([, held]) => held > 0);
  const sum = entries.reduce((all, [, held]) => all + held, 0);
  const rest = Math.max((budget.total ?? sum) - sum, 0);
  const words = entries.map(([name, held]) => `${WORDS[name]} ${bytes(held)}`).join(", ");
  const name = budget.name === "process" ? "this process" : budget.name;
  return make("div", {},
    make("h3", {}, `${name}: ${bytes(sum)}${limit(budget)}`),
    make("div", { class: "stack", role: "img", "aria-label": `${name}: ${words}${budget.total ? `, ${bytes(rest)} left` : ""}` },
      entries.map(([name, held]) => make("i", { class: `${name}-c`, "--part": held, title: `${WORDS[name]}: ${bytes(held)}` })),
      make("i", { class: "rest", "--part": rest })),
    entries.map(([name, held]) => account(name, held)));
}

export function showBudget(engine) {
  const mark = JSON.stringify(engine.budgets.map((budget) => [budget.name, Object.values(budget.held).map((held) => held >> 16)]));
  if (mark !== showBudget.mark) {
    showBudget.mark = mark;
    find("accounts").replaceChildren(...engine.budgets.map(stack));
  }
  const { resident_bytes: resident, peak_resident_bytes: peak } = engine.process;
  find("budget-sum").textContent = resident ? `resident ${bytes(resident)}, at most ${bytes(peak)}` : "";
}
