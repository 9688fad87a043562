// The messages of the session, and the answer being generated.

import { button, count, find, make, rate, time } from "./dom.js";

function about(turn, actions) {
  const answer = turn.answer;
  const parts = [];
  if (answer) {
    parts.push(answer.head ? `head ${answer.head}` : "base model", count(answer.tokens, "token"), `first token after ${time(answer.ttft_ms)}`);
    if (answer.tokens_per_second > 0) parts.push(`${rate(answer.tokens_per_second)} tokens/s`);
    if (answer.finish === "length") parts.push("maximum length reached");
    if (answer.finish === "cancelled") parts.push("cancelled");
    if (answer.finish === "repetition") parts.push("ended, as it only repeated itself");
  }
  if (turn.evicted) parts.push("evicted from memory");
  else if (turn.hidden) parts.push(`hidden: ${turn.hidden}`);
  const does = turn.evicted ? [] : [
    button("Fork", () => actions.fork(turn.id), { name: `Fork before ${turn.text}`, key: `fork-${turn.id}` }),
    button("Rewind", () => actions.rewind(turn.id), { name: `Rewind to before ${turn.text}`, key: `back-${turn.id}` }),
  ];
  return make("p", { class: "about" }, parts.map((part) => make("span", {}, part)), does);
}

function said(who, words, kind = "") {
  return make("div", { class: `said ${who} ${kind}` }, make("div", { class: "words" }, words));
}

function thoughts(text) {
  return make("details", { class: "thoughts" }, make("summary", {}, "Thoughts"), make("div", {}, text));
}

function shown(turn, actions) {
  const gone = turn.evicted ? "gone" : "";
  if (turn.kind === "opening") return turn.text ? [said("told", `System prompt: ${turn.text}`)] : [];
  if (turn.kind === "fact") {
    if (turn.superseded_by !== null) return [said("told", `Superseded fact: ${turn.text}`)];
    return [said("told", `Fact: ${turn.text}`, gone)];
  }
  const answer = said("model", turn.answer?.text ?? "", gone);
  if (turn.answer?.reasoning_content) answer.prepend(thoughts(turn.answer.reasoning_content));
  answer.append(about(turn, actions));
  return [said("user", turn.text, gone), answer];
}

export class Chat {
  constructor(actions) {
    this.actions = actions;
    this.log = find("log");
    this.answer = null;
  }

  show(session) {
    // Screen readers read only new messages, so unchanged ones are kept.
    const mark = JSON.stringify([session?.id, session?.branch, session?.turns?.map((turn) => [turn.id, turn.evicted, turn.hidden, turn.superseded_by])]);
    if (mark === this.mark || this.answer) return;
    this.mark = mark;
    const turns = session?.turns ?? [];
    const all = turns.flatMap((turn) => shown(turn, this.actions));
    this.log.replaceChildren(...(all.length ? all : [this.welcome()]));
    this.toEnd();
  }

  welcome() {
    return make("p", { class: "welcome" }, make("strong", {}, "Send a message. "),
      "The panels beside the conversation show what the model remembers and what it costs.");
  }

  begin(text) {
    this.log.querySelector(".welcome")?.remove();
    this.answer = said("model", "", "under-way");
    // Screen readers read it once it is complete.
    this.answer.setAttribute("aria-busy", "true");
    this.log.append(said("user", text), this.answer);
    this.toEnd();
  }

  waiting(place) {
    if (this.answer && !this.answer.textContent) this.answer.setAttribute("title", `${place} requests before this one`);
  }

  add(text) {
    this.append(this.answer.querySelector(".words"), text);
  }

  think(text) {
    if (!this.answer.querySelector(".thoughts")) this.answer.prepend(thoughts(""));
    this.append(this.answer.querySelector(".thoughts > div"), text);
  }

  append(place, text) {
    const atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
    place.append(text);
    if (atEnd) this.toEnd();
  }

  end() {
    this.answer?.removeAttribute("aria-busy");
    this.answer = null;
    this.mark = null;
  }

  toEnd() {
    this.log.scrollTop = this.log.scrollHeight;
  }
}
