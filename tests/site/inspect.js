// What is wrong with the open page, and where it links to.
const wrong = [];
const all = (selector) => [...document.querySelectorAll(selector)];
const name = (element) => element.outerHTML.slice(0, 90).replace(/\s+/g, " ");

if (!document.documentElement.lang) wrong.push("no language");
if (!document.title.trim()) wrong.push("no title");
for (const landmark of ["body > header", "main", "body > footer", "nav"])
  if (!document.querySelector(landmark)) wrong.push(`no ${landmark}`);
for (const nav of all("nav")) if (!nav.ariaLabel) wrong.push(`no name: ${name(nav)}`);
if (all("h1").length !== 1) wrong.push(`${all("h1").length} headings of the first level`);
let level = 0;
for (const heading of all("h1, h2, h3, h4")) {
  const next = Number(heading.tagName[1]);
  if (next > level + 1) wrong.push(`a level is left out before: ${heading.textContent}`);
  level = next;
}
const ids = new Set();
for (const { id } of all("[id]")) {
  if (ids.has(id)) wrong.push(`two elements have the id ${id}`);
  ids.add(id);
}

for (const image of all("img"))
  if (!image.hasAttribute("alt") || !image.complete || !image.naturalWidth)
    wrong.push(`no alt text, or not loaded: ${name(image)}`);
for (const svg of all("svg:not([aria-hidden=true])"))
  if (svg.getAttribute("role") !== "img" || !svg.querySelector(":scope > title")?.textContent.trim())
    wrong.push(`no text alternative: ${name(svg)}`);
for (const control of all("input, select, textarea"))
  if (!control.labels.length && !control.ariaLabel) wrong.push(`no label: ${name(control)}`);
for (const button of all("button"))
  if (!button.textContent.trim() && !button.ariaLabel) wrong.push(`no name: ${name(button)}`);
for (const link of all("a"))
  if (!link.textContent.trim()) wrong.push(`a link without text: ${name(link)}`);
for (const region of all("[role=region], [role=group], section"))
  if (!region.ariaLabel && !region.hasAttribute("aria-labelledby"))
    wrong.push(`no name: ${name(region)}`);

for (const details of all("details")) details.open = true;
const root = document.documentElement;
if (root.scrollWidth > window.innerWidth) {
  const wide = all("main *").filter(
    (element) => element.getBoundingClientRect().right > window.innerWidth + 1 &&
                 !element.parentElement.closest(".scroll, svg"));
  wrong.push(`wider than ${window.innerWidth} pixels: ${root.scrollWidth}: ` +
             wide.slice(0, 3).map(name).join(" "));
}
for (const element of all("main *"))
  if (element.scrollWidth > element.clientWidth + 1 && element.tabIndex < 0 &&
      ["auto", "scroll"].includes(getComputedStyle(element).overflowX))
    wrong.push(`scrolls, and the keyboard cannot reach it: ${name(element)}`);
for (const text of all("svg text")) {
  const box = text.getBoundingClientRect(), around = text.closest("svg").getBoundingClientRect();
  if (box.width && (box.left < around.left - 1 || box.right > around.right + 1 ||
                    box.bottom > around.bottom + 1 || box.top < around.top - 1))
    wrong.push(`text leaves its picture: ${text.textContent}`);
  if (box.width && parseFloat(getComputedStyle(text).fontSize) *
      around.width / text.closest("svg").viewBox.baseVal.width < 9)
    wrong.push(`too small: ${text.textContent}`);
}

// Contrast of every element that has text of its own, by WCAG 2.2, 1.4.3.
// rgb(255, 0, 0), or color(srgb 1 0 0), which a mix of colours is given as.
const channels = (colour) => {
  const numbers = colour.match(/[\d.]+/g).map(Number);
  return colour.startsWith("color(srgb") ? numbers.map((c, i) => (i < 3 ? 255 * c : c)) : numbers;
};
const luminance = (colour) => {
  const [r, g, b] = channels(colour).slice(0, 3).map((c) =>
    c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (element) => {
  for (; element; element = element.parentElement) {
    const colour = getComputedStyle(element).backgroundColor, parts = channels(colour);
    if (parts.length < 4 || parts[3] > 0) return colour;
  }
  return "rgb(255, 255, 255)";
};
const pale = new Set();
for (const element of all("body *")) {
  if (element.closest("svg, math, noscript") || element.disabled) continue;
  const text = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  if (!text || !element.getClientRects().length) continue;
  const a = luminance(getComputedStyle(element).color), b = luminance(behind(element));
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (contrast < 4.5) pale.add(`contrast ${contrast.toFixed(1)}: ${name(element)}`);
}
wrong.push(...[...pale].slice(0, 5));

return {
  wrong,
  ids: [...ids],
  links: all("a[href]").map((a) => a.getAttribute("href")),
};
