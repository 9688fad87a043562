// The console: a session to chat in, and the state of the engine.

import { events, get, onUnauthorized, post, remove, setKey } from "./api.js";
import { showBudget } from "./budget.js";
import { Chat } from "./chat.js";
import { find, setOptions } from "./dom.js";
import { Plots } from "./plots.js";
import { showSegments } from "./segments.js";
import { showStreams, showTree } from "./streams.js";
import { Timeline } from "./timeline.js";

const OWN = "";
const NEW = "";
const SAVED = "saved:";
const HERE = "firebox-session";
const THEMES = ["auto", "light", "dark"];

const state = { models: [], session: null, sessions: [], saved: [], stopping: null };

function notice(text) {
  const element = find("notice");
  element.textContent = text ?? "";
  element.hidden = !text;
}

// Runs an action and reports its error. Other buttons are disabled meanwhile.
async function attempt(act) {
  notice();
  document.body.setAttribute("aria-busy", "true");
  try {
    return await act();
  } catch (error) {
    if (error.name !== "AbortError") notice(error.message);
  } finally {
    document.body.removeAttribute("aria-busy");
  }
}

const actions = {
  mark: (turn, change) => changed(`turns/${turn}`, change),
  rewind: (turn) => changed("rewind", { turn }),
  fork: (turn) => changed("fork", turn === undefined ? {} : { turn }),
  branch: (what, branch) => attempt(async () => {
    const path = `/v1/sessions/${state.session.id}/branches/${branch}`;
    show(await (what === "drop" ? remove(path) : post(what === "promote" ? `${path}/promote` : path)));
  }),
  replaceFact: (fact) => {
    state.replacing = fact;
    const field = find("fact");
    field.value = fact.text;
    find("add-fact").querySelector("button").textContent = "Replace";
    field.focus();
    field.select();
  },
  loadHead: (model, head) => attempt(() => post("/v1/heads", { model, head: head.head, loaded: head.state !== "warm" })),
};

const chat = new Chat(actions);
const timeline = new Timeline();
const plots = new Plots();

const changed = (path, body) => attempt(async () => show(await post(`/v1/sessions/${state.session.id}/${path}`, body)));

function endReplacing() {
  state.replacing = null;
  find("fact").value = "";
  find("add-fact").querySelector("button").textContent = "Add";
}

function show(session) {
  // Ids of facts are valid within their branch only.
  const elsewhere = session?.id !== state.session?.id || session?.branch !== state.session?.branch;
  if (state.replacing && elsewhere) endReplacing();
  state.session = session;
  if (session) sessionStorage.setItem(HERE, session.id);
  else sessionStorage.removeItem(HERE);
  const known = state.sessions.findIndex((other) => other.id === session?.id);
  if (session && known < 0) state.sessions.push(session);
  chat.show(session);
  showStreams(session, actions);
  showTree(session, actions);
  showPickers();
  find("fork").disabled = find("delete").disabled = find("save").disabled = !session;
}

function showPickers() {
  const session = state.session;
  const names = state.models.map((model) => [model.name, model.name]);
  setOptions(find("model"), names, session?.model ?? find("model").value ?? undefined);
  if (!find("model").value && names.length) find("model").value = names[0][0];
  setOptions(find("new-model"), names);
  const model = state.models.find((known) => known.name === find("model").value);
  const heads = (model?.heads ?? []).map((head) => [head.head, head.head]);
  setOptions(find("head"), [[OWN, "none (base model)"], ...heads], session ? session.head ?? OWN : undefined);
  const label = (other) => `${other.model}, ${other.tokens} tokens (${other.id.slice(5, 9)})`;
  const running = state.sessions.map((other) => [other.id, label(other.id === session?.id ? session : other)]);
  const saved = state.saved.map((name) => [SAVED + name, `saved: ${name}`]);
  setOptions(find("session"), [...(session ? [] : [[NEW, "none"]]), ...running, ...saved], session?.id ?? NEW);
}

async function list() {
  const { data, saved } = await get("/v1/sessions");
  state.sessions = data;
  state.saved = saved;
  showPickers();
}

async function begin(options) {
  const model = find("model").value;
  const head = find("head").value;
  const session = await post("/v1/sessions", options ?? { model: head ? `${model}:${head}` : model });
  show(session);
  await list();
  return session;
}

async function say(text) {
  if (!state.session) await begin();
  chat.begin(text);
  state.stopping = new AbortController();
  find("send").hidden = true;
  find("stop").hidden = false;
  try {
    const path = `/v1/sessions/${state.session.id}/say`;
    for await (const event of events("POST", path, { content: text, stream: true }, state.stopping.signal)) {
      if (event.type === "delta") chat.add(event.text);
      else if (event.type === "reasoning") chat.think(event.text);
      else if (event.type === "waiting") chat.waiting(event.place);
      else if (event.type === "error") throw new Error(event.error.message);
      else if (event.type === "done") {
        chat.end();
        show(event.session);
      }
    }
  } finally {
    chat.end();
    find("send").hidden = false;
    find("stop").hidden = true;
    state.stopping = null;
  }
}

// Waits until the server has ended a cancelled answer, and shows what remains of it.
async function settle() {
  for (let wait = 50; wait < 2000; wait *= 2) {
    const session = await get(`/v1/sessions/${state.session.id}`);
    if (!session.busy) return show(session);
    await new Promise((done) => setTimeout(done, wait));
  }
}

function ask(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue === "ok"), { once: true }));
}

let asking = false;
async function askKey() {
  if (asking) return;
  asking = true;
  find("key").hidden = false;
  if (await ask(find("ask-key"))) {
    setKey(find("key-value").value.trim());
    find("key-value").value = "";
    start();
  }
  asking = false;
}

let watching = null;
async function watch() {
  watching?.abort();
  const mine = (watching = new AbortController());
  const link = find("link");
  for (let wait = 500; !mine.signal.aborted; wait = Math.min(wait * 2, 8000)) {
    try {
      for await (const engine of events("GET", "/v1/engine/events", undefined, mine.signal)) {
        wait = 500;
        link.textContent = "live";
        link.className = "link up";
        state.models = engine.models;
        timeline.add(engine);
        plots.add(engine);
        if (document.hidden) continue;
        showPickers();
        showSegments(engine, actions);
        timeline.show(engine);
        showBudget(engine);
        plots.show(engine);
      }
    } catch (error) {
      if (error.status === 401) return;
    }
    if (mine.signal.aborted) return;
    link.textContent = "no connection";
    link.className = "link down";
    await new Promise((done) => setTimeout(done, wait));
  }
}

async function start() {
  await attempt(async () => {
    const engine = await get("/v1/engine");
    state.models = engine.models;
    await list();
    const here = sessionStorage.getItem(HERE);
    const known = state.sessions.find((session) => session.id === here) ?? state.sessions.at(-1);
    show(known ? await get(`/v1/sessions/${known.id}`) : null);
    find("save").hidden = false;
    watch();
  });
}

function theme(name) {
  if (name === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.dataset.theme = name;
  const button = find("theme");
  button.textContent = name[0].toUpperCase() + name.slice(1);
  button.setAttribute("aria-label", `${button.textContent} theme; change it`);
  localStorage.setItem("firebox-theme", name);
}

find("theme").addEventListener("click", () => {
  theme(THEMES[(THEMES.indexOf(localStorage.getItem("firebox-theme") ?? "auto") + 1) % THEMES.length]);
});
find("say").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = find("content");
  const text = field.value.trim();
  if (!text || state.stopping) return;
  field.value = "";
  notice();
  say(text).catch(async (error) => {
    if (error.name !== "AbortError") {
      notice(error.message);
      if (!field.value) field.value = text;
    }
    if (state.session) await settle().catch(() => {});
  }).finally(() => field.focus());
});
find("content").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("say").requestSubmit();
  }
});
find("stop").addEventListener("click", () => state.stopping?.abort());
find("add-fact").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = find("fact");
  const text = field.value.trim();
  if (!text) return;
  attempt(async () => {
    if (!state.session) await begin();
    const replaced = state.replacing ? `/${state.replacing.id}` : "";
    show(await post(`/v1/sessions/${state.session.id}/facts${replaced}`, { text }));
    endReplacing();
  });
});
find("fact").addEventListener("keydown", (event) => {
  if (event.key === "Escape") endReplacing();
});
find("fork").addEventListener("click", () => actions.fork());
find("head").addEventListener("change", (event) => {
  if (state.session) changed("head", { head: event.target.value || null });
});
find("model").addEventListener("change", () => {
  // A session belongs to its model.
  sessionStorage.removeItem(HERE);
  show(null);
});
find("session").addEventListener("change", (event) => attempt(async () => {
  const chosen = event.target.value;
  if (chosen.startsWith(SAVED)) await begin({ model: find("model").value, restore: chosen.slice(SAVED.length) });
  else if (chosen) show(await get(`/v1/sessions/${chosen}`));
}));
find("new").addEventListener("click", async () => {
  find("new-model").value = find("model").value;
  if (!(await ask(find("ask-new")))) return;
  const lines = find("new-facts").value.split("\n").map((line) => line.trim()).filter(Boolean);
  const tokens = Number.parseInt(find("new-tokens").value, 10);
  await attempt(() => begin({
    model: find("new-model").value,
    system: find("new-system").value.trim() || undefined,
    facts: lines,
    turn_tokens: Number.isFinite(tokens) ? tokens : undefined,
    relevance: find("new-relevance").checked,
  }));
});
find("save").addEventListener("click", async () => {
  if (!(await ask(find("ask-name")))) return;
  await attempt(async () => {
    show(await post(`/v1/sessions/${state.session.id}/save`, { name: find("name-value").value }));
    await list();
  });
});
find("delete").addEventListener("click", () => attempt(async () => {
  await remove(`/v1/sessions/${state.session.id}`);
  await list();
  show(state.sessions.length ? await get(`/v1/sessions/${state.sessions.at(-1).id}`) : null);
}));
find("key").addEventListener("click", askKey);
onUnauthorized(askKey);
theme(localStorage.getItem("firebox-theme") ?? "auto");
start();
