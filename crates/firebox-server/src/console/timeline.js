// Quanta and forward passes of the last seconds, one row per model.

import { count, draw, find, make } from "./dom.js";

const SECONDS = 12;
const WIDTH = 720;
const LEFT = 96;
const ROW = 34;
const MOST = 4000;
const SPANS = new Set(["decode", "prefill", "quantum", "replay", "verify"]);

export class Timeline {
  constructor() {
    this.events = [];
    this.now = 0;
  }

  add(engine) {
    const now = engine.timeline.now_us ?? 0;
    // Times restart with the engine's timeline, which invalidates earlier events.
    if (now < this.now) this.events = [];
    this.now = now;
    this.events.push(...engine.timeline.events);
    if (this.events.length > MOST) this.events.splice(0, this.events.length - MOST);
  }

  show(engine) {
    const from = this.now - SECONDS * 1e6;
    this.events = this.events.filter((event) => event.at_us + event.took_us >= from);
    const models = engine.models.map((model) => model.name);
    const height = models.length * ROW + 22;
    const x = (at) => LEFT + Math.max(0, (at - from) / (SECONDS * 1e6)) * (WIDTH - LEFT);
    const parts = [];
    for (let second = 0; second <= SECONDS; second += 2) {
      const at = LEFT + (second / SECONDS) * (WIDTH - LEFT);
      parts.push(draw("line", { class: "grid", x1: at, x2: at, y1: 0, y2: height - 18 }),
        draw("text", { x: at, y: height - 4, "text-anchor": second === SECONDS ? "end" : "middle" }, second === SECONDS ? "now" : `−${SECONDS - second} s`));
    }
    let busy = 0;
    models.forEach((model, row) => {
      const top = row * ROW + 4;
      parts.push(draw("rect", { class: "lane", x: LEFT, y: top, width: WIDTH - LEFT, height: ROW - 8, rx: 4 }),
        draw("text", { x: 0, y: top + 17 }, model.length > 13 ? `${model.slice(0, 12)}…` : model));
      for (const event of this.events) {
        if (event.model !== model) continue;
        const start = x(event.at_us);
        if (SPANS.has(event.kind)) {
          const width = Math.max(x(event.at_us + event.took_us) - start, 1);
          if (event.kind !== "quantum") busy += event.took_us;
          const whole = event.kind === "quantum";
          parts.push(draw("rect", { class: event.kind, x: start, width, y: whole ? top : top + 5, height: whole ? ROW - 8 : ROW - 18, rx: 2 },
            draw("title", {}, `${event.kind}, ${(event.took_us / 1000).toFixed(1)} ms`)));
        } else {
          parts.push(draw("line", { class: "mark", x1: start, x2: start, y1: top, y2: top + ROW - 8 }, draw("title", {}, event.kind)));
        }
      }
    });
    const share = Math.min(100, Math.round(busy / (SECONDS * 1e4)));
    find("timeline").replaceChildren(draw("svg", {
      viewBox: `0 0 ${WIDTH} ${height}`, role: "img",
      "aria-label": `The last ${SECONDS} seconds: ${models.join(", ")} were busy ${share} percent of the time`,
    }, parts));
    const schedule = engine.schedule;
    find("schedule-sum").textContent =
      `busy ${share} % · ${count(schedule.quanta, "quantum", "quanta")} · ${count(schedule.slips, "late token")} · ${count(schedule.preemptions, "preemption")}`;
    const running = engine.requests.filter((request) => request.waits === null);
    const waiting = engine.requests.length - running.length;
    const list = find("requests");
    list.replaceChildren(...(engine.requests.length === 0 ? ["No requests."] : [
      make("b", {}, `${running.length} running`), `, ${waiting} waiting: `,
      running.slice(0, 4).map((request) => `${request.model} ${request.prompt_tokens} + ${request.generated_tokens} tokens`).join("; "),
    ]));
  }
}
