"use strict";

// Data: each set of maps is packed row by row; `at(map, query, key)` reads one number.

const page = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const STAGES = ["scores", "scaled", "masked", "weights", "value-weighted"];
const STAGE_NAMES = { weights: "softmax" };
const STAGE_NOTES = {
  scores:
    "Q·Kᵀ: the product of each token's query with every token's key. Above the diagonal, too: these numbers are computed, but GPT-2 masks them.",
  scaled:
    "The scores times the model's scale: in GPT-2, divided by the root of the head's width, √d. Above the diagonal, too: GPT-2 masks those.",
  masked: "The scaled scores with −∞ added above the diagonal: no token sees what comes after it.",
  weights: "The softmax of each masked row: shares that sum to 100 %. This is what GPT-2 uses.",
  "value-weighted":
    "Each share times the length of the value vector that it passes on: how much is moved. A large share of a short vector, as on the first token, moves little.",
  mean: "The mean of this layer's maps (softmax) over the heads shown here.",
  rollout:
    "How much of each token's embedding reaches a position after this layer, if every layer passes on half by its mean map and half unchanged. It leans to the first tokens whatever the model does.",
};
const MINUS_INFINITY = 255;
const BLANKS = /^(?:␣|⏎|⇥)+|(?:␣|⏎|⇥)+$/g;

function bytes(base64) {
  const text = atob(base64);
  const array = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) array[i] = text.charCodeAt(i);
  return array.buffer;
}

function reader(packed, n, name) {
  const exact = packed.dtype === "float32";
  const numbers = exact ? new Float32Array(bytes(packed.data)) : new Uint8Array(bytes(packed.data));
  const rows = exact ? null : new Float32Array(bytes(packed.rows));
  const size = packed.causal ? (n * (n + 1)) / 2 : n * n;
  const above = name === "masked" ? -Infinity : 0;
  return (map, query, key) => {
    if (packed.causal && key > query) return above;
    const number =
      numbers[map * size + (packed.causal ? (query * (query + 1)) / 2 : query * n) + key];
    if (exact) return number;
    if (number === MINUS_INFINITY) return -Infinity;
    const row = 2 * (map * n + query);
    const value = rows[row] + number * rows[row + 1];
    return packed.root ? value * value : value;
  };
}

function textOf(raw) {
  const n = raw.labels.length;
  const text = {
    ...raw,
    n,
    at: {},
    stages: STAGES.filter((name) => name in raw.maps),
    views: new Map(),
  };
  for (const name in raw.maps) text.at[name] = reader(raw.maps[name], n, name);
  if (raw.value_norms && text.at.weights) {
    const norms = new Float32Array(bytes(raw.value_norms));
    text.at["value-weighted"] = (map, query, key) =>
      text.at.weights(map, query, key) * norms[map * n + key];
    text.stages.push("value-weighted");
  }
  return text;
}

// What is shown. `layer` and `column` are places in the grid: after the heads' columns come "mean"
// and "rollout". `shown` tokens are there at the chosen generation step.

const heads = page.heads.length;
const combined = ["mean", "rollout"].filter((name) => name in page.texts[0].maps);
const columns = heads + combined.length;
const texts = [];
const state = {
  text: 0,
  layer: 0,
  column: 0,
  stage: "",
  shown: 0,
  query: 0,
  key: 0,
  span: 0,
  row: 0,
  left: 0,
};
let text = null;

const kindOf = (column) => (column < heads ? state.stage : combined[column - heads]);
const isShare = (kind) => kind === "weights" || kind === "mean" || kind === "rollout";
const isCausal = (kind) => kind !== "scores" && kind !== "scaled";
const nameOf = (layer, column) =>
  column < heads
    ? `Layer ${page.layers[layer]}, head ${page.heads[column]}`
    : `Layer ${page.layers[layer]}, ${combined[column - heads] === "mean" ? "mean over heads" : "rollout"}`;

/** The map at a place of the grid: its numbers, their range, and how strongly to colour one. */
function viewOf(layer, column) {
  const kind = kindOf(column);
  const id = `${kind} ${layer} ${column}`;
  if (text.views.has(id)) return text.views.get(id);
  const map = column < heads ? layer * heads + column : layer;
  const at = (query, key) => text.at[kind](map, query, key);
  let low = 0;
  let high = 1;
  if (!isShare(kind)) {
    [low, high] = [kind === "value-weighted" ? 0 : Infinity, -Infinity];
    for (let query = 0; query < text.n; query++) {
      for (let key = 0; key < text.n; key++) {
        const value = at(query, key);
        if (value === -Infinity) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
  }
  const rooted = isShare(kind) || kind === "value-weighted";
  // Roots, because most shares are small: 1 % must differ from nothing to the eye.
  const shade = (value) => {
    if (value === -Infinity) return -1;
    const place = high > low ? (value - low) / (high - low) : 0;
    return rooted ? Math.sqrt(place) : place;
  };
  const view = { id, kind, at, low, high, rooted, shade };
  text.views.set(id, view);
  return view;
}

const shown = (value, kind) =>
  isShare(kind) ? percent(value) : value === -Infinity ? "−∞" : plain(value, 4);
const plain = (value, digits) => String(Number(value.toPrecision(digits))).replace("-", "−");
function percent(share) {
  const value = 100 * share;
  if (value === 0) return "0 %";
  if (value < 0.01) return "<0.01 %";
  return `${value.toFixed(value < 0.095 ? 2 : value < 99.95 ? 1 : 0)} %`;
}

// Colour: one hue from paper to ink, even in OKLab's lightness, turned round in the dark.

const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

function okLabToRgb(L, a, b) {
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((c) =>
    Math.round(
      255 * Math.min(1, Math.max(0, c <= 0.0031308 ? 12.92 * c : 1.055 * c ** (1 / 2.4) - 0.055)),
    ),
  );
}

function ramp(hue, dark) {
  const [from, to] = dark ? [0.235, 0.92] : [0.985, 0.3];
  const angle = (hue * Math.PI) / 180;
  return Array.from({ length: 256 }, (_, i) => {
    const chroma = 0.13 * Math.sin((Math.PI * (i + 5)) / 310);
    return okLabToRgb(
      from + ((to - from) * i) / 255,
      chroma * Math.cos(angle),
      chroma * Math.sin(angle),
    );
  });
}

let colours = null; // of the theme: two ramps and the page's own colours
function readColours() {
  const dark = isDark();
  const style = getComputedStyle(document.body);
  const probe = document.createElement("span");
  document.body.append(probe);
  const named = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  colours = {
    dark,
    back: ramp(258, dark), // where a token looks
    ahead: ramp(60, dark), // who looks at it
    font: style.fontFamily,
    ...Object.fromEntries(
      ["paper", "panel", "ink", "soft", "line", "accent", "made"].map((name) => [
        name,
        named(`--${name}`),
      ]),
    ),
  };
  probe.remove();
  $("theme").textContent = dark ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", `Switch to ${dark ? "light" : "dark"} colours`);
}
const level = (shade) => Math.round(255 * Math.min(1, Math.max(0, shade)));
const rgb = (colour) => `rgb(${colour.join(" ")})`;
const inkOn = (shade) => rgb(shade > 0.5 !== colours.dark ? [255, 255, 255] : [20, 22, 26]);

/** A canvas of `pixels` squared with a window of a map; where cells share a pixel, the strongest. */
function raster(view, row, left, span, pixels) {
  const canvas = Object.assign(document.createElement("canvas"), { width: pixels, height: pixels });
  const context = canvas.getContext("2d");
  const image = context.createImageData(pixels, pixels);
  const causal = isCausal(view.kind);
  const edge = (place) => Math.floor((place * span) / pixels);
  for (let y = 0; y < pixels; y++) {
    const bottom = Math.min(row + edge(y + 1), state.shown);
    for (let x = 0; x < pixels; x++) {
      let best = -Infinity;
      for (let query = row + edge(y); query < bottom; query++) {
        const right = Math.min(left + edge(x + 1), causal ? query + 1 : state.shown);
        for (let key = left + edge(x); key < right; key++)
          best = Math.max(best, view.at(query, key));
      }
      if (best === -Infinity) continue;
      image.data.set(colours.back[level(view.shade(best))], 4 * (y * pixels + x));
      // What is computed but masked afterwards stays pale.
      image.data[4 * (y * pixels + x) + 3] = left + edge(x) > row + edge(y) ? 80 : 255;
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

let printing = false;
function sized(canvas, width, height) {
  const ratio = (devicePixelRatio || 1) * (printing ? 3 : 1); // paper is finer than a screen
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}
