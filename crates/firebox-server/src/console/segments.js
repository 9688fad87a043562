// A map of the weights: segments in memory, on disk, or streamed.

import { bytes, button, count, find, make, put } from "./dom.js";

const short = (id) => id.replace(/^layer-0*(\d)/, "layer $1");

function cell(segment) {
  const percent = Math.round(segment.resident * 100);
  const words = segment.state === "streamed" ? "streamed from disk" : segment.state === "resident" ? "resident" : `mapped, ${percent} % in memory`;
  return make("div", { class: `cell ${segment.state}`, "--fill": `${percent}%`, title: `${short(segment.id)}: ${bytes(segment.bytes)}, ${words}` });
}

function weights(model, actions) {
  const all = model.segments.reduce((sum, segment) => sum + segment.bytes, 0);
  const there = model.segments.reduce((sum, segment) => sum + segment.bytes * segment.resident, 0);
  const cells = make("div", { class: "cells", role: "img", "aria-label": `${model.name}: ${bytes(there)} of ${bytes(all)} of weights in memory, in ${count(model.segments.length, "segment")}` },
    model.segments.map(cell));
  const chips = model.heads.map((head) => {
    const label = `${head.head} · ${head.state}`;
    const chip = button(label, () => actions.loadHead(model.name, head), {
      name: `${label}: ${head.state === "warm" ? "evict this head" : "load this head"}`,
      key: `head-${model.name}-${head.head}`,
      className: `chip ${head.state.replace(" ", "-")}`,
    });
    chip.title = head.reason ?? bytes(head.bytes);
    return chip;
  });
  const words = model.opened ? `${bytes(there)} of ${bytes(all)}` : "opened on first use";
  return make("div", { class: "weights" },
    make("h3", {}, make("span", {}, model.name), make("span", {}, words)),
    model.opened ? cells : null, chips.length ? make("div", { class: "chips", role: "group", "aria-label": `Heads of ${model.name}` }, chips) : null);
}

export function showSegments(engine, actions) {
  const mark = JSON.stringify(engine.models.map((model) => [model.name, model.opened, model.segments, model.heads]));
  if (mark === showSegments.mark) return;
  showSegments.mark = mark;
  put(find("segments"), engine.models.map((model) => weights(model, actions)));
  const streamed = engine.models.reduce((sum, model) => sum + model.streamed_bytes, 0);
  find("weights-sum").textContent = count(engine.models.length, "model") + (streamed ? ` · ${bytes(streamed)} streamed` : "");
}
