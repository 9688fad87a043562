// Requests to the page's server.

const KEY = "firebox-key";
let unauthorizedHandler = () => {};

export const setKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));
export const onUnauthorized = (act) => (unauthorizedHandler = act);

export class RequestError extends Error {
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
    // A response without an error object has only its status.
  }
  if (response.status === 401) unauthorizedHandler();
  throw new RequestError(response.status, message);
}

export const get = async (path) => (await send("GET", path)).json();
export const post = async (path, body = {}) => (await send("POST", path, body)).json();
export const remove = async (path) => (await send("DELETE", path)).json();

// Yields the events of a stream. EventSource cannot send a key.
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
        // A keep-alive comment.
        if (line.startsWith(":")) continue;
        if (line === "[DONE]") return;
        yield JSON.parse(line);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
