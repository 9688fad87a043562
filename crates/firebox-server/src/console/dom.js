// Creates elements and formats numbers. Model output is only ever inserted as text.

const SVG = "http://www.w3.org/2000/svg";

export const find = (id) => document.getElementById(id);

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const make = (tag, properties, ...children) => filled(document.createElement(tag), properties, children);
export const draw = (tag, properties, ...children) => filled(document.createElementNS(SVG, tag), properties, children);

// Replaces an element's children, and restores the focus within it.
export function put(element, ...children) {
  const focus = element.contains(document.activeElement) ? document.activeElement.getAttribute("data-key") : null;
  element.replaceChildren(...children.flat().filter(Boolean));
  if (focus) element.querySelector(`[data-key="${CSS.escape(focus)}"]`)?.focus();
}

export function button(label, does, { name, key, pressed, className = "plain small" } = {}) {
  const properties = { type: "button", class: className, "aria-label": name, "data-key": key ?? name, onclick: does };
  if (pressed !== undefined) properties["aria-pressed"] = String(pressed);
  return make("button", properties, label);
}

export function setOptions(select, entries, chosen) {
  const same = select.options.length === entries.length
    && entries.every(([value, label], at) => select.options[at].value === value && select.options[at].text === label);
  if (!same) select.replaceChildren(...entries.map(([value, label]) => make("option", { value }, label)));
  if (chosen !== undefined) select.value = chosen;
}

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; count >= 1024 && unit < units.length - 1; unit++) count /= 1024;
  return `${count >= 100 || unit === 0 ? Math.round(count) : count.toFixed(1)} ${units[unit]}`;
}

export const time = (ms) => (ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${ms >= 10 ? Math.round(ms) : ms.toFixed(1)} ms`);
export const rate = (value) => (value >= 100 ? Math.round(value).toString() : value.toFixed(1));
export const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
