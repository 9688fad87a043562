// Requests to the server this page came from.

const KEY = "firebox-key";
let whenRefused = () => {};

export const setKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));
export const onRefused = (act) => (whenRefused = act);

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function send(method, path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // What is no error of the server's says no more than its number.
  }
  if (response.status === 401) whenRefused();
  throw new Refused(response.status, message);
}

export const get = async (path) => (await send("GET", path)).json();
export const post = async (path, body = {}) => (await send("POST", path, body)).json();
export const remove = async (path) => (await send("DELETE", path)).json();

// The events of a stream, one after the other. EventSource would send no key.
export async function* events(method, path, body, signal) {
  const response = await send(method, path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
        const line = text.slice(0, end).replace(/^data: /, "");
        text = text.slice(end + 2);
        // A comment, while there is nothing to tell.
        if (line.startsWith(":")) continue;
        if (line === "[DONE]") return;
        yield JSON.parse(line);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
