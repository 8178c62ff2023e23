// Elements, and numbers in words: what both the page and its charts are made of.

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** A number and its unit are not parted at the end of a line. */
export function seconds(value) {
  if (value < 0.9995) return `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)}\u00a0ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)}\u00a0s`;
}

export function duration(value) {
  const minutes = Math.floor(value / 60);
  if (minutes < 1) return `${Math.floor(value)} s`;
  if (minutes < 60) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const count = (value) => value.toLocaleString("en");
export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

/** A name of the protocol, such as tbt_objective. */
export const spoken = (name) => name.replaceAll("_", " ").replace(/\b(tbt|ttft)\b/g, (word) => word.toUpperCase());
