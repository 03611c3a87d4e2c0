// Small pieces of the document. Labels go in as text, never as markup.

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}
const labelOf = (token) => text.labels[token];
const called = (token) => `${labelOf(token).replace(BLANKS, "") || labelOf(token)} (${token})`;
const isMade = (token) => token >= text.prompt_length;

function fill(list, entries) {
  list.replaceChildren(
    ...entries.map(({ name, note, value, part, open }) => {
      const bar = element("i");
      bar.style.width = `${100 * Math.min(1, Math.max(0, part))}%`;
      const label = element("span", { className: "name" }, name, " ");
      if (note !== undefined) label.append(element("small", {}, String(note)));
      const parts = [bar, label, element("span", {}, value)];
      const entry = open
        ? element("button", { className: "entry", type: "button", onclick: open }, ...parts)
        : element("div", { className: "entry" }, ...parts);
      return element("li", {}, entry);
    }),
  );
}

// The overview.

function thumbnailSize() {
  const room = $("grid-box").clientWidth - 46 - 18 * combined.length;
  return Math.max(26, Math.min(84, Math.floor(room / columns) - 5));
}

function buildGrid() {
  const grid = $("grid");
  grid.style.gridTemplateColumns = `auto repeat(${columns}, auto)`;
  const names = page.heads.map((head, i) =>
    i === 0 && thumbnailSize() > 44 ? `head ${head}` : String(head),
  );
  const cells = [element("span", {}, "layer"), ...names.map((name) => element("span", {}, name))];
  for (const name of combined) cells.push(element("span", { className: "combined" }, name));
  page.layers.forEach((number, layer) => {
    cells.push(element("span", { className: "layer" }, String(number)));
    for (let column = 0; column < columns; column++) {
      const button = element(
        "button",
        { type: "button", className: column < heads ? "" : "combined" },
        element("canvas"),
      );
      if (text.at.weights) button.append(element("span", { className: "bar" }, element("i")));
      button.dataset.layer = layer;
      button.dataset.column = column;
      cells.push(button);
    }
  });
  grid.replaceChildren(...cells);
}

const headButton = (layer, column) =>
  $("grid").querySelector(`[data-layer="${layer}"][data-column="${column}"]`);
const share = (layer, column) =>
  text.at[column < heads ? "weights" : kindOf(column)](
    column < heads ? layer * heads + column : layer,
    state.shown - 1,
    0,
  );

function drawGrid() {
  const size = thumbnailSize();
  const pixels = Math.round(size * Math.min(2, devicePixelRatio || 1));
  for (const button of $("grid").querySelectorAll("button")) {
    const [layer, column] = [Number(button.dataset.layer), Number(button.dataset.column)];
    const context = sized(button.firstChild, size, size);
    button.firstChild.style.width = `${size}px`;
    context.fillStyle = colours.panel;
    context.fillRect(0, 0, size, size);
    context.imageSmoothingEnabled = false;
    const fine = Math.min(pixels, text.n);
    context.drawImage(raster(viewOf(layer, column), 0, 0, text.n, fine), 0, 0, size, size);
    const sink = text.at.weights ? share(layer, column) : null;
    if (sink !== null) button.lastChild.firstChild.style.width = percent(sink).replace(/[< ]/g, "");
    button.title =
      nameOf(layer, column) + (sink === null ? "" : `: ${percent(sink)} on the first token`);
    button.setAttribute("aria-label", button.title);
  }
  markHead();
  drawSink();
}

function markHead() {
  for (const button of $("grid").querySelectorAll("button")) {
    const chosen =
      Number(button.dataset.layer) === state.layer &&
      Number(button.dataset.column) === state.column;
    button.setAttribute("aria-current", String(chosen));
    button.tabIndex = chosen ? 0 : -1;
  }
}

function drawSink() {
  $("sink").hidden = !text.at.weights || state.shown < 2; // one token has nowhere else to look
  if ($("sink").hidden) return;
  let sum = 0;
  page.layers.forEach((_, layer) => page.heads.forEach((_, head) => (sum += share(layer, head))));
  const count = heads * page.layers.length;
  $("sink").textContent =
    `${percent(sum / count)} of the last token's attention lands on the first token` +
    `${count > 1 ? `, on average over these ${count} heads (the bar under each)` : ""}; uniform would be ` +
    `${percent(1 / state.shown)}. A large share is normal for GPT-2, not a fault: heads that find nothing ` +
    "to look for rest on the first token, the “attention sink”.";
}

// One head: the text.

function buildTokens() {
  const box = $("tokens");
  box.replaceChildren();
  for (let token = 0; token < text.n; token++) {
    const [, blank, rest] = labelOf(token).match(/^(␣*)([^]*)$/);
    const button = element("button", { type: "button", className: isMade(token) ? "made" : "" });
    if (blank) button.append(element("span", { className: "space" }, blank));
    button.append(rest);
    button.dataset.token = token;
    button.title = `token ${token}${isMade(token) ? ", generated" : ""}`;
    box.append(button);
    if (rest.endsWith("⏎")) box.append(element("br"));
  }
  const options = () =>
    text.labels.map((label, token) =>
      element("option", { value: String(token) }, `${token} ${label}`),
    );
  $("from").replaceChildren(...options());
  $("to").replaceChildren(...options());
}

function drawText(query = state.query) {
  const view = viewOf(state.layer, state.column);
  const entries = []; // of the tokens before the query, then of those after it
  for (let token = 0; token < state.shown; token++) {
    entries.push({ token, value: token <= query ? view.at(query, token) : view.at(token, query) });
  }
  const back = entries.slice(0, query + 1);
  const ahead = entries.slice(query + 1);
  const darkest = (side) => Math.max(...side.map(({ value }) => value)) || 1;
  const strongest = { back: darkest(back), ahead: darkest(ahead) };
  // Shares are coloured against the strongest of their side: in a long text all are small.
  const part = ({ value }, side) => (view.rooted ? value / strongest[side] : view.shade(value));
  const shadeOf = (entry, side) => (view.rooted ? Math.sqrt(part(entry, side)) : part(entry, side));
  for (const button of $("tokens").querySelectorAll("button")) {
    const token = Number(button.dataset.token);
    const side = token <= query ? "back" : "ahead";
    const future = token >= state.shown;
    const shade = future ? -1 : shadeOf(entries[token], side);
    button.style.background = shade < 0 ? "" : rgb(colours[side][level(shade)]);
    button.style.color = shade < 0 ? "" : inkOn(shade);
    button.classList.toggle("future", future);
    button.setAttribute("aria-current", String(token === query));
    if (query !== state.query) continue; // a mouse points: the keyboard's place stays
    button.tabIndex = token === query ? 0 : -1;
    const said = future
      ? "not there yet"
      : `${side === "back" ? "is looked at" : "looks here"}: ${shown(entries[token].value, view.kind)}`;
    button.setAttribute("aria-label", `${labelOf(token)}, ${said}`);
  }
  for (const [side, those] of [
    ["back", back],
    ["ahead", ahead],
  ]) {
    those.sort((a, b) => b.value - a.value || a.token - b.token);
    fill(
      $(side),
      those.slice(0, 5).map((entry) => ({
        name: labelOf(entry.token),
        note: entry.token,
        value: shown(entry.value, view.kind),
        part: part(entry, side),
      })),
    );
  }
  $("back-title").textContent = `${called(query)} looks most at`;
  $("ahead-title").textContent = `Later tokens that look most at ${called(query)}`;
  if (!ahead.length)
    $("ahead").replaceChildren(element("li", { className: "lead" }, "None: it is the last token."));
}

/** Scrolls the text's own box, never the page, so that the chosen token is seen. */
function showToken() {
  const [box, token] = [
    $("tokens").getBoundingClientRect(),
    tokenButton(state.query).getBoundingClientRect(),
  ];
  if (token.bottom > box.bottom) $("tokens").scrollTop += token.bottom - box.bottom + 8;
  if (token.top < box.top) $("tokens").scrollTop -= box.top - token.top + 8;
}

// What is written around them.

function drawWords() {
  const count = heads * page.layers.length;
  const plural = (number, word) =>
    `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
  const made = text.n - text.prompt_length;
  const model = page.source.find(([key]) => key === "model");
  $("about").textContent = [
    ...(model ? [model[1]] : []),
    plural(text.n, "token") + (made > 0 ? `, ${made} of them generated` : ""),
    `${plural(page.layers.length, "layer")} × ${plural(heads, "head")}`,
  ].join(" · ");
  $("overview-lead").textContent =
    `${count === 1 ? "This is one head's map" : "Each square is one head's map"}: row by row, how strongly each token (top to bottom) looks at ` +
    "every token up to itself (left to right); the stronger the colour, the more.";
  $("text-lead").replaceChildren(
    "Point at a token or choose one; colours are relative to the strongest. ",
    element("span", { className: "key back" }, "Before it: where it looks."),
    " ",
    element("span", { className: "key ahead" }, "After it: who looks at it."),
    ...(made > 0
      ? [" ", element("span", { className: "key made" }, "Underlined: generated.")]
      : []),
  );
  for (const [name, place] of [
    ["back", 0.45],
    ["ahead", 0.45],
  ]) {
    const key = $("text-lead").querySelector(`.${name}`);
    key.style.background = rgb(colours[name][level(place)]);
    key.style.color = inkOn(place);
  }
  $("detail-lead").textContent =
    "A map says where a head looks, not what it does with what it finds: attention is not an explanation of the output.";
  const errors = Object.values(text.maps).map((packed) => packed.error);
  const exact = Object.values(text.maps).every((packed) => packed.dtype === "float32");
  const worst = Math.max(...errors);
  $("precision").textContent = exact
    ? `Every number is stored in full, as float32${worst ? ` (rounded by at most ${worst.toExponential(1)})` : ""}.`
    : `Numbers are stored in 8 bits to keep this file small: ${Object.entries(text.maps)
        .map(
          ([name, packed]) =>
            `${STAGE_NAMES[name] || name} ${isShare(name) ? `by at most ${(100 * packed.error).toPrecision(2)} percentage points` : `by at most ${packed.error.toPrecision(2)}`}`,
        )
        .join(", ")} off. A page of fewer heads holds them in full.`;
  $("source").replaceChildren(
    ...page.source.flatMap(([key, value]) => [element("dt", {}, key), element("dd", {}, value)]),
  );
}

function buildStages() {
  const places = text.stages.map((name) => {
    const input = element("input", { type: "radio", name: "stage", value: name });
    input.onchange = () => chooseStage(name);
    return element("label", {}, input, STAGE_NAMES[name] || name);
  });
  $("stages").hidden = places.length < 2;
  $("stages").replaceChildren(element("legend", {}, "Show"), ...places);
}

function drawLegend(view) {
  const ticks = isShare(view.kind) ? [0, 0.01, 0.05, 0.2, 0.5, 1] : [view.low, view.high];
  const written = (value) =>
    isShare(view.kind) ? `${100 * value}${value === 1 ? " %" : ""}` : shown(value, view.kind);
  const width = 260;
  const context = sized($("legend"), width, 30);
  context.font = `12px ${colours.font}`;
  context.textBaseline = "bottom";
  for (let x = 0; x < width; x++) {
    context.fillStyle = rgb(colours.back[level(x / (width - 1))]);
    context.fillRect(x, 0, 1, 11);
  }
  context.fillStyle = colours.soft;
  for (const value of ticks) {
    const x = width * Math.max(0, view.shade(value));
    context.textAlign = x === 0 ? "left" : x >= width ? "right" : "center";
    context.fillText(written(value), x, 29);
  }
  $("legend").setAttribute(
    "aria-label",
    `Colours from ${written(ticks[0])} to ${written(ticks.at(-1))}`,
  );
}

function drawHead() {
  const view = viewOf(state.layer, state.column);
  $("detail-title").textContent = nameOf(state.layer, state.column);
  $("stage-note").textContent = STAGE_NOTES[view.kind];
  for (const input of $("stages").querySelectorAll("input")) {
    input.checked = input.value === (isShare(view.kind) ? "weights" : view.kind);
    input.disabled = state.column >= heads && input.value !== "weights";
  }
  $("matrix-lead").textContent = `A row is one token asking: it tells ${
    isShare(view.kind)
      ? "how that token spreads its attention over the tokens it reads from"
      : view.kind === "value-weighted"
        ? "how much each token that it reads from moves"
        : "its number with each token that it is compared with"
  }.`;
  drawLegend(view);
  markHead();
  drawText();
  drawMatrix();
}

function drawSteps() {
  const made = text.n - text.prompt_length;
  $("steps").hidden = made <= 0;
  if (made <= 0) return;
  const step = state.shown - text.prompt_length;
  $("step").max = made;
  $("step").value = step;
  const next = state.shown < text.n ? `“${labelOf(state.shown)}”` : "the token after this text";
  const now =
    step === 0 ? "the prompt has been read" : `“${labelOf(state.shown - 1)}” has been added`;
  $("step-note").textContent =
    `${step} of ${made}: ${now}; its last token now looks back, and the model chooses ${next}.`;
}

function drawRanking() {
  const [query, key] = [Number($("from").value), Number($("to").value)];
  const entries = [];
  page.layers.forEach((_, layer) => {
    for (let head = 0; head < heads; head++)
      entries.push({ layer, head, value: text.at.weights(layer * heads + head, query, key) });
  });
  entries.sort((a, b) => b.value - a.value);
  fill(
    $("ranking"),
    entries.slice(0, 8).map(({ layer, head, value }) => ({
      name: nameOf(layer, head),
      value: percent(value),
      part: value,
      open: () => {
        chooseToken(query, key);
        chooseHead(layer, head);
        $("detail").scrollIntoView({ block: "start" });
      },
    })),
  );
}

// What a person does.

function chooseText(number) {
  texts[number] ||= textOf(page.texts[number]);
  text = texts[number];
  Object.assign(state, {
    text: number,
    shown: text.n,
    query: text.n - 1,
    key: 0,
    span: text.n,
    row: 0,
    left: 0,
  });
  if (!text.stages.includes(state.stage))
    state.stage = text.stages.includes("weights") ? "weights" : text.stages.at(-1);
  buildGrid();
  buildTokens();
  buildStages();
  $("search").hidden = !text.at.weights || heads * page.layers.length < 2;
  $("zoom").hidden = text.n <= 6;
  [$("from").value, $("to").value] = [text.n - 1, 0];
  drawAll();
  showToken();
}

function drawAll() {
  layoutMatrix();
  drawWords();
  drawGrid();
  drawSteps();
  drawHead();
  if (!$("search").hidden) drawRanking();
}

function chooseHead(layer, column) {
  [state.layer, state.column] = [layer, column];
  drawHead();
}

function chooseStage(stage) {
  if (!text.stages.includes(stage) || (state.column >= heads && stage !== "weights")) return;
  state.stage = stage;
  drawGrid();
  drawHead();
}

function chooseToken(query, key = state.key) {
  state.query = Math.min(Math.max(0, query), state.shown - 1);
  state.key = Math.min(Math.max(0, key), state.shown - 1);
  keepInView();
  drawText();
  showToken();
  drawMatrix();
}

function chooseStep(count) {
  state.shown = Math.min(text.n, Math.max(text.prompt_length, count));
  chooseToken(state.shown - 1);
  drawGrid();
  drawSteps();
}

const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

function gridKey(event) {
  const move = ARROWS[event.key];
  if (move) {
    const layer = Math.min(page.layers.length - 1, Math.max(0, state.layer + move[0]));
    const column = Math.min(columns - 1, Math.max(0, state.column + move[1]));
    chooseHead(layer, column);
    headButton(layer, column).focus();
  } else if (event.key === "Enter") {
    tokenButton(state.query).focus();
  } else return;
  event.preventDefault();
}

const tokenButton = (token) => $("tokens").querySelector(`[data-token="${token}"]`);

function tokenKey(event) {
  const move = ARROWS[event.key];
  if (move) {
    chooseToken(move[1] ? state.query + move[1] : tokenOnNextLine(move[0]));
    tokenButton(state.query).focus();
  } else if (event.key === "Enter") $("matrix").focus();
  else if (event.key === "Escape") headButton(state.layer, state.column).focus();
  else return;
  event.preventDefault();
}

/** The token nearest above (-1) or below (1) the chosen one; itself on the first or last line. */
function tokenOnNextLine(direction) {
  const box = (token) => tokenButton(token).getBoundingClientRect();
  const from = box(state.query);
  let [best, line] = [state.query, null];
  for (let token = state.query + direction; token >= 0 && token < state.shown; token += direction) {
    const to = box(token);
    if (Math.abs(to.top - from.top) < 4) continue;
    line ??= to.top;
    if (Math.abs(to.top - line) > 4) break;
    if (
      best === state.query ||
      Math.abs(to.left - from.left) < Math.abs(box(best).left - from.left)
    )
      best = token;
  }
  return best;
}

function matrixKey(event) {
  const move = ARROWS[event.key];
  if (move) chooseToken(state.query + move[0], state.key + move[1]);
  else if (event.key === "Escape") tokenButton(state.query).focus();
  else return;
  event.preventDefault();
}

/** The cell (query, key) under the pointer, or null. */
function cellAt(event) {
  const box = $("matrix").getBoundingClientRect();
  const place = (offset) => Math.floor(offset / matrix.cell);
  const [x, y] = [
    place(event.clientX - box.left - matrix.margin),
    place(event.clientY - box.top - matrix.top),
  ];
  const [query, key] = [state.row + y, state.left + x];
  if (Math.min(x, y) < 0 || Math.max(x, y) >= state.span || Math.max(query, key) >= state.shown)
    return null;
  return [query, key];
}

function pageKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select")) return;
  const actions = {
    "[": () => chooseStep(state.shown - 1),
    "]": () => chooseStep(state.shown + 1),
    "+": () => zoom(0.5),
    "=": () => zoom(0.5),
    "-": () => zoom(2),
    0: () => zoom(0),
  };
  if (event.key >= "1" && event.key <= "5") chooseStage(STAGES[event.key - 1]);
  else if (event.key in actions) actions[event.key]();
}

$("grid").onclick = (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  chooseHead(Number(button.dataset.layer), Number(button.dataset.column));
  const detail = $("detail").getBoundingClientRect();
  if (detail.top > 0.6 * innerHeight) $("detail").scrollIntoView(); // on a phone it lies below
};
$("grid").onkeydown = gridKey;
const tokenUnder = (event) => {
  const button = event.target.closest("button");
  return button && Number(button.dataset.token) < state.shown ? Number(button.dataset.token) : null;
};
$("tokens").onpointerover = (event) => {
  const token = tokenUnder(event);
  if (token === null || event.pointerType !== "mouse") return;
  drawText(token);
  drawMatrix(token);
};
$("tokens").onpointerleave = () => {
  drawText();
  drawMatrix();
};
$("tokens").onclick = (event) => {
  const token = tokenUnder(event);
  if (token !== null) chooseToken(token);
};
$("tokens").onkeydown = tokenKey;
$("matrix").onpointermove = (event) => {
  const cell = cellAt(event);
  if (cell && event.pointerType === "mouse") drawMatrix(...cell);
};
$("matrix").onpointerleave = () => drawMatrix();
$("matrix").onclick = (event) => {
  const cell = cellAt(event);
  if (!cell) return;
  chooseToken(...cell);
  if ($("search").hidden) return;
  [$("from").value, $("to").value] = cell;
  drawRanking();
};
$("matrix").onkeydown = matrixKey;
$("zoom-in").onclick = () => zoom(0.5);
$("zoom-out").onclick = () => zoom(2);
$("zoom-fit").onclick = () => zoom(0);
$("from").onchange = $("to").onchange = drawRanking;
$("text").onchange = (event) => chooseText(Number(event.target.value));
let waiting = false;
$("step").oninput = () => {
  if (waiting) return;
  waiting = true; // a dragged slider fires faster than many heads are drawn
  requestAnimationFrame(() => {
    waiting = false;
    chooseStep(text.prompt_length + Number($("step").value));
  });
};
document.addEventListener("keydown", pageKey);
$("theme").onclick = () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  readColours();
  drawAll();
};
matchMedia("(prefers-color-scheme: dark)").onchange = () => {
  readColours();
  drawAll();
};
/** Paper is light whatever the screen is, and what is folded up cannot be opened on it. */
function onPaper(on) {
  const [root, origin] = [document.documentElement.dataset, $("source").parentElement];
  if (on === printing) return;
  if (on) onPaper.before = { theme: root.theme, open: origin.open };
  printing = on;
  origin.open = on || onPaper.before.open;
  if (on) root.theme = "light";
  else if (onPaper.before.theme) root.theme = onPaper.before.theme;
  else delete root.theme;
  readColours();
  drawAll();
}
addEventListener("beforeprint", () => onPaper(true));
addEventListener("afterprint", () => onPaper(false));
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return; // a phone's address bar comes and goes
  width = innerWidth;
  buildGrid();
  drawAll();
});

page.texts.forEach((one, number) => {
  const begins = one.labels.slice(0, 12).join("").replaceAll("␣", " ");
  $("text").append(
    element("option", { value: String(number) }, `${number}: ${begins.slice(0, 40)}`),
  );
});
$("chooser").hidden = page.texts.length < 2;
readColours();
chooseText(0);
