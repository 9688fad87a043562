// Tokens per second and time to first token of the last minute.

import { draw, find, make, rate, time } from "./dom.js";

const SAMPLES = 240;
const WIDTH = 360;
const HEIGHT = 84;
const TOP = 14;

const sum = (models, of) => models.reduce((all, model) => all + of(model), 0);

function nice(most) {
  const power = 10 ** Math.floor(Math.log10(Math.max(most, 1)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= most);
}

export class Plots {
  constructor() {
    this.samples = [];
  }

  add(engine) {
    const at = performance.now();
    const now = {
      at,
      tokens: sum(engine.models, (model) => model.generated_tokens),
      firsts: sum(engine.models, (model) => model.time_to_first_token?.count ?? 0),
      waited: sum(engine.models, (model) => model.time_to_first_token?.sum_ms ?? 0),
    };
    const last = this.last;
    this.last = now;
    if (!last || now.tokens < last.tokens) return;
    const seconds = (at - last.at) / 1000;
    const firsts = now.firsts - last.firsts;
    this.samples.push({ rate: (now.tokens - last.tokens) / seconds, first: firsts > 0 ? (now.waited - last.waited) / firsts : null });
    if (this.samples.length > SAMPLES) this.samples.shift();
  }

  show(engine) {
    const rates = this.samples.map((sample) => sample.rate);
    const firsts = this.samples.map((sample) => sample.first);
    find("plots").replaceChildren(
      this.plot("Tokens per second", rates, (value) => rate(value), true),
      this.plot("Time to first token", firsts, (value) => time(value), false));
    const spread = engine.models.map((model) => model.time_to_first_token).filter((first) => first?.count > 0);
    find("pace-sum").textContent = spread.length ? `first token: median ${time(spread[0].p50_ms)}, p99 ${time(spread[0].p99_ms)}` : "";
  }

  plot(title, values, words, line) {
    const known = values.filter((value) => value !== null);
    const most = nice(Math.max(...known, 1));
    const x = (at) => ((SAMPLES - values.length + at) / (SAMPLES - 1)) * WIDTH;
    const y = (value) => TOP + (1 - value / most) * (HEIGHT - TOP - 2);
    const marks = [];
    if (line && values.length > 1) {
      const points = values.map((value, at) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
      marks.push(draw("polygon", { class: "area", points: `${x(0)},${HEIGHT} ${points} ${x(values.length - 1)},${HEIGHT}` }), draw("polyline", { class: "line", points }));
    }
    if (!line) values.forEach((value, at) => value !== null && marks.push(draw("circle", { class: "dot", cx: x(at), cy: y(value), r: 3 }, draw("title", {}, words(value)))));
    const latest = known.at(-1);
    return make("figure", { class: "plot" }, draw("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img",
      "aria-label": `${title}, last minute: ${latest === undefined ? "no data" : `now ${words(latest)}, at most ${words(Math.max(...known))}`}`,
    },
    draw("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT - 1, y2: HEIGHT - 1 }),
    draw("line", { class: "grid", x1: 0, x2: WIDTH, y1: TOP, y2: TOP }),
    draw("text", { x: 0, y: TOP - 4 }, title), draw("text", { x: WIDTH, y: TOP - 4, "text-anchor": "end" }, words(most)), marks));
  }
}
